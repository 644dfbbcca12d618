"""Encodings of checkpoints, bit for bit as the libraries that define them, on every level."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers.looped import each
from native.support import Source, assert_same

from ktconv import native
from ktconv.formats import FORMATS, fp8, mxfp8
from ktconv.formats.decode import bf16_to_f32, e4m3fn_to_f32, f16_to_f32
from ktconv.native import Encoding, audit_encoded, encode
from ktconv.system.arrays import F32, U8, Array

pytestmark = pytest.mark.slow

ROWS, COLS = 64, 384
KINDS = ("ordinary", "zeros", "denormals", "largest", "any exponent", "tiny", "one magnitude")
INTS = [Encoding(kind, group, half) for kind in ("int4", "int8") for group in (0, 32, 64, 128)
        for half in (False, True)]  # fmt: skip
OTHERS = [Encoding("fp8"), Encoding("fp8", 128), Encoding("mxfp4", 32), Encoding("mxfp8", 32),
          Encoding("nvfp4", 16)]  # fmt: skip


def source_of(encoding: Encoding, **changes: Any) -> Source:
    """Weights in the dtype that the encoding wants, of all magnitudes that have a scale."""
    words: dict[str, Any] = {"dtype": "F16" if encoding.half else "BF16", "kinds": KINDS}
    return Source("int8", **{"rows": ROWS, "cols": COLS, **words, **changes})


def tensor_scale(source: Source) -> float:
    return float(np.float32(448 * 6) / np.abs(source.values()).max())


@cache
def library() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("compressed_tensors.quantization")


@cache
def by_library(encoding: Encoding, source: Source) -> tuple[U8, Array]:
    """Codes and scales by compressed-tensors."""
    import torch
    from compressed_tensors.compressors import pack_to_int32
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    dtype = torch.float16 if encoding.half else torch.bfloat16
    weight = torch.from_numpy(source.bits().view(np.int16)).view(dtype)
    groups = weight.reshape(source.rows, -1, encoding.group or source.cols)
    arguments = library().QuantizationArgs(**_ARGUMENTS[encoding.kind](encoding))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    codes = quantize(weight, scale, zero, arguments, torch.int8)
    packed = pack_to_int32(codes, arguments.num_bits)
    return packed.numpy().view(np.uint8), scale.view(torch.int16).numpy().view(np.uint16)


def _integers(encoding: Encoding) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": encoding.group}
    bits = 4 if encoding.kind == "int4" else 8
    return {"num_bits": bits, **(strategy if encoding.group else {"strategy": "channel"})}


_ARGUMENTS = {"int4": _integers, "int8": _integers}


@pytest.mark.parametrize("encoding", INTS, ids=str)
def test_integers_are_those_of_compressed_tensors(isa: str, encoding: Encoding) -> None:
    library()
    source = source_of(encoding)
    codes, scales = encode(encoding, source.matrix())
    expected = by_library(encoding, source)
    assert_same("scales", scales, expected[1])
    assert_same("codes", codes, expected[0])


@pytest.mark.parametrize("encoding", [*INTS, *OTHERS], ids=str)
@each("transposed", [False, True])
@each("rows, cols", [(ROWS, COLS), (33, 128), (1, 256)])
def test_levels_agree(isa: str, encoding: Encoding, transposed: bool, rows: int, cols: int) -> None:
    native.use_isa(isa)
    source = source_of(encoding, rows=rows, cols=cols, transposed=transposed, pad=3, seed=rows)
    scale = tensor_scale(source) if encoding.kind == "nvfp4" else 0.0
    found = encode(encoding, source.matrix(), scale)
    native.use_isa("scalar")
    expected = encode(encoding, source.but(transposed=False, pad=0).matrix(), scale)
    assert_same("codes", found[0], expected[0])
    assert_same("scales", found[1], expected[1])


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3"])
def test_fp8_is_the_reference(isa: str, group: int, dtype: str) -> None:
    source = Source("int8", 160, 256, dtype, kinds=("ordinary", "zeros", "one magnitude"), seed=3)
    found = encode(Encoding("fp8", group), source.matrix())
    fmt = FORMATS["fp8" if group else "fp8-channel"]
    codes, scale = fp8.quantize(fmt, source.values())
    assert_same("codes", found[0], codes)
    assert_same("scales", found[1], scale)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


def nibbles(codes: U8) -> U8:
    found = np.empty((len(codes), 2 * codes.shape[1]), np.uint8)
    found[:, 0::2], found[:, 1::2] = codes & 15, codes >> 4
    return found


def nearest(values: F32, levels: F32) -> F32:
    """Of each value the nearest level, of two the one with an even code; levels are ascending."""
    middle = (levels[1:] + levels[:-1]) / 2
    at = np.searchsorted(middle, np.abs(values), "left")
    tie = (at < len(middle)) & (np.abs(values) == middle[np.minimum(at, len(middle) - 1)])
    at += tie & (at % 2 == 1)
    return np.copysign(levels[at], values)


def e4m3_levels() -> F32:
    codes = np.arange(127, dtype=np.uint8)
    exponent, mantissa = (codes >> 3).astype(int), codes & 7
    small = mantissa * 2.0**-9
    return np.where(exponent == 0, small, (8 + mantissa) * 2.0 ** (exponent - 10)).astype(
        np.float32
    )


def test_the_reference_of_mxfp8_is_the_encoder(isa: str) -> None:
    """formats/mxfp8.py, which packs weights that are in memory."""
    source = source_of(Encoding("mxfp8", 32), kinds=(*KINDS, "int4 ties"))
    codes, scales = encode(Encoding("mxfp8", 32), source.matrix())
    found, exponents = mxfp8.quantize(FORMATS["mxfp8"], source.values())
    assert_same("scales", exponents, scales)
    assert_same("codes", found, codes)


@pytest.mark.parametrize(("kind", "top"), [("mxfp4", 2), ("mxfp8", 8)])
def test_mx_formats_follow_their_definition(isa: str, kind: str, top: int) -> None:
    source = source_of(
        Encoding(kind, 32), kinds=("ordinary", "zeros", "one magnitude", "int4 ties")
    )
    codes, scales = encode(Encoding(kind, 32), source.matrix())
    values = source.values().reshape(ROWS, -1, 32)
    amax = np.abs(values).max(axis=2)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(amax.astype(np.float64)))
    # The next power of two from 1.75 times one on.
    exponent += amax.astype(np.float64) >= 1.75 * 2.0**exponent
    expected = np.where(amax > 0, np.maximum(exponent + 127 - top, 0), 0).astype(np.uint8)
    assert_same("scales", scales, expected)
    step = np.ldexp(np.float64(1), scales.astype(int) - 127)[..., None]
    levels = E2M1[:8] if kind == "mxfp4" else e4m3_levels()
    wanted = nearest((values / step).astype(np.float32), levels)
    table = E2M1 if kind == "mxfp4" else np.concatenate([levels, [np.nan], -levels, [np.nan]])
    got = table[nibbles(codes) if kind == "mxfp4" else codes].reshape(values.shape)
    assert_same("values", got.astype(np.float32), wanted)


def test_nvfp4_follows_its_definition(isa: str) -> None:
    source = source_of(Encoding("nvfp4", 16), kinds=("ordinary", "zeros", "one magnitude"))
    scale = np.float32(tensor_scale(source))
    codes, scales = encode(Encoding("nvfp4", 16), source.matrix(), float(scale))
    values = source.values().reshape(ROWS, -1, 16)
    amax = np.abs(values).max(axis=2)
    levels = e4m3_levels()
    stored = nearest(scale * (amax / np.float32(6)), levels)
    stored = np.where(stored == 0, np.float32(0.125), stored)
    assert_same("scales", levels[scales], stored)
    wanted = nearest(values / (stored / scale)[..., None], E2M1[:8])
    assert_same("values", E2M1[nibbles(codes)].reshape(values.shape), wanted)


def restored(encoding: Encoding, codes: U8, scales: Array) -> F32:
    levels = nibbles(codes).astype(np.float32) - 8 if encoding.kind == "int4" else (
        codes.astype(np.float32) - 128)  # fmt: skip
    step = f16_to_f32(scales) if encoding.half else bf16_to_f32(scales)
    return levels * np.repeat(step, encoding.group or levels.shape[1], axis=1)


@pytest.mark.parametrize("encoding", INTS, ids=str)
@each("transposed", [False, True])
def test_the_audit_measures_what_is_there(isa: str, encoding: Encoding, transposed: bool) -> None:
    kinds = ("ordinary", "zeros", "one magnitude")
    source = source_of(encoding, transposed=transposed, kinds=kinds)
    codes, scales = encode(encoding, source.matrix())
    found = audit_encoded(encoding, source.matrix(), codes, scales)
    values, got = source.values().astype(np.float64), restored(encoding, codes, scales)
    off = (source.values() - got).astype(np.float64)
    assert found.squared_source == pytest.approx((values**2).sum(), rel=1e-6)
    assert found.squared_error == pytest.approx((off**2).sum(), rel=1e-6)
    assert found.squared_value == pytest.approx((got.astype(np.float64) ** 2).sum(), rel=1e-6)
    assert found.zeros == int((got == 0).sum())
    assert found.other_scales == found.other_codes == 0
    assert 0.4 < found.max_steps < (0.6 if encoding.kind == "int4" else 1.1)
    native.use_isa("scalar")
    assert audit_encoded(encoding, source.matrix(), codes, scales) == found


@pytest.mark.parametrize("encoding", INTS, ids=str)
def test_the_audit_finds_codes_that_are_one_off(isa: str, encoding: Encoding) -> None:
    source = source_of(encoding)
    codes, scales = encode(encoding, source.matrix())
    assert audit_encoded(encoding, source.matrix(), codes, scales).other_codes == 0
    for byte in range(0, codes.shape[1], 7):
        wrong = codes.copy()
        wrong[byte % ROWS, byte] ^= 1  # a code's last bit
        assert audit_encoded(encoding, source.matrix(), wrong, scales).other_codes == 1


@pytest.mark.parametrize("encoding", INTS, ids=str)
def test_the_audit_finds_what_is_wrong(isa: str, encoding: Encoding) -> None:
    source = source_of(encoding, kinds=("ordinary",))
    codes, scales = encode(encoding, source.matrix())
    clean = audit_encoded(encoding, source.matrix(), codes, scales)
    for row, byte in ((0, 0), (ROWS - 1, codes.shape[1] - 1), (31, 17)):
        wrong = codes.copy()
        wrong[row, byte] ^= 0x44
        found = audit_encoded(encoding, source.matrix(), wrong, scales)
        assert found.max_steps > 3 > clean.max_steps
        assert found.other_codes == (2 if encoding.kind == "int4" else 1)
    other = scales.copy()
    other[ROWS - 1, -1] ^= 1
    assert audit_encoded(encoding, source.matrix(), codes, other).other_scales == 1


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_what_is_not_finite_is_named(isa: str, dtype: str) -> None:
    encoding = Encoding("int4", 32, dtype == "F16")
    source = source_of(encoding, kinds=("ordinary",))
    bits = source.bits()
    bits[40, 100] = bits[41, 0] = 0x7FC1 if dtype == "BF16" else 0x7C00
    with pytest.raises(native.NonFiniteError) as found:
        encode(encoding, source.matrix(bits))
    assert (found.value.row, found.value.col) == (40, 100)


@pytest.mark.parametrize(
    "encoding",
    [Encoding("int4", 48), Encoding("mxfp4", 16), Encoding("mxfp8"), Encoding("nvfp4", 32),
     Encoding("fp8", 64), Encoding("fp8", half=True), Encoding("int8", -32)],
    ids=str,
)  # fmt: skip
def test_groups_that_a_kind_does_not_have(encoding: Encoding) -> None:
    with pytest.raises(ValueError):
        encoding.code_shape(32, 128)


@pytest.mark.parametrize("cols", [100, 99, 33])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_rows_end_with_a_whole_word(isa: str, kind: str, cols: int) -> None:
    encoding = Encoding(kind)
    source = source_of(encoding, cols=cols, kinds=("ordinary",))
    codes, scales = encode(encoding, source.matrix())
    expected = by_library(encoding, source) if library() else None
    assert expected is not None
    assert_same("codes", codes, expected[0])
    assert_same("scales", scales, expected[1])


EXTREMES = (2.0**-145, 1e-38, 1e-20, 2.0**-41, 2.0**41, 1e20, 2e38)


@each("most", EXTREMES)
@pytest.mark.parametrize(
    "encoding", [*INTS[:8:2], *OTHERS, Encoding("bf16")], ids=str
)  # fmt: skip
def test_sums_of_weights_that_binary32_has_no_squares_of(
    isa: str, encoding: Encoding, most: float
) -> None:
    """Some rows of such weights, among zeros and ordinary ones."""
    native.use_isa(isa)
    values = np.random.default_rng(5).uniform(-1, 1, (ROWS, COLS))
    values[1] = 0
    values[2:] *= most
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    source = native.Matrix(bits.reshape(-1).view(np.uint8), "BF16", ROWS, COLS)
    second = 1.0 if most < 1e-30 else float(np.float32(448 * 6) / native.largest(source))
    second = second if encoding.kind == "nvfp4" else 0.0
    codes, scales = encode(encoding, source, second)
    found = audit_encoded(encoding, source, codes, scales, second)
    assert found.other_codes == found.other_scales == 0
    wide = bf16_to_f32(bits).astype(np.float64)
    assert found.squared_source == pytest.approx(float((wide**2).sum()), rel=1e-6)
    if encoding.kind in ("int4", "int8"):
        got = restored(encoding, codes, scales).astype(np.float64)
        assert found.squared_error == pytest.approx(float(((wide - got) ** 2).sum()), rel=1e-6)
        assert found.squared_value == pytest.approx(float((got**2).sum()), rel=1e-6)
    else:
        assert math.isfinite(found.squared_error) and math.isfinite(found.squared_value)
    product = (found.squared_source + found.squared_value - found.squared_error) / 2
    if most >= 1e-20:  # smaller ones than scales can be
        length = math.sqrt(found.squared_source) * math.sqrt(found.squared_value)
        assert product / length > 0.98
    native.use_isa("scalar")
    assert audit_encoded(encoding, source, codes, scales, second) == found


def test_codes_that_stand_for_infinity(isa: str) -> None:
    """MXFP4's level nearest to the largest numbers is beyond binary32."""
    bits = np.full((ROWS, COLS), 0x7F60, np.uint16)  # 7/8 of 2^128
    source = native.Matrix(bits.reshape(-1).view(np.uint8), "BF16", ROWS, COLS)
    encoding = Encoding("mxfp4", 32)
    found = audit_encoded(encoding, source, *encode(encoding, source))
    assert math.isfinite(found.squared_source) and math.isinf(found.squared_error)


# ---- in one pass, and near where codes change ---------------------------------------------------


@pytest.mark.parametrize("encoding", [*INTS, *OTHERS, Encoding("bf16")], ids=str)
@each("transposed", [False, True])
def test_rounding_and_comparing_in_one_pass(isa: str, encoding: Encoding, transposed: bool) -> None:
    """Of pieces of 128 rows, the last of which is smaller."""
    source = source_of(encoding, rows=288, transposed=transposed, kinds=("ordinary", "zeros"))
    view, scale = source.matrix(), 0.0
    if encoding.kind == "nvfp4":
        scale = tensor_scale(source)
    codes, scales = encode(encoding, view, scale)
    wanted = audit_encoded(encoding, view, codes, scales, scale)
    own = np.empty_like(codes), np.empty_like(scales)
    scratch = native.new_scratch(view.cols)
    found, sums = native.encode_audit(encoding, view, scale, *own, scratch)
    assert_same("codes", own[0], codes)
    assert_same("scales", own[1], scales)
    assert sums == (native.byte_sum(codes), native.byte_sum(scales) if scales.size else 0)
    for name, value in found._asdict().items():
        assert value == pytest.approx(getattr(wanted, name), rel=1e-12, abs=0)


def test_shapes_that_are_not_compared_are_not_encoded(isa: str) -> None:
    encoding, rows, cols = Encoding("int8", 8), 4, 40
    view = native.Matrix(np.ones(2 * rows * cols, np.uint8), "BF16", rows, cols)
    codes, scales = np.full((rows, cols), 7, np.uint8), np.zeros((rows, cols // 8), np.uint16)
    with pytest.raises(ValueError, match="not a multiple"):
        native.encode_audit(encoding, view, 0.0, codes, scales, native.new_scratch(cols))
    assert (codes == 7).all()


# Quotients at which codes change: middles of E2M1's numbers, and of bf16's and binary16's, to which
# quotients of integers are rounded.
_MIDDLES = {
    Encoding("nvfp4", 16): np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]),
    Encoding("int4", 32): np.array([0.501953125, 1.49609375, 2.5078125, 3.4921875, 6.484375]),
    Encoding("int8", 0): np.array([0.501953125, 3.4921875, 14.53125, 63.375, 126.75]),
    Encoding("int4", 64, half=True): np.array([0.500244140625, 1.49951171875, 6.498046875]),
}


@pytest.mark.parametrize("encoding", _MIDDLES, ids=str)
def test_quotients_next_to_where_codes_change(isa: str, encoding: Encoding) -> None:
    """Where a product with the reciprocal of a scale has another code than the quotient."""
    rng, rows, cols = np.random.default_rng(7), 64, 512
    group = encoding.group or cols
    most = {"nvfp4": 6.0, "int4": 7.5, "int8": 127.5}[encoding.kind]
    second = 1.7 if encoding.kind == "nvfp4" else 0.0
    values = np.zeros((rows, cols // group, group), np.float32)
    values[..., 0] = rng.uniform(0.6, 1.9, values.shape[:2]) * most
    _, scales = encode(encoding, _floats(values), second)
    divisor = _divisors(encoding, scales, second)[..., None]
    middles = rng.choice(_MIDDLES[encoding], (rows, cols // group, group - 1))
    near = (middles * rng.choice([-1, 1], middles.shape) * divisor).astype(np.float32)
    values[..., 1:] = (near.view(np.int32) + rng.integers(-2, 3, near.shape, np.int32)).view(
        np.float32
    )
    quotients = values / divisor.astype(np.float32)
    products = values * (np.float32(1) / divisor.astype(np.float32))
    assert (quotients != products).mean() > 0.05
    codes, same = encode(encoding, _floats(values), second)
    assert_same("scales", same, scales)
    native.use_isa("scalar")
    assert_same("codes", codes, encode(encoding, _floats(values), second)[0])
    assert audit_encoded(encoding, _floats(values), codes, scales, second).other_codes == 0


def _floats(values: F32) -> native.Matrix:
    rows = len(values)
    return native.Matrix(values.reshape(-1).view(np.uint8), "F32", rows, values.size // rows)


def _divisors(encoding: Encoding, scales: Array, second: float) -> F32:
    if encoding.kind == "nvfp4":
        return e4m3fn_to_f32(scales) / np.float32(second)
    return f16_to_f32(scales) if encoding.half else bf16_to_f32(scales)
