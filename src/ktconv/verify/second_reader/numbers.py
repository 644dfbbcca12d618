"""Bits of tensors to numbers, as float32."""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, U8, Array

# What NumPy reads the dtypes of tensors as: integers without signs, and the floats that it has.
ITEMS = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<u4",
    "I8": "u1", "U8": "u1", "F4": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1",
}  # fmt: skip
AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # of output 8c + i in word c


def _e4m3() -> F32:
    """Values of E4M3 by code: sign, exponent with bias 7, three bits of mantissa; 0x7F is NaN."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(
        exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6)
    )
    values[127] = np.nan
    both: F32 = np.concatenate([values, -values]).astype(np.float32)
    return both


E4M3 = _e4m3()
QUARTERS = np.concatenate([np.arange(8), -np.arange(8.0)]).astype(np.float32) / np.float32(4)
SIGNED_4 = np.concatenate([np.arange(8), np.arange(-8, 0)]).astype(np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

_EIGHTHS = np.array([*range(16), *range(16, 32, 2), *range(32, 64, 4)], np.float32)
E2M3 = np.concatenate([_EIGHTHS, -_EIGHTHS]) / np.float32(8)


def fours(triples: U8) -> U8:
    """Bytes [..., 3] to numbers [..., 4] of 6 bits each."""
    bits = np.unpackbits(triples, axis=-1, bitorder="little").reshape(*triples.shape[:-1], 4, 6)
    return np.packbits(bits, axis=-1, bitorder="little")[..., 0]


def eighths_of_powers(codes: Array) -> F32:
    """E5M3 without a sign: (8 + the last 3 bits) times a power of two, no 8 under the lowest."""
    exponent, last = codes.astype(np.int32) >> 3, codes & 7
    values = np.ldexp(np.where(exponent > 0, 8.0, 0.0) + last, np.maximum(exponent, 1) - 18)
    values[codes == 255] = np.nan
    found: F32 = values.astype(np.float32)
    return found


def powers_of_two(codes: Array) -> F32:
    """E8M0: 2^(code - 127); 255 is NaN."""
    values = np.ldexp(np.float64(1), codes.astype(np.int32) - 127)
    values[codes == 255] = np.nan
    found: F32 = values.astype(np.float32)
    return found


def floats(items: Array, dtype: str) -> F32:
    """Array of one floating-point number each."""
    if dtype == "BF16":
        high = np.zeros((*items.shape, 2), "<u2")
        high[..., 1] = items
        values: F32 = high.view("<f4")[..., 0]
        return values
    if dtype == "F8_E4M3":
        return E4M3[items]
    if dtype in ("F8_E8M0", "U8"):
        return powers_of_two(items)
    return items.astype(np.float32)


def floats_of(data: U8 | bytes, dtype: str) -> F32:
    """The numbers of a tensor's bytes, one behind the other."""
    return floats(np.frombuffer(data, ITEMS[dtype]), dtype)


def signed(items: Array) -> F32:
    """Bytes in two's complement."""
    return items.view(np.int8).astype(np.float32)


def pairs(items: Array) -> Array:
    """[..., n] bytes to [..., 2n] nibbles, the low one of each byte first."""
    split = np.stack([items & 15, items >> 4], axis=-1)
    return split.reshape(*items.shape[:-1], -1).astype(np.uint8)


def stream(words: Array, bits: int) -> F32:
    """[..., n] words of 32 bits to [..., 32 * n // bits] unsigned numbers of a stream of bits
    whose first bit is the lowest of word 0."""
    each = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    count = each.shape[-1] // bits
    each = each[..., : count * bits].reshape(*words.shape[:-1], count, bits)
    numbers: F32 = each.astype(np.float32) @ (2.0 ** np.arange(bits)).astype(np.float32)
    return numbers


def awq(words: Array) -> F32:
    """[..., n] words to [..., 8n] numbers of four bits, in AWQ's order."""
    split = np.stack([words >> np.uint32(4 * nibble) & np.uint32(15) for nibble in AWQ_NIBBLE], -1)
    return split.reshape(*words.shape[:-1], -1).astype(np.float32)


# Blocks of ggml's types are read by the package gguf, but for two that it has no decoder for:
# nothing in either is of our own decoders.
GGML_TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_M",
    "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_NL", "IQ4_XS", "MXFP4",
    "NVFP4", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0",
)  # fmt: skip


_OWN_BITS = {"Q1_0": 1, "Q2_0": 2}  # of a number; 16 bytes of these follow a scale


def _own_numbers(blocks: U8, bits: int) -> F32:
    """Bits 0 and 1 are -1 and 1, pairs of bits -1, 0, 1 and 2; the first in the lowest bits."""
    single = np.unpackbits(np.ascontiguousarray(blocks[..., 2:]), axis=-1, bitorder="little")
    scale = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    if bits == 1:
        return np.where(single != 0, scale, -scale)
    return scale * (single[..., 0::2] + 2.0 * single[..., 1::2] - 1).astype(np.float32)


def block_size(name: str) -> tuple[int, int]:
    """Numbers of a block of this type, and its bytes."""
    if name in _OWN_BITS:
        return 128 // _OWN_BITS[name], 18

    import gguf

    count, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    return count, nbytes


def block_numbers(name: str, blocks: U8) -> F32:
    """Blocks [..., bytes of a block] of this type to float32 [..., numbers of a block]."""
    if name in _OWN_BITS:
        return _own_numbers(blocks, _OWN_BITS[name])

    import gguf

    flat = np.ascontiguousarray(blocks).reshape(-1, blocks.shape[-1])
    values: F32 = gguf.quants.dequantize(flat, gguf.GGMLQuantizationType[name])
    return values.reshape(*blocks.shape[:-1], -1)
