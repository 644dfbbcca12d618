"""Rows of `--mode sft` as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ktconv.bench.render import DISTURBED, REMOTE, is_remote, local_text, render_report
from ktconv.bench.run import Report, told_of_nodes
from ktconv.bench.sft.rows import Row
from ktconv.train.gradients import MATRICES, NAMES

_COLUMNS: dict[str, Callable[[Row], str]] = {
    "shape": lambda row: str(row.shape["name"]),
    "engine": lambda row: row.engine,
    "method": lambda row: row.method,
    "isa": lambda row: row.isa,
    "threads": lambda row: str(row.threads),
    "tokens": lambda row: str(row.tokens),
    "rank": lambda row: str(row.rank),
    "forward ms": lambda row: f"{row.forward.median_us / 1e3:.1f}",
    "backward ms": lambda row: f"{row.backward.median_us / 1e3:.1f}",
    "GFLOPS": lambda row: f"{row.forward.gflops:.0f}, {row.backward.gflops:.0f}",
    "of bf16 limit": lambda row: (
        f"{row.forward.share_of_bf16:.0%}, {row.backward.share_of_bf16:.0%}"
    ),
    "saved MB": lambda row: _megabytes(row.saved_bytes),
    "scratch MB": lambda row: _megabytes(row.scratch_bytes),
    "local": local_text,
    "y": lambda row: f"{row.errors['y']:.4f}",
    "dx": lambda row: f"{row.errors['dx']:.4f}",
    "dw": lambda row: f"{row.errors['dw']:.4f}",
    "LoRA": lambda row: f"{_largest(row.errors, MATRICES):.4f}",
    "kernel": lambda row: _of_kernel(row),
    "": lambda row: _marks(row),
}
_LEGEND = {
    "!": DISTURBED,
    "r": REMOTE,
    "x": "x an error exceeds its bound",
}
_ERRORS = (
    "y, dx, dw, LoRA: relative error against float32 autograd on the same weights (LoRA: the "
    "largest of its gradients);\nkernel: the largest error with activations rounded as the kernels "
    "do, which has a bound"
)


def render(report: Report[Row], form: str) -> str:
    """The report in one of bench.render.FORMATS, without a newline at its end."""
    notes = [] if report.nodes is None else told_of_nodes(report.nodes)
    return render_report(report, form, _COLUMNS, _marks, _LEGEND, _ERRORS, *notes)


def _marks(row: Row) -> str:
    return (
        ("!" if row.disturbed else "")
        + ("r" if is_remote(row) else "")
        + ("x" if row.beyond_bound else "")
    )


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f}"


def _of_kernel(row: Row) -> str:
    return f"{_largest(row.kernel_errors, NAMES):.4f}" if row.kernel_errors else "-"


def _largest(errors: Mapping[str, float], names: Sequence[str]) -> float:
    """NaN if there is one."""
    return float(np.max([errors[name] for name in names if name in errors]))
