"""compressed-tensors' pack-quantized: codes in int32 words, and the shape of the matrix.

A matrix [rows, cols] becomes `weight_packed` int32 [rows, cols * bits / 32], each level q stored as
q + 2^(bits-1), first column in the lowest bits; `weight_scale` [rows, cols / group size];
`weight_shape` int64 [2], which vLLM does not read for all experts at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ktconv.targets.encoded.layouts.base import Layout, Sizes

if TYPE_CHECKING:
    from ktconv.system.arrays import U8, Array


class _PackQuantized(Layout):
    name = "pack-quantized"
    parts: Sequence[str] = ("weight_packed", "weight_scale", "weight_shape")
    scale_part = "weight_scale"

    def shapes(self, sizes: Sizes) -> Sequence[tuple[str, tuple[int, ...], int]]:
        scales = sizes.scale_shape[0] * sizes.scale_shape[1]
        return (
            ("I32", (sizes.rows, sizes.row_bytes // 4), sizes.rows * sizes.row_bytes),
            (sizes.scale_dtype, sizes.scale_shape, sizes.scale_bytes * scales),
            ("I64", (2,), 16),
        )

    def others(
        self, sizes: Sizes, scales: Array, factor: float, zeros: U8 | None = None
    ) -> Mapping[str, Array]:
        import numpy as np

        return {"weight_scale": scales, "weight_shape": np.array([sizes.rows, sizes.cols], "<i8")}


class _WithoutShape(_PackQuantized):
    parts = ("weight_packed", "weight_scale")

    def shapes(self, sizes: Sizes) -> Sequence[tuple[str, tuple[int, ...], int]]:
        return super().shapes(sizes)[:2]

    def others(
        self, sizes: Sizes, scales: Array, factor: float, zeros: U8 | None = None
    ) -> Mapping[str, Array]:
        return {"weight_scale": scales}


PACK_QUANTIZED = _PackQuantized()
WITHOUT_SHAPE = _WithoutShape()
