"""Searched scales of INT4 and INT8 (docs/formats.md, 10.2): no error is larger than before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.looped import each
from native.support import Source

from ktconv import native
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import Encoding, audit_encoded, encode
from ktconv.system.arrays import F32, U8, Array

pytestmark = pytest.mark.slow

ROWS, COLS = 64, 384
KINDS = ("ordinary", "zeros", "one magnitude", "tiny", "any exponent")
ENCODINGS = [Encoding(kind, group, half, True) for kind in ("int4", "int8")
             for group in (0, 32, 64, 128) for half in (False, True)]  # fmt: skip
f32 = np.float32


def source_of(encoding: Encoding, **changes: Any) -> Source:
    words: dict[str, Any] = {"dtype": "F16" if encoding.half else "BF16", "kinds": KINDS}
    return Source("int8", **{"rows": ROWS, "cols": COLS, **words, **changes})


def narrow(value: np.floating[Any], half: bool) -> np.float32:
    """T of the rule."""
    if half:
        return f32(np.float16(f32(value)))
    return f32(bf16_to_f32(f32_to_bf16(np.array([value], f32)))[0])


def rule_scale(amax: np.float32, top: int, half: bool) -> np.float32:
    found = narrow(amax / f32(top + 0.5), half)
    return found if found else f32(2.0**-10 if half else 2.0**-7)


def sums(w: F32, d: np.float32, top: int) -> tuple[float, float]:
    """A and B."""
    y = w * (f32(1) / d)
    c = np.rint(np.maximum(np.minimum(y, f32(top)), f32(-top - 1)))
    product = square = 0.0
    for start in range(0, len(w), 512):
        lanes = np.zeros((2, 4), f32)
        for k in range(start, min(start + 512, len(w)), 4):
            here = slice(k, k + 4)
            lanes[0] += c[here] * w[here]
            lanes[1] += c[here] * c[here]
        p, s = ((lane[0] + lane[1]) + (lane[2] + lane[3]) for lane in lanes)
        product, square = product + float(p), square + float(s)
    return product, square


def searched(w: F32, top: int, half: bool) -> np.float32:
    """The scale of a group, step by step."""
    amax = np.abs(w).max()
    first = rule_scale(amax, top, half)
    if not (2.0**-10 if half else 2.0**-60) <= amax <= 2.0**60:
        return first
    best: tuple[float, np.float32, int, float, float] = (-np.inf, first, 0, 0.0, 0.0)

    def candidate(n: int) -> np.float32:
        return narrow(first * (f32(840 - 13 * n) / f32(840)), half) if n else first

    def attempt(d: np.float32, n: int) -> None:
        nonlocal best
        product, square = sums(w, d, top)
        gain = float(d) * (2.0 * product - float(d) * square)
        if gain > best[0]:
            best = (gain, d, n, product, square)

    for n in range(0, 43, 6):
        attempt(candidate(n), n)
    _, middle, m, product, square = best
    for step in (-4, -2, -1, 1, 2, 3, 4):
        attempt(candidate(min(m + step, 42)), min(m + step, 42))
    least = narrow(f32(product / square), half) if square else f32(0)
    fits = candidate(42) <= least <= f32(1.25) * first
    attempt(least if fits else middle, m)
    return best[1]


def levels(encoding: Encoding, codes: U8) -> F32:
    if encoding.kind == "int8":
        return codes.astype(f32) - 128
    split = np.stack([codes & 15, codes >> 4], -1)
    return split.reshape(len(codes), -1).astype(f32) - 8


def values(encoding: Encoding, scales: Array) -> F32:
    found: F32 = scales.view(np.float16).astype(f32) if encoding.half else bf16_to_f32(scales)
    return found


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_scales_are_those_of_the_rule(isa: str, encoding: Encoding) -> None:
    source = source_of(encoding, rows=8)
    codes, scales = encode(encoding, source.matrix())
    weights, top = source.values(), 7 if encoding.kind == "int4" else 127
    groups = weights.reshape(8, -1, encoding.group or COLS)
    wanted = [[searched(group, top, encoding.half) for group in row] for row in groups]
    found = values(encoding, scales)
    assert np.array_equal(found, np.array(wanted, f32))
    spread = np.repeat(found, encoding.group or COLS, axis=1)
    nearest = np.rint(np.clip(weights / spread, -top - 1, top))
    assert np.array_equal(levels(encoding, codes), nearest)


@pytest.mark.parametrize("rows", [3, 19])  # other numbers than groups that are searched at once
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_rows_of_more_columns_than_a_sum_has(isa: str, kind: str, rows: int) -> None:
    source = source_of(Encoding(kind, 0, False, True), rows=rows, cols=1056, kinds=("ordinary",))
    _, scales = encode(Encoding(kind, 0, False, True), source.matrix())
    wanted = [[searched(row, 7 if kind == "int4" else 127, False)] for row in source.values()]
    assert np.array_equal(bf16_to_f32(scales), np.array(wanted, f32))


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_products_that_are_rounded(isa: str, dtype: str) -> None:
    """Of weights with more bits than bf16 has, and of such that factors change."""
    weights = np.random.default_rng(3).standard_normal((32, 384)).astype(f32)
    factor, bytes_of = None, weights.reshape(-1).view(np.uint8)
    if dtype == "BF16":
        stored = f32_to_bf16(weights)
        factor = np.linspace(0.9, 1.1, 384).astype(f32)
        weights, bytes_of = bf16_to_f32(stored) * factor, stored.reshape(-1).view(np.uint8)
    matrix = native.Matrix(bytes_of, dtype, 32, 384, col_factor=factor)
    _, scales = encode(Encoding("int4", 128, False, True), matrix)
    wanted = [[searched(one, 7, False) for one in row.reshape(3, 128)] for row in weights]
    assert np.array_equal(bf16_to_f32(scales), np.array(wanted, f32))


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_no_group_has_a_larger_error(isa: str, encoding: Encoding) -> None:
    source = source_of(encoding)
    plain = Encoding(encoding.kind, encoding.group, encoding.half)
    errors = []
    for one in (encoding, plain):
        codes, scales = encode(one, source.matrix())
        width = one.group or COLS
        off = source.values() - levels(one, codes) * np.repeat(values(one, scales), width, axis=1)
        errors.append((off.astype(np.float64) ** 2).reshape(ROWS, -1, width).sum(2))
    assert (errors[0] <= errors[1] * (1 + 1e-6)).all()
    assert errors[0].sum() < errors[1].sum()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@each("transposed", [False, True])
def test_levels_agree_and_the_audit_proves_them(
    isa: str, encoding: Encoding, transposed: bool
) -> None:
    source = source_of(encoding, transposed=transposed)
    codes, scales = encode(encoding, source.matrix())
    found = audit_encoded(encoding, source.matrix(), codes, scales)
    assert (found.other_codes, found.other_scales) == (0, 0)
    native.use_isa("scalar")
    again = encode(encoding, source.matrix())
    assert np.array_equal(codes, again[0]) and np.array_equal(scales, again[1])
    assert audit_encoded(encoding, source.matrix(), codes, scales) == found


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_the_audit_finds_what_is_wrong(isa: str, encoding: Encoding) -> None:
    source = source_of(encoding, kinds=("ordinary",))
    codes, scales = encode(encoding, source.matrix())
    for row, byte in ((0, 0), (ROWS - 1, codes.shape[1] - 1), (31, 17)):
        wrong = codes.copy()
        wrong[row, byte] ^= 1
        assert audit_encoded(encoding, source.matrix(), wrong, scales).other_codes == 1
    for change in (0, 0x7F80, 0x8000 | int(scales[5, 0])):
        other = scales.copy()
        other[5, 0] = change
        assert audit_encoded(encoding, source.matrix(), codes, other).other_scales == 1
    other = scales.copy()
    other[5, 0] += 0x400 if encoding.half else 0x80  # twice
    assert audit_encoded(encoding, source.matrix(), codes, other).other_scales == 1


def test_only_integers_are_searched() -> None:
    with pytest.raises(ValueError, match="not valid"):
        Encoding("mxfp4", 32, False, True).code_shape(32, 32)


@pytest.mark.parametrize("cols", [33, 34, 35])
def test_what_the_scratch_held_does_not_matter(isa: str, cols: int) -> None:
    """Whole rows whose columns are no multiple of those summed at once."""
    encoding = Encoding("int8", 0, False, True)
    matrix = source_of(encoding, rows=8, cols=cols, kinds=("ordinary",)).matrix()
    found = []
    for content in (0, 1e4):
        scratch = native.new_scratch(cols)
        scratch.view(f32)[:] = content
        found.append(encode(encoding, matrix, scratch=scratch))
    assert np.array_equal(found[0][1], found[1][1]) and np.array_equal(found[0][0], found[1][0])
