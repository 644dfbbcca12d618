"""Plans and runs an encoding of a checkpoint's experts, in bounded memory.

The steps are those of every conversion (`ktconv.conversion`): plan from headers; check output,
memory and disk; convert layer by layer; write config, index and manifest.
"""

from __future__ import annotations

from msgspec.structs import replace

from ktconv.conversion.pipeline import Observer
from ktconv.conversion.plan import Selection, plan_checkpoint
from ktconv.conversion.run import Report, check_output, check_request, fit_memory, refuse_nested
from ktconv.conversion.together import with_room
from ktconv.errors import CheckpointError, UsageError
from ktconv.quantize.encoded.conversion import Encode
from ktconv.quantize.encoded.request import Preflight, Request, buffer_sizes
from ktconv.quantize.encoded.task import encoding_buffers, encoding_memory
from ktconv.source import Checkpoint, ExpertMatrix, open_checkpoint
from ktconv.system import machine
from ktconv.system.text import Notify, silent
from ktconv.system.units import counted
from ktconv.targets.encoded.engines import engine_lines
from ktconv.targets.encoded.kept import awq_group, is_kept
from ktconv.targets.encoded.module_classes import count_classes
from ktconv.targets.encoded.naming import OWN
from ktconv.targets.encoded.readers import listed, readers_of
from ktconv.targets.encoded.recipe import parse_recipe
from ktconv.targets.encoded.scheme import Scheme
from ktconv.targets.encoded.target import EncodedTarget, Options, Plan, weight_dtype
from ktconv.targets.expert_sets import check_expert_set, others, read_expert_set
from ktconv.targets.second_rounding import refuse_second_rounding


def prepare(request: Request, job: type[Encode] = Encode, libraries: int = 0) -> Preflight:
    """Open the checkpoint and plan. Reads headers only, writes nothing. `libraries`: bytes that
    those of the job take."""
    check_request(request)
    checkpoint = open_checkpoint(request.source)
    _check_tower(request, checkpoint)
    refuse_nested(checkpoint.path, request.output)
    request = _with_recipe(_with_groups_of_awq(request, checkpoint), checkpoint)
    options, selection = _choose_experts(request, checkpoint)
    plan = plan_checkpoint(checkpoint, EncodedTarget(options, checkpoint), selection)
    plan = replace(
        plan,
        notes=[*plan.notes, *plan.target.notes, *_loading_notes(plan), *_kept_notes(plan)],
        skipped=[*plan.skipped, *_left_out(plan)],
    )
    if not options.requantize:
        rounded = (matrix for matrix, kept in _kept(plan) if not kept)
        what = "the recipe" if options.recipe else plan.target.name
        refuse_second_rounding(checkpoint, rounded, what)
    copies = [copy for unit in plan.others for copy in unit.copies]
    classes = count_classes(plan.target, plan.layers, copies)
    check_output(plan, request.output)
    units = plan.layer_units(request.layers)
    beside = job.check(request, plan)
    buffers = encoding_buffers(plan).with_those_of(buffer_sizes(plan))
    per_thread = buffers.nbytes + encoding_memory(plan)
    threads, peak = fit_memory(request, checkpoint, per_thread, libraries)
    buffers, peak = with_room(request, buffers, threads, peak)
    peak = max(peak, beside)
    free = machine.disk_free(request.output)
    return Preflight(request, plan, units, threads, peak, free, classes, buffers)


def encode(
    request: Request,
    observer: Observer | None = None,
    preflight: Preflight | None = None,
    notify: Notify = silent,
) -> Report:
    """Encode; see `Request`. `notify` gets what happens around the layers. Raises KtconvError, or
    KeyboardInterrupt with all state kept."""
    return Encode(preflight or prepare(request), observer or Observer(), notify).run()


def _check_tower(request: Request, checkpoint: Checkpoint) -> None:
    row = Scheme(request.options.scheme).row
    if checkpoint.tower is None:
        return
    own = row.naming is OWN
    if own or not request.options.experts_only:
        raise CheckpointError(
            f"{checkpoint.path} has experts in several towers, of which only those of "
            f"{checkpoint.tower} would be quantized: engines find quantized experts by one "
            "pattern, which fits those of all towers",
            "Convert the experts for CPUs, with quantize-cpu, or serve the original model."
            if own
            else "Convert them alone, with --experts-only, or with --method int4 or int8.",
        )


def _with_groups_of_awq(request: Request, checkpoint: Checkpoint) -> Request:
    """An AWQ source that is kept has its own group size."""
    options = request.options
    if options.scheme != "awq" or options.requantize:
        return request
    size = awq_group(checkpoint.layers)
    return request if size is None else replace(request, options=replace(options, group_size=size))


def _with_recipe(request: Request, checkpoint: Checkpoint) -> Request:
    """The recipe as this model has it. UsageError for one that does not fit it."""
    options = request.options
    if not options.recipe:
        return request
    layers = checkpoint.converted(options.mtp)
    resolved = parse_recipe(options.recipe).resolved(layers)
    return replace(request, options=replace(options, recipe=resolved.toml))


def _choose_experts(request: Request, checkpoint: Checkpoint) -> tuple[Options, Selection | None]:
    """The experts of --experts, or all but those of --exclude-experts."""
    options = request.options
    if request.experts is None and request.exclude_experts is None:
        return options, None
    if request.experts is not None and request.exclude_experts is not None:
        raise UsageError("--experts and --exclude-experts cannot be combined", "give one of them")
    counts = {layer.index: len(layer.experts) for layer in checkpoint.converted(options.mtp)}
    if request.experts is not None:
        chosen = read_expert_set(request.experts)
        counts = {layer.index: len(layer.experts) for layer in checkpoint.layers}
        check_expert_set(chosen, counts, request.experts)
        return replace(options, experts=chosen), {index: chosen.of(index) for index in counts}
    path = request.exclude_experts
    assert path is not None
    excluded = read_expert_set(path, "--exclude-experts")
    check_expert_set(excluded, counts, path)
    return replace(options, exclude_experts=excluded), others(excluded, counts)


def _left_out(plan: Plan) -> list[str]:
    """Experts that were not chosen."""
    left = [unit.omitted for unit in plan.layers if unit.omitted]
    if not left:
        return []
    why = "not in --experts" if plan.target.options.experts else "--exclude-experts"
    return [f"{counted(sum(left), 'expert')} of {counted(len(left), 'layer')}: {why}"]


def _loading_notes(plan: Plan) -> list[str]:
    """A note about each engine that cannot load the output."""
    checkpoint, target = plan.checkpoint, plan.target
    own = all(target.row.naming.keeps(layer) for layer in plan.moe_layers)
    if not own:
        example = next(iter(target.modules(plan.moe_layers)))
        return [
            f"experts are named as KTransformers' {target.row.kt_method or 'converter'} wants it, "
            f"{example}, which engines that load the whole model do not know"
        ]
    if target.recipe is not None:
        return engine_lines(target.recipe, [(unit.layer, unit.experts) for unit in plan.layers])
    if any(layer.biased for layer in plan.moe_layers):
        return []  # another note says who computes experts with biases
    readers = readers_of(target.row.name, checkpoint, target.options.expert_layout)
    able = [reader.title for reader, failure in readers.items() if failure is None]
    stacking = target.stacking
    layout = "" if stacking is None else f" with --expert-layout {stacking.name}"
    return [
        f"{target.name}{layout} is not for {reader.engine}: {reader.title} {failure}"
        + (f"; {listed(able)} {'read' if len(able) > 1 else 'reads'} it" if able else "")
        for reader, failure in readers.items()
        if failure
    ]


def _kept(plan: Plan) -> list[tuple[ExpertMatrix, bool]]:
    """A matrix of each layer, projection and scheme that encodes; whether its codes are kept."""
    found = []
    for unit in plan.layers:
        for (proj, scheme), experts in plan.target.schemes_of(unit.layer, unit.experts).items():
            if not experts or not scheme.encodes:
                continue
            matrix = unit.layer.experts[experts[0]][proj]
            found.append((matrix, is_kept(scheme, matrix, weight_dtype(matrix) == "F16")))
    return found


def _kept_notes(plan: Plan) -> list[str]:
    """A note about matrices that have the format already."""
    if plan.target.options.requantize:
        return []
    kept = [one for _, one in _kept(plan)]
    if not any(kept):
        return []
    whole = all(kept) and all(
        scheme.encodes
        for unit in plan.layers
        for _, scheme in plan.target.schemes_of(unit.layer, unit.experts)
    )
    which = "all matrices have" if whole else "some matrices have"
    return [f"{which} this format in the source: their codes and scales are kept"]
