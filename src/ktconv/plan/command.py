"""`ktconv plan` behind its options: open a model, place its experts, say who has what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ktconv.errors import UsageError
from ktconv.plan.cpu import cpu_side
from ktconv.plan.document import document
from ktconv.plan.lines import lines_of
from ktconv.plan.load import Load, load_of
from ktconv.plan.placement.parallel import expert_parallel, tensor_parallel
from ktconv.plan.planned import Planned
from ktconv.plan.ranks import (
    LayerPlacement,
    Sizes,
    cut_sizes,
    place_balanced,
    place_in_turn,
    rank_bytes,
)
from ktconv.plan.request import PlanRequest, check
from ktconv.plan.sizes import Model, open_model
from ktconv.plan.split import Split, check_memory, check_others
from ktconv.system.text import Notify, silent
from ktconv.system.units import counted, format_ranges
from ktconv.targets.expert_sets import expert_set, expert_set_file, write_expert_set
from ktconv.writer.option_files import check_written
from ktconv.writer.pictures import picture_file


def run(request: PlanRequest, notify: Notify = silent) -> tuple[dict[str, Any], list[str]]:
    """The JSON document and the lines for people; writes what the request names. Raises
    KtconvError, with exit code 2 for what is impossible."""
    check(request)
    written = (
        None if request.write is None else expert_set_file(request.write),
        None if request.plot is None else picture_file(request.plot),
    )
    check_written(written, (*request.source.files(), request.load))
    planned = make_plan(request)
    for note in planned.model.notes:
        notify(f"note: {note}")
    if request.write is not None:
        counts = {one.layer.index: len(one.copies) for one in planned.layers}
        chosen = expert_set(planned.on_gpus, counts)
        if not chosen:
            raise UsageError("no expert fits on the GPUs", "omit --write")
        write_expert_set(chosen, request.write)
        notify(
            f"wrote {counted(chosen.count, 'expert')} of "
            f"{counted(len(chosen.layers), 'layer')} to {request.write}"
        )
    if request.plot is not None:
        from ktconv.plan.plots import plot

        plot(planned, request.plot)
        notify(f"wrote {request.plot}")
    return document(planned), list(lines_of(planned))


def make_plan(request: PlanRequest) -> Planned:
    """Everything that is known of the placement that was asked for."""
    check(request)
    model = open_model(request.source)
    _check_possible(model, request)
    load = load_of(model, request.load)
    sizes = cut_sizes(model, request.tp)
    placements = _placements(model, load, request, sizes)
    totals = rank_bytes(placements, sizes)
    if request.placed == "balanced":
        check_memory(model, request, totals)
    cpu, warnings = cpu_side(model, placements, request)
    warnings = [*_warnings(model, load, request, placements), *warnings]
    return Planned(request, model, load, placements, totals, cpu, warnings)


def _check_possible(model: Model, request: PlanRequest) -> None:
    """UsageError for a number of GPUs that cannot share the experts."""
    if model.packed is not None:
        for option, given in (("--tp", request.tp > 1), ("--gpu-memory", request.gpu_memory)):
            if given:
                raise UsageError(
                    f"{option} is for experts on GPUs, and {model.path} has experts for CPUs",
                    "plan with the checkpoint that the GPUs load",
                )
    shapes = [layer.shape for layer in model.layers]
    for layer, shape in zip(model.layers, shapes, strict=True):
        split = tensor_parallel([shape], request.tp)
        if not split.possible:
            sizes = [size for size in range(1, 65) if tensor_parallel(shapes, size).possible]
            raise UsageError(
                f"--tp {request.tp} cannot cut the experts of layer {layer.index}: {split.reason}",
                f"possible for this model: {', '.join(map(str, sizes))}",
            )


def _placements(
    model: Model, load: Load, request: PlanRequest, sizes: Sizes
) -> list[LayerPlacement]:
    if request.placed == "balanced":
        check_others(model, request)
        return place_balanced(model, load, request.ep, request.redundant, request.nodes)
    if request.splits:
        return Split(model, load, request, sizes).chosen()
    ids = {layer.index: layer.ids for layer in model.layers}
    return place_in_turn(model, ids, load, request.ep, request.placed)


# ---- warnings --------------------------------------------------------------------------


def _warnings(
    model: Model, load: Load, request: PlanRequest, placements: Sequence[LayerPlacement]
) -> Iterator[str]:
    """Warnings of what is possible, but perhaps not what was wanted."""
    if load.uncounted:
        layers = format_ranges(list(load.uncounted))
        yield f"layers {layers} (MTP) were not counted: their experts are taken as equally used"
    if request.splits:
        if not any(rank for one in placements for rank in one.places):
            yield "no expert fits on the GPUs"
        elif model.packed is not None:
            yield "sizes are those of experts for CPUs; GPUs load them in another format"
    elif request.placed != "balanced":
        yield from _uneven(model, request.ep)
    elif request.nodes > 1:
        yield from _ungrouped(model, request.nodes)


def _uneven(model: Model, ep: int) -> Iterator[str]:
    """Numbers of experts that GPUs cannot share out evenly."""
    reason = expert_parallel([layer.shape for layer in model.layers], ep).reason
    if reason is not None:
        yield f"--ep {ep}: {reason}, the first GPUs more than the last"
    most = max(len(layer.ids) for layer in model.layers)
    if most < ep:
        yield f"{ep - most} of {ep} ranks hold no expert"


def _ungrouped(model: Model, nodes: int) -> Iterator[str]:
    """Groups of experts that nodes cannot share out."""
    groups = min(model.groups(layer.index) for layer in model.layers)
    if groups % nodes:
        what = f"{groups} groups of experts, which nodes cannot share out"
        what = what if groups > 1 else "no groups of experts"
        yield f"--nodes {nodes} has no effect: the router has {what}"
