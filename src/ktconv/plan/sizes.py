"""A model as a plan needs it: its layers, how large their experts are, how they can be cut."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from msgspec import Struct

from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import is_backward
from ktconv.plan.cuts import cut_bytes, grains
from ktconv.plan.placement.parallel import LayerShape
from ktconv.source import Checkpoint, MoELayer, open_checkpoint
from ktconv.source.config import CONFIG_NAME
from ktconv.source.model_source import ModelSource, refuse_options
from ktconv.source.settings import ModelSettings
from ktconv.targets.packed.weights import (
    Geometry,
    PackedWeights,
    may_hold_packed,
    name_of,
    open_packed,
)
from ktconv.writer.journal import Journal
from ktconv.writer.manifest import read_manifest


class Layer(Struct, frozen=True):
    """The routed experts of a layer."""

    index: int
    experts: int  # that its router chooses from
    ids: Sequence[int]  # those that are there
    hidden: int
    intermediate: int
    gated: bool
    biased: bool
    is_mtp: bool = False
    source: MoELayer | None = None  # of a checkpoint

    @property
    def shape(self) -> LayerShape:
        """Shape of a layer of a checkpoint, with the cuts that are possible."""
        if self.source is None:
            return LayerShape(self.ids, self.intermediate)
        experts = [self.source.experts[one] for one in distinct(self.source)]
        found = dict.fromkeys(grain for expert in experts for grain in grains(expert))
        return LayerShape(self.ids, self.intermediate, list(found))


def distinct(layer: MoELayer) -> Sequence[int]:
    """Experts that stand for all: one, unless a layer mixes encodings."""
    return [0] if len(layer.encodings) == 1 else range(len(layer.experts))


class Model(Struct, frozen=True, dict=True):
    """A checkpoint, or experts that are packed for CPUs."""

    path: str
    layers: Sequence[Layer]
    config: ModelSettings
    other_bytes: int  # of all tensors that are not routed experts
    packed: PackedWeights | None = None
    notes: Sequence[str] = ()  # of the checkpoint, as `inspect` shows them

    @cached_property
    def experts(self) -> dict[int, int]:
        """Their number by layer."""
        return {layer.index: layer.experts for layer in self.layers}

    @property
    def count(self) -> int:
        """Experts of all layers that are there."""
        return sum(len(layer.ids) for layer in self.layers)

    def expert_bytes(self, layer: Layer, tp: int = 1) -> list[int]:
        """Bytes of each expert as it is stored, by its place in `ids`; on each of `tp` GPUs."""
        if layer.source is not None:
            sizes = [cut_bytes(layer.source.experts[e], tp) for e in distinct(layer.source)]
            return sizes * len(layer.ids) if len(sizes) == 1 else sizes
        return [sum(self.part_bytes[layer.index, expert]) for expert in layer.ids]

    @cached_property
    def part_bytes(self) -> Mapping[tuple[int, int], Sequence[int]]:
        """Bytes of packed experts in each NUMA part, by layer and expert; without matrices of
        backward passes, which serving does not load."""
        assert self.packed is not None
        found: dict[tuple[int, int], list[int]] = {}
        for tensor, place in self.packed.tensors.items():
            if is_backward(tensor.proj):
                continue
            parts = self.packed.layers[tensor.layer].parts
            sizes = found.setdefault((tensor.layer, tensor.expert), [0] * parts)
            sizes[tensor.part] += place.nbytes
        return found

    def groups(self, layer: int) -> int:
        """Groups of experts among which the router chooses first; 1 where it is not known."""
        with contextlib.suppress(CheckpointError):
            return self.config.router(layer).n_group
        return 1


def open_model(source: ModelSource) -> Model:
    """Headers and config.json of a checkpoint, as `open_checkpoint` takes it, or of an output of
    quantize-cpu. Raises KtconvError for anything else, and for an output that is not complete."""
    path, directory = source.model, Path(source.model)
    if directory.is_dir() and Journal(directory).has_run():
        raise UsageError(
            f"{path} is a conversion that is not finished", "run the same command again first"
        )
    if directory.is_dir() and (read_manifest(directory) or may_hold_packed(directory)):
        found = open_packed(directory)
        if found.tensors:
            hint = "plan the model that this was made from, or omit it"
            refuse_options(source, f"is for checkpoints, not for {path}", hint)
            return _of_packed(found)
    return _of_checkpoint(open_checkpoint(source))


def _of_checkpoint(checkpoint: Checkpoint) -> Model:
    layers = [
        Layer(
            one.index,
            len(one.experts),
            range(len(one.experts)),
            one.hidden_size,
            one.intermediate_size,
            one.gated,
            one.biased,
            one.is_mtp,
            one,
        )
        for one in checkpoint.layers
    ]
    other = sum(tensor.nbytes for tensor in checkpoint.other_tensors)
    return Model(str(checkpoint.path), layers, checkpoint.config, other, notes=checkpoint.notes)


def _of_packed(found: PackedWeights) -> Model:
    there = (found.directory / CONFIG_NAME).exists()
    config = ModelSettings.beside(found.directory) if there else ModelSettings({})
    number = config.checked.num_layers if config else None
    layers = []
    for index in found.layers:
        geometry = found.geometry(index)
        missing = next((one for one in geometry.tensors(index) if one not in found.tensors), None)
        if missing is not None:
            raise CheckpointError(
                f"{found.directory} lacks {name_of(missing)}", "complete the conversion first"
            )
        layers.append(_packed_layer(index, geometry, number is not None and index >= number.value))
    other = sum(tensor.nbytes for tensor in found.others.values())
    return Model(str(found.directory), layers, config, other, found)


def _packed_layer(index: int, found: Geometry, is_mtp: bool) -> Layer:
    return Layer(
        index,
        found.experts,
        found.here,
        found.hidden,
        found.intermediate,
        found.gated,
        found.biased,
        is_mtp,
    )
