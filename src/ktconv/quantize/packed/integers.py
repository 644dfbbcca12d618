"""Integers of a source that go unchanged into INT8 and INT4, by its headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ktconv.source import BlockGrid, ExpertMatrix, MoELayer
from ktconv.targets.packed.target import Options


def may_be_kept(matrix: ExpertMatrix) -> bool:
    """Whether it has integers with one scale per row, as packed rows have."""
    scale = matrix.scale
    whole = scale is not None and scale.block_cols >= matrix.cols
    return matrix.element.integer_zero is not None and whole


def treated(
    layers: Iterable[MoELayer], options: Options
) -> tuple[Sequence[ExpertMatrix], Sequence[str]]:
    """Matrices that are rounded although --requantize does not ask for it, one of each kind in a
    layer; and a sentence for every way in which integers of the source are treated."""
    kinds = [matrix for layer in layers for matrix in layer.kinds]
    integers = (matrix for matrix in kinds if matrix.element.integer_zero is not None)
    rounded = [] if options.requantize else [one for one in kinds if not may_be_kept(one)]
    return rounded, list(dict.fromkeys(_note(matrix, options) for matrix in integers))


def _note(matrix: ExpertMatrix, options: Options) -> str:
    if options.calibrate is not None:
        return "integers of the source are quantized again: --calibrate"
    if options.requantize or options.compat:
        option = "--requantize" if options.requantize else "--compat"
        return f"integers of the source are quantized again: {option}"
    found, scale = matrix.quantization, matrix.scale
    assert found is not None
    assert scale is not None
    if scale.block_cols < matrix.cols:
        return (
            f"integers with a scale for {scale.block_cols} inputs are quantized again, because "
            "packed rows have one scale each"
        )
    if isinstance(found.zero_point, BlockGrid):
        return (
            "integers with one scale per row are kept unchanged where all zero points of a matrix "
            "are symmetric and no number is beyond the packed levels; other rows are quantized "
            "again"
        )
    return (
        "integers with one scale per row are kept unchanged; only rows with a number beyond the "
        "packed levels (-128 in INT8, -8 in INT4) are quantized again"
    )
