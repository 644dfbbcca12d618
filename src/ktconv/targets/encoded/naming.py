"""Names of the experts in an encoded checkpoint.

Models' own names are what vLLM, SGLang and transformers read. Loaders of KTransformers know a few
names only, by method (docs/formats.md section 10): where the model's own are among these, they
stay, so that both read the output.
"""

from __future__ import annotations

import re

from msgspec import Struct

from ktconv.families.family import NUMBERED_W, USUAL, Matrices
from ktconv.source import MoELayer, Projection
from ktconv.targets.encoded.names import module_name

_USUAL_WORDS, _NUMBERED_WORDS = "(?:gate|up|down)_proj", "w[123]"
_MODEL = r"(?:model\.language_model|language_model\.model|model)\."


class Naming(Struct, frozen=True):
    """`accepted`: a pattern of module names whose group 1 is the layer's number, "" for any name;
    `container` and `words`: what modules of other models are called."""

    accepted: str = ""
    container: str = ""  # of a layer's number
    words: Matrices | None = None

    def module(self, layer: MoELayer, expert: int, proj: Projection) -> str:
        """The name of a matrix without its last component."""
        own = module_name(layer, expert, proj)
        if not self.accepted or self._is_accepted(own, layer):
            return own
        assert self.words is not None
        return self.container.format(layer=layer.index, expert=expert, proj=self.words.of(proj))

    def keeps(self, layer: MoELayer) -> bool:
        """Whether the layer's experts have the model's own names."""
        return not self.accepted or self._is_accepted(module_name(layer, 0, "up"), layer)

    def _is_accepted(self, name: str, layer: MoELayer) -> bool:
        found = re.fullmatch(self.accepted, name)
        return found is not None and int(found[1]) == layer.index


def _naming(accepted: str, container: str, words: Matrices) -> Naming:
    return Naming(accepted, container + ".experts.{expert}.{proj}", words)


OWN = Naming()
MLP = _naming(
    rf"{_MODEL}layers\.([0-9]+)\.mlp\.experts\.[0-9]+\.{_USUAL_WORDS}",
    "model.layers.{layer}.mlp",
    USUAL,
)
THREE = _naming(
    rf"(?:{_MODEL})?layers\.([0-9]+)\.(?:mlp\.experts\.[0-9]+\.{_USUAL_WORDS}"
    rf"|(?:block_sparse_moe\.)?experts\.[0-9]+\.{_NUMBERED_WORDS})",
    "model.layers.{layer}.mlp",
    USUAL,
)
V4 = _naming(
    rf"(?:model\.)?layers\.([0-9]+)\.ffn\.experts\.[0-9]+\.{_NUMBERED_WORDS}",
    "layers.{layer}.ffn",
    NUMBERED_W,
)
M3 = _naming(
    r"(?:language_model\.model\.|language_model\.|model\.)?layers\.([0-9]+)\.block_sparse_moe"
    rf"\.experts\.[0-9]+\.{_NUMBERED_WORDS}",
    "model.layers.{layer}.block_sparse_moe",
    NUMBERED_W,
)
BLK = Naming(
    r"blk\.([0-9]+)\..*",
    "blk.{layer}.ffn_{proj}_exps.{expert}",
    Matrices("gate", "up", "down"),
)
