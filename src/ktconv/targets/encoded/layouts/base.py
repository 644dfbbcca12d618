"""The interface of a layout: the tensors of one encoded matrix, and their bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from msgspec import Struct

from ktconv.writer.shards import Tensor

if TYPE_CHECKING:
    from ktconv.system.arrays import U8, Array


class Sizes(Struct, frozen=True):
    """Sizes of kt_encode's result for a matrix [rows, cols]; without scales `scale_shape` is (0,
    0)."""

    rows: int
    cols: int
    row_bytes: int  # of codes
    scale_shape: tuple[int, int]
    scale_dtype: str  # as safetensors spells it
    scale_bytes: int  # of each


class Layout(ABC):
    """Layout of the codes and scales of kt_encode in a file. An array of scales has the bytes that
    kt_encode leaves; `factor` is the second scale of a whole matrix as it is stored, `zeros` [rows,
    groups] are the codes that mean 0 where they are not those of kt_encode."""

    name: str  # in manifests and messages
    parts: Sequence[str]  # the last components of the tensors' names; the first one has the codes
    streamed = True  # codes are written row by row, as kt_encode leaves them
    scale_part: str | None  # the one of `parts` that has the scales

    @abstractmethod
    def shapes(self, sizes: Sizes) -> Sequence[tuple[str, tuple[int, ...], int]]:
        """dtype, shape and bytes of each part."""

    @abstractmethod
    def others(
        self, sizes: Sizes, scales: Array, factor: float, zeros: U8 | None = None
    ) -> Mapping[str, Array]:
        """The parts but for the codes."""

    def whole(self, codes: U8) -> U8:
        """All codes [rows, bytes] of a matrix as stored, where they are not streamed."""
        return codes

    def codes(self, stored: U8, sizes: Sizes) -> U8:
        """The inverse of `whole`: [rows, bytes]."""
        return stored.reshape(sizes.rows, sizes.row_bytes)

    def scales(self, parts: Mapping[str, U8], sizes: Sizes) -> U8:
        """The bytes of kt_encode's scales, [scale rows, bytes], from those of the parts."""
        if self.scale_part is None:
            raise ValueError(f"{self.name} has no scales")
        return parts[self.scale_part].reshape(sizes.scale_shape[0], -1)

    @property
    def divides(self) -> bool:
        """Whether scales are divided by the factor, not multiplied with it."""
        return True

    def factor(self, parts: Mapping[str, U8]) -> float:
        """The second scale, from the bytes of the parts; 0 where there is none."""
        return 0.0

    def zeros(self, parts: Mapping[str, U8], sizes: Sizes) -> U8 | None:
        """The codes that mean 0 [rows, groups], where the layout has any."""
        return None

    def tensors(self, module: str, sizes: Sizes) -> list[Tensor]:
        """`module`: the name of the matrix without ".weight"."""
        stored = zip(self.parts, self.shapes(sizes), strict=True)
        return [Tensor(f"{module}.{part}", *about) for part, about in stored]


class _MixedPrecision(Layout):
    """The layout of an output whose matrices have layouts of their own; never that of a matrix."""

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
