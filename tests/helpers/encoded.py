"""Expert weights as quantized checkpoints store them, and the values that they stand for.

Everything here is written from the formats' descriptions with plain NumPy; tests/source/
test_oracles.py holds it against the libraries that define them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.families import (
    Raw,
    Tensor,
    Weights,
    bf16,
    e8m0,
    fp8,
    fp8_values,
    raw,
    simple_config,
    write_checkpoint,
)

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Rng = np.random.Generator
Stored = tuple[dict[str, Tensor], F32]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 outputs a word's nibbles have, lowest first


def pairs(nibbles: U8) -> U8:
    """Even columns in the low nibbles of bytes."""
    return nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)


def stream(numbers: U8, bits: int) -> NDArray[np.uint32]:
    """Words of a little-endian stream of bits per row."""
    each = np.unpackbits(numbers[:, :, None], axis=2, count=bits, bitorder="little")
    packed = np.packbits(each.reshape(len(numbers), -1), axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.uint32)


def awq_words(nibbles: U8) -> NDArray[np.uint32]:
    """Eight rows per word, in AWQ's order."""
    ordered = nibbles.reshape(-1, 8, nibbles.shape[1])[:, AWQ_ORDER]
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    return np.bitwise_or.reduce(ordered.astype(np.uint32) << shifts, axis=1)


def e2m1(nibbles: U8) -> F32:
    values: F32 = np.where(nibbles & 8, -E2M1[nibbles & 7], E2M1[nibbles & 7])
    return values


def fours(numbers: U8) -> U8:
    """Four numbers of 6 bits in three bytes, the first in the lowest bits."""
    return stream(numbers, 6).view(np.uint8)


def e2m3(numbers: U8) -> F32:
    """Sign, two bits of exponent, three of mantissa."""
    exponent, mantissa = (numbers >> 3 & 3).astype(int), (numbers & 7) / 8
    magnitude = np.where(exponent > 0, np.ldexp(1 + mantissa, exponent - 1), mantissa)
    values: F32 = np.where(numbers & 32, -magnitude, magnitude).astype(np.float32)
    return values


def e0m3(nibbles: U8) -> F32:
    """Sign, and a magnitude in quarters."""
    magnitude = (nibbles & 7).astype(np.float32) / 4
    values: F32 = np.where(nibbles & 8, -magnitude, magnitude)
    return values


def signed(nibbles: U8) -> F32:
    """Two's complement."""
    values: F32 = (nibbles.astype(np.int16) - 16 * (nibbles >> 3)).astype(np.float32)
    return values


def spread(scales: F32, rows: int, cols: int, group: int = 0) -> F32:
    """One scale per element, of a grid with blocks of equal size, ragged at the ends. `group`: how
    many columns a block has; 0: as few as possible."""
    block = [-(-size // count) for size, count in zip((rows, cols), scales.shape, strict=True)]
    block[1] = group or block[1]
    return np.kron(scales, np.ones(block, np.float32))[:rows, :cols]


def halves(values: F32) -> Tensor:
    return values.astype(np.float16)


def truncated(values: F32) -> F32:
    """What bf16 and half precision have as well."""
    kept: F32 = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return kept.astype(np.float16).astype(np.float32)


def with_zeros(scales: F32, zeros: bool, negative: bool = False) -> F32:
    """The first scale and one in the middle are 0 if `zeros`; every third is below 0 if
    `negative`."""
    scales = scales.copy()
    if negative:
        scales.reshape(-1)[1::3] *= -1
    if zeros:
        scales[0, 0] = scales[len(scales) // 2, 0] = 0
    return scales


def powers(codes: U8) -> F32:
    return np.ldexp(np.float64(1), codes.astype(int) - 127).astype(np.float32)


# ---- FP8 -------------------------------------------------------------------------------


def of_fp8(
    rng: Rng,
    rows: int,
    cols: int,
    grid: Callable[[int, int], tuple[int, int]],
    name: str = "weight_scale",
    store: Callable[[F32], Tensor] = lambda scales: scales,
    shape: Callable[[tuple[int, int]], tuple[int, ...]] = lambda grid: grid,
    group: int = 0,
    zeros: bool = False,
) -> Stored:
    codes = rng.integers(0, 256, (rows, cols), np.uint8)
    codes[codes & 127 == 127] = 0
    drawn = rng.uniform(0.01, 2, grid(rows, cols)).astype(np.float16).astype(np.float32)
    drawn = with_zeros(truncated(drawn), zeros)
    stored = store(drawn.reshape(shape(drawn.shape)))
    values = fp8_values()[codes] * spread(drawn, rows, cols, group)
    return {"weight": fp8(codes), name: stored}, values


def of_fp8_powers(
    rng: Rng,
    rows: int,
    cols: int,
    block: tuple[int, int],
    name: str,
    store: Callable[[U8], Tensor],
) -> Stored:
    codes = rng.integers(0, 0x7F, (rows, cols), np.uint8)
    scale = rng.integers(110, 130, (-(-rows // block[0]), -(-cols // block[1])), np.uint8)
    values = fp8_values()[codes] * np.kron(powers(scale), np.ones(block))[:rows, :cols]
    return {"weight": fp8(codes), name: store(scale)}, values.astype(np.float32)


# ---- FP4 -------------------------------------------------------------------------------


def of_mxfp4(
    rng: Rng, rows: int, cols: int, names: tuple[str, str], dtypes: tuple[str, str]
) -> Stored:
    codes = rng.integers(0, 16, (rows, cols), np.uint8)
    scale = rng.integers(110, 130, (rows, cols // 32), np.uint8)
    stored = {
        names[0]: Raw(dtypes[0], (rows, cols // 2), pairs(codes).tobytes()),
        names[1]: Raw(dtypes[1], scale.shape, scale.tobytes()),
    }
    return dict(stored), e2m1(codes) * powers(scale).repeat(32, axis=1)


def of_mxfp6(rng: Rng, rows: int, cols: int) -> Stored:
    codes = rng.integers(0, 64, (rows, cols), np.uint8)
    scale = rng.integers(110, 130, (rows, cols // 32), np.uint8)
    return {"weight_packed": fours(codes), "weight_scale": scale}, (
        e2m3(codes) * powers(scale).repeat(32, axis=1)
    )


def of_mxint4(rng: Rng, rows: int, cols: int) -> Stored:
    codes = rng.integers(0, 16, (rows, cols), np.uint8)
    scale = rng.integers(110, 130, (rows, cols // 32), np.uint8)
    return {"weight_packed": pairs(codes), "weight_scale": scale}, (
        e0m3(codes) * powers(scale).repeat(32, axis=1)
    )


def e5m3(codes: U8) -> F32:
    """No sign, five bits of exponent, three of mantissa."""
    exponent, mantissa = (codes >> 3).astype(int), (codes & 7) / 8
    values: F32 = np.where(
        exponent > 0, np.ldexp(1 + mantissa, exponent - 15), np.ldexp(mantissa, -14)
    ).astype(np.float32)
    return values


def of_nvfp4_e5m3(rng: Rng, rows: int, cols: int) -> Stored:
    codes = rng.integers(0, 16, (rows, cols), np.uint8)
    scale = rng.integers(0, 255, (rows, cols // 16), np.uint8)
    return {"weight_packed": pairs(codes), "weight_scale": scale}, (
        e2m1(codes) * e5m3(scale).repeat(16, axis=1)
    )


def of_nvfp4(
    rng: Rng, rows: int, cols: int, names: tuple[str, str], divides: bool, zeros: bool = False
) -> Stored:
    codes = rng.integers(0, 16, (rows, cols), np.uint8)
    scale = rng.integers(1, 0x7E, (rows, cols // 16), np.uint8)
    if zeros:
        scale[:, 0] = scale[rows // 2] = 0
    outer = np.float32(rng.uniform(0.5, 200))
    level = fp8_values()[scale]
    both = level / outer if divides else level * outer
    parts: dict[str, Tensor] = {
        names[0]: pairs(codes), "weight_scale": fp8(scale), names[1]: np.array([outer], np.float32)
    }  # fmt: skip
    return parts, e2m1(codes) * both.repeat(16, axis=1)


# ---- integers --------------------------------------------------------------------------


def scales_and_zeros(
    rng: Rng, bits: int, rows: int, groups: int, asymmetric: bool, special: bool = False
) -> tuple[F32, U8]:
    """`special`: some scales are zero, and some negative, as AutoRound has them."""
    scale = rng.uniform(0.001, 1, (rows, groups)).astype(np.float16).astype(np.float32)
    scale = with_zeros(scale, special, special)
    zero = np.full(scale.shape, 1 << bits - 1, np.uint8)
    if asymmetric:
        zero = rng.integers(0, 1 << bits, scale.shape, np.uint8)
    return scale, zero


def group_index(rng: Rng, cols: int, group: int, shuffled: bool) -> NDArray[np.int32]:
    """Groups in order, or the same in any order; the last one may be shorter."""
    index = (np.arange(cols) // (group or cols)).astype(np.int32)
    return rng.permutation(index) if shuffled else index


def dequantized(codes: U8, scale: F32, zero: U8, index: NDArray[np.int32]) -> F32:
    values = codes.astype(np.float32) - zero[:, index].astype(np.float32)
    return values * scale[:, index]


def of_packed(
    rng: Rng, rows: int, cols: int, bits: int, group: int = 0, asymmetric: bool = False,
    order: str | None = None, store: Callable[[F32], Tensor] = halves, special: bool = False,
) -> Stored:  # fmt: skip
    """compressed-tensors' pack-quantized."""
    codes = rng.integers(0, 1 << bits, (rows, cols), np.uint8)
    groups = -(-cols // group) if group else 1
    scale, zero = scales_and_zeros(rng, bits, rows, groups, asymmetric, special)
    scale = truncated(scale)
    parts: dict[str, Tensor] = {
        "weight_packed": stream(codes, bits).view(np.int32),
        "weight_scale": store(scale),
        "weight_shape": np.array([rows, cols], np.int64),
    }
    if asymmetric:
        parts["weight_zero_point"] = np.ascontiguousarray(stream(zero.T, bits).T).view(np.int32)
    index = group_index(rng, cols, group, order == "shuffled")
    if order is not None:
        unused = np.full(cols, -1, np.int32)
        parts["weight_g_idx"] = unused if order == "unused" else index
    return parts, dequantized(codes, scale, zero, index)


def of_int8(
    rng: Rng, rows: int, cols: int, group: int = 0, asymmetric: bool = False, special: bool = False
) -> Stored:
    """compressed-tensors' int-quantized: signed codes, and zero points from -128 on."""
    codes = rng.integers(0, 256, (rows, cols), np.uint8)
    scale, zero = scales_and_zeros(
        rng, 8, rows, -(-cols // group) if group else 1, asymmetric, special
    )
    parts: dict[str, Tensor] = {
        "weight": (codes.astype(np.int16) - 128).astype(np.int8), "weight_scale": scale
    }  # fmt: skip
    if asymmetric:
        parts["weight_zero_point"] = (zero.astype(np.int16) - 128).astype(np.int8)
    return parts, dequantized(codes, scale, zero, group_index(rng, cols, group, False))


def in_int8(values: F32) -> Stored:
    """Given weights in the nearest INT8 with a scale for each row, and what they have become."""
    scale = np.abs(values).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127)
    codes = np.rint(values / scale).astype(np.int8)
    return {"weight": codes, "weight_scale": scale}, codes * scale


def of_angelslim(rng: Rng, rows: int, cols: int) -> Stored:
    codes = rng.integers(0, 16, (rows, cols), np.uint8) ^ np.uint8(8)
    scale = rng.uniform(0.001, 1, (rows, 1)).astype(np.float32)
    parts: dict[str, Tensor] = {"weight_packed": pairs(codes).view(np.int8), "weight_scale": scale}
    return parts, signed(codes) * scale


def of_msmodelslim(rng: Rng, rows: int, cols: int, asymmetric: bool = False) -> Stored:
    codes = (rng.integers(0, 256, (rows, cols), np.uint8) ^ np.uint8(128)).view(np.int8)
    scale = rng.uniform(0.001, 1, (rows, 1)).astype(np.float32)
    offset = rng.integers(0, 40, (rows, 1), np.uint8).astype(np.float32) * asymmetric
    parts: dict[str, Tensor] = {"weight": codes, "weight_scale": scale, "weight_offset": offset}
    return parts, (codes - offset) * scale


def of_gptq(
    rng: Rng, rows: int, cols: int, bits: int, v2: bool, order: str | None = None, group: int = 64,
    asymmetric: bool = True, special: bool = False,
) -> Stored:  # fmt: skip
    codes = rng.integers(0, 1 << bits, (rows, cols), np.uint8)
    scale, zero = scales_and_zeros(rng, bits, rows, -(-cols // group), asymmetric, special)
    stored_zero = zero if v2 else (zero - 1) & ((1 << bits) - 1)
    parts: dict[str, Tensor] = {
        "qweight": np.ascontiguousarray(stream(codes, bits).T).view(np.int32),
        "scales": halves(np.ascontiguousarray(scale.T)),
        "qzeros": stream(np.ascontiguousarray(stored_zero.T), bits).view(np.int32),
    }
    index = group_index(rng, cols, group, order == "shuffled")
    if order is not None:
        parts["g_idx"] = index
    return parts, dequantized(codes, scale, zero, index)


def of_awq(
    rng: Rng, rows: int, cols: int, group: int = 64, asymmetric: bool = True, special: bool = False
) -> Stored:
    codes = rng.integers(0, 16, (rows, cols), np.uint8)
    scale, zero = scales_and_zeros(rng, 4, rows, -(-cols // group), asymmetric, special)
    parts: dict[str, Tensor] = {
        "qweight": np.ascontiguousarray(awq_words(codes).T).view(np.int32),
        "scales": halves(np.ascontiguousarray(scale.T)),
        "qzeros": np.ascontiguousarray(awq_words(zero).T).view(np.int32),
    }
    return parts, dequantized(codes, scale, zero, group_index(rng, cols, group, False))


def of_reordered_awq(rng: Rng, rows: int, cols: int, group: int = 64) -> Stored:
    codes = rng.integers(0, 16, (rows, cols), np.uint8)
    scale, zero = scales_and_zeros(rng, 4, rows, -(-cols // group), True)
    parts: dict[str, Tensor] = {
        "weight": stream(codes, 4).view(np.int32),
        "scale": halves(np.ascontiguousarray(scale.T).reshape(-1)),
        "qzeros": stream(np.ascontiguousarray(zero.T), 4).view(np.int32),
    }
    return parts, dequantized(codes, scale, zero, group_index(rng, cols, group, False))


@dataclass(frozen=True)
class Kind:
    """One encoding: ktconv's name for it, a generator of one weight [rows, cols], and the
    quantization_config of such a model."""

    name: str
    of: Callable[[Rng, int, int], Stored]
    quantization: Mapping[str, Any] = field(default_factory=dict)


def _fp8(encoding: str, grid: Callable[[int, int], tuple[int, int]], **details: Any) -> Kind:
    return Kind(
        encoding, partial(of_fp8, grid=grid, **details), {"quant_method": "compressed-tensors"}
    )


def _blocks(rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // 128), -(-cols // 128)


_PACK = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def _groups_of(size: int) -> dict[str, Any]:
    """As compressed-tensors says it; groups of what goes in are others."""
    weights, inputs = {"group_size": size}, {"group_size": 128}
    groups = {"group_0": {"weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


_FORMAT = {"quant_method": "gptq", "format": "gptq_v2"}  # as GPTQModel 7 calls it
_V1, _V2 = ({"quant_method": "gptq", "checkpoint_format": one} for one in ("gptq", "gptq_v2"))

KINDS: dict[str, Kind] = {
    "fp8 tensor": _fp8("fp8-tensor", lambda n, k: (1, 1), shape=lambda _: (1,)),
    "fp8 tensor, scalar": _fp8(
        "fp8-tensor", lambda n, k: (1, 1), shape=lambda _: (), name="qscale_weight", store=bf16
    ),
    "fp8 channel": _fp8("fp8-channel", lambda n, k: (n, 1), store=bf16),
    "fp8 channel, 1-D": _fp8("fp8-channel", lambda n, k: (n, 1), shape=lambda g: (g[0],)),
    "fp8 group": _fp8("fp8-group", lambda n, k: (n, k // 64), store=halves),
    "fp8 block": _fp8("fp8-block", _blocks),
    "fp8 block, ModelOpt": _fp8("fp8-block", _blocks, shape=lambda g: (g[0], 1, g[1], 1)),
    "fp8 block, Qwen": _fp8("fp8-block", _blocks, store=bf16, name="weight_scale_inv"),
    "fp8 block, DeepSeek-V4": Kind(
        "fp8-block", partial(of_fp8_powers, block=(128, 128), name="scale", store=e8m0)
    ),
    "mxfp8": Kind(
        "fp8-block",
        partial(of_fp8_powers, block=(1, 32), name="weight_scale_inv", store=lambda codes: codes),
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
    ),
    "mxfp4, DeepSeek-V4": Kind(
        "mxfp4",
        partial(of_mxfp4, names=("weight", "scale"), dtypes=("I8", "F8_E8M0")),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
    ),
    "mxfp4, compressed-tensors": Kind(
        "mxfp4", partial(of_mxfp4, names=("weight_packed", "weight_scale"), dtypes=("U8", "U8"))
    ),
    "mxfp4, Quark": Kind(
        "mxfp4",
        partial(of_mxfp4, names=("weight", "weight_scale"), dtypes=("U8", "U8")),
        {"quant_method": "quark"},
    ),
    "mxfp4, Ling": Kind(
        "mxfp4", partial(of_mxfp4, names=("weight", "weight_scale_inv"), dtypes=("U8", "F8_E8M0"))
    ),
    "mxfp6": Kind(
        "mxfp6",
        of_mxfp6,
        {"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"},
    ),
    "mxint4, AutoRound": Kind(
        "mxint4",
        of_mxint4,
        {"quant_method": "auto-round", "data_type": "mx_int", "packing_format": "auto_round"},
    ),
    "nvfp4, compressed-tensors": Kind(
        "nvfp4",
        partial(of_nvfp4, names=("weight_packed", "weight_global_scale"), divides=True),
    ),
    "nvfp4, ModelOpt": Kind(
        "nvfp4", partial(of_nvfp4, names=("weight", "weight_scale_2"), divides=False)
    ),
    "nvfp4, E5M3": Kind(
        "nvfp4-e5m3",
        of_nvfp4_e5m3,
        {"quant_method": "compressed-tensors", "format": "nvfp4-e5m3-pack-quantized"},
    ),
    "int4 packed, group 32": Kind("int4-packed", partial(of_packed, bits=4, group=32), _PACK),
    "int4 packed, channel": Kind("int4-packed", partial(of_packed, bits=4, store=bf16), _PACK),
    "int8 packed, channel": Kind("int8-packed", partial(of_packed, bits=8), _PACK),
    **{
        f"int{bits} packed, asymmetric": Kind(
            f"int{bits}-packed", partial(of_packed, bits=bits, group=64, asymmetric=True), _PACK
        )
        for bits in range(2, 9)
    },
    **{
        f"int{bits} packed": Kind(f"int{bits}-packed", partial(of_packed, bits=bits, group=64))
        for bits in (2, 3, 5, 6, 7)
    },
    "int4 packed by activation": Kind(
        "int4-packed", partial(of_packed, bits=4, group=64, asymmetric=True, order="shuffled")
    ),
    "int4 packed, unused index": Kind(
        "int4-packed", partial(of_packed, bits=4, group=64, order="unused")
    ),
    "int8 channel": Kind("int8", of_int8, {"quant_method": "compressed-tensors"}),
    "int8 group": Kind("int8", partial(of_int8, group=64)),
    "int4, AngelSlim": Kind(
        "int4", of_angelslim, {"quant_method": "compressed-tensors", "format": "int-quantized"}
    ),
    "int8, msModelSlim": Kind("int8", of_msmodelslim),
    "int8 asymmetric, msModelSlim": Kind("int8", partial(of_msmodelslim, asymmetric=True)),
    "int8 asymmetric": Kind("int8", partial(of_int8, asymmetric=True)),
    **{
        f"gptq int{bits}, v{1 + v2}": Kind(
            f"gptq-int{bits}", partial(of_gptq, bits=bits, v2=v2), _V2 if v2 else _V1
        )
        for bits in (2, 3, 4, 8)
        for v2 in (False, True)
    },
    "gptq symmetric": Kind("gptq-int4", partial(of_gptq, bits=4, v2=False, asymmetric=False), _V1),
    "gptq int4, v2 by format": Kind("gptq-int4", partial(of_gptq, bits=4, v2=True), _FORMAT),
    "gptq in order": Kind("gptq-int4", partial(of_gptq, bits=4, v2=True, order="given"), _V2),
    "gptq by activation": Kind(
        "gptq-int4", partial(of_gptq, bits=4, v2=False, order="shuffled"), _V1
    ),
    "AutoRound": Kind(
        "gptq-int4",
        partial(of_gptq, bits=4, v2=True),
        {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"},
    ),
    "AutoRound, auto_gptq": Kind(
        "gptq-int4",
        partial(of_gptq, bits=4, v2=False),
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    ),
    "awq": Kind("awq-int4", of_awq, {"quant_method": "awq", "version": "gemm"}),
    "awq symmetric": Kind(
        "awq-int4",
        partial(of_awq, asymmetric=False, group=128),
        {"quant_method": "awq", "version": "gemm"},
    ),
    "awq, KTransformers": Kind("awq-reordered", of_reordered_awq),
    # Groups that do not divide the inputs; where another size would, config.json decides.
    "fp8 group, short last": Kind(
        "fp8-group",
        partial(of_fp8, grid=lambda n, k: (n, -(-k // 160)), group=160),
        _groups_of(160),
    ),
    "int4 packed, short last": Kind(
        "int4-packed", partial(of_packed, bits=4, group=160), _groups_of(160)
    ),
    "int4 packed by activation, short last": Kind(
        "int4-packed",
        partial(of_packed, bits=4, group=160, asymmetric=True, order="shuffled"),
        _groups_of(160),
    ),
    "int3 packed, short last": Kind(
        "int3-packed", partial(of_packed, bits=3, group=100, asymmetric=True), _groups_of(100)
    ),
    "int8 group, short last": Kind("int8", partial(of_int8, group=160), _groups_of(160)),
    **{
        f"gptq int{bits}, short last": Kind(
            f"gptq-int{bits}",
            partial(of_gptq, bits=bits, v2=False, group=group),
            _V1 | {"group_size": group, "bits": bits},
        )
        for bits, group in ((2, 160), (3, 100), (4, 160), (8, 72))
    },
    "gptq by activation, short last": Kind(
        "gptq-int4",
        partial(of_gptq, bits=4, v2=False, order="shuffled", group=160),
        _V1 | {"group_size": 160},
    ),
    "awq, short last": Kind(
        "awq-int4", partial(of_awq, group=96), {"quant_method": "awq", "group_size": 96}
    ),
    "awq, KTransformers, short last": Kind(
        "awq-reordered", partial(of_reordered_awq, group=160), {"group_size": 160}
    ),
    # Scales that are zero, and of integers also negative.
    "fp8 channel, zero scales": _fp8("fp8-channel", lambda n, k: (n, 1), zeros=True),
    "fp8 block, zero scales": _fp8("fp8-block", _blocks, zeros=True),
    "nvfp4, compressed-tensors, zero scales": Kind(
        "nvfp4",
        partial(of_nvfp4, names=("weight_packed", "weight_global_scale"), divides=True, zeros=True),
    ),
    "nvfp4, ModelOpt, zero scales": Kind(
        "nvfp4",
        partial(of_nvfp4, names=("weight", "weight_scale_2"), divides=False, zeros=True),
    ),
    "int4 packed, zero scales": Kind(
        "int4-packed", partial(of_packed, bits=4, group=32, special=True), _PACK
    ),
    "int8 channel, zero scales": Kind("int8", partial(of_int8, special=True)),
    "AutoRound, zero scales": Kind(
        "gptq-int4",
        partial(of_gptq, bits=4, v2=True, asymmetric=False, special=True),
        {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"},
    ),
    "awq, zero scales": Kind("awq-int4", partial(of_awq, special=True), {"quant_method": "awq"}),
}

# ---- a whole model ---------------------------------------------------------------------

SOURCE = "model.layers.0.mlp.experts"
HIDDEN, INNER = 256, 384
SIZES = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 2}


def encoded_model(directory: Path, kind: str, **changes: Any) -> tuple[Path, Weights, int]:
    """A model of two experts, the values that it stands for, and the bytes of its experts.

    `changes`: other tensors by name; None: the tensor is missing.
    """
    rng = np.random.default_rng(len(kind))
    tensors: dict[str, Tensor] = {}
    stacks = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        rows, cols = (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
        values = []
        for expert in range(2):
            parts, value = KINDS[kind].of(rng, rows, cols)
            tensors |= {f"{SOURCE}.{expert}.{name}.{part}": one for part, one in parts.items()}
            values.append(value)
        stacks.append(np.stack(values))
    tensors = {name: one for name, one in {**tensors, **changes}.items() if one is not None}
    config = simple_config(**SIZES, quantization_config=dict(KINDS[kind].quantization))
    model = write_checkpoint(directory, tensors, config)
    return model, Weights(*stacks), sum(len(raw(one).data) for one in tensors.values())
