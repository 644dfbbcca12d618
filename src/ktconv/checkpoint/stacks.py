"""Expert tensors found by the structure of their names, whatever the model is called.

A stack is everything under one `...layers.{L}.{block}.experts`: the experts of one layer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ktconv.checkpoint.types import TensorRef
from ktconv.errors import CheckpointError

# mtp.{j} without "layers." is how DeepSeek V4 names its multi-token-prediction layers.
_STACK = re.compile(
    r"(?P<prefix>(?:.+\.)?)(?P<list>layers|mtp)\.(?P<number>[0-9]+)\."
    r"(?:mlp|block_sparse_moe|ffn|feed_forward)"
)
_MOST_DIGITS = 6  # of a layer's number; no model comes near
LOOKED_FOR = "[prefix.]layers.<L>.(mlp|block_sparse_moe|ffn|feed_forward).experts.*"
_TYPICAL_KEY = "model.layers.0.mlp.experts.0.gate_proj.weight"


@dataclass(slots=True)
class Stack:
    """The expert tensors of one layer, keyed by what follows `source` and a dot."""

    source: str  # model.layers.3.mlp.experts
    prefix: str  # "model." or ""
    number: int  # the layer's number as the name spells it
    in_mtp: bool  # the number counts MTP layers, not decoder layers
    tensors: dict[str, TensorRef] = field(default_factory=dict)

    @property
    def layer_path(self) -> str:
        """Common start of the names of all the layer's tensors: "model.layers.3."."""
        return self.source.rsplit(".", 2)[0] + "."


@dataclass(frozen=True, slots=True)
class Split:
    """The tensors of a checkpoint, parted into experts and the rest."""

    stacks: Sequence[Stack]
    others: Sequence[TensorRef]
    unrecognised: Sequence[str]  # names in `others` that have experts in an unknown place


def split_tensors(tensors: Iterable[TensorRef]) -> Split:
    """Part routed-expert tensors from all others; shared experts are others."""
    stacks: dict[str, Stack | None] = {}
    others: list[TensorRef] = []
    unrecognised: list[str] = []
    for tensor in tensors:
        start, found, rest = tensor.name.partition(".experts.")
        if not found:
            others.append(tensor)
            continue
        # One regular expression per layer and not per tensor: there may be 100 000.
        if start not in stacks:
            stacks[start] = _parse_stack(start)
        stack = stacks[start]
        if stack is None:
            others.append(tensor)
            unrecognised.append(tensor.name)
        else:
            stack.tensors[rest] = tensor
    found_stacks = [stack for stack in stacks.values() if stack is not None]
    return Split(found_stacks, others, unrecognised)


def _parse_stack(start: str) -> Stack | None:
    """The empty stack of a layer; None where nothing else says that experts are a layer's."""
    match = _STACK.fullmatch(start)
    if match is None:
        return None
    if len(match["number"]) > _MOST_DIGITS:
        raise CheckpointError(
            f"{start}.experts has a layer number of more than {_MOST_DIGITS} digits",
            "The checkpoint is damaged, or not what it seems; get it again.",
        )
    prefix = match["prefix"]
    in_mtp = match["list"] == "mtp" or "mtp" in prefix.split(".")
    return Stack(start + ".experts", prefix, int(match["number"]), in_mtp)


def nearest_keys(names: Iterable[str]) -> list[str]:
    """Up to three names that most look as if they belonged to experts, for an error."""
    everything = list(names)
    for word in ("expert", "moe"):
        found = list(islice((name for name in everything if word in name), 3))
        if found:
            return found
    # difflib is quadratic; the first thousand names show how the model spells things.
    return difflib.get_close_matches(_TYPICAL_KEY, everything[:1000], n=3, cutoff=0.3)
