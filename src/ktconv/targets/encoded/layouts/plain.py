"""Codes and scales as kt_encode leaves them, under the names and dtypes of a library; also bf16
weights, which have no scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ktconv.targets.encoded.layouts.base import Layout, Sizes

if TYPE_CHECKING:
    from ktconv.system.arrays import U8, Array


class Plain(Layout):
    """`codes` and `scales`: the last component of a name, and a dtype. `outer`: that of the scale
    of the matrix, and whether engines divide by it (compressed-tensors) or multiply (ModelOpt)."""

    def __init__(
        self,
        name: str,
        codes: tuple[str, str],
        scales: tuple[str, str] | None = None,
        outer: tuple[str, bool] | None = None,
    ) -> None:
        self.name, self._codes, self._scales, self._outer = name, codes, scales, outer
        named = (codes, scales, outer)
        self.parts = tuple(str(one[0]) for one in named if one is not None)
        self.scale_part = None if scales is None else scales[0]

    def shapes(self, sizes: Sizes) -> Sequence[tuple[str, tuple[int, ...], int]]:
        dtype = self._codes[1]
        width = sizes.row_bytes // (2 if dtype == "BF16" else 1)
        found = [(dtype, (sizes.rows, width), sizes.rows * sizes.row_bytes)]
        if self._scales is not None:
            count = sizes.scale_shape[0] * sizes.scale_shape[1]
            found.append((self._scales[1], sizes.scale_shape, sizes.scale_bytes * count))
        if self._outer is not None:
            shape: tuple[int, ...] = (1,) if self._outer[1] else ()
            return (*found, ("F32", shape, 4))
        return found

    def others(
        self, sizes: Sizes, scales: Array, factor: float, zeros: U8 | None = None
    ) -> Mapping[str, Array]:
        import numpy as np

        found: dict[str, Array] = {}
        if self._scales is not None:
            found[self._scales[0]] = scales
        if self._outer is not None:
            found[self._outer[0]] = np.array([factor], "<f4")
        return found

    @property
    def divides(self) -> bool:
        return self._outer is not None and self._outer[1]

    def factor(self, parts: Mapping[str, U8]) -> float:
        if self._outer is None:
            return 0.0
        return float(parts[self._outer[0]].view("<f4")[0])


BF16 = Plain("bf16", ("weight", "BF16"))
FP8_BLOCK = Plain("fp8-block", ("weight", "F8_E4M3"), ("weight_scale_inv", "F32"))
FLOAT_QUANTIZED = Plain("float-quantized", ("weight", "F8_E4M3"), ("weight_scale", "F32"))
MXFP4_PACK_QUANTIZED = Plain(
    "mxfp4-pack-quantized", ("weight_packed", "U8"), ("weight_scale", "U8")
)
MXFP4_V4 = Plain("mxfp4", ("weight", "I8"), ("scale", "F8_E8M0"))
MXFP8_QUANTIZED = Plain("mxfp8-quantized", ("weight", "F8_E4M3"), ("weight_scale", "U8"))
MXFP8_M3 = Plain("mxfp8", ("weight", "F8_E4M3"), ("weight_scale_inv", "U8"))
NVFP4_PACK_QUANTIZED = Plain(
    "nvfp4-pack-quantized",
    ("weight_packed", "U8"),
    ("weight_scale", "F8_E4M3"),
    ("weight_global_scale", True),
)
NVFP4_MODELOPT = Plain(
    "nvfp4", ("weight", "U8"), ("weight_scale", "F8_E4M3"), ("weight_scale_2", False)
)
