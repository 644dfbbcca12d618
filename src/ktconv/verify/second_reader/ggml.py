"""Blocks of ggml's types to float32: [..., bytes of a block] to [..., numbers of a block].

w = d * q and so on, in float32, in the order of the formulas; d and m are in half precision.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ktconv.system.arrays import F32, U8, Array
from ktconv.verify.second_reader import numbers

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_VALUES = np.array(_IQ4, np.float32)
# Bytes of a block, its numbers, and how they are decoded.
Blocks = tuple[int, int, Callable[[U8], Array]]


def _half(blocks: U8, at: int) -> F32:
    """[..., 1] numbers in half precision at byte `at`."""
    low, high = blocks[..., at : at + 1].astype(np.uint16), blocks[..., at + 1 : at + 2]
    values: F32 = (low | high.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    return values


def _nibbles(qs: U8) -> Array:
    """All low halves of some bytes, then all high ones."""
    values: Array = np.concatenate([qs & 15, qs >> 4], axis=-1).astype(np.float32)
    return values


def _fields(qs: U8, bits: int, run: int) -> Array:
    """Numbers of `bits` bits: the lowest of `run` bytes, then the next of the same, and so on;
    then those of the next `run` bytes."""
    runs = qs.reshape(*qs.shape[:-1], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    each = runs >> shifts & np.uint8((1 << bits) - 1)
    values: Array = each.reshape(*qs.shape[:-1], -1).astype(np.float32)
    return values


def _bits(words: U8) -> Array:
    return np.unpackbits(words, axis=-1, bitorder="little").astype(np.float32)


def _spread(scales: Array, run: int) -> Array:
    return np.repeat(scales, run, axis=-1)


def _q5(blocks: U8, at: int) -> Array:
    """Five bits: those of `at + 4` on, with the fifth ones from `at` on."""
    values: Array = _nibbles(blocks[..., at + 4 :]) + 16 * _bits(blocks[..., at : at + 4])
    return values


def _q2_k(b: U8) -> Array:
    scale = _spread(_half(b, 80) * (b[..., :16] & 15).astype(np.float32), 16)
    least = _spread(_half(b, 82) * (b[..., :16] >> 4).astype(np.float32), 16)
    return scale * _fields(b[..., 16:80], 2, 32) - least


def _q3_k(b: U8) -> Array:
    packed = b[..., 96:108].astype(np.int16)
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    high = np.concatenate([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scale = (low + 16 * high - 32).astype(np.float32)
    # Bit 4h + s of byte l is of number 128h + 32s + l: bits in the order of the numbers.
    top = _fields(b[..., :32], 1, 32)
    values: Array = _spread(_half(b, 108) * scale, 16) * (
        _fields(b[..., 32:96], 2, 32) - 4 * (1 - top)
    )
    return values


def _six_bits(packed: U8) -> tuple[Array, Array]:
    """Eight scales and eight minima of six bits in twelve bytes."""
    s = packed.astype(np.int16)
    scale = np.concatenate([s[..., :4] & 63, s[..., 8:] & 15 | s[..., :4] >> 6 << 4], axis=-1)
    least = np.concatenate([s[..., 4:8] & 63, s[..., 8:] >> 4 | s[..., 4:8] >> 6 << 4], axis=-1)
    return scale.astype(np.float32), least.astype(np.float32)


def _with_minima(b: U8, codes: Array) -> Array:
    scale, least = _six_bits(b[..., 4:16])
    return _spread(_half(b, 0) * scale, 32) * codes - _spread(_half(b, 2) * least, 32)


def _q5_k(b: U8) -> Array:
    return _with_minima(b, _fields(b[..., 48:], 4, 32) + 16 * _fields(b[..., 16:48], 1, 32))


def _q6_k(b: U8) -> Array:
    codes = _fields(b[..., :128], 4, 64) + 16 * _fields(b[..., 128:192], 2, 32) - 32
    scale = _half(b, 208) * numbers.signed(np.ascontiguousarray(b[..., 192:208]))
    values: Array = _spread(scale, 16) * codes
    return values


def _iq4_nl(b: U8) -> Array:
    return _half(b, 0) * _IQ4_VALUES[_nibbles(b[..., 2:]).astype(np.intp)]


def _iq4_xs(b: U8) -> Array:
    low = numbers.pairs(b[..., 4:8]).astype(np.int16)
    high = np.stack([b[..., 2 + j // 4] >> 2 * (j % 4) & 3 for j in range(8)], axis=-1)
    scale = (low + 16 * high.astype(np.int16) - 32).astype(np.float32)
    codes = _fields(b[..., 8:], 4, 16).astype(np.intp)
    return _spread(_half(b, 0) * scale, 32) * _IQ4_VALUES[codes]


def _mxfp4(b: U8) -> Array:
    return numbers.E2M1[_nibbles(b[..., 1:]).astype(np.intp)] * numbers.powers_of_two(b[..., :1])


def _nvfp4(b: U8) -> Array:
    """Four scales of 16 numbers each, in E4M3 without a sign: 0x7F is 0, 0xFF is no NaN either."""
    scale = np.nan_to_num(numbers.E4M3[b[..., :4] & 127], nan=480)
    scale = np.where(b[..., :4] == 0x7F, np.float32(0), scale)
    return _spread(scale, 16) * numbers.E2M1[_fields(b[..., 4:], 4, 8).astype(np.intp)]


def _digits(qs: U8, count: int) -> Array:
    """The first of `count` digits of base 3 of some bytes, then the second of the same ones."""
    each = qs[..., None, :].astype(np.uint16) * np.array([[3**i] for i in range(count)], np.uint16)
    digits = (each & 255) * 3 >> 8
    return digits.reshape(*qs.shape[:-1], -1).astype(np.float32)


def _tq1_0(b: U8) -> Array:
    parts = _digits(b[..., :32], 5), _digits(b[..., 32:48], 5), _digits(b[..., 48:52], 4)
    values: Array = _half(b, 52) * (np.concatenate(parts, axis=-1) - 1)
    return values


def _by_package(name: str) -> Callable[[U8], Array]:
    """Types with tables of grids, which the package gguf has."""

    def decode(b: U8) -> Array:
        from gguf import GGMLQuantizationType, quants

        flat = np.ascontiguousarray(b).reshape(-1, b.shape[-1])
        values: Array = quants.dequantize(flat, GGMLQuantizationType[name])
        return values.reshape(*b.shape[:-1], -1)

    return decode


_GRIDS = {
    "IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82, "IQ3_XXS": 98, "IQ3_S": 110, "IQ1_S": 50, "IQ1_M": 56
}  # fmt: skip

TYPES: dict[str, Blocks] = {
    "Q4_0": (18, 32, lambda b: _half(b, 0) * (_nibbles(b[..., 2:]) - 8)),
    "Q4_1": (20, 32, lambda b: _half(b, 0) * _nibbles(b[..., 4:]) + _half(b, 2)),
    "Q5_0": (22, 32, lambda b: _half(b, 0) * (_q5(b, 2) - 16)),
    "Q5_1": (24, 32, lambda b: _half(b, 0) * _q5(b, 4) + _half(b, 2)),
    "Q8_0": (34, 32, lambda b: _half(b, 0) * numbers.signed(np.ascontiguousarray(b[..., 2:]))),
    "Q2_K": (84, 256, _q2_k),
    "Q3_K": (110, 256, _q3_k),
    "Q4_K": (144, 256, lambda b: _with_minima(b, _fields(b[..., 16:], 4, 32))),
    "Q5_K": (176, 256, _q5_k),
    "Q6_K": (210, 256, _q6_k),
    "IQ4_NL": (18, 32, _iq4_nl),
    "IQ4_XS": (136, 256, _iq4_xs),
    "MXFP4": (17, 32, _mxfp4),
    "NVFP4": (36, 64, _nvfp4),
    "TQ1_0": (54, 256, _tq1_0),
    "TQ2_0": (66, 256, lambda b: _half(b, 64) * (_fields(b[..., :64], 2, 32) - 1)),
    **{name: (nbytes, 256, _by_package(name)) for name, nbytes in _GRIDS.items()},
}
