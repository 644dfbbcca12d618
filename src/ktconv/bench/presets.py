"""Shapes of MoE layers: the published dimensions of known models, or any other."""

from __future__ import annotations

from msgspec import Struct, field

from ktconv.errors import UsageError
from ktconv.families.sizes import size_named
from ktconv.families.table import FAMILIES
from ktconv.native import Activation
from ktconv.runtime.layers.load import kernel_activation

_EXAMPLE = "hidden,intermediate,experts,top-k like 2048,768,128,8"
_LARGEST = 1 << 20  # of any dimension: beyond it a number is a mistake
_LARGEST_TOP_K = (1 << 20) - 1  # kt_moe_forward's


class Shape(Struct, frozen=True):
    """One MoE layer. `name` is the preset's, or the four numbers."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: Activation = field(default_factory=Activation)

    @property
    def operations(self) -> int:
        """Multiplications and additions of one token in one expert: its products."""
        return self.activation.products * 2 * self.hidden * self.intermediate


_MODELS = (
    "DeepSeek-V3",
    "DeepSeek-V4-Flash",
    "Qwen3-30B-A3B",
    "Qwen3-235B-A22B",
    "Kimi-K2",
    "GLM-4.5-Air",
    "MiniMax-M2",
    "Mixtral-8x7B",
    "gpt-oss-120b",
    "Nemotron-3-Nano",
    "nomic-embed-text-v2-moe",
)


def _preset(model: str) -> Shape:
    """A model's shape, with what its family's experts compute."""
    size = size_named(model)
    family = FAMILIES.of(size.type)
    assert family is not None
    shape = size.hidden, size.intermediate, size.experts, size.top_k
    return Shape(model.lower(), *shape, kernel_activation(family.activation))


PRESETS = {shape.name: shape for shape in map(_preset, _MODELS)}


def parse_shape(text: str) -> Shape:
    """A preset by name (any case), or "H,I,E,K". Raises UsageError."""
    known = PRESETS.get(text.strip().lower())
    if known is not None:
        return known
    numbers = text.split(",")
    if len(numbers) != 4 or not all(n.strip().isdecimal() for n in numbers):
        raise UsageError(
            f"--shape {text!r} is neither a preset nor H,I,E,K",
            f"presets: {', '.join(PRESETS)}; or {_EXAMPLE}",
        )
    hidden, intermediate, experts, top_k = (int(n) for n in numbers)
    for what, size, largest in (
        ("hidden size", hidden, _LARGEST),
        ("intermediate size", intermediate, _LARGEST),
        ("number of experts", experts, _LARGEST),
        ("top-k", top_k, _LARGEST_TOP_K),
    ):
        if not 1 <= size <= largest:
            raise UsageError(f"--shape {text!r} has a {what} of {size}", f"write {_EXAMPLE}")
    if top_k > experts:
        raise UsageError(
            f"--shape {text!r} has more experts per token ({top_k}) than experts ({experts})"
        )
    return Shape(f"{hidden},{intermediate},{experts},{top_k}", hidden, intermediate, experts, top_k)
