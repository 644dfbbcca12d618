"""Scales, zero points and groups: from a tensor's bytes to the arrays of one matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ktconv.errors import CheckpointError
from ktconv.source.types import BlockGrid, GroupIndex, OuterScale

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

    import numpy as np
    from numpy.typing import NDArray

    Decoder = Callable[[NDArray[np.uint32]], Any]
else:
    Decoder = Callable  # help() evaluates annotations

_HINT = "The checkpoint is damaged, or was written by a faulty quantizer; download it again."


class Number(Struct, frozen=True):
    """Storage of the numbers of a grid: in words of `nbytes`; `words` of them, one below the other,
    have `rows` numbers, one below the other.

    `decode`: words as uint32 [rows, cols] to float32, exactly. `beyond`: of scales, the smallest
    word that is not a finite number of no sign; smaller words are in the order of their numbers.
    """

    nbytes: int
    decode: Decoder
    rows: int = 1
    words: int = 1
    beyond: int = 0

    def height(self, rows: int) -> int:
        """Rows of words for `rows` numbers."""
        return -(-rows // self.rows) * self.words


def _e8m0(bits: NDArray[np.uint32]) -> Any:
    """Code s is 2^(s-127): float32 with exponent field s and no mantissa. Code 0 is a float32
    subnormal with one mantissa bit, code 255 is NaN."""
    import numpy as np

    bits = np.where(bits == 0, 1 << 22, np.where(bits == 255, 0x7FC00000, bits << 23))
    return bits.astype(np.uint32).view(np.float32)


def _e4m3(bits: NDArray[np.uint32]) -> Any:
    """E4M3 as a half of the same mantissa, whose exponent is 8 smaller; magnitude 127 is NaN."""
    import numpy as np

    half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).astype(np.uint16).view(np.float16)
    return np.where(bits & 0x7F == 0x7F, np.nan, half.astype(np.float32) * 256).astype(np.float32)


def _ue5m3(bits: NDArray[np.uint32]) -> Any:
    """E5M3 without a sign: float32 with an exponent 112 larger, multiples of 2^-17 below 8. Code
    255 is NaN; no code is an infinity."""
    import numpy as np

    normal = ((bits << 20) + np.uint32(112 << 23)).astype(np.uint32).view(np.float32)
    values = np.where(bits < 8, bits.astype(np.float32) * np.float32(2**-17), normal)
    return np.where(bits == 255, np.float32(np.nan), values)


def _rows_in_words(bits: int, order: Sequence[int] = (), add: int = 0) -> Number:
    """Unsigned numbers of several rows as a stream of bits in 32-bit words, from the lowest bits
    on unless `order` has the places of rows 0, 1, ...; `add` is added to each, modulo 2^bits."""
    count = bits // gcd(bits, 32)  # words after which a number ends with a word

    def decode(words: NDArray[np.uint32]) -> Any:
        import numpy as np

        units = words.reshape(-1, count, words.shape[1]).astype(np.uint64)
        units = np.concatenate([units, units[:, :1]], axis=1)  # so that each has a next one
        first = np.array(order or range(32 * count // bits)) * bits
        word, shift = first // 32, (first % 32).astype(np.uint64)[:, None]
        numbers = (units[:, word] | units[:, word + 1] << np.uint64(32)) >> shift
        numbers = numbers + np.uint64(add) & np.uint64((1 << bits) - 1)
        return numbers.reshape(-1, words.shape[1]).astype(np.float32)

    return Number(4, decode, rows=32 * count // bits, words=count)


NUMBERS = {
    "F32": Number(4, lambda bits: bits.view("f4"), beyond=0x7F800000),
    "BF16": Number(2, lambda bits: (bits << 16).view("f4"), beyond=0x7F80),
    "F16": Number(2, lambda bits: bits.astype("u2").view("f2").astype("f4"), beyond=0x7C00),
    "E4M3": Number(1, _e4m3, beyond=0x7F),
    "E8M0": Number(1, _e8m0, beyond=0xFF),
    "UE5M3": Number(1, _ue5m3, beyond=0xFF),
    "I8": Number(1, lambda bits: bits.astype("i1").astype("f4")),
    **{f"U{bits}_ROWS": _rows_in_words(bits) for bits in range(2, 9)},
    **{f"U{bits}_ROWS_LESS_ONE": _rows_in_words(bits, add=1) for bits in (2, 3, 4, 8)},
    "U4_ROWS_AWQ": _rows_in_words(4, order=(0, 4, 1, 5, 2, 6, 3, 7)),
}


def scale_grid_shape(grid: BlockGrid, rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of blocks that a matrix of `rows` x `cols` touches, ragged ones too."""
    first_row, first_col = _first_block(grid)
    last_row = (grid.row_origin + rows - 1) // grid.block_rows
    last_col = (grid.col_origin + cols - 1) // grid.block_cols
    return last_row - first_row + 1, last_col - first_col + 1


def grid_nbytes(grid: BlockGrid, rows: int, cols: int) -> int:
    """Bytes of the numbers for a matrix of `rows` x `cols`, ragged blocks and units included."""
    number = NUMBERS[grid.number]
    grid_rows, grid_cols = -(-rows // grid.block_rows), -(-cols // grid.block_cols)
    return number.height(grid_rows) * grid_cols * number.nbytes


def scale_span(grid: BlockGrid, rows: int, cols: int) -> tuple[int, int]:
    """Offset within `grid.tensor` and length, in bytes, of what has a matrix's numbers."""
    number = NUMBERS[grid.number]
    (row, height), (col, width) = _words(grid, rows, cols)
    first = grid.start + row * grid.row_stride + col * grid.col_stride
    count = (height - 1) * grid.row_stride + (width - 1) * grid.col_stride + 1
    return first * number.nbytes, count * number.nbytes


def load_grid(grid: BlockGrid, rows: int, cols: int, data: Buffer) -> NDArray[np.float32]:
    """The contiguous float32 grid of a matrix of `rows` x `cols`, [grid_rows, grid_cols].

    `data` has the bytes of `scale_span`. The grid starts with the block that has element
    (0, 0): element (n, k) takes entry ((row_origin % block_rows + n) // block_rows,
    (col_origin % block_cols + k) // block_cols).
    """
    import numpy as np

    number = NUMBERS[grid.number]
    raw = _stored_words(grid, rows, cols, data)
    numbers = number.decode(np.ascontiguousarray(raw).astype(np.uint32))
    (first_word, _), _ = _words(grid, rows, cols)
    row = _first_block(grid)[0] - first_word // number.words * number.rows
    height, _ = scale_grid_shape(grid, rows, cols)
    return np.ascontiguousarray(numbers[row : row + height], np.float32)


def _stored_words(
    grid: BlockGrid, rows: int, cols: int, data: Buffer
) -> NDArray[np.unsignedinteger]:
    """The words with a matrix's numbers, a view of the bytes of `scale_span`."""
    import numpy as np

    size = NUMBERS[grid.number].nbytes
    (_, words), (_, width) = _words(grid, rows, cols)
    strides = grid.row_stride * size, grid.col_stride * size
    found: NDArray[np.unsignedinteger] = np.ndarray(
        (words, width), dtype=f"<u{size}", buffer=data, strides=strides
    )
    return found


def load_block_scale(scale: BlockGrid, rows: int, cols: int, data: Buffer) -> NDArray[np.float32]:
    """`load_grid` of scales: every one is finite and not negative (of any sign, where the grid says
    so), else CheckpointError names the tensor and the block."""
    grid = load_grid(scale, rows, cols, data)
    _check_values(scale, grid)
    return grid


def scan_block_scale(scale: BlockGrid, rows: int, cols: int, data: Buffer) -> tuple[int, float]:
    """Number of scales of a matrix that are zero, and the largest magnitude: what
    `load_block_scale` refuses is refused, in a fraction of its time.

    Words of finite numbers without a sign are in the order of their numbers, so that the largest
    word tells of all. Others are looked at one by one.
    """
    import numpy as np

    number, words = NUMBERS[scale.number], _stored_words(scale, rows, cols, data)
    most = words.max()
    if most < number.beyond:
        largest = float(number.decode(np.array([[most]], np.uint32))[0, 0])
        zeros = 0 if scale.number == "E8M0" else words.size - np.count_nonzero(words)
        return int(zeros), largest
    grid = load_block_scale(scale, rows, cols, data)
    return int(count_zeros(grid)), float(np.abs(grid).max())


def count_zeros(grid: NDArray[np.float32]) -> int:
    """Count the zero scales of either sign. By bits, because a process that treats denormals as
    zero would count them too."""
    import numpy as np

    return int(grid.size - np.count_nonzero(grid.view(np.uint32) << np.uint32(1)))


def load_zero_points(zero: BlockGrid, rows: int, cols: int, data: Buffer) -> NDArray[np.float32]:
    """`load_grid` of zero points: every one is in the range of integers of 8 bits, signed or not,
    else CheckpointError names the tensor."""
    import numpy as np

    grid = load_grid(zero, rows, cols, data)
    wrong = ~(np.abs(grid) <= 255)
    if wrong.any():
        raise CheckpointError(
            f"{zero.tensor.name} has the zero point {grid[wrong][0]:.9g}, not a number in the "
            "range of 8-bit integers",
            _HINT,
        )
    return grid


def load_outer_scale(
    outer: OuterScale, grid: NDArray[np.float32], data: Buffer
) -> NDArray[np.float32]:
    """Both levels of scales as one grid; `data` has the float32 of `outer`. CheckpointError for
    one that is not finite or negative, and for a zero that divides."""
    import numpy as np

    value: Any = load_outer_value(outer, data)
    with np.errstate(all="ignore"):
        both: NDArray[np.float32] = grid / value if outer.divides else grid * value
    wrong = _negative_or_not_finite(both)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise CheckpointError(
            f"{outer.tensor.name} has the scale {value}, which makes a block's scale {grid[at]} "
            f"{both[at]}, not a finite number",
            _HINT,
        )
    return both


def load_outer_value(outer: OuterScale, data: Buffer) -> np.float32:
    """The float32 of `outer`, which `data` has: finite and not negative, and above zero where it
    divides, else CheckpointError."""
    import numpy as np

    value: np.float32 = np.frombuffer(data, "<f4")[0]
    if np.isfinite(value) and (value > 0 or (value == 0 and not outer.divides)):
        return value
    what = "a finite number above 0" if outer.divides else "a finite number of 0 or more"
    raise CheckpointError(f"{outer.tensor.name} has the scale {value}, not {what}", _HINT)


def load_groups(
    groups: GroupIndex, scale: BlockGrid, count: int, data: Buffer
) -> NDArray[np.int32] | None:
    """The column of the matrix's loaded grid, which has `count`, for each column of the matrix;
    None if groups are in order, as without an index (-1 everywhere also means that).

    The stored numbers count the groups of the whole tensor, of which a matrix that is a slice has
    those from `col_origin` on. CheckpointError for one that it does not have.
    """
    import numpy as np

    found, (_, first) = np.frombuffer(data, "<i4"), _first_block(scale)
    in_order = (scale.col_origin + np.arange(len(found))) // scale.block_cols
    if (found == -1).all() or np.array_equal(found, in_order):
        return None
    if len(found) and (found.min() < first or found.max() >= first + count):
        beyond = f"but there are only {count} groups of scales"
        if first:
            beyond = f"but its scales are those of groups {first} to {first + count - 1}"
        raise CheckpointError(
            f"{groups.tensor.name} has group numbers {found.min()} to {found.max()}, {beyond}",
            _HINT,
        )
    relative: NDArray[np.int32] = found - np.int32(first)
    return relative


def _check_values(scale: BlockGrid, grid: NDArray[np.float32]) -> None:
    import numpy as np

    wrong = ~np.isfinite(grid) if scale.any_sign else _negative_or_not_finite(grid)
    if not wrong.any():
        return
    row, col = (int(index) for index in np.argwhere(wrong)[0])
    first_row, first_col = _first_block(scale)
    block = f"block ({first_row + row}, {first_col + col}){_of_expert(scale)}"
    raise CheckpointError(
        f"{scale.tensor.name}: the scale of {block} is "
        f"{grid[row, col]}, not a finite number{'' if scale.any_sign else ' of 0 or more'}",
        _HINT,
    )


def _negative_or_not_finite(grid: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Mask of scales that are negative or not finite, by bits, because a process that treats
    denormals as zero would not find negative ones. Zero is fine with either sign."""
    import numpy as np

    bits = grid.view(np.uint32)
    wrong: NDArray[np.bool_] = (bits >= 0x7F800000) & (bits != 0x80000000)
    return wrong


def _of_expert(scale: BlockGrid) -> str:
    """Words for the expert whose grid it is, where one tensor has all of them."""
    shape = scale.tensor.shape
    if len(shape) != 3 and not (len(shape) == 1 and scale.tensor.file.suffix == ".gguf"):
        return ""
    return f" of expert {scale.start // prod(shape[1:])}"


def _first_block(grid: BlockGrid) -> tuple[int, int]:
    """The block of the matrix's element (0, 0), counted in outputs and inputs."""
    return grid.row_origin // grid.block_rows, grid.col_origin // grid.block_cols


def _words(grid: BlockGrid, rows: int, cols: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """First and number of the words with the blocks of a matrix, by rows and by columns."""
    number, (row, col) = NUMBERS[grid.number], _first_block(grid)
    height, width = scale_grid_shape(grid, rows, cols)
    unit = row // number.rows
    units = (row + height - 1) // number.rows - unit + 1
    return (unit * number.words, units * number.words), (col, width)
