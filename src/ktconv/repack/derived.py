"""A conversion whose source is packed weights.

Journal, locks, resume, disk check, pipeline and final files are those of quantize-cpu. What
differs is where the bytes come from; the record of that (`Preflight.origin`) is written into
run.json and manifest, and a run into an output with another one is refused.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ktconv.conversion.pipeline import Observer, Task
from ktconv.conversion.plan import Copy, LayerContent, Unit, lay_out
from ktconv.conversion.records import ZERO_SCALES
from ktconv.conversion.run import MANIFEST_EXPANSION, MEMORY_MARGIN, BaseRequest, Conversion
from ktconv.conversion.run import Preflight as AnyPreflight
from ktconv.conversion.tasks import Advance, CopyTask
from ktconv.families.family import ExpertActivation
from ktconv.repack.sources import check_side_files, layer_alone, source_files
from ktconv.repack.tasks import check_sum
from ktconv.repack.tree import Tree, TreeLayer
from ktconv.source import Checkpoint, MoELayer, TensorRef
from ktconv.source.activations import of_records
from ktconv.source.config import CONFIG_NAME
from ktconv.source.mapped import Mapped
from ktconv.source.model_source import ModelSource
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.reader import SourceReader
from ktconv.source.settings import ModelSettings
from ktconv.source.side_files import find_side_files
from ktconv.system import machine
from ktconv.system.checksums import Checksum, checksum_for
from ktconv.targets.card import (
    card,
    errors_line,
    header,
    mismatch_paragraph,
    runtime,
    tags,
    uneven_paragraph,
)
from ktconv.targets.packed.target import KTransformersTarget, Options, Plan, target_for
from ktconv.writer.journal import Record
from ktconv.writer.manifest import Manifest
from ktconv.writer.staging import Staging

if TYPE_CHECKING:
    from ktconv.repack import merge, reshard

BUFFERS = BufferSizes()
MOST_THREADS = 8  # copying is bound by the disk


class Preflight(AnyPreflight[KTransformersTarget], frozen=True):
    """A planned job with what it will need here, and what its bytes come from."""

    origin: Record  # for run.json and manifest: {"merged_from": {...}}
    about: str  # for the model card: what the weights come from
    command: str  # the command that was given
    zeros: Mapping[str, int]  # zero scales of the source by unit, as a manifest records them

    def zero_scales(self) -> int | None:
        """Number of zero scales, as their conversion counted them; without its manifest, of a
        source that is given."""
        known = [self.zeros[unit.key] for unit in self.pending() if unit.key in self.zeros]
        return sum(known) if known else super().zero_scales()


class CheckedCopy(CopyTask, frozen=True):
    """One other tensor, copied unchanged, with the checksum that its manifest records."""

    known: Mapping[str, Record]

    def checksum(self) -> Checksum:
        return checksum_for(self.known.get(self.name))

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        result = super().run(staging, buffers, advance)
        where = f"{self.name} in {self.tensor.file}"
        check_sum(result[self.name], self.known.get(self.name), where)
        return result


class Derived(Conversion, ABC):
    """One run; subclasses say which tasks a layer takes."""

    preflight: Preflight
    plan: Plan

    def __init__(self, preflight: Preflight, observer: Observer, manifest: Manifest | None) -> None:
        super().__init__(preflight, observer)
        self.known = manifest.tensors if manifest else {}

    def buffers(self) -> BufferSizes:
        return BUFFERS

    def origin(self) -> Record:
        return self.preflight.origin

    def card(self) -> str:
        preflight, name = self.preflight, self.plan.target.name
        library, whose = runtime(self.plan)
        why = uneven_paragraph(self.plan.checkpoint.layers) or mismatch_paragraph(self.plan)
        return card(
            self.plan,
            header(self.source_card, library, tags(self.plan)),
            f"CPU experts in {name}",
            f"Routed experts for {whose} CPU kernels, from {preflight.about}",
            "contains a checksum of every tensor." + (f"\n\n{why}" if why else ""),
            preflight.command,
            errors_line(self.errors, ()),  # whose model is not here
        )

    def unit_facts(self, unit: Unit) -> Record:
        """Facts with the zero scales that the conversion counted in the source of the packed
        weights."""
        zeros = self.preflight.zeros.get(unit.key)
        return super().unit_facts(unit) | ({ZERO_SCALES: zeros} if zeros else {})

    def copy_task(self, reader: SourceReader, tensor: TensorRef, name: str) -> Task:
        return CheckedCopy(reader, tensor, name, self.request.verify, self.known)


def needs(
    asked: merge.Request | reshard.Request,
    model: ModelSource | str,
    plan: Plan,
    per_thread: int,
    manifest: Manifest | None,
) -> dict[str, Any]:
    """The fields that the preflights of all conversions have, with `model` as their source; the
    manifest is read at once."""
    request = BaseRequest(
        model,
        asked.output,
        plan.target.options,
        threads=asked.threads,
        verify=asked.verify,
        overwrite=asked.overwrite,
    )
    threads = request.threads or min(machine.usable_cpus(), MOST_THREADS)
    base = machine.resident_memory() + MEMORY_MARGIN
    base += MANIFEST_EXPANSION * (manifest.path.stat().st_size if manifest else 0)
    return {
        "request": request,
        "plan": plan,
        "units": plan.layers,
        "threads": threads,
        "peak_memory": base + threads * (BUFFERS.nbytes + per_thread),
        "disk_free": machine.disk_free(request.output),
        "zeros": _zero_scales(manifest),
    }


def _zero_scales(manifest: Manifest | None) -> dict[str, int]:
    """Counts by unit; units without any are left out."""
    units = manifest.units.items() if manifest else ()
    return {key: unit[ZERO_SCALES] for key, unit in units if unit.get(ZERO_SCALES)}


def plan_alone(
    tree: Tree,
    options: Options,
    manifest: Manifest | None,
    copies: Sequence[Copy],
    notes: Sequence[str],
) -> Plan:
    """The plan for all that packed weights contain, without their source."""
    directory = tree.root
    recorded = manifest.layers if manifest else {}
    has_config = (directory / CONFIG_NAME).exists()
    tower = manifest.tower if manifest else None
    config = ModelSettings.beside(directory, tower) if has_config else ModelSettings({})
    known = of_records(manifest.geometry) if manifest else None
    layers = [
        replace(
            layer_alone(found, recorded.get(index, {})),
            activation=(known or {}).get(index) or _activation(found, config),
        )
        for index, found in tree.layers.items()
    ]
    checkpoint = Checkpoint(
        path=directory,
        config=config,
        files=(),
        layers=layers,
        other_tensors=(),
        notes=(),
        sources=source_files(manifest),
        side_directory=directory,
        tower=tower,
        adapters=(manifest and manifest.adapters) or (),
        mapped=Mapped(manifest.naming, {}, {}) if manifest and manifest.naming else None,
        pruning=manifest.pruning if manifest else None,
    )
    check_side_files(manifest, directory)
    side_files = find_side_files(directory)
    target = target_for(checkpoint, layers, options, tree.backward)
    content = packed_content(layers, tree)
    return lay_out(checkpoint, target, content, copies, side_files, [*notes, *target.notes])


def _activation(layer: TreeLayer, config: ModelSettings) -> ExpertActivation:
    """Activation by the config.json next to packed weights, and by whether they have gates. Where
    that leaves no function that kernels have, as without a config.json, it is that of most models:
    squared ReLU without a gate, and SiLU with one."""
    stated = config.activation(layer.index)
    if stated.gated and not layer.gated:
        ungated = replace(stated, gated=False)
        stated = ungated if ungated.supported else ExpertActivation("relu2", gated=False)
    return replace(stated, biases=layer.biased)


def packed_content(layers: Sequence[MoELayer], tree: Tree) -> list[LayerContent]:
    """The experts of these layers that the tree has."""
    packed = [(layer, tree.layers[layer.index]) for layer in layers]
    return [LayerContent(layer, found.here, found.total_bytes) for layer, found in packed]
