"""Packed weights cut into another number of NUMA parts.

    report = reshard(Request(Path("out-1"), Path("out-2"), numa=2))

Row scales decide what is exact without the source. gate and up are cut by rows, each with its
scale: always exact, and the bytes of a fresh conversion. down is cut by columns, and a row has
one scale per part: parts that are cut further inherit it (every weight keeps its value, where a
fresh conversion would choose finer scales), parts that are joined must have the same one. With
backward matrices, which are transposed, it is the other way round. Scales of groups of columns
stay with them, so all matrices are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ktconv.conversion.pipeline import Observer, Task
from ktconv.conversion.plan import LayerUnit
from ktconv.conversion.run import Report, check_output, refuse_nested
from ktconv.errors import UsageError
from ktconv.formats import TensorId, cut_by_rows
from ktconv.quantize.packed import run as quantize_cpu
from ktconv.repack import derived
from ktconv.repack.complete import CompleteWeights, open_complete
from ktconv.repack.derived import Derived, plan_alone
from ktconv.repack.recut import (
    MATRIX_COPIES,
    RecutTask,
    UnequalScales,
    joined_scales,
    shares,
)
from ktconv.repack.sources import check_same_source
from ktconv.repack.tree import Tree, TreeLayer
from ktconv.source.model_source import ModelSource, source_or_none
from ktconv.source.reading.reader import SourceReader
from ktconv.system.units import counted
from ktconv.targets.card import command_line
from ktconv.targets.packed.target import BY_WEIGHTS, Options, Plan
from ktconv.targets.packed.weights import name_of
from ktconv.writer.journal import Record


class Request(Struct, frozen=True):
    """The request of `reshard`: what to cut again, and into how many parts."""

    packed: Path  # an OUTPUT of quantize-cpu or merge; shards are written in any case
    output: Path
    numa: int
    source: ModelSource | str | None = None  # the model: then this is a conversion like any other
    max_shard_size: int = Options().max_shard_size
    threads: int | None = None
    verify: bool = True
    overwrite: bool = False
    importance: Path | None = None  # with a source: the file of it that the weights follow from

    @property
    def original(self) -> ModelSource | None:
        """The model with the options about reading it; None where the manifest has the rest."""
        return source_or_none(self.source)


class Preflight(derived.Preflight, frozen=True):
    """A planned resharding; what `--dry-run` prints."""

    packed: CompleteWeights


def prepare(request: Request) -> quantize_cpu.Preflight | Preflight:
    """Read headers, and where parts are joined all scales; check and plan. Writes nothing.

    With a source this plans a conversion by `quantize_cpu`.
    """
    if request.importance is not None and request.source is None:
        raise UsageError("--importance belongs to --source", "give --source MODEL too")
    refuse_nested(request.packed, request.output, "the directory")
    packed = open_complete(request.packed)
    if request.numa == packed.tree.parts:
        raise UsageError(
            f"{request.packed} has {counted(request.numa, 'NUMA part')} already", "use it unchanged"
        )
    if request.source is None and any(layer.biased for layer in packed.tree.layers.values()):
        raise UsageError(
            f"{request.packed} has experts with biases, which only the model has whole",
            "give --source MODEL",
        )
    if request.source is not None:
        return _from_source(request, packed)
    plan = _plan(request, packed)
    _refuse_unequal_scales(packed, plan)
    check_output(plan, request.output)
    return _preflight(request, packed, plan)


def reshard(
    request: Request,
    observer: Observer | None = None,
    preflight: quantize_cpu.Preflight | Preflight | None = None,
) -> Report:
    """Cut again; see `Request`. Raises KtconvError, or KeyboardInterrupt with all state kept."""
    preflight, observer = preflight or prepare(request), observer or Observer()
    if isinstance(preflight, Preflight):
        return Resharding(preflight, observer).run()
    return quantize_cpu.QuantizeCpu(preflight, observer).run()


def _from_source(request: Request, packed: CompleteWeights) -> quantize_cpu.Preflight:
    """A conversion with the same choices. UsageError for another file of importance."""
    recorded = packed.options.importance
    if request.importance is not None and recorded is None:
        raise UsageError(
            f"{request.packed} was converted without --importance", "omit --importance"
        )
    if request.importance is not None and recorded == BY_WEIGHTS:
        raise UsageError(
            f"{request.packed} was converted with --importance weights, which follow from the "
            "source",
            "omit --importance",
        )
    preflight = quantize_cpu.prepare(source_request(request, packed))
    if packed.manifest is not None:
        check_same_source(packed.manifest, preflight.plan.checkpoint)
    given = preflight.plan.target.options.importance
    if recorded is not None and given is not None and given.sha256 != recorded.sha256:
        raise UsageError(
            f"{request.packed} was converted with another file of importance than "
            f"{request.importance}",
            f"give the file {recorded.file} that the conversion was given",
        )
    return preflight


def source_request(request: Request, packed: CompleteWeights) -> quantize_cpu.Request:
    """The conversion that makes these parts from the source."""
    original, manifest = request.original, packed.manifest
    assert original is not None  # `prepare` asked
    return quantize_cpu.Request(
        model=manifest.as_converted(original) if manifest else original,
        output=request.output,
        options=replace(_options(request, packed), save_backward=packed.tree.backward),
        threads=request.threads,
        verify=request.verify,
        overwrite=request.overwrite,
        importance=request.importance,
    )


# ---- planning --------------------------------------------------------------------------


def _options(request: Request, packed: CompleteWeights) -> Options:
    return replace(
        packed.options,
        numa=request.numa,
        max_shard_size=request.max_shard_size,
        allow_activation_mismatch=True,  # decided when the weights were converted
    )


def _plan(request: Request, packed: CompleteWeights) -> Plan:
    copies = [(tensor, name) for name, tensor in packed.weights.others.items()]
    notes = [_down_scales(packed.tree, request.numa)]
    options = _options(request, packed)
    return plan_alone(packed.tree, options, packed.manifest, copies, notes)


def _down_scales(tree: Tree, new: int) -> str:
    """Origin of the scales of matrices that are cut by columns."""
    old = tree.parts
    if tree.format.group:
        return f"down keeps the scales of its groups: the bytes of a fresh conversion with {new}"
    if new % old == 0:
        return (
            f"down keeps the row scales of {counted(old, 'part')}: the same weights, but not the "
            f"bytes of a fresh conversion with --numa {new}, which takes a scale per part"
        )
    return f"down is joined from {old} parts, whose row scales agree"


def _preflight(request: Request, packed: CompleteWeights, plan: Plan) -> Preflight:
    largest = max(layer.hidden * layer.intermediate for layer in packed.tree.layers.values())
    memory = MATRIX_COPIES * largest
    return Preflight(
        **derived.needs(request, str(request.packed), plan, memory, packed.manifest),
        origin={"resharded_from": _origin(packed, request.numa)},
        about=f"packed weights in {counted(packed.tree.parts, 'NUMA part')}",
        command=f"ktconv reshard PACKED OUTPUT --numa {request.numa} "
        f"--max-shard-size {request.max_shard_size}",
        packed=packed,
    )


def _origin(packed: CompleteWeights, numa: int) -> Record:
    """Origin of the bytes; a resumed run must have the same."""
    record = packed.manifest.record if packed.manifest else {}
    earlier = record.get("resharded_from")
    return {
        "numa": packed.tree.parts,
        "manifest": packed.manifest is not None,
        "down_scales": _down_scales(packed.tree, numa),
        "earlier": [*earlier.get("earlier", []), earlier.get("numa")] if earlier else [],
        "files": packed.records,
    }


# ---- whether parts can be joined -------------------------------------------------------


def _refuse_unequal_scales(packed: CompleteWeights, plan: Plan) -> None:
    """Before anything is written: every row that parts share has one scale. Group scales stay with
    their columns."""
    if packed.tree.format.group:
        return
    for layer in packed.tree.layers.values():
        groups = _joined_parts(layer, plan.target.options.numa)
        for expert in layer.here:
            for proj in layer.matrices(layer.backward):
                if not cut_by_rows(proj):
                    for parts in groups:
                        tensors = [
                            TensorId(layer.index, proj, expert, part, "scale") for part in parts
                        ]
                        _refuse_unequal(packed, tensors, plan.target.options)


def _joined_parts(layer: TreeLayer, new: int) -> list[list[int]]:
    """Old parts that go into one new part, where they are several."""
    found = (shares(layer.intermediate, layer.parts, new, index) for index in range(new))
    return [[share.part for share in of_part] for of_part in found if len(of_part) > 1]


def _refuse_unequal(packed: CompleteWeights, tensors: Sequence[TensorId], options: Options) -> None:
    scales = [np.frombuffer(packed.weights.map(tensor), "<f4") for tensor in tensors]
    try:
        joined_scales(scales, [scale == 0 for scale in scales])
    except UnequalScales as error:
        manifest = packed.manifest
        command = command_line(
            "MODEL",
            options,
            mapped=manifest is not None and manifest.naming is not None,
            tower=manifest.tower if manifest else None,
            adapters=(manifest and manifest.adapters) or (),
            pruned=manifest is not None and manifest.pruning is not None,
        )
        raise UnequalScales(
            f"{packed.directory} cannot be joined into --numa {options.numa} without its source: "
            f"in {name_of(tensors[0])} and {name_of(tensors[-1])} {error}",
            f"convert again: {command}"
            if options.calibrate is not None  # which this command does not do
            else f"convert again: give --source MODEL, or run {command}",
        ) from error


# ---- cutting ---------------------------------------------------------------------------


class Resharding(Derived):
    """One run of a planned resharding."""

    def __init__(self, preflight: Preflight, observer: Observer) -> None:
        super().__init__(preflight, observer, preflight.packed.manifest)
        self._packed = preflight.packed

    def reader(self) -> SourceReader:
        return self._packed.reader()

    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        layer, parts = self._packed.tree.layers[unit.layer.index], self.plan.target.options.numa
        for expert in layer.here:
            for proj in layer.matrices(layer.backward):
                yield RecutTask(
                    self._packed, reader, layer, expert, proj, parts, self.known,
                    self.request.verify,
                )  # fmt: skip
