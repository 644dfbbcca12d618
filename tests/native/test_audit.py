"""kt_audit_run and kt_audit_codes against the readable reference, on every level, and the
faults that they must show."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest
from helpers import reference
from helpers.levels import at_level
from helpers.looped import each
from helpers.reference.kt_layout import offsets, pack_codes, unpack_codes
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from msgspec import structs
from native.support import (
    F32,
    RULES,
    STORED,
    U8,
    Rule,
    Source,
    assert_same,
    every_rule,
    quantize_pack,
)
from numpy.typing import NDArray

from ktconv import native
from ktconv.formats import FORMATS, output_formats

pytestmark = pytest.mark.slow

F64 = NDArray[np.float64]

formats = pytest.mark.parametrize("fmt", output_formats())


def restored(source: Source, packed: U8, scale: F32) -> F32:
    codes = unpack_codes(source.fmt, packed, source.rows, source.cols)
    values: F32 = codes * step_of(source, scale)[:, None]
    return values


def step_of(source: Source, scale: F32) -> F32:
    step: F32 = scale * np.float32(source.fmt.traits.scale_units)
    return step


def audited(source: Source, packed: U8, scale: F32) -> native.Audit:
    choice = source.choice
    return native.audit(source.format, source.matrix(), source.rows, 0, packed, scale, choice)


@lru_cache(maxsize=64)
def rule_scale(source: Source) -> F32:
    """What the source's rule gives for each row [rows]; the same for every level."""
    found: F32 = reference.quantize(source.fmt, source.values(), source.reference_choice)[1]
    return found


class Truth(NamedTuple):
    """What an audit finds; arrays have a value for each row."""

    row_error: F32
    row_amax: F32
    squared_error: F64
    squared_source: F64
    squared_value: float
    max_steps: float
    zeros: int
    invalid: int


@lru_cache(maxsize=2)  # for all levels, one after the other
def truth(source: Source, packed: bytes, scale: bytes) -> Truth:
    payload, scales = np.frombuffer(packed, np.uint8), np.frombuffer(scale, np.float32)
    values, got = source.values(), restored(source, payload, scales)
    with np.errstate(all="ignore"):
        top = np.float32(source.fmt.traits.max_level) * step_of(source, scales)[:, None]
        cut = np.where((top > 0) & (np.abs(values) > top), np.copysign(top, values), values)
        error = np.abs((cut if source.rule != "amax" else values) - got).max(axis=1)
        step = scales.astype(np.float64) * source.fmt.traits.scale_units
        steps = np.where(step > 0, error / step, 0)
    exact = values.astype(np.float64), got.astype(np.float64)
    codes = unpack_codes(source.fmt, payload, source.rows, source.cols)
    return Truth(
        error,
        np.abs(values).max(axis=1),
        ((exact[0] - exact[1]) ** 2).sum(axis=1),
        (exact[0] ** 2).sum(axis=1),
        float((exact[1] ** 2).sum()),
        steps.max(),
        int((codes == 0).sum()),
        int((np.abs(codes.astype(int)) > source.fmt.traits.max_level).sum()),
    )


def assert_audit(source: Source, packed: U8, scale: F32) -> native.Audit:
    """Maxima to the bit, sums within what binary32 squares allow."""
    found, right = audited(source, packed, scale), truth(source, packed.tobytes(), scale.tobytes())
    assert_same("row_error", found.row_error, right.row_error)
    assert_same("row_amax", found.row_amax, right.row_amax)
    assert_same("row_scale", found.row_scale, rule_scale(source))
    least = 1e-12 * right.squared_source.max()
    np.testing.assert_allclose(found.row_squared_error, right.squared_error, 1e-5, least)
    np.testing.assert_allclose(found.row_squared_source, right.squared_source, 1e-5)
    sums = right.squared_source.sum(), right.squared_error.sum(), right.squared_value
    mine = found.squared_source, found.squared_error, found.squared_value
    for one, other in zip(mine, sums, strict=True):
        assert math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-12 * sums[0])
    assert found.max_steps == right.max_steps
    assert (found.zeros, found.invalid) == (right.zeros, right.invalid)
    return found


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)
@given(
    fmt=st.sampled_from(list(output_formats())),
    dtype=st.sampled_from(list(STORED)),
    strips=st.integers(1, 5),
    wide=st.integers(1, 4),
    transposed=st.booleans(),
    rounded=st.booleans(),
    block=st.sampled_from([(128, 128), (48, 80), (1, 64), (5, 7)]),
    origin=st.sampled_from([(0, 0), (64, 128), (3, 50)]),
    seed=st.integers(0, 2**32),
    kinds=st.sampled_from([("ordinary",), ("ordinary", "zeros"), ("tiny",), Source.kinds]),
    rule=st.sampled_from(RULES),
    factored=st.booleans(),
)
def test_sound_payload(
    tiles: object,
    fmt: str,
    dtype: str,
    strips: int,
    wide: int,
    transposed: bool,
    rounded: bool,
    block: tuple[int, int],
    origin: tuple[int, int],
    seed: int,
    kinds: tuple[str, ...],
    rule: tuple[Rule, bool],
    factored: bool,
) -> None:
    source = Source(
        fmt,
        32 * strips,
        FORMATS[fmt].traits.col_multiple * wide,
        dtype,
        transposed=transposed,
        rounded=rounded,
        block=block,
        origin=origin,
        seed=seed,
        kinds=kinds,
        rule=rule[0],
        weighted=rule[1],
        factored=factored,
    )
    for isa in native.isa_available():
        note(f"at {isa}")
        with at_level(isa):
            packed, scale = quantize_pack(source, source.matrix())
            assert_audit(source, packed, scale)


@formats
@every_rule
@each("rows", [32, 96, 160, 288])
@each("isa", native.isa_available())
def test_every_block(
    tiles: object, isa: str, fmt: str, rows: int, rule: Rule, weighted: bool
) -> None:
    """Several row blocks, a last one that is not full, and columns beyond a column block."""
    cols = 3584 + 256
    source = Source(fmt, rows, cols, kinds=("ordinary",), rule=rule, weighted=weighted)
    with at_level(isa):
        packed, scale = quantize_pack(source, source.matrix())
        assert_audit(source, packed, scale)


@formats
@every_rule
def test_any_codes(isa: str, fmt: str, rule: Rule, weighted: bool) -> None:
    """Also those that no packer writes."""
    source = Source(fmt, 64, 256, kinds=("ordinary",), rule=rule, weighted=weighted)
    bits = source.fmt.traits.bits - 1
    rng = np.random.default_rng(1)
    codes = rng.integers(-(1 << bits), 1 << bits, (64, 256)).astype(np.int8)
    scale = rng.uniform(0.01, 1, 64).astype(np.float32)
    found = assert_audit(source, pack_codes(source.fmt, codes), scale)
    assert found.invalid > 0


@formats
def test_rows_in_pieces(isa: str, fmt: str) -> None:
    """Chunks of rows find what all rows at once find."""
    source = Source(fmt, 192, 256, kinds=("ordinary",))
    packed, scale = quantize_pack(source, source.matrix())
    whole = native.audit(fmt, source.matrix(), 192, 0, packed, scale)
    bits, errors = source.bits(), []
    for first, count in ((0, 64), (64, 32), (96, 96)):
        piece = native.Matrix(
            bits[first : first + count].reshape(-1).view(np.uint8), "BF16", count, 256
        )
        errors.append(native.audit(fmt, piece, 192, first, packed, scale).row_error)
    assert_same("row_error", np.concatenate(errors), whole.row_error)


@formats
@every_rule
def test_levels_agree_to_the_bit(fmt: str, rule: Rule, weighted: bool) -> None:
    source = Source(fmt, 96, 512, rule=rule, weighted=weighted)
    packed, scale = quantize_pack(source, source.matrix())
    found = []
    for level in native.isa_available():
        with at_level(level):
            one = audited(source, packed, scale)
            sums = one.squared_source, one.squared_error, one.squared_value, one.zeros
            per_row = one.row_error, one.row_scale, one.row_squared_error, one.row_squared_source
            found.append((sums, *(each.tobytes() for each in per_row)))
    assert len(set(found)) == 1


@formats
@pytest.mark.parametrize("odd", [1.0, np.nan, np.inf, -3e38, 1e-44])
def test_levels_agree_on_odd_numbers_and_codes(fmt: str, odd: float) -> None:
    """Codes that no packer writes, numbers whose squares are not finite: in blocks of some rows."""
    source = Source(fmt, 32, 2304, "F32", kinds=("ordinary",), rule="search")
    packed, scale = quantize_pack(source, source.matrix())
    bits, codes = source.bits(), unpack_codes(source.fmt, packed, 32, 2304)
    bits[3, [9, 700, 2100]] = np.float32(odd).view(np.uint32)
    bits[5, 1030:1100] = np.float32(odd).view(np.uint32)
    codes[4, 2000] = codes[20, 63] = codes[20, 64] = codes[5, 1] = -1 << source.fmt.traits.bits - 1
    packed, scale[6] = pack_codes(source.fmt, codes), np.inf
    found = []
    for level in native.isa_available():
        with at_level(level):
            one = native.audit(fmt, source.matrix(bits), 32, 0, packed, scale, source.choice)
            assert one.invalid == 4
            per_row = one.row_error, one.row_amax, one.row_squared_error, one.row_squared_source
            found.append(
                (
                    repr(one.squared_value),
                    one.zeros,
                    *(np.nan_to_num(each).tobytes() for each in per_row),
                )
            )
    assert len(set(found)) == 1


@formats
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_source(isa: str, fmt: str, value: float) -> None:
    source = Source(fmt, 32, FORMATS[fmt].traits.col_multiple, "F32", kinds=("ordinary",))
    packed, scale = quantize_pack(source, source.matrix())
    bits = source.bits()
    bits[7, 9] = np.float32(value).view(np.uint32)
    found = native.audit(fmt, source.matrix(bits), 32, 0, packed, scale)
    assert not math.isfinite(found.squared_source)
    assert not math.isfinite(found.squared_error)


@formats
@pytest.mark.parametrize("shape", [(32, 128), (96, 640), (160, 3584 + 128), (256, 7168)])
def test_codes(isa: str, fmt: str, shape: tuple[int, int]) -> None:
    packed = np.random.default_rng(3).integers(
        0, 256, native.packed_size(fmt, *shape), dtype=np.uint8
    )
    expected = unpack_codes(FORMATS[fmt], packed, *shape)
    assert_same("codes", native.audit_codes(fmt, packed, *shape), expected)


def test_what_audit_refuses() -> None:
    source = Source("int8", 64, 64, kinds=("ordinary",))
    packed, scale = quantize_pack(source, source.matrix())
    for first, rows in ((16, 64), (-32, 64), (32, 64), (0, 32)):
        with pytest.raises(ValueError):
            native.audit("int8", source.matrix(), rows, first, packed, scale)
    with pytest.raises(ValueError):
        native.audit("int8", source.matrix(), 64, 0, packed[:-1], scale)
    with pytest.raises(ValueError):
        native.audit("int8", source.matrix(), 64, 0, packed, scale[:-1])
    with pytest.raises(ValueError):
        native.audit_codes("int8", packed[:-1], 64, 64)
    with pytest.raises(ValueError):
        native.audit_codes("int4", packed, 64, 64)


def test_reads_and_does_not_write(isa: str) -> None:
    source = Source("int4", 32, 128, kinds=("ordinary",))
    packed, scale = quantize_pack(source, source.matrix())
    packed.flags.writeable = scale.flags.writeable = False
    assert_audit(source, packed, scale)
    with pytest.raises(ValueError, match="read-only"):
        native.quantize_pack("int4", source.matrix(), packed, scale)


# Faults


def planted(fmt: str) -> tuple[Source, U8, F32]:
    source = Source(fmt, 64, 2 * FORMATS[fmt].traits.col_multiple, kinds=("ordinary",), seed=5)
    packed, scale = quantize_pack(source, source.matrix())
    assert assert_audit(source, packed, scale).max_steps <= source.fmt.max_error_steps
    return source, packed, scale


def set_code(source: Source, packed: U8, n: int, k: int, code: int) -> None:
    byte, plane = offsets(source.fmt, np.array(n), np.array(k), source.rows, source.cols)
    mask = (1 << source.fmt.traits.bits) - 1
    shift = source.fmt.traits.bits * int(plane)
    rest = int(packed[byte]) & ~(mask << shift)
    packed[byte] = rest & 0xFF | (code & mask) << shift


def rows_beyond(source: Source, found: native.Audit, scale: F32) -> list[int]:
    """Rows with an error that no rounding makes."""
    allowed = source.fmt.max_error_steps * source.fmt.traits.scale_units * scale.astype(np.float64)
    return [int(row) for row in np.flatnonzero(~(found.row_error <= allowed))]


def rows_off_the_rule(found: native.Audit, scale: F32) -> list[int]:
    return [int(row) for row in np.flatnonzero(found.row_scale != scale)]


@formats
def test_a_flipped_bit_shows(isa: str, fmt: str) -> None:
    """A code that is off by one or more is off by 1 - max_error_steps or more, and beyond
    the bound unless the source was near the middle of two codes."""
    source, packed, scale = planted(fmt)
    step = scale.astype(np.float64)[:, None] * source.fmt.traits.scale_units
    codes = unpack_codes(source.fmt, packed, source.rows, source.cols)
    near_the_middle = np.abs(source.values() / step - codes) > 0.4
    rng = np.random.default_rng(2)
    for n, k in rng.permutation(np.argwhere(~near_the_middle))[:40]:
        flipped = int(codes[n, k]) ^ 1 << int(rng.integers(source.fmt.traits.bits))
        damaged = packed.copy()
        set_code(source, damaged, n, k, flipped)
        found = audited(source, damaged, scale)
        assert rows_beyond(source, found, scale) == [n]
        assert found.max_steps > source.fmt.max_error_steps


@formats
@pytest.mark.parametrize("bad", [-1.0, -1e-30, np.nan, np.inf, -np.inf, 1e-40])
def test_an_impossible_scale_shows(isa: str, fmt: str, bad: float) -> None:
    source, packed, scale = planted(fmt)
    zeros = audited(source, packed, scale).zeros
    scale[19] = bad
    found = audited(source, packed, scale)
    assert rows_off_the_rule(found, scale) == [19]
    assert found.zeros == zeros and found.invalid == 0


@formats
@pytest.mark.parametrize("factor", [0.5, 0.99, 1.01, 2.0, 1e30, 1e-30])
def test_a_wrong_scale_shows(isa: str, fmt: str, factor: float) -> None:
    source, packed, scale = planted(fmt)
    scale[40] *= np.float32(factor)
    found = audited(source, packed, scale)
    assert rows_off_the_rule(found, scale) == [40]
    if fmt == "int8" or not 0.98 < factor < 1.02:  # 1 % of 7 steps is within INT4's half
        assert rows_beyond(source, found, scale) == [40]
        assert found.max_steps > source.fmt.max_error_steps


@formats
def test_a_code_under_a_zero_scale_is_invalid(isa: str, fmt: str) -> None:
    """It restores to 0 all the same, so neither errors nor scales tell."""
    source = Source(fmt, 32, FORMATS[fmt].traits.col_multiple, kinds=("zeros",))
    packed, scale = quantize_pack(source, source.matrix())
    assert not packed.any()
    assert audited(source, packed, scale).invalid == 0
    set_code(source, packed, 3, 5, 1)
    set_code(source, packed, 3, 6, -2)
    set_code(source, packed, 9, 0, -(1 << (source.fmt.traits.bits - 1)))  # counts once
    found = audited(source, packed, scale)
    assert found.invalid == 3
    assert found.zeros == 32 * source.cols - 3
    assert rows_beyond(source, found, scale) == rows_off_the_rule(found, scale) == []


@formats
def test_erased_rows_show(isa: str, fmt: str) -> None:
    """Zeroed payload under zeroed scales, as a hole in a file reads."""
    source, packed, scale = planted(fmt)
    for n in (0, 33):
        scale[n] = 0
        for k in range(source.cols):
            set_code(source, packed, n, k, 0)
    found = assert_audit(source, packed, scale)
    assert found.invalid == 0
    assert rows_off_the_rule(found, scale) == rows_beyond(source, found, scale) == [0, 33]
    assert_same("row_error", found.row_error[[0, 33]], found.row_amax[[0, 33]])


@pytest.mark.parametrize("rule", ["amax", "search"])
@formats
@pytest.mark.parametrize("rows", [32, 128, 160, 416])
@pytest.mark.parametrize("across", [False, True], ids=["rows", "columns"])
def test_packing_and_auditing_in_one_pass_are_the_two(
    fmt: str, rule: str, rows: int, across: bool
) -> None:
    """Pieces of 128 rows, the last one shorter, also where a source stores columns."""
    found = FORMATS[fmt]
    layout, cols, choice = found.layout, 512, native.Choice(rule)
    values = np.random.default_rng(rows).standard_normal((rows, cols)).astype(np.float32)
    stored = np.ascontiguousarray(values.T if across else values).reshape(-1).view(np.uint8)
    strides = (1, rows) if across else (cols, 1)
    matrix = native.Matrix(stored, "F32", rows, cols, row_stride=strides[0], col_stride=strides[1])
    size, scale_size = layout.weight_size(rows, cols), layout.scale_size(rows, cols)
    packed, again = np.empty(size, np.uint8), np.empty(size, np.uint8)
    scale, scale_again = native.aligned_bytes(scale_size), native.aligned_bytes(scale_size)
    scratch = native.new_scratch(cols)
    native.quantize_pack(layout, matrix, packed, scale, scratch, choice)
    expected = native.audit(layout, matrix, rows, 0, packed, scale, choice)
    one = native.Unpacked(matrix, again, scale_again, choice)
    ((got, sums),) = native.quantize_audit(layout, [one], scratch)
    np.testing.assert_array_equal(again, packed)
    np.testing.assert_array_equal(scale_again, scale)
    wanted = (int(array.view(np.uint64).sum()) for array in (packed, scale))
    assert sums == tuple(wanted)
    for field in structs.fields(native.Audit):
        first, second = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "squared_value":  # added up in another order
            assert math.isclose(first, second, rel_tol=1e-14)
        else:
            np.testing.assert_array_equal(first, second, err_msg=field.name)


def test_one_pass_names_the_first_number_that_is_not_finite() -> None:
    values = np.ones((416, 128), np.float32)
    values[300, 7], values[310, 3] = np.nan, np.inf
    matrix = native.Matrix(values.reshape(-1).view(np.uint8), "F32", 416, 128)
    layout = FORMATS["int4"].layout
    packed = np.empty(layout.weight_size(416, 128), np.uint8)
    scale = native.aligned_bytes(layout.scale_size(416, 128))
    with pytest.raises(native.NonFiniteError, match="row 300, column 7"):
        one = native.Unpacked(matrix, packed, scale, native.Choice("search"))
        native.quantize_audit(layout, [one], native.new_scratch(128))


def unpacked(values: F32, rule: str) -> native.Unpacked:
    """A matrix of float32 with places for INT4."""
    layout = FORMATS["int4"].layout
    matrix = native.Matrix(values.reshape(-1).view(np.uint8), "F32", *values.shape)
    packed = np.empty(layout.weight_size(*values.shape), np.uint8)
    scale = native.aligned_bytes(layout.scale_size(*values.shape))
    return native.Unpacked(matrix, packed, scale, native.Choice(rule))


def test_many_matrices_in_one_call_are_as_one_at_a_time() -> None:
    """Of other shapes and rules, and so with other places for what is found."""
    shapes = [(32, 128), (416, 256), (64, 512), (160, 128)]
    rng, layout, scratch = np.random.default_rng(3), FORMATS["int4"].layout, native.new_scratch(512)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    rules = ["search", "amax", "amax", "search"]
    together = [unpacked(*one) for one in zip(values, rules, strict=True)]
    found = native.quantize_audit(layout, together, scratch)
    for (got, sums), one, weights, rule in zip(found, together, values, rules, strict=True):
        alone = unpacked(weights, rule)
        ((wanted, wanted_sums),) = native.quantize_audit(layout, [alone], scratch)
        np.testing.assert_array_equal(one.packed, alone.packed)
        np.testing.assert_array_equal(one.scale, alone.scale)
        assert sums == wanted_sums
        for field in structs.fields(native.Audit):
            np.testing.assert_array_equal(getattr(got, field.name), getattr(wanted, field.name))


def test_the_matrix_that_is_not_finite_is_named_among_many() -> None:
    values = [np.ones((32, 128), np.float32) for _ in range(3)]
    values[2][5, 7] = np.inf
    matrices = [unpacked(one, "amax") for one in values]
    with pytest.raises(native.NonFiniteError, match="row 5, column 7") as caught:
        native.quantize_audit(FORMATS["int4"].layout, matrices, native.new_scratch(128))
    assert caught.value.matrix == 2


@pytest.mark.parametrize("size", [0, 1, 8, 4099, 16384, 40001])
def test_same_bytes(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert native.same_bytes(data, data.copy()) == native.byte_sum(data)
    for place in {0, size // 2, size - 1} if size else ():
        other = data.copy()
        other[place] ^= 16
        assert native.same_bytes(data, other) is None


@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, 200, 4099])
@pytest.mark.parametrize("offset", [0, 3])
def test_sum_of_bytes(size: int, offset: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, offset + size, np.uint8)[offset:]
    words = np.frombuffer(data.tobytes() + bytes(-size % 8), np.uint64)
    assert native.byte_sum(data) == int(words.sum(dtype=np.uint64))
