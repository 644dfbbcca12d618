"""The scales that a rule gives to rows of a source, by the audit's own implementation."""

from __future__ import annotations

import numpy as np

from ktconv import native
from ktconv.formats import Format
from ktconv.system.arrays import F32


def expected_scales(fmt: Format, found: native.Audit, source: native.Matrix) -> tuple[F32, int]:
    """Scales [rows, 1], or [rows, groups], of what was audited, and of how many rows the integers
    are kept: those have the scale of their source, others what the rule of the audit gives."""
    shape = source.rows, -1
    if source.row_scale is None or fmt.group:
        return found.row_scale.reshape(shape), 0
    kept = source.row_scale / np.float32(fmt.traits.scale_units)
    limit = np.float32(fmt.traits.max_level + 0.5) * source.row_scale
    possible = (kept >= np.finfo(np.float32).tiny) & (found.row_amax <= limit)
    expected: F32 = np.where(possible, kept, found.row_scale)
    return expected.reshape(shape), int(possible.sum())


def scales_of(fmt: Format, source: native.Matrix, choice: native.Choice) -> F32:
    """Scales [rows, 1], or [rows, groups], of rows that were packed as they are in `source`."""
    layout = fmt.layout
    nothing = np.zeros(layout.weight_size(source.rows, source.cols), np.uint8)
    scale = np.zeros(layout.scale_size(source.rows, source.cols), np.uint8)
    found = native.audit(layout, source, source.rows, 0, nothing, scale, choice)
    return expected_scales(fmt, found, source)[0]
