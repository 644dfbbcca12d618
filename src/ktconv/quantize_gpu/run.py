"""`ktconv quantize-gpu`: experts as W4A16 or W8A16, in bounded memory.

    report = quantize_gpu(Request(model="path/to/model", output=Path("out")))

The steps are those of every conversion (`ktconv.conversion`): plan from headers; check output,
memory and disk; convert layer by layer; write config, index and manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec

from ktconv.checkpoint import Checkpoint, ExpertMatrix, open_checkpoint, read_map
from ktconv.conversion.pipeline import Observer
from ktconv.conversion.plan import Selection, plan_checkpoint
from ktconv.conversion.run import Report, check_output, fit_memory, refuse_nested
from ktconv.errors import CheckpointError, UsageError
from ktconv.placement.expert_sets import check_expert_set, read_expert_set
from ktconv.quantize_gpu.common import Preflight, Request, buffer_sizes
from ktconv.quantize_gpu.gptq.run import Gptq
from ktconv.quantize_gpu.rtn import Rtn, rtn_buffers
from ktconv.system import machine
from ktconv.system.text import Notify, silent
from ktconv.targets.pack_quantized.loading import transformers_reads_packed
from ktconv.targets.pack_quantized.module_classes import count_classes
from ktconv.targets.pack_quantized.target import Options, PackQuantizedTarget, Plan

LIBRARIES_MEMORY = 700 << 20  # torch, transformers and llm-compressor once imported
INSTALL = "pip install 'ktconv[gpu]'"
METHODS: Mapping[str, type[Rtn]] = {"rtn": Rtn, "gptq": Gptq}


def prepare(request: Request) -> Preflight:
    """Open the checkpoint and plan. Reads headers only, writes nothing; gptq alone needs torch."""
    if request.options.method not in METHODS:
        raise UsageError(
            f"--method {request.options.method} is unknown", f"available: {', '.join(METHODS)}"
        )
    if request.options.method == "gptq":
        _require_libraries()
    checkpoint = open_checkpoint(
        request.model, request.config, read_map(request.map), request.tower
    )
    if checkpoint.tower is not None:
        raise CheckpointError(
            f"{checkpoint.path} has experts in several towers, of which only those of "
            f"{checkpoint.tower} would be quantized: engines find quantized experts by one "
            "pattern, which fits those of all towers",
            "Convert the experts for CPUs, with quantize-cpu, or serve the original model.",
        )
    if request.map is not None and request.options.method != "rtn":
        raise UsageError(
            f"--map cannot be combined with --method {request.options.method}: transformers loads "
            "the model, and by its own names",
            "use --method rtn",
        )
    refuse_nested(checkpoint.path, request.output)
    options, selection = _choose_experts(request, checkpoint)
    plan = plan_checkpoint(checkpoint, PackQuantizedTarget(options, checkpoint), selection)
    plan = replace(
        plan,
        notes=[*plan.notes, *_loading_notes(checkpoint)],
        skipped=[*plan.skipped, *_left_out(plan)],
    )
    classes = count_classes(plan.layers, [copy for unit in plan.others for copy in unit.copies])
    check_output(plan, request.output)
    units = plan.layer_units(request.layers)
    beside = METHODS[options.method].check(request, plan)
    libraries = LIBRARIES_MEMORY if options.method == "gptq" else 0
    threads, peak = fit_memory(request, _per_thread(plan), libraries)
    peak = max(peak, beside)
    free = machine.disk_free(request.output)
    return Preflight(request, plan, units, threads, peak, free, classes)


def quantize_gpu(
    request: Request,
    observer: Observer | None = None,
    preflight: Preflight | None = None,
    notify: Notify = silent,
) -> Report:
    """Quantize; see `Request`. `notify` gets what happens around the layers. Raises KtconvError,
    or KeyboardInterrupt with all state kept."""
    preflight = preflight or prepare(request)
    method = METHODS[request.options.method]
    return method(preflight, observer or Observer(), notify).run()


def _require_libraries() -> None:
    for package in ("torch", "transformers", "compressed_tensors", "llmcompressor"):
        if find_spec(package) is None:
            raise UsageError(f"--method gptq needs {package}, which is not installed", INSTALL)


def _choose_experts(request: Request, checkpoint: Checkpoint) -> tuple[Options, Selection | None]:
    if request.experts is None:
        return request.options, None
    chosen = read_expert_set(request.experts)
    counts = {layer.index: len(layer.experts) for layer in checkpoint.layers}
    check_expert_set(chosen, counts, request.experts)
    selection = {index: chosen.of(index) for index in counts}
    return replace(request.options, experts=chosen), selection


def _left_out(plan: Plan) -> list[str]:
    """Experts that --experts does not name."""
    left = [unit.omitted for unit in plan.layers if unit.omitted]
    return [f"{sum(left)} experts of {len(left)} layers: not in --experts"] if left else []


def _loading_notes(checkpoint: Checkpoint) -> list[str]:
    """A note if transformers cannot load the output."""
    if transformers_reads_packed(checkpoint):
        return []
    name = checkpoint.config.get("model_type", "this model")
    return [
        f"transformers reads the experts of {name} only in fused form: it cannot load this "
        "output, which is for engines that read them one by one, as vLLM does"
    ]


def _per_thread(plan: Plan) -> int:
    """Bytes that a worker needs."""
    rounding = rtn_buffers(plan.moe_layers, plan.target.scheme)
    scales = max(2 * m.rows * plan.target.scheme.groups(m.cols) for m in _matrices(plan))
    return rounding.with_those_of(buffer_sizes(plan)).nbytes + scales


def _matrices(plan: Plan) -> list[ExpertMatrix]:
    return [matrix for layer in plan.moe_layers for matrix in layer.kinds]
