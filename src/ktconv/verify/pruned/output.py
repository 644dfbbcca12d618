"""A pruned checkpoint on disk, and the model that it was made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ktconv.conversion.plan import plan_checkpoint
from ktconv.errors import KtconvError
from ktconv.source import Checkpoint, MoELayer, open_checkpoint
from ktconv.source.agreement import Dimensions
from ktconv.source.model_source import ModelSource
from ktconv.source.pruning.view import PrunedView
from ktconv.targets.packed.weights import open_packed
from ktconv.targets.pruned import FORMAT, Options, PrunedTarget
from ktconv.verify.output import NO_LIMIT, OpenedOutput
from ktconv.writer.manifest import read_manifest


class PrunedOutput(OpenedOutput, frozen=True, kw_only=True):
    layers: Sequence[MoELayer]  # by its own tensors; none where these cannot be read

    @property
    def described(self) -> dict[str, Any]:
        return {"method": FORMAT}

    def experts_in(self, layer: int) -> Sequence[int]:
        return next((range(len(one.experts)) for one in self.layers if one.index == layer), ())

    @property
    def dimensions(self) -> Mapping[int, Dimensions]:
        return {
            one.index: (len(one.experts), one.hidden_size, one.intermediate_size, one.gated)
            for one in self.layers
        }


def is_pruned_output(directory: Path) -> bool:
    """Whether it is an output of `ktconv prune`, by its manifest."""
    manifest = read_manifest(directory)
    return manifest is not None and manifest.options.get("format") == FORMAT


def open_pruned_output(output: Path, source: ModelSource | None) -> PrunedOutput:
    """An output, and the model that it was made of, if given. Raises as `open_checkpoint` for the
    source."""
    packed, checkpoint, plan = open_packed(output), None, None
    if source is not None:
        whole = open_checkpoint(replace(source, prune=None))
        pruning = source.pruning()
        assert pruning is not None, "as the manifest records it"
        view = PrunedView(whole, pruning)
        target = PrunedTarget(Options(max_shard_size=NO_LIMIT), view)
        checkpoint = view.checkpoint()
        plan = plan_checkpoint(checkpoint, target)
    return PrunedOutput(
        packed=packed,
        manifest=read_manifest(output),
        checkpoint=checkpoint,
        plan=plan,
        others=packed.others,
        layers=_own_layers(output),
    )


def _own_layers(output: Path) -> Sequence[MoELayer]:
    """The layers of the output itself; none where they cannot be read, which other checks say."""
    found: Checkpoint | None = None
    try:
        found = open_checkpoint(output)
    except KtconvError:
        return ()
    return found.layers
