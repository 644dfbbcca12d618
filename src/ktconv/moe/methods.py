"""Weight formats of the kernels by name: layout, quantizer, what to expect of the result.

Quantizers here are plain round-to-nearest: they make weights for benchmarks and tests.
Converting a model is quantize-cpu's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats.decode import E4M3FN_VALUES, bf16_to_f32, f32_to_bf16
from ktconv.native import Layout

Array = NDArray[Any]
F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP8_MAX, FP8_BLOCK, MXFP4_MAX_EXPONENT = 448.0, 128, 2
KERNEL_BOUND = 0.005  # y is bf16: 2^-9 at most; the rest is for sums in another order


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [N, K] as row-major codes and scales (kt_pack's), and what they mean."""

    codes: Array
    scale: Array | None
    values: F32


@dataclass(frozen=True, slots=True)
class Method:
    """A row of METHODS.

    `bound` is what to expect of the relative error of a layer's output against float32 arithmetic
    on the same quantized weights and ordinary inputs: that of rounding activations (int8: about
    1/127 of the largest in a row, twice; bf16: 2^-9). Outliers can make it larger without anything
    being wrong; against arithmetic with `activations` rounded too, KERNEL_BOUND holds always.
    """

    name: str
    layout: Layout
    quantize: Callable[[F32, Layout], Quantized]
    bound: float
    unit: str = "bf16"  # of the limits: which kind of product the kernels use

    def activations(self, values: F32) -> F32:
        """Rows as the kernels see them: int8 with a scale per row or group, or bf16."""
        if self.unit == "bf16":
            return bf16_to_f32(f32_to_bf16(values))
        runs = _grouped(values, self.layout.group or values.shape[1])
        scale = np.abs(runs).max(axis=2, keepdims=True) * np.float32(1 / 127)
        scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        rounded: F32 = (np.rint(runs * inverse) * scale).reshape(values.shape)
        return rounded

    def steps(self) -> tuple[int, int]:
        """What rows and columns of a packed matrix must be multiples of."""
        cols = next(k for k in (32, 64, 128) if self.layout.weight_size(32, k))
        return 32, cols

    def holds(self, hidden: int, intermediate: int, parts: int) -> bool:
        """Whether a layer of that shape can be cut into parts and packed."""
        if intermediate % parts:
            return False
        width = intermediate // parts
        shapes = ((width, hidden), (hidden, width))
        return all(self.layout.multiplies(*shape) for shape in shapes)

    def expert_bytes(self, hidden: int, intermediate: int, parts: int = 1) -> int:
        """Bytes of one expert, scales included."""
        width = intermediate // parts
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        sizes = (self.layout.weight_size(*s) + self.layout.scale_size(*s) for s in shapes)
        return parts * sum(sizes)


def _kt_integer(values: F32, layout: Layout) -> Quantized:
    """INT8 and INT4 as quantize-cpu packs them."""
    matrix = native.Matrix(values.view(np.uint8).reshape(-1), "F32", *values.shape)
    codes, scale = native.quantize(layout, matrix)
    step = np.float32(layout.traits()["scale_units"])
    return Quantized(codes, scale, codes * (scale * step)[:, None])


def _bf16(values: F32, layout: Layout) -> Quantized:
    codes = f32_to_bf16(values)
    return Quantized(codes, None, bf16_to_f32(codes))


def _grouped(values: F32, group: int) -> F32:
    rows, cols = values.shape
    return values.reshape(rows, cols // group, group)


def _nibbles(codes: Array) -> Array:
    """Codes 0..15 [N, K] as bytes [N, K/2], even columns low."""
    packed: Array = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return packed


def _gint4(values: F32, layout: Layout) -> Quantized:
    groups = _grouped(values, layout.group)
    scale = f32_to_bf16(np.abs(groups).max(axis=2) / np.float32(7))
    step = np.maximum(bf16_to_f32(scale), np.float32(1e-30))[..., None]
    codes = np.clip(np.rint(groups / step), -8, 7).astype(np.int8)
    stored = (codes + 8).astype(np.uint8).reshape(values.shape)
    return Quantized(_nibbles(stored), scale, (codes * step).reshape(values.shape))


def _mxfp4(values: F32, layout: Layout) -> Quantized:
    """OCP Microscaling: the scale is the power of two of the largest magnitude, less 2."""
    groups = _grouped(values, layout.group)
    largest = np.maximum(np.abs(groups).max(axis=2), np.float32(2.0**-120))
    exponent = np.floor(np.log2(largest)).astype(np.int32) - MXFP4_MAX_EXPONENT
    step = np.ldexp(np.float32(1), exponent)[..., None].astype(np.float32)
    middles = (E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2
    sizes = np.abs(groups) / step
    codes = np.zeros(groups.shape, np.uint8)
    for middle in middles:
        codes += sizes > middle
    restored = (np.copysign(E2M1_VALUES[codes], groups) * step).reshape(values.shape)
    signed = (codes | (np.signbit(groups) << 3)).astype(np.uint8).reshape(values.shape)
    return Quantized(_nibbles(signed), (exponent + 127).astype(np.uint8), restored)


def _fp8(values: F32, layout: Layout) -> Quantized:
    rows, cols = values.shape
    block = (FP8_BLOCK, FP8_BLOCK) if layout.group else (1, cols)
    firsts = [np.arange(0, size, step) for size, step in zip(values.shape, block, strict=True)]
    largest = np.maximum.reduceat(np.abs(values), firsts[0], axis=0)
    largest = np.maximum.reduceat(largest, firsts[1], axis=1)
    scale = (np.maximum(largest, 1e-30) / FP8_MAX).astype(np.float32)
    spread = scale.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :cols]
    codes = _e4m3_codes((np.abs(values) / spread).astype(np.float32, copy=False))
    restored = np.copysign(E4M3FN_VALUES[codes], values) * spread
    signed = (codes | (np.signbit(values) << 7)).astype(np.uint8)
    return Quantized(signed, scale if layout.group else scale[:, 0], restored)


def _e4m3_codes(sizes: F32) -> Array:
    """Nearest codes of magnitudes up to FP8_MAX, ties to even: float32 has the same fields, 20
    bits further up and with a bias larger by 120; below 2^-6 codes are multiples of 2^-9."""
    bits = sizes.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1))) >> np.uint32(20)
    small = np.rint(np.minimum(sizes, 1) * np.float32(512)).astype(np.uint32)
    codes: Array = np.where(sizes < np.float32(2.0**-6), small, rounded - np.uint32(960))
    capped: Array = np.minimum(codes, np.uint32(0x7E)).astype(np.uint8)
    return capped


METHODS = {
    method.name: method
    for method in (
        Method("int4", Layout("int4"), _kt_integer, 0.08, "int8"),
        Method("int8", Layout("int8"), _kt_integer, 0.08, "int8"),
        Method("bf16", Layout("bf16", 0, "none"), _bf16, 0.01),
        Method("fp8", Layout("fp8", FP8_BLOCK), _fp8, 0.01),
        Method("fp8-channel", Layout("fp8"), _fp8, 0.01),
        Method("mxfp4", Layout("mxfp4", 32, "ue8m0"), _mxfp4, 0.01),
        Method("gint4-32", Layout("gint4", 32, "bf16"), _gint4, 0.05, "int8"),
        Method("gint4-64", Layout("gint4", 64, "bf16"), _gint4, 0.05, "int8"),
        Method("gint4-128", Layout("gint4", 128, "bf16"), _gint4, 0.05, "int8"),
    )
}


ALIASES = {
    "rawint4": "gint4-32",
    "gint4": "gint4-32",
    "gint4-g32": "gint4-32",
    "gint4-g64": "gint4-64",
    "gint4-g128": "gint4-128",
    "gptq-int4": "gint4-128",
    "fp8-block": "fp8",
}


def method_named(name: str) -> Method:
    """A row of METHODS, by its name or another that it is known by; else UsageError."""
    known = ALIASES.get(name.lower(), name.lower())
    if known not in METHODS:
        raise UsageError(f"unknown method {name!r}", f"available: {', '.join(METHODS)}")
    return METHODS[known]


def methods_that_hold(hidden: int, intermediate: int, parts: int) -> list[str]:
    """Names of the methods that such a layer can be packed with."""
    return [m.name for m in METHODS.values() if m.holds(hidden, intermediate, parts)]
