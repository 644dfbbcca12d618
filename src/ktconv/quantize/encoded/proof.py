"""The C library's comparison of encoded matrices with their source, where it takes them."""

from __future__ import annotations

from ktconv import native
from ktconv.system.arrays import U8, Array

_WHOLE = 32  # columns and groups, and rows of sources [in, out], are multiples of this


def audit(
    encoding: native.Encoding, source: native.Matrix, codes: U8, scales: Array, tensor_scale: float
) -> native.EncodedAudit | None:
    """None for a shape that it does not compare."""
    if not is_compared(encoding, source.rows, source.cols, source.c.col_stride != 1):
        return None
    return native.audit_encoded(encoding, source, codes, scales, tensor_scale)


def is_compared(encoding: native.Encoding, rows: int, cols: int, across: bool) -> bool:
    """Whether the C library compares matrices of this shape; `across`: stored column by column."""
    grouped = encoding.group % _WHOLE and encoding.kind != "nvfp4"
    return not (cols % _WHOLE or grouped or (across and rows % _WHOLE))
