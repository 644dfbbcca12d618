"""The description of one input encoding; each encoding's file makes one or more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ktconv.checkpoint.config import ModelConfig
from ktconv.checkpoint.elements import Element
from ktconv.checkpoint.types import Quantization, TensorRef
from ktconv.checkpoint.views import StoredView

# The tensors of one stored weight by what follows its name: weight, weight_scale_inv, ...
Parts = Mapping[str, TensorRef]
WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the numbers of an expert weight are stored.

    A weight has this encoding if its tensor `primary` has one of `dtypes` and its other tensors
    are `companions`, and possibly some of `optional`. `quantization` finds scales, zero points and
    groups of a view, and checks them; `check` refuses a config.json that declares another
    encoding.
    """

    name: str
    dtypes: tuple[str, ...]  # of the primary tensor, as safetensors spells them
    element: Element  # the stored unit
    primary: str = WEIGHT
    companions: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    transposed: bool = False  # numbered experts are stored [in, out]
    quantization: Callable[[Parts, StoredView, ModelConfig], Quantization] | None = None
    check: Callable[[TensorRef, ModelConfig], None] | None = None

    def fits(self, parts: Parts) -> bool:
        """Whether these are the tensors of a weight so stored."""
        primary = parts.get(self.primary)
        if primary is None or primary.dtype not in self.dtypes:
            return False
        known = [name for name in self.optional if name in parts]
        needed = all(name in parts for name in self.companions)
        return needed and len(parts) == 1 + len(self.companions) + len(known)

    def sizes(self, tensor: TensorRef, transposed: bool) -> tuple[int, ...]:
        """The shape of a primary tensor in elements, as they are stored."""
        unit = (self.element.unit_rows, self.element.unit_cols)
        *experts, rows, cols = tensor.shape
        if transposed:
            unit = unit[1], unit[0]
        return (*experts, rows * unit[0], cols * unit[1])
