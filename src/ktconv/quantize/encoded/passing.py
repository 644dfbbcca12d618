"""Codes and scales of a source that are kept, as kt_encode would leave them."""

from __future__ import annotations

import numpy as np

from ktconv import native
from ktconv.formats.decode import E4M3FN_VALUES, f32_to_bf16
from ktconv.source import ExpertMatrix
from ktconv.source.reading.matrices import MatrixReader, Scales
from ktconv.system.arrays import U8, Array
from ktconv.targets.encoded.kept import CODES
from ktconv.targets.encoded.scheme import Scheme


def awq_codes(source: MatrixReader, chunk: range, stored: U8, groups: int) -> U8:
    """Codes of AWQ, 0 to 15, as kt_encode leaves those of INT4: numbers without scales, which the
    reader puts in order."""
    cols = source.matrix.cols
    ones = Scales(np.ones((source.matrix.rows, groups), np.float32))
    levels = native.decode(source.view(chunk, ones, stored, 0, cols)).astype(np.uint8)
    codes: U8 = (levels[:, 0::2] | levels[:, 1::2] << np.uint8(4)).reshape(-1)
    return codes


def kept_codes(scheme: Scheme, matrix: ExpertMatrix, stored: U8) -> U8:
    """Codes of rows as `MatrixReader.read` leaves them."""
    turned = CODES[scheme.row.kind][matrix.element]
    return stored ^ np.uint8(turned) if turned else stored


def kept_scales(scheme: Scheme, source: MatrixReader, half: bool) -> tuple[Array, float]:
    """Scales as kt_encode would leave them, and the second scale as it is stored (0: none)."""
    kind = scheme.row.kind
    if kind == "nvfp4":
        blocks, factor, divides = source.load_levels()
        codes = np.searchsorted(E4M3FN_VALUES[:127], blocks).astype(np.uint8)
        if not factor:  # all weights are zero, and no number divides so
            return np.zeros_like(codes), 1.0
        return codes, factor if divides == scheme.layout.divides else float(np.float32(1 / factor))
    found = source.load_scales()
    assert found is not None
    scales = found.scale
    if scheme.row.is_int:
        stored = scales.astype("<f2").view(np.uint16) if half else f32_to_bf16(scales)
        return np.ascontiguousarray(stored), 0.0
    if kind == "fp8":
        return np.ascontiguousarray(scales), 0.0
    bits = scales.view(np.uint32)  # not by value, where denormals may count as zero
    return np.where(bits == 1 << 22, 0, bits >> 23).astype(np.uint8), 0.0
