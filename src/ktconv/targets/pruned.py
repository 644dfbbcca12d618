"""A checkpoint with fewer experts in the encoding of its source, as the target of a conversion:
all bytes are copied."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from ktconv import __version__
from ktconv.conversion.plan import Plan as AnyPlan
from ktconv.conversion.target import Target
from ktconv.source import MoELayer
from ktconv.source.pruning.tensors import Named, expert_tensors
from ktconv.source.pruning.view import PrunedView
from ktconv.source.source_card import SourceCard
from ktconv.system.units import format_ranges, format_size
from ktconv.targets.card import header, model_name, uneven_paragraph
from ktconv.writer.shards import Tensor

FORMAT = "pruned"  # in the options of a manifest
_TAGS = ("ktconv", "mixture-of-experts", "pruned")


class Options(Struct, frozen=True):
    """The options that decide which bytes are written; which experts stay is the source's."""

    mtp: bool = True
    max_shard_size: int = 5_000_000_000

    def as_dict(self) -> dict[str, object]:
        return {"format": FORMAT, "max_shard_size": self.max_shard_size}


class PrunedTarget(Target):
    """The tensors of the experts that stay under their new names, all others as they are."""

    def __init__(self, options: Options, view: PrunedView) -> None:
        self.options, self._view = options, view
        self.experts: Mapping[int, Sequence[Named]] = expert_tensors(view)

    @property
    def name(self) -> str:
        return FORMAT

    @property
    def description(self) -> str:
        return f"the source's own encoding with {self._view.pruning.in_words}"

    def facts(self) -> dict[str, object]:
        return {"method": FORMAT}

    def check(self, layers: Sequence[MoELayer]) -> None:
        pass

    def sections(self, layer: MoELayer, experts: Sequence[int]) -> Sequence[Iterator[Tensor]]:
        return [(Tensor(name, one.dtype, one.shape, one.nbytes) for one, name in self._of(layer))]

    def _of(self, layer: MoELayer) -> Sequence[Named]:
        return self.experts[layer.index]

    def alike(self, layer: MoELayer) -> object:
        return [(one.dtype, one.shape, len(name)) for one, name in self._of(layer)]

    def metadata(self) -> dict[str, str]:
        return {"format": "pt", "ktconv_version": __version__, "ktconv_method": FORMAT}


Plan: TypeAlias = AnyPlan[PrunedTarget]


def card(plan: Plan, source: SourceCard) -> str:
    """README.md of the output."""
    name, pruning = source.name or model_name(plan.checkpoint.path), plan.checkpoint.pruning
    assert pruning is not None
    layers = format_ranges([layer.index for layer in plan.moe_layers])
    library = "ktconv" if (own := uneven_paragraph(plan.checkpoint.layers)) else "transformers"
    use = own or "Engines load it as they load the model it was made of."
    left = ""
    if pruning.left_out:
        left = f"- Left out: MTP layers {format_ranges(list(pruning.left_out))}\n"
    return f"""---
{header(source, library, _TAGS)}
---

# {name} with fewer experts

{name} with {pruning.in_words}, everything else as it was: {format_size(plan.output_bytes)}.

- MoE layers: {layers}
{left}- `ktconv.json` says which expert of the model each one was; it has checksums of all tensors

{use}

Made with ktconv {__version__}:

    ktconv prune {shlex.quote(source.argument or name)} OUTPUT --prune ktconv.json
"""
