"""Shapes of MoE layers: the published dimensions of known models, or any other."""

from __future__ import annotations

from dataclasses import dataclass, field

from ktconv.errors import UsageError
from ktconv.native import Activation

_EXAMPLE = "hidden,intermediate,experts,top-k like 2048,768,128,8"
_LARGEST = 1 << 20  # of any dimension: beyond it a number is a mistake
_LARGEST_TOP_K = (1 << 20) - 1  # kt_moe_forward's


@dataclass(frozen=True, slots=True)
class Shape:
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


# From each model's config.json on the hub. DeepSeek-V4-Flash clamps at 10, gpt-oss at 7; experts of
# Nemotron-3 and Nomic's embedding model have no gate.
PRESETS = {
    shape.name: shape
    for shape in (
        Shape("deepseek-v3", 7168, 2048, 256, 8),
        Shape("deepseek-v4-flash", 4096, 2048, 256, 6, Activation(limit=10.0)),
        Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
        Shape("qwen3-235b-a22b", 4096, 1536, 128, 8),
        Shape("kimi-k2", 7168, 2048, 384, 8),
        Shape("glm-4.5-air", 4096, 1408, 128, 8),
        Shape("minimax-m2", 3072, 1536, 256, 8),
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape("gpt-oss-120b", 2880, 2880, 128, 4, Activation("swiglu", 1.702, 1.0, 7.0)),
        Shape("nemotron-3-nano", 2688, 1856, 128, 6, Activation("relu2")),
        Shape("nomic-embed-text-v2-moe", 768, 3072, 8, 2, Activation("ungated_gelu")),
    )
}


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
