"""Weight formats of the kernels that hold the numbers of a stored matrix exactly, by its headers.

A format holds a matrix if a code of the format is a stored number, and if all that share a scale in
the format share one in the source: a scale that is stored once is written as often as needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ktconv.formats import FORMATS, Format
from ktconv.formats.specs import SPECS, FormatSpec
from ktconv.native.layouts import INNER_COLS
from ktconv.runtime.layers.ggml_blocks import CODED_BLOCKS, COLS
from ktconv.source import BlockGrid, ExpertMatrix, MoELayer
from ktconv.source.elements import BF16, F4_E0M3, F4_E2M1, F6_E2M3, F8_E4M3

_KERNELS = [one for one in SPECS if one.kernel]


def _codes(specs: Iterable[FormatSpec]) -> tuple[str, ...]:
    """Each kt_format of these once, in their order."""
    return tuple(dict.fromkeys(FORMATS[one.kernel].code for one in specs))


# kt_format of integers, the preferred ones first: of few bits, and with scales per row.
_INTEGERS = sorted(
    (one for one in _KERNELS if one.is_int), key=lambda one: (one.bits, one.group > 0)
)
_LEVELS = _codes(_INTEGERS)
_WIDE = _codes(one for one in _INTEGERS if one.bits == 8)
_CODES = {  # kt_format of numbers that are stored as they are
    **{
        number: _codes(one for one in _KERNELS if one.number == number)
        for number in (BF16.name, F8_E4M3.name, F4_E2M1.name)
    },
    F4_E0M3.name: _codes(one for one in _KERNELS if one.kind == "int4" and one.group > 0),  # / 4
    F6_E2M3.name: _codes(one for one in _KERNELS if one.kind == "int8" and one.group > 0),  # / 8
    **{name: (block.codes,) for name, block in CODED_BLOCKS.items()},
}
_CODES[F8_E4M3.name] += _CODES[BF16.name]  # times a power of two


def formats_of_layer(layer: MoELayer, experts: Sequence[int] | None = None) -> list[Format]:
    """Formats that hold all matrices of a layer, or of some of its experts, best first.

    What headers do not show can still stand against it: see `plain_codes` and `plain_scales`.
    """
    chosen = range(len(layer.experts)) if experts is None else experts
    matrices = [matrix for one in chosen for matrix in layer.experts[one].values()]
    possible = (fmt for code in _codes_of(matrices[0]) for fmt in _rows(code, matrices[0]))
    return [fmt for fmt in possible if all(_holds(fmt, matrix) for matrix in matrices)]


def _rows(code: str, matrix: ExpertMatrix) -> list[Format]:
    """Rows of the table: first those with the source's own blocks, then those with the most columns
    to a scale."""
    cols, grid = matrix.cols, matrix.scale
    own = (grid.block_rows, grid.block_cols) if grid else (1, cols)
    rows = [fmt for fmt in FORMATS.values() if fmt.code == code]
    return sorted(rows, key=lambda fmt: (scale_block(fmt, cols) != own, -(fmt.group or cols)))


def _codes_of(matrix: ExpertMatrix) -> Sequence[str]:
    unit = matrix.element
    if unit.integer_zero is None:
        return _CODES.get(unit.name, ())
    bits = 8 * unit.unit_bytes // (unit.unit_rows * unit.unit_cols)
    return _LEVELS if bits <= 4 else _WIDE


def scale_block(fmt: Format, cols: int) -> tuple[int, int]:
    """Rows and columns of a matrix with `cols` columns that share a scale in `fmt`: one of those
    among its codes, where there are some."""
    if inner := fmt.traits.inner_scales:
        return 1, INNER_COLS // inner
    return (fmt.traits.scale_rows, fmt.group) if fmt.group else (1, cols)


def _holds(fmt: Format, matrix: ExpertMatrix) -> bool:
    grid = matrix.scale
    if fmt.code not in _codes_of(matrix):
        return False
    if matrix.element.name in CODED_BLOCKS:
        return grid is None and fmt.group == COLS
    if fmt.scale_dtype == "none":
        powers = grid is not None and grid.number == "E8M0"
        return powers if matrix.element == F8_E4M3 else grid is None
    if grid is None or (fmt.traits.inner_scales and grid.number != "E4M3"):
        return False
    if fmt.scale_dtype == "ue8m0" and grid.number != "E8M0":
        return False
    return _is_refined(grid, matrix, *scale_block(fmt, matrix.cols))


def _is_refined(grid: BlockGrid, matrix: ExpertMatrix, rows: int, cols: int) -> bool:
    """Whether each block of `rows` x `cols` of a matrix, from its first element on, lies in a block
    of its grid."""
    return _lie_within(rows, matrix.rows, grid.block_rows, grid.row_origin) and _lie_within(
        cols, matrix.cols, grid.block_cols, grid.col_origin
    )


def _lie_within(step: int, length: int, block: int, origin: int) -> bool:
    """Whether steps lie within blocks along an axis of `length`, whose first element is number
    `origin` of the grid's."""
    if origin % block + length <= block:
        return True  # all of the axis does
    return block % step == 0 and origin % step == 0
