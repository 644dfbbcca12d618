"""Compare the errors recorded in the manifest with those measured."""

from __future__ import annotations

import math

from ktconv.packed.matrix_check import ErrorStats
from ktconv.verify.reading import Context
from ktconv.writer.manifest import MANIFEST

CLAIMS = ("relative_rms_error", "max_error_steps", "zero_share")
TOLERANCE = 2e-3  # the manifest has four digits, and sums are made in another order


def check_claims(context: Context, name: str, sums: ErrorStats) -> None:
    """A failure for each error of tensor `name` that is not the one measured, `sums`."""
    about, measured = context.records.get(name, {}), sums.as_dict()
    for key in CLAIMS:
        if key in about and not _agree(about[key], measured[key]):
            context.findings.fail(
                "weights",
                "manifest",
                f"{MANIFEST} says {key} {about[key]} of {name}, but {measured[key]:.4g} was "
                "measured.",
                file=MANIFEST,
                tensor=name,
            )


def _agree(claim: object, measured: float) -> bool:
    if not isinstance(claim, (int, float)) or isinstance(claim, bool):
        return False
    return math.isclose(claim, measured, rel_tol=TOLERANCE, abs_tol=1e-9)
