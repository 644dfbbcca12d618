"""The C library's comparison of encoded matrices with their source, where it takes them."""

from __future__ import annotations

from ktconv import native
from ktconv.system.arrays import U8, Array

WHOLE = 32  # rows, columns and groups of what it compares are multiples of this
_KINDS = ("int4", "int8")


def audit(
    encoding: native.Encoding, source: native.Matrix, codes: U8, scales: Array, tensor_scale: float
) -> native.EncodedAudit | None:
    """None for a shape or a kind of number that it does not compare."""
    group = encoding.group or source.cols
    if encoding.kind not in _KINDS or source.rows % WHOLE or source.cols % WHOLE or group % WHOLE:
        return None
    return native.audit_encoded(encoding, source, codes, scales)
