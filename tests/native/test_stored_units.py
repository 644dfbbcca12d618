"""Elements that share a stored unit, with scales, zero points and groups of any kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers.encoded import awq_words, e0m3, e2m1, e2m3, fours, pairs, signed, stream
from numpy.typing import NDArray

from ktconv import native
from ktconv.formats.decode import e4m3fn_to_f32

pytestmark = pytest.mark.slow

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
ROWS, COLS = 64, 256


def words(nibbles: U8) -> NDArray[np.uint32]:
    """Eight columns per word, the first in the lowest bits."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    grouped = nibbles.reshape(len(nibbles), -1, 8).astype(np.uint32) << shifts
    return np.bitwise_or.reduce(grouped, axis=2)


def units_of(bits: int, words_per_unit: int) -> Callable[[U8], Any]:
    def store(numbers: U8) -> Any:
        return stream(numbers, bits).view(f"V{4 * words_per_unit}")

    return store


def unsigned(numbers: U8) -> F32:
    return numbers.astype(np.float32)


def finite(numbers: U8) -> U8:
    """Codes of E4M3 whose lowest bit of the exponent is 0: none of them is NaN."""
    return numbers & np.uint8(0xF7)


# dtype -> bits, how numbers [rows, cols] are stored, and what they mean.
PACKED: dict[str, tuple[int, Callable[[U8], Any], Callable[[U8], F32]]] = {
    "F4_E2M1": (4, pairs, e2m1),
    "F8_E4M3": (8, finite, lambda numbers: e4m3fn_to_f32(finite(numbers))),
    "I8": (8, lambda numbers: numbers, lambda numbers: numbers.view(np.int8).astype(np.float32)),
    "F4_E0M3": (4, pairs, e0m3),
    "F6_E2M3": (6, lambda numbers: fours(numbers).view("V3"), e2m3),
    "I4": (4, pairs, signed),
    "U4": (4, words, unsigned),
    "U4_AWQ": (4, awq_words, unsigned),
    **{
        f"U{bits}": (bits, units_of(bits, count), unsigned)
        for bits, count in ((2, 1), (3, 3), (5, 5), (6, 3), (7, 7), (8, 1))
    },
}


def packed_source(
    dtype: str, *, transposed: bool, zeros: bool, order: str | None, rounded: bool = False
) -> tuple[native.Matrix, F32]:
    """A matrix with one scale per row and 32 columns, and the values that it stands for. `order`
    "ends short": other groups, the last of which has less columns; one scale is zero."""
    rng = np.random.default_rng(len(dtype) + 2 * transposed + 4 * zeros)
    bits, store, mean = PACKED[dtype]
    nibbles = rng.integers(0, 1 << bits, (ROWS, COLS), np.uint8)
    units = store(nibbles)
    strides = (units.shape[1], 1)
    if transposed:
        units, strides = units.T, (1, units.shape[0])
    width = {"ends short": 48, "ends short, odd": 20}.get(str(order), 32)
    assert (COLS % width == 0) == (width == 32)
    scale = rng.uniform(0.01, 1, (ROWS, -(-COLS // width))).astype(np.float32)
    scale[0, -1] = 0 if width != 32 else scale[0, -1]
    zero = rng.integers(1, 17, scale.shape).astype(np.float32) if zeros else None
    groups = np.arange(COLS, dtype=np.int32) // width
    if order == "shuffled":
        rng.shuffle(groups)
    values = mean(nibbles)
    if zero is not None:
        values = values - zero[:, groups]
    values = values * scale[:, groups]
    if rounded:
        raw = values.view(np.uint32)
        values = ((raw + 0x7FFF + (raw >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    matrix = native.Matrix(
        np.ascontiguousarray(units).reshape(-1).view(np.uint8),
        dtype,
        ROWS,
        COLS,
        row_stride=strides[0],
        col_stride=strides[1],
        block_scale=scale,
        block=(1, width),
        zero_point=zero,
        group_of_col=groups if order in ("in order", "shuffled") else None,
        round_to_bf16=rounded,
    )
    return matrix, values


def plain(values: F32) -> native.Matrix:
    return native.Matrix(values.reshape(-1).view(np.uint8), "F32", *values.shape)


# Transposed, with zero points, order of groups.
KINDS = list(
    product(
        [False, True], [False, True],
        [None, "in order", "shuffled", "ends short", "ends short, odd"],
    )
)  # fmt: skip


@lru_cache(maxsize=2 * len(PACKED) * len(KINDS))
def source_of(
    dtype: str, transposed: bool, zeros: bool, order: str | None, rounded: bool = False
) -> tuple[native.Matrix, F32]:
    """The same for every level."""
    return packed_source(dtype, transposed=transposed, zeros=zeros, order=order, rounded=rounded)


@pytest.mark.parametrize("dtype", PACKED)
def test_values(isa: str, dtype: str) -> None:
    for kind in KINDS:
        matrix, values = source_of(dtype, *kind)
        found = native.decode(matrix).view(np.uint32)
        np.testing.assert_array_equal(found, values.view(np.uint32), err_msg=str(kind))


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("dtype", PACKED)
def test_packing_and_audit_are_those_of_the_values(isa: str, fmt: str, dtype: str) -> None:
    for kind in KINDS:
        matrix, values = source_of(dtype, *kind, rounded=True)
        size = native.packed_size(fmt, ROWS, COLS)
        found, expected = (np.empty(size, np.uint8) for _ in range(2))
        scale, expected_scale = (np.empty(ROWS, np.float32) for _ in range(2))
        native.quantize_pack(fmt, matrix, found, scale)
        native.quantize_pack(fmt, plain(values), expected, expected_scale)
        np.testing.assert_array_equal(found, expected, err_msg=str(kind))
        np.testing.assert_array_equal(scale, expected_scale, err_msg=str(kind))
        ours, theirs = (
            native.audit(fmt, m, ROWS, 0, found, scale) for m in (matrix, plain(values))
        )
        assert ours.squared_error == theirs.squared_error > 0, kind
        assert ours.squared_source == theirs.squared_source, kind
        np.testing.assert_array_equal(ours.row_amax, theirs.row_amax, err_msg=str(kind))
        np.testing.assert_array_equal(ours.row_error, theirs.row_error, err_msg=str(kind))


def test_fp8_with_zero_points_and_groups(isa: str) -> None:
    """What the vector decoder of rows of FP8 leaves to the scalar one."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 0x7F, (32, 128), np.uint8)
    scale = rng.uniform(0.5, 2, (32, 2)).astype(np.float32)
    groups = rng.integers(0, 2, 128).astype(np.int32)
    flat = codes.reshape(-1)
    unscaled = native.decode(
        native.Matrix(flat, "F8_E4M3", 32, 128, block_scale=np.ones((1, 1), np.float32),
                      block=(32, 128))
    )  # fmt: skip
    for zero in (None, np.full_like(scale, 3)):
        matrix = native.Matrix(
            flat, "F8_E4M3", 32, 128, block_scale=scale, block=(1, 64), zero_point=zero,
            group_of_col=groups,
        )  # fmt: skip
        expected = (unscaled - (0 if zero is None else 3)) * scale[:, groups]
        np.testing.assert_array_equal(native.decode(matrix), expected)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_every_fp8_number_stored_in_out(isa: str, zeros: bool, rounded: bool) -> None:
    """[in, out] as [out, in], bit for bit: all 256 numbers, NaN included, in blocks that begin
    before the matrix and end after it."""
    rows, cols = 48, 160
    codes = np.arange(rows * cols).astype(np.uint8).reshape(rows, cols)
    rng = np.random.default_rng(4)
    scale = rng.uniform(0.5, 2, (3, 4)).astype(np.float32)
    scale[1] *= np.float32(2.0**-120)  # a value times it can be denormal
    scale[2] *= np.float32(2.0**110)  # so that its scale times 2^120 is none
    zero = rng.integers(1, 9, scale.shape).astype(np.float32) if zeros else None
    found = []
    for stored, strides in ((codes, (cols, 1)), (np.ascontiguousarray(codes.T), (1, rows))):
        matrix = native.Matrix(
            stored.reshape(-1), "F8_E4M3", rows, cols, row_stride=strides[0],
            col_stride=strides[1], block_scale=scale, block=(20, 50), origin=(7, 30),
            zero_point=zero, round_to_bf16=rounded,
        )  # fmt: skip
        found.append(native.decode(matrix).view(np.uint32))
    np.testing.assert_array_equal(found[1], found[0])
    native.use_isa("scalar")
    np.testing.assert_array_equal(native.decode(matrix).view(np.uint32), found[1])


def test_views_that_do_not_fit_are_refused() -> None:
    data, scale = np.zeros(32 * 64, np.uint8), np.ones((32, 4), np.float32)
    groups = np.zeros(128, np.int32)

    def matrix(**changes: Any) -> native.Matrix:
        fitting = {"block_scale": scale, "block": (1, 32), "group_of_col": groups}
        return native.Matrix(data, "F4_E2M1", 32, 128, **{**fitting, **changes})

    native.decode(matrix())
    with pytest.raises(ValueError, match="from unit 1 on exceeds"):
        matrix(start=1)
    with pytest.raises(ValueError, match=r"group_of_col must be 0\.\.3"):
        matrix(group_of_col=groups + 4)
    with pytest.raises(ValueError, match="group_of_col must be contiguous int32"):
        matrix(group_of_col=groups[:64])
    with pytest.raises(ValueError, match="zero_point is"):
        matrix(zero_point=scale[:, :2])
    with pytest.raises(ValueError, match="need a block_scale"):
        matrix(block_scale=None)
    with pytest.raises(ValueError, match="scales"):
        native.decode(native.Matrix(data, "F4_E2M1", 32, 128))
    with pytest.raises(ValueError, match="multiple"):
        native.decode(native.Matrix(data, "F4_E2M1", 4, 65, block_scale=scale, block=(32, 65)))
