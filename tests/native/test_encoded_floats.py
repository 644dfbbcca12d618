"""The audit of floating-point codes: it measures what is there, and finds everything wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native.support import Source

from ktconv import native
from ktconv.formats.decode import f32_to_bf16
from ktconv.native import Encoding, audit_encoded, encode
from ktconv.system.arrays import F32, U8, Array
from ktconv.verify.encoded.nearest import LEVELS, codes_of, compare, expected_scales

pytestmark = pytest.mark.slow

ROWS, COLS = 256, 384
KINDS = ("ordinary", "zeros", "denormals", "largest", "any exponent", "tiny", "one magnitude")
PLAIN = Encoding("bf16")
FLOATS = [Encoding("fp8"), Encoding("fp8", 128), Encoding("mxfp4", 32), Encoding("mxfp8", 32),
          Encoding("nvfp4", 16)]  # fmt: skip


def source_of(**changes: Any) -> Source:
    words: dict[str, Any] = {"rows": ROWS, "cols": COLS, "dtype": "BF16", "kinds": KINDS}
    return Source("int8", **{**words, **changes})


def second(encoding: Encoding, source: Source) -> float:
    most = float(np.abs(source.values()).max())
    return float(np.float32(448 * 6) / np.float32(most)) if encoding.kind == "nvfp4" else 0.0


def divisors(encoding: Encoding, scales: Array, shape: tuple[int, int], t: float) -> F32:
    """Of each weight, by the definitions."""
    rows, cols = shape
    if encoding.kind == "fp8":
        grid = scales
    elif encoding.kind == "nvfp4":
        grid = LEVELS["fp8"].values[scales] / np.float32(t)
    else:
        grid = np.ldexp(np.float64(1), scales.astype(int) - 127).astype(np.float32)
    height = 128 if encoding.kind == "fp8" and encoding.group else 1
    width = encoding.group or cols
    tall: F32 = np.repeat(np.repeat(grid, height, 0)[:rows], width, 1)[:, :cols]
    return tall


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("encoding", FLOATS, ids=str)
def test_it_measures_what_is_there(isa: str, encoding: Encoding, transposed: bool) -> None:
    """Errors, zeros and steps by NumPy; nothing is wrong with what the encoder makes."""
    for kinds in (("ordinary",), KINDS):
        source = source_of(kinds=kinds, transposed=transposed)
        t = second(encoding, source)
        codes, scales = encode(encoding, source.matrix(), t)
        found = audit_encoded(encoding, source.matrix(), codes, scales, t)
        assert (found.other_codes, found.other_scales) == (0, 0)
        weights = source.values()
        if kinds != ("ordinary",):
            continue
        by = divisors(encoding, scales, weights.shape, t)
        wanted = compare(encoding.kind, weights, codes.reshape(-1), by)
        assert not wanted.wrong.any()
        for name in ("squared_source", "squared_error", "squared_value", "zeros"):
            assert getattr(found, name) == pytest.approx(getattr(wanted.sums, name), rel=1e-5)
        assert found.max_steps == pytest.approx(_steps(encoding, weights, codes, by), rel=1e-6)


def _steps(encoding: Encoding, weights: F32, codes: U8, by: F32) -> float:
    values = LEVELS[encoding.kind].values.astype(np.float64)
    _, place = codes_of(encoding.kind, codes.reshape(-1), *weights.shape)
    q = np.abs(weights / by).astype(np.float64)
    here = values[place]
    above = values[np.minimum(place + 1, len(values) - 1)] - here
    below = here - values[np.maximum(place - 1, 0)]
    up = np.where(place == len(values) - 1, below, above)
    with np.errstate(all="ignore"):
        steps = np.abs(q - here) / np.where(q > here, up, below)
    return float(np.nanmax(steps))


@pytest.mark.parametrize("encoding", FLOATS, ids=str)
@pytest.mark.parametrize("damage", ["up", "down", "sign", "swap"])
def test_one_wrong_code_is_found(isa: str, encoding: Encoding, damage: str) -> None:
    source = source_of(kinds=("ordinary",))
    t = second(encoding, source)
    codes, scales = encode(encoding, source.matrix(), t)
    nibbles = encoding.kind in ("mxfp4", "nvfp4")
    rng = np.random.default_rng(5)
    for _ in range(20):
        row, col = int(rng.integers(ROWS)), int(rng.integers(codes.shape[1]))
        wrong, byte = codes.copy(), int(codes[row, col])
        bit, most = (3, 7) if nibbles else (7, 126)
        place = byte & ((1 << bit) - 1)
        if damage == "sign":
            changed = byte ^ 1 << bit
        elif damage == "up":
            changed = byte + 1 if place < most else byte + (1 if not nibbles else -1)
        elif damage == "down":
            changed = byte - 1 if place else byte + 1
        elif nibbles:
            changed = byte >> 4 | (byte & 15) << 4
        else:
            changed = int(codes[(row + 1) % ROWS, col])
        if changed == byte:
            continue
        wrong[row, col] = changed
        found = audit_encoded(encoding, source.matrix(), wrong, scales, t)
        assert found.other_codes >= 1 and found.other_scales == 0


@pytest.mark.parametrize("encoding", FLOATS, ids=str)
def test_one_wrong_scale_is_found(isa: str, encoding: Encoding) -> None:
    """One bit, the neighbour's, NaN, 0."""
    source = source_of(kinds=("ordinary",))
    t = second(encoding, source)
    codes, scales = encode(encoding, source.matrix(), t)
    at = scales.shape[0] // 2, scales.shape[1] // 2
    changes: list[Any] = [scales[at] * 0]
    if encoding.kind == "fp8":
        value = scales[at]
        changes += [np.nextafter(value, np.float32(9)), np.nextafter(value, np.float32(0)), np.nan]
        changes += [np.inf, -value]
    else:
        changes += [scales[at] ^ 1, scales[at] + 1, scales[at] - 1, 255, scales[at] ^ 128, 0x7F]
    for change in changes:
        wrong = scales.copy()
        wrong[at] = change
        found = audit_encoded(encoding, source.matrix(), codes, wrong, t)
        assert found.other_scales == 1, change


def test_codes_that_are_no_numbers_are_found(isa: str) -> None:
    source = source_of(kinds=("largest",))
    for encoding in (Encoding("fp8"), Encoding("fp8", 128), Encoding("mxfp8", 32)):
        codes, scales = encode(encoding, source.matrix())
        row, col = (
            (int(i[0]) for i in np.nonzero(codes & 127 == 126))
            if (codes & 127 == 126).any()
            else (0, 0)
        )
        codes[row, col] |= 127
        assert audit_encoded(encoding, source.matrix(), codes, scales).other_codes == 1


@pytest.mark.parametrize(
    "encoding", [Encoding("fp8"), Encoding("fp8", 128), Encoding("mxfp8", 32)], ids=str
)
def test_beyond_the_largest_number_only_that_is_right(isa: str, encoding: Encoding) -> None:
    """Under scales that are too small, what is nearest has the code 126: neither 125 nor NaN."""
    ones = np.full((ROWS, COLS), 0x3F80, np.uint16)
    matrix = source_of(kinds=("ordinary",)).matrix(ones)
    codes, scales = encode(encoding, matrix)
    small = scales * np.float32(0.25) if encoding.kind == "fp8" else scales - 2
    codes[:] = 126
    assert audit_encoded(encoding, matrix, codes, small).other_codes == 0
    for wrong in (125, 127):
        codes[7, 33] = wrong
        assert audit_encoded(encoding, matrix, codes, small).other_codes == 1


@pytest.mark.parametrize("encoding", FLOATS, ids=str)
def test_odd_numbers_of_rows(isa: str, encoding: Encoding) -> None:
    """Also a last block that is cut."""
    for rows, cols in ((1, 32), (129, 160), (383, 512)):
        source = source_of(rows=rows, cols=cols, kinds=("ordinary",))
        t = second(encoding, source)
        codes, scales = encode(encoding, source.matrix(), t)
        found = audit_encoded(encoding, source.matrix(), codes, scales, t)
        assert (found.other_codes, found.other_scales) == (0, 0)
        scales[-1, -1] = scales[-1, -1] * 2 if encoding.kind == "fp8" else scales[-1, -1] ^ 1
        found = audit_encoded(encoding, source.matrix(), codes, scales, t)
        assert found.other_scales == 1


@pytest.mark.parametrize("encoding", FLOATS, ids=str)
def test_levels_have_the_same_bits(encoding: Encoding) -> None:
    source, found, before = source_of(), set(), native.isa()
    t = second(encoding, source)
    codes, scales = encode(encoding, source.matrix(), t)
    codes[3, 5] ^= 1
    try:
        for isa in native.isa_available():
            native.use_isa(isa)
            found.add(audit_encoded(encoding, source.matrix(), codes, scales, t))
    finally:
        native.use_isa(before)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("encoding", "one", "wrong"),
    [
        (Encoding("fp8"), 1.0, (0.0, -1.0, np.nan, -np.nan)),
        (Encoding("fp8", 128), 1.0, (0.0, -1.0, np.nan, -np.nan)),
        (Encoding("nvfp4", 16), 0x38, (0, 0x80, 0xB8, 0x7F, 0xFF)),
    ],
    ids=str,
)
def test_no_code_is_right_under_a_scale_that_is_not_positive(
    isa: str, encoding: Encoding, one: float, wrong: tuple[float, ...]
) -> None:
    """Nor code 0 of zeros: 0 / 0 is NaN, whose sign depends on the CPU."""
    weights = np.zeros((ROWS, COLS), np.uint16)
    weights[0] = 1  # denormal: code 0, too
    matrix = source_of().matrix(weights)
    codes, scales = encode(encoding, matrix, 1.0)
    codes[:], scales[:] = 0, one
    assert audit_encoded(encoding, matrix, codes, scales, 1.0).other_codes == 0
    under = (encoding.group or COLS) * (128 if encoding == Encoding("fp8", 128) else 1)
    for row in (0, -1):
        for change in wrong:
            scales[row, 0] = change
            found = audit_encoded(encoding, matrix, codes, scales, 1.0)
            assert found.other_codes == under, (row, change)
            scales[row, 0] = one


def test_what_it_does_not_take() -> None:
    source = source_of(cols=48)
    codes, scales = encode(Encoding("nvfp4", 16), source.matrix(), 1.0)
    with pytest.raises(ValueError, match="multiple"):
        audit_encoded(Encoding("nvfp4", 16), source.matrix(), codes, scales, 1.0)
    source = source_of()
    codes, scales = encode(Encoding("nvfp4", 16), source.matrix(), 1.0)
    with pytest.raises(ValueError, match="scale"):
        audit_encoded(Encoding("nvfp4", 16), source.matrix(), codes, scales, 0.0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_plain_numbers(isa: str, dtype: str, transposed: bool) -> None:
    """bf16: the encoder rounds as NumPy does, and the audit finds every other number."""
    source = source_of(dtype=dtype, transposed=transposed, kinds=("ordinary", "zeros", "denormals"))
    codes, scales = encode(PLAIN, source.matrix())
    bits = codes.view(np.uint16)
    assert np.array_equal(bits, f32_to_bf16(source.values())) and scales.size == 0
    found = audit_encoded(PLAIN, source.matrix(), codes, scales)
    assert (found.other_codes, found.other_scales) == (0, 0)
    assert found.zeros == int((bits & 0x7FFF == 0).sum())
    for at in ((0, 0), (ROWS - 1, COLS - 1), (7, 33)):
        wrong = bits.copy()
        wrong[at] ^= 1
        changed = audit_encoded(PLAIN, source.matrix(), wrong.view(np.uint8), scales)
        assert changed.other_codes == 1


@pytest.mark.parametrize("transposed", [False, True])
def test_the_largest_magnitude(isa: str, transposed: bool) -> None:
    source = source_of(transposed=transposed)
    assert native.largest(source.matrix()) == float(np.abs(source.values()).max())
    bits = source_of(kinds=("ordinary",)).bits()
    bits[40, 100] = 0x7F80
    with pytest.raises(native.NonFiniteError) as error:
        native.largest(source_of(kinds=("ordinary",)).matrix(bits))
    assert (error.value.row, error.value.col) == (40, 100)


def test_scales_of_the_rule_in_numpy() -> None:
    """The statement that verify names faults by agrees with the encoder."""
    source = source_of()
    for encoding in FLOATS:
        t = second(encoding, source)
        _, scales = encode(encoding, source.matrix(), t)
        weights = np.abs(source.values())
        largest = weights.reshape(ROWS, -1, encoding.group or COLS).max(2)
        if encoding.kind == "fp8" and encoding.group:
            largest = np.maximum.reduceat(largest, range(0, ROWS, 128), axis=0)
        assert np.array_equal(expected_scales(encoding.kind, largest, t), scales)
