"""The fixtures of tests/helpers/encoded.py against the libraries that define the encodings.

What these libraries unpack is what a checkpoint stands for; test_packed_encodings.py then holds
ktconv's output against the fixtures.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.encoded import KINDS, e5m3, of_awq, of_gptq, of_mxfp4, of_nvfp4, of_packed
from helpers.families import Raw, Tensor, raw
from numpy.typing import NDArray

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")
F32 = NDArray[np.float32]
ROWS, COLS = 96, 256
_DTYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "BF16": "bfloat16"}


def tensor(stored: Tensor) -> Any:
    """As torch.Tensor, with the dtype that torch has for it."""
    found: Raw = raw(stored)
    plain = {"F32": "f4", "F16": "f2", "I32": "i4", "I64": "i8", "I8": "i1", "U8": "u1"}
    if found.dtype in plain:
        values = np.frombuffer(found.data, "<" + plain[found.dtype]).reshape(found.shape)
        return torch.from_numpy(values.copy())
    data = torch.frombuffer(bytearray(found.data), dtype=torch.uint8)
    return data.view(getattr(torch, _DTYPES[found.dtype])).reshape(found.shape)


def check(theirs: Any, ours: F32) -> None:
    np.testing.assert_array_equal(theirs.to(torch.float32).numpy(), ours)


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "fp8 block" in kind or "mxfp8" in kind])
def test_fp8_blocks(kind: str) -> None:
    parts, values = KINDS[kind].of(rng(), ROWS, COLS)
    weight = tensor(parts.pop("weight")).to(torch.float32)
    [scale] = (tensor(one) for one in parts.values())
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    scale = scale.to(torch.float32)
    if scale.ndim == 4:
        scale = scale[:, 0, :, 0]
    block = (1, 32) if kind == "mxfp8" else (128, 128)
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    check(weight * wide[:ROWS, :COLS], values)


def test_mxfp4() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    parts, values = of_mxfp4(rng(), ROWS, COLS, ("blocks", "scales"), ("U8", "U8"))
    blocks = tensor(parts["blocks"]).reshape(1, ROWS, COLS // 32, 16)
    scales = tensor(parts["scales"]).reshape(1, ROWS, COLS // 32)
    # The function leaves experts transposed: [1, K, N].
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    check(theirs[0].T, values)


def test_mxfp6() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.mxfp6.helpers")
    parts, values = KINDS["mxfp6"].of(rng(), ROWS, COLS)
    packed, scale = tensor(parts["weight_packed"]), tensor(parts["weight_scale"])
    numbers = helpers.unpack_fp6_from_uint8(packed, ROWS, COLS, torch.float32)
    assert torch.equal(helpers.pack_fp6_to_uint8(numbers), packed)
    check(
        numbers * scale.view(torch.float8_e8m0fnu).to(torch.float32).repeat_interleave(32, 1),
        values,
    )


def test_mxint4() -> None:
    utils = pytest.importorskip("auto_round.experimental.qmodules.mxint4_utils")
    parts, values = KINDS["mxint4, AutoRound"].of(rng(), ROWS, COLS)
    numbers = utils.unpack_int4_from_uint8(
        tensor(parts["weight_packed"]), ROWS, COLS, torch.float32
    )
    scale = tensor(parts["weight_scale"]).view(torch.float8_e8m0fnu).to(torch.float32)
    check(numbers * scale.repeat_interleave(32, 1), values)


def test_nvfp4_e5m3() -> None:
    nvfp = pytest.importorskip("auto_round.data_type.nvfp")
    if not hasattr(nvfp, "e5m3_to_float_tensor"):
        pytest.skip("an AutoRound without E5M3")
    codes = np.arange(255, dtype=np.uint8)
    check(nvfp.e5m3_to_float_tensor(tensor(codes)), e5m3(codes))
    assert torch.equal(nvfp.float_to_e5m3_frexp(tensor(e5m3(codes))), tensor(codes))


@pytest.mark.parametrize("divides", [True, False])
def test_nvfp4(divides: bool) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    names = ("weight_packed", "outer")
    parts, values = of_nvfp4(rng(), ROWS, COLS, names, divides)
    numbers = helpers.unpack_fp4_from_uint8(
        tensor(parts["weight_packed"]), ROWS, COLS, torch.float32
    )
    scale, outer = tensor(parts["weight_scale"]).to(torch.float32), tensor(parts["outer"])
    both = scale / outer if divides else scale * outer
    check(numbers * both.repeat_interleave(16, 1), values)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_pack_quantized(bits: int, asymmetric: bool) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    parts, values = of_packed(rng(), ROWS, COLS, bits, group=64, asymmetric=asymmetric)
    shape = torch.Size(tensor(parts["weight_shape"]).tolist())
    codes = helpers.unpack_from_int32(tensor(parts["weight_packed"]), bits, shape).to(torch.float32)
    if asymmetric:
        zero = helpers.unpack_from_int32(
            tensor(parts["weight_zero_point"]), bits, torch.Size((ROWS, COLS // 64)), packed_dim=0
        )
        codes = codes - zero.to(torch.float32).repeat_interleave(64, 1)
    scale = tensor(parts["weight_scale"]).to(torch.float32)
    check(codes * scale.repeat_interleave(64, 1), values)


@pytest.mark.parametrize("order", [None, "shuffled"])
@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, v2: bool, order: str | None) -> None:
    name = "qlinear_torch" if v2 else "qlinear_torch_zp"
    module = pytest.importorskip(f"auto_round_extension.torch.{name}")
    parts, values = of_gptq(rng(), ROWS, COLS, bits, v2, order)
    layer = module.QuantLinear(bits, 64, COLS, ROWS, bias=False, g_idx=order is not None)
    for part, stored in parts.items():
        setattr(layer, part, tensor(stored))
    layer.dequant_dtype = torch.int16 if bits == 8 else torch.int8
    layer.scales = layer.scales.to(torch.float32)
    theirs = layer(torch.eye(COLS, dtype=torch.float32)).T
    if not v2:  # where z is 0 it stores 2^bits - 1, which this library reads as 2^bits
        wrapped = np.isclose(np.abs(theirs.numpy() - values).max(axis=1), 0)
        assert wrapped.any()
        theirs, values = theirs[wrapped], values[wrapped]
    np.testing.assert_allclose(theirs.numpy(), values, rtol=1e-6, atol=0)


def test_awq() -> None:
    utils = pytest.importorskip("auto_round.export.export_to_awq.utils")
    parts, values = of_awq(rng(), ROWS, COLS)
    theirs = utils.dequantize_gemm(
        tensor(parts["qweight"]),
        tensor(parts["qzeros"]),
        tensor(parts["scales"]).to(torch.float32),
        4,
        64,
    )
    check(theirs.T, values)
