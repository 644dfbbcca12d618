"""What will be written when packed weights become other shards: layer by layer, then the rest.

The same units, names and bytes as `plan.make_plan` gives, without a source checkpoint, and with
the backward matrices that it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ktconv.checkpoint import Checkpoint, MoELayer
from ktconv.targets.ktransformers import Content as PlanContent
from ktconv.targets.ktransformers import (
    Copy,
    KTransformersTarget,
    LayerContent,
    Options,
    Plan,
    lay_out,
)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer that will be written."""

    layer: MoELayer
    experts: Sequence[int]
    backward: bool
    nbytes: int  # that are read for it


@dataclass(frozen=True, slots=True)
class Content:
    """All that a plan is made of."""

    checkpoint: Checkpoint
    options: Options
    layers: Sequence[PackedLayer]
    copies: Sequence[Copy] = ()
    sidecars: Sequence[Path] = ()
    notes: Sequence[str] = ()
    skipped: Sequence[str] = ()


def plan_packed(content: Content) -> Plan:
    """Plan all shards; refuses dimensions that the format cannot hold."""
    backward = {packed.layer.index for packed in content.layers if packed.backward}
    layers = [
        LayerContent(packed.layer, packed.experts, packed.nbytes) for packed in content.layers
    ]
    return lay_out(
        PlanContent(
            content.checkpoint,
            layers,
            content.copies,
            content.sidecars,
            content.notes,
            content.skipped,
        ),
        KTransformersTarget(content.options, frozenset(backward)),
    )
