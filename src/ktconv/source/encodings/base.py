"""The description of one input encoding; each encoding's file makes one or more."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from ktconv.source.config import ModelConfig
from ktconv.source.elements import Element
from ktconv.source.types import Quantization, TensorRef
from ktconv.source.views import StoredView

# The tensors of one stored weight by what follows its name: weight, weight_scale_inv, ...
Parts = Mapping[str, TensorRef]
# The same by what they are for: one of the names below.
Roles = Mapping[str, TensorRef]

WEIGHT = "weight"  # the primary tensor
BLOCKS = "blocks"  # the name that gpt-oss's has
SCALE = "scale"
OUTER = "outer scale"
ZERO = "zero point"
GROUPS = "groups"
SHAPE = "shape"  # of the weight, as numbers

BIAS = "bias"  # the name of a tensor that a weight of any encoding may have beside it


class Companion(Struct, frozen=True):
    """A tensor next to the primary one: what it is for, the names that it may have (one of them at
    a time), and its dtypes."""

    role: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    optional: bool = False


class Encoding(Struct, frozen=True):
    """An encoding: a way to store the numbers of an expert weight.

    A weight can have this encoding if its tensor `primary` has one of `dtypes`, the tensors next
    to it are `companions`, and everything else is `ignored`. It has it if also the shape of the
    primary tensor is right, and `quantization` finds scales, zero points and groups: the first
    such row of ENCODINGS counts. `quantization` returns None where the shapes are not those of
    this encoding; without companions it is not asked.
    """

    name: str
    dtypes: tuple[str, ...]  # of the primary tensor, as safetensors spells them
    element: Element  # what it consists of
    primary: str = WEIGHT
    companions: tuple[Companion, ...] = ()
    ignored: tuple[str, ...] = ()  # nothing that is computed here depends on them
    transposed: bool = False  # numbered experts are stored [in, out]
    quantization: Callable[[Roles, StoredView, ModelConfig], Quantization | None] | None = None
    methods: tuple[str, ...] = ()  # quant_method of config.json has one of these words; (): any
    formats: tuple[str, ...] = ()  # so has fmt

    @property
    def names(self) -> frozenset[str]:
        """Names that its tensors may have, but for a bias."""
        beside = (name for companion in self.companions for name in companion.names)
        return frozenset((self.primary, *beside, *self.ignored))

    def roles(self, parts: Mapping[str, str]) -> Mapping[str, str] | None:
        """The name of each role's tensor; None if tensors of such names and dtypes are not a
        weight of this encoding. `parts`: dtypes by name."""
        if parts.get(self.primary) not in self.dtypes:
            return None
        found = {WEIGHT: self.primary}
        for companion in self.companions:
            names = [name for name in companion.names if name in parts]
            if not names and companion.optional:
                continue
            if len(names) != 1 or parts[names[0]] not in companion.dtypes:
                return None
            found[companion.role] = names[0]
        rest = parts.keys() - found.values() - {*self.ignored, BIAS}
        return None if rest else found

    def outputs(self, roles: Roles) -> int:
        """Rows [out, in] of a weight of an expert of its own; 0 where the tensor is no matrix, or
        has other outputs than its scales."""
        weight = roles[WEIGHT]
        size = weight.shape[1 if self.transposed else 0] if len(weight.shape) == 2 else 0
        outputs = size * self.element.unit_rows
        if self.transposed and SCALE in roles and roles[SCALE].shape[-1:] != (outputs,):
            return 0
        return outputs

    def sizes(self, tensor: TensorRef, transposed: bool) -> tuple[int, ...]:
        """The shape of a primary tensor in elements, as they are stored."""
        rows, cols = self.element.unit_rows, self.element.unit_cols
        *experts, height, width = tensor.shape
        if transposed:
            return (*experts, height // self.element.items * cols, width * rows)
        return (*experts, height * rows, width // self.element.items * cols)
