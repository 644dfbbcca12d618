"""Random blocks of ggml's types, and the values that the package gguf says they have.

Q1_0 and Q2_0, for which it has no decoder, are read here number by number."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

# Where blocks have numbers in half precision.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,), "Q2_0": (0,), "MXFP4": (), "NVFP4": (),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,),
    "IQ1_M": (),
}  # fmt: skip


def number_of(name: str) -> GGMLQuantizationType:
    """A type as the package's writer takes it, also one of llama.cpp that it has no name for."""
    if name != "Q2_0" or name in GGMLQuantizationType.__members__:
        return GGMLQuantizationType[name]
    number = int.__new__(GGMLQuantizationType, 42)
    number._name_, number._value_ = name, 42
    gguf.GGML_QUANT_SIZES[number] = (64, 18)
    return number


def block_size(name: str) -> tuple[int, int]:
    """Columns and bytes of a block."""
    if name in _BITS:
        return 128 // _BITS[name], 18
    cols, nbytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return cols, nbytes


def blocks_of(rng: np.random.Generator, name: str, rows: int, cols: int) -> U8:
    """Blocks [rows, bytes] of random bits whose values are finite, scales of any size."""
    per_block, nbytes = block_size(name)
    blocks = rng.integers(0, 256, (rows, cols // per_block, nbytes), np.uint8)
    for at in HALVES[name]:  # no Inf, no NaN
        high = blocks[:, :, at + 1]
        blocks[:, :, at + 1] = np.where(high & 0x7C == 0x7C, high ^ 0x40, high)
    if name == "MXFP4":  # 6 * 2^125 is finite, and twice as much
        blocks[:, :, 0] %= 252
    if name == "IQ1_M":  # the highest bits of four 16-bit words
        blocks[:, :, 55] &= 0xBF
    return blocks.reshape(rows, -1)


def values_of(name: str, blocks: U8) -> F32:
    if name in _BITS:
        return _values(blocks, _BITS[name])
    values: F32 = gguf.quants.dequantize(blocks, GGMLQuantizationType[name])
    return values


_BITS = {"Q1_0": 1, "Q2_0": 2}  # of a number


def _values(blocks: U8, bits: int) -> F32:
    each = blocks.reshape(-1, 18)
    values = np.empty((len(each), 128 // bits), np.float32)
    for block, row in zip(each, values, strict=True):
        scale = np.float32(block[:2].view("<f2")[0])
        stream = int.from_bytes(block[2:].tobytes(), "little")
        for i in range(len(row)):
            code = stream >> bits * i & (1 << bits) - 1
            row[i] = scale * np.float32(2 * code - 1 if bits == 1 else code - 1)
    return values.reshape(*blocks.shape[:-1], -1)
