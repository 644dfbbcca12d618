"""Packed weights cut into another number of NUMA parts.

    report = reshard(Request(Path("out-1"), Path("out-2"), numa=2))

Row scales decide what is exact without the source. gate and up are cut by rows, each with its
scale: exact always, and the bytes of a fresh conversion. down is cut by columns, and a row has
one scale per part: parts that are cut further inherit it (every weight keeps its value, where a
fresh conversion would choose finer scales), parts that are joined must have the same one. With
backward matrices, which are transposed, it is the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ktconv.checkpoint import Checkpoint
from ktconv.checkpoint.config import CONFIG_NAME, read_config
from ktconv.checkpoint.side_files import find_side_files
from ktconv.conversion import BufferedTask, Report, SilentObserver, refuse_nested
from ktconv.conversion.pipeline import Observer
from ktconv.errors import UsageError
from ktconv.formats import TensorId
from ktconv.packed.weights import name_of
from ktconv.quantize_cpu import run as quantize_cpu
from ktconv.reading.reader import SourceReader
from ktconv.repack import derived
from ktconv.repack.complete import CompleteWeights, open_complete
from ktconv.repack.derived import Derived
from ktconv.repack.planning import Content, PackedLayer, plan_packed
from ktconv.repack.recut import (
    MATRIX_COPIES,
    RecutTask,
    UnequalScales,
    cut_by_rows,
    joined_scales,
    shares,
)
from ktconv.repack.sources import check_side_files, layer_alone
from ktconv.repack.tree import TreeLayer, matrices
from ktconv.system import machine
from ktconv.targets.card import command_line
from ktconv.targets.ktransformers import Options, Plan, Unit
from ktconv.writer.journal import Record


@dataclass(frozen=True, slots=True)
class Request:
    """What to cut anew, and into how many parts."""

    packed: Path  # an OUTPUT of quantize-cpu or merge; shards are written, whatever it holds
    output: Path
    numa: int
    source: str | None = None  # the model: then this is a conversion like any other
    max_shard_size: int = Options().max_shard_size
    threads: int | None = None
    verify: bool = True
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Preflight(derived.Preflight):
    """A planned resharding; what `--dry-run` prints."""

    given: CompleteWeights


def prepare(request: Request) -> quantize_cpu.Preflight:
    """Read headers, and where parts are joined all scales; check and plan. Writes nothing.

    With a source this plans a conversion by `quantize_cpu`.
    """
    refuse_nested(request.packed, request.output, "the directory")
    given = open_complete(request.packed)
    if request.numa == given.tree.parts:
        raise UsageError(
            f"{request.packed} has {request.numa} NUMA part(s) already", "use it as it is"
        )
    if request.source is not None:
        return quantize_cpu.prepare(source_request(request, given))
    plan = plan_packed(_content(request, given))
    _refuse_unequal_scales(given, plan)
    derived.check_output(plan, request.output)
    return _preflight(request, given, plan)


def reshard(
    request: Request,
    observer: Observer | None = None,
    preflight: quantize_cpu.Preflight | None = None,
) -> Report:
    """Cut anew; see `Request`. Raises KtconvError, or KeyboardInterrupt with all state kept."""
    preflight, observer = preflight or prepare(request), observer or SilentObserver()
    if isinstance(preflight, Preflight):
        return Resharding(preflight, observer).run()
    return quantize_cpu.QuantizeCpu(preflight, observer).run()


def source_request(request: Request, given: CompleteWeights) -> quantize_cpu.Request:
    """The conversion that makes these parts from the source."""
    return quantize_cpu.Request(
        model=str(request.source),
        output=request.output,
        options=_options(request, given),
        threads=request.threads,
        verify=request.verify,
        overwrite=request.overwrite,
    )


# ---- planning --------------------------------------------------------------------------


def _options(request: Request, given: CompleteWeights) -> Options:
    return replace(given.options, numa=request.numa, max_shard_size=request.max_shard_size)


def _content(request: Request, given: CompleteWeights) -> Content:
    directory, told = given.directory, given.manifest.layers if given.manifest else {}
    layers = [
        PackedLayer(
            layer_alone(old.index, old.experts, old.hidden, old.intermediate, told.get(index, {})),
            old.here,
            old.backward,
            old.nbytes,
        )
        for index, old in given.tree.layers.items()
    ]
    has_config = (directory / CONFIG_NAME).exists()
    checkpoint = Checkpoint(
        path=directory,
        config=read_config(directory).content if has_config else {},
        files=(),
        layers=[packed.layer for packed in layers],
        other_tensors=(),
        notes=(),
        sources=given.manifest.source_files if given.manifest else (),
    )
    copies = [(tensor, name) for name, tensor in given.weights.others.items()]
    check_side_files(given.manifest, directory)
    notes, sidecars = [_down_scales(given.tree.parts, request.numa)], find_side_files(directory)
    return Content(checkpoint, _options(request, given), layers, copies, sidecars, notes)


def _down_scales(old: int, new: int) -> str:
    """Where the scales of matrices that are cut by columns come from."""
    if new % old == 0:
        return (
            f"down keeps the row scales of {old} part(s): the same weights, but not the bytes of "
            f"a fresh conversion with --numa {new}, which takes a scale per part"
        )
    return f"down is joined from {old} parts, whose row scales agree"


def _preflight(request: Request, given: CompleteWeights, plan: Plan) -> Preflight:
    threads = request.threads or min(machine.usable_cpus(), derived.MOST_THREADS)
    largest = max(layer.hidden * layer.intermediate for layer in given.tree.layers.values())
    known = [given.manifest.path] if given.manifest else []
    return Preflight(
        request=quantize_cpu.Request(
            model=str(request.packed),
            output=request.output,
            options=plan.options,
            threads=threads,
            verify=request.verify,
            overwrite=request.overwrite,
        ),
        plan=plan,
        units=plan.layers,
        threads=threads,
        peak_memory=derived.expected_memory(threads, MATRIX_COPIES * largest, known),
        disk_free=machine.disk_free(request.output),
        origin={"resharded_from": _origin(given, request.numa)},
        about=f"packed weights in {given.tree.parts} NUMA part(s)",
        base=None,
        command=f"ktconv reshard PACKED OUTPUT --numa {request.numa} "
        f"--max-shard-size {request.max_shard_size}",
        given=given,
    )


def _origin(given: CompleteWeights, numa: int) -> Record:
    """What the bytes come from; a resumed run must have the same."""
    told = given.manifest.record if given.manifest else {}
    earlier = told.get("resharded_from")
    return {
        "numa": given.tree.parts,
        "manifest": given.manifest is not None,
        "down_scales": _down_scales(given.tree.parts, numa),
        "earlier": [*earlier.get("earlier", []), earlier.get("numa")] if earlier else [],
        "files": given.records,
    }


# ---- whether parts can be joined -------------------------------------------------------


def _refuse_unequal_scales(given: CompleteWeights, plan: Plan) -> None:
    """Before anything is written: every row that parts share has one scale."""
    for layer in given.tree.layers.values():
        groups = _joined_parts(layer, plan.options.numa)
        for expert in layer.here:
            for proj in matrices(layer.backward):
                if not cut_by_rows(proj):
                    for parts in groups:
                        tensors = [
                            TensorId(layer.index, proj, expert, part, "scale") for part in parts
                        ]
                        _refuse_unequal(given, tensors, plan.options)


def _joined_parts(layer: TreeLayer, new: int) -> list[list[int]]:
    """Old parts that go into one new part, where they are several."""
    found = (shares(layer.intermediate, layer.parts, new, index) for index in range(new))
    return [[share.part for share in of_part] for of_part in found if len(of_part) > 1]


def _refuse_unequal(given: CompleteWeights, tensors: Sequence[TensorId], options: Options) -> None:
    scales = [np.frombuffer(given.weights.map(tensor), "<f4") for tensor in tensors]
    try:
        joined_scales(scales, [scale == 0 for scale in scales])
    except UnequalScales as error:
        raise UnequalScales(
            f"{given.directory} cannot be joined into --numa {options.numa} without its source: "
            f"in {name_of(tensors[0])} and {name_of(tensors[-1])} {error}",
            f"convert again: give --source MODEL, or run {command_line('MODEL', options)}",
        ) from error


# ---- cutting ---------------------------------------------------------------------------


class Resharding(Derived):
    """One run of a planned resharding."""

    def __init__(self, preflight: Preflight, observer: Observer) -> None:
        super().__init__(preflight, observer)
        self._given = preflight.given
        self._known = preflight.given.manifest.tensors if preflight.given.manifest else {}

    def reader(self) -> SourceReader:
        return self._given.reader()

    def known_copies(self) -> Mapping[str, Record]:
        return self._known

    def expert_tasks(self, unit: Unit, reader: SourceReader) -> Iterator[BufferedTask]:
        assert unit.layer is not None
        layer = self._given.tree.layers[unit.layer.index]
        for expert in layer.here:
            for proj in matrices(layer.backward):
                yield RecutTask(
                    self._given,
                    reader,
                    layer,
                    expert,
                    proj,
                    self.plan.options.numa,
                    self._known,
                    self.request.verify,
                )
