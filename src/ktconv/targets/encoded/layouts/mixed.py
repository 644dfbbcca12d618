"""The layout of an output whose matrices have layouts of their own; never that of a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from ktconv.targets.encoded.layouts.base import Layout, Sizes

if TYPE_CHECKING:
    from ktconv.system.arrays import U8, Array


class _MixedPrecision(Layout):
    name = "mixed-precision"  # as compressed-tensors calls it
    parts = ()
    scale_part = None

    def shapes(self, sizes: Sizes) -> Sequence[tuple[str, tuple[int, ...], int]]:
        self._none()

    def others(
        self, sizes: Sizes, scales: Array, factor: float, zeros: U8 | None = None
    ) -> Mapping[str, Array]:
        self._none()

    def _none(self) -> NoReturn:
        raise ValueError("each matrix of a mix has a layout of its own")


MIXED_PRECISION = _MixedPrecision()
