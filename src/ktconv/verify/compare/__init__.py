"""Compare two conversions of the same model, made by any tools and in any layout.

    found = compare(Path("ours"), Path("theirs"))
    found.verdict        # "equal bytes", "equal weights" or "different"

Needs no manifest and no source, only headers and tensors. Unpacking is the audit's
(native/src/audit). A worker has one matrix of both sides in memory at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ktconv.errors import UsageError
from ktconv.source.reading.buffers import BufferSizes
from ktconv.system import machine
from ktconv.verify.compare.comparison import Comparison
from ktconv.verify.compare.planning import Plan, make_plan
from ktconv.verify.compare.tally import Tally
from ktconv.verify.runner import run_checks

if TYPE_CHECKING:
    from ktconv.conversion.pipeline import Observer

__all__ = ["Comparison", "compare", "make_plan", "run"]


def compare(
    a: Path,
    b: Path,
    *,
    sample: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
    observer: Observer | None = None,
) -> Comparison:
    """Compares the packed weights of two directories: shards or layer folders.

    Compares all names and sizes, and the bytes of a `sample` of each layer's experts (at least
    one) and of the other tensors. Faults of a readable file are differences. Raises UsageError for
    a directory without packed weights.
    """
    return run(make_plan(a, b, sample, seed), threads, observer)


def run(plan: Plan, threads: int | None = None, observer: Observer | None = None) -> Comparison:
    """`compare` after headers were read."""
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads} is not a positive number")
    tally = Tally(plan)
    threads = threads or machine.usable_cpus()
    for found in run_checks(plan.tasks, BufferSizes(), threads, observer):
        tally.add(found)
    return tally.result()
