"""A picture of a comparison: what a size costs in error, and what it brings in speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.verify.report.outputs import ERRORS, deepest
from ktconv.verify.report.values import records
from ktconv.writer.pictures import picture

_SIZE = (11.0, 5.0)
Facts = Mapping[str, Any]


def plot(rows: Sequence[Facts], path: Path) -> None:
    """Left: error over size; right: tokens/s over size, a line for each number of tokens."""
    measure = deepest(records(rows)) or "relative_rms_error"
    with picture(path, _SIZE, 1, 2) as (errors, speeds):
        for row in rows:
            gigabytes = row["bytes"] / 1e9
            if isinstance(row[measure], float) and not row["is_source"]:
                errors.scatter(gigabytes, row[measure], marker="o")
                errors.annotate(row["name"], (gigabytes, row[measure]), fontsize=8)
        errors.set_xlabel("size, GB")
        errors.set_ylabel(ERRORS[measure])
        errors.set_ylim(bottom=0)
        errors.grid(alpha=0.3)
        for tokens in dict.fromkeys(n for row in rows for n in row["tokens_per_s"]):
            here = sorted(
                (row["bytes"] / 1e9, row["tokens_per_s"][tokens], row["name"])
                for row in rows
                if tokens in row["tokens_per_s"]
            )
            speeds.plot(
                [x for x, _, _ in here], [y for _, y, _ in here], "o-", label=f"{tokens} tokens"
            )
            for x, y, name in here:
                speeds.annotate(name, (x, y), fontsize=8)
        speeds.set_xlabel("size, GB")
        speeds.set_ylabel("tokens/s of all MoE layers")
        speeds.set_yscale("log")
        speeds.grid(alpha=0.3)
        if speeds.get_legend_handles_labels()[0]:
            speeds.legend(fontsize=8)
