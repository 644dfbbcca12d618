"""Blocks of ggml: every type on every level is bit for bit what the package gguf decodes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers.ggml import F32, HALVES, U8, blocks_of, values_of
from native.support import guarded

from ktconv import native
from ktconv.formats.decode import round_to_bf16
from ktconv.source.elements import BLOCKS

pytestmark = pytest.mark.slow

ROWS, COLS = 32, 512


def matrix(name: str, blocks: U8, cols: int, **details: Any) -> native.Matrix:
    units = blocks.shape[1] // BLOCKS[name].unit_bytes
    return native.Matrix(blocks.reshape(-1), name, len(blocks), cols, row_stride=units, **details)


def plain(values: F32) -> native.Matrix:
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return native.Matrix(flat, "F32", *values.shape)


def same_bits(found: F32, expected: F32) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.copy().view(np.uint32))


@pytest.mark.parametrize("name", BLOCKS)
def test_values(isa: str, name: str) -> None:
    """Rows of 1 to 5 blocks, from every place where they may be cut, to any other."""
    rng = np.random.default_rng(len(name))
    wide = BLOCKS[name].unit_cols
    for count in (1, 2, 5):
        blocks = blocks_of(rng, name, 3, count * wide)
        values = values_of(name, blocks)
        for first in range(0, wide, 32):
            for cols in range(32, count * wide - first + 1, 32 if count == 2 else wide):
                found = native.decode(matrix(name, blocks, cols, first_col=first))
                same_bits(found, values[:, first : first + cols])


@cache
def every_byte(name: str) -> tuple[U8, F32]:
    """Blocks that differ in one byte from each other, and their values, with 0 for a NaN."""
    block = blocks_of(np.random.default_rng(5), name, 1, BLOCKS[name].unit_cols)[0]
    at, numbers = np.arange(block.size), np.arange(0, 256, 1 if block.size < 50 else 5)
    rows = np.tile(block, (len(at), len(numbers), 1))
    rows[at, :, at] = numbers
    rows = rows.reshape(-1, block.size)
    with np.errstate(all="ignore"):
        values = values_of(name, rows)
    values[np.isnan(values)] = 0
    return rows, values


@pytest.mark.parametrize("name", BLOCKS)
def test_every_byte_of_a_block(isa: str, name: str) -> None:
    rows, values = every_byte(name)
    found = native.decode(matrix(name, rows, values.shape[1]))
    found[np.isnan(found)] = 0
    same_bits(found, values)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("name", BLOCKS)
def test_packing_and_audit_are_those_of_the_values(isa: str, name: str, fmt: str) -> None:
    """Also of parts that begin within a block, with a factor, rounded, stored [in, out]."""
    rng = np.random.default_rng(len(name))
    wide = BLOCKS[name].unit_cols
    blocks = blocks_of(rng, name, ROWS, 2 * wide + COLS)
    factor = np.array([[-1.5e-3]], np.float32)
    scaled: dict[str, Any] = {"block_scale": factor, "block": (ROWS, 2 * wide + COLS)}
    turned = blocks.reshape(ROWS, -1, BLOCKS[name].unit_bytes).swapaxes(0, 1)
    cases: list[tuple[int, dict[str, Any]]] = [
        (0, {}), (wide - 32, scaled), (wide // 64 * 32, {"round_to_bf16": True})
    ]  # fmt: skip
    for first, details in cases:
        first -= first % 64 if fmt == "int8" else 0
        values = values_of(name, blocks)[:, first : first + COLS]
        if details is scaled:
            values = values * factor
        elif details.get("round_to_bf16"):
            values = round_to_bf16(np.ascontiguousarray(values))
        straight = matrix(
            name, blocks, COLS, first_col=first % wide, start=first // wide, **details
        )
        across = native.Matrix(
            np.ascontiguousarray(turned).reshape(-1), name, ROWS, COLS, row_stride=1,
            col_stride=ROWS, first_col=first % wide, start=first // wide * ROWS, **details,
        )  # fmt: skip
        for source in (straight, across):
            same_bits(native.decode(source), values)
            same_packing_and_audit(fmt, source, values)


def same_packing_and_audit(fmt: str, source: native.Matrix, values: F32) -> None:
    found, expected = (np.empty(native.packed_size(fmt, *values.shape), np.uint8) for _ in "ab")
    scale, expected_scale = (np.empty(len(values), np.float32) for _ in "ab")
    native.quantize_pack(fmt, source, found, scale)
    native.quantize_pack(fmt, plain(values), expected, expected_scale)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(scale, expected_scale)
    ours, theirs = (
        native.audit(fmt, one, len(values), 0, found, scale) for one in (source, plain(values))
    )
    assert ours.squared_error == theirs.squared_error
    assert ours.squared_source == theirs.squared_source > 0
    np.testing.assert_array_equal(ours.row_amax, theirs.row_amax)
    np.testing.assert_array_equal(ours.row_error, theirs.row_error)


@pytest.mark.parametrize("name", BLOCKS)
def test_guard_pages(isa: str, name: str) -> None:
    """Blocks end where memory does, at any alignment."""
    blocks = blocks_of(np.random.default_rng(1), name, ROWS, COLS)
    values = values_of(name, blocks)
    for shift in (0, 1):
        with guarded(blocks.nbytes + shift) as memory:
            memory[: blocks.nbytes] = blocks.reshape(-1)
            source = matrix(name, memory[: blocks.nbytes].reshape(blocks.shape), COLS)
            same_bits(native.decode(source), values)
            same_packing_and_audit("int8", source, values)
            del source


@pytest.mark.parametrize("name", [*(name for name in BLOCKS if HALVES[name]), "MXFP4"])
def test_a_scale_that_is_not_finite_is_found(isa: str, name: str) -> None:
    rng = np.random.default_rng(2)
    per_block = BLOCKS[name].unit_cols
    for at in HALVES[name] or (0,):
        blocks = blocks_of(rng, name, ROWS, COLS).reshape(ROWS, -1, BLOCKS[name].unit_bytes)
        row, block = 9, COLS // per_block - 1
        blocks[row, block] = 0x11  # so that no code, scale or minimum is 0
        blocks[row, block, at : at + 2] = (0x00, 0xFC) if HALVES[name] else (0xFF, 0x77)
        source = matrix(name, blocks.reshape(ROWS, -1), COLS)
        packed = np.empty(native.packed_size("int8", ROWS, COLS), np.uint8)
        with pytest.raises(native.NonFiniteError) as caught:
            native.quantize_pack("int8", source, packed, np.empty(ROWS, np.float32))
        assert caught.value.row == row
        assert caught.value.col >= block * per_block


def test_factors_of_floats(isa: str) -> None:
    """As GGUF files have them beside any type."""
    values = np.random.default_rng(3).standard_normal((ROWS, 256)).astype(np.float32)
    factors = np.array([[0.3, -7], [1e-3, 0]], np.float32)
    each = np.repeat(np.repeat(factors, ROWS // 2, 0), 128, 1)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    for dtype, stored in (("F32", values), ("BF16", halves), ("F16", values.astype(np.float16))):
        plain_values = stored.astype(np.float32)
        if dtype == "BF16":
            plain_values = (halves.astype(np.uint32) << 16).view(np.float32)
        expected = plain_values * each
        for turned in (False, True):
            data = np.ascontiguousarray(stored.T if turned else stored).reshape(-1).view(np.uint8)
            strides: dict[str, Any] = {"row_stride": 1, "col_stride": ROWS} if turned else {}
            for rounded in (False, True):
                source = native.Matrix(
                    data, dtype, ROWS, 256, block_scale=factors, block=(ROWS // 2, 128),
                    round_to_bf16=rounded, **strides,
                )  # fmt: skip
                truth = round_to_bf16(expected) if rounded else expected
                same_bits(native.decode(source), truth)
                same_packing_and_audit("int4", source, truth)


def test_cuts_that_are_refused() -> None:
    data = np.zeros(4 * 144, np.uint8)
    for changes in ({"first_col": 16}, {"first_col": 256}, {"cols": 80}):
        shape: dict[str, Any] = {"first_col": 0, "cols": 256, **changes}
        with pytest.raises(ValueError, match="multiple"):
            native.decode(native.Matrix(data, "Q4_K", 1, row_stride=2, **shape))
    with pytest.raises(ValueError, match="multiple"):
        native.decode(native.Matrix(data, "F32", 1, 32, first_col=32))
