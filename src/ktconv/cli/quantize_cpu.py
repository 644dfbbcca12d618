"""`ktconv quantize-cpu`: options, turned into a request for `quantize_cpu`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ktconv.cli import options as common
from ktconv.cli.encode import ENCODED_METHODS, encode_experts, refuse_options_of_packed
from ktconv.cli.exits import errors_shown
from ktconv.cli.fleet import convert_list
from ktconv.cli.mix import Mix, MixEngine
from ktconv.cli.output import JsonOption, given_options
from ktconv.cli.parsing import MOST_PARTS, choice, flag, option
from ktconv.cli.ray import RayOption, RayScratchOption, on_cluster
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.errors import UsageError
from ktconv.formats import output_formats
from ktconv.system.units import parse_ranges, parse_size

if TYPE_CHECKING:
    Method = str
else:
    _METHODS = (*output_formats(), *ENCODED_METHODS)
    Method = Literal[_METHODS]
ScaleRule = Literal["amax", "search"]  # as in ktransformers.py; a test compares them
DEFAULT_METHOD = next(iter(output_formats()))  # as in Options; a test compares them
Layout = Literal["safetensors", "layers"]
_MOST_AT_ONCE = 64  # processes, each with threads and buffers of its own


@reads_source()
def quantize_cpu_command(
    context: typer.Context,
    model: common.OptionalModelArgument = None,
    output: common.OptionalOutputArgument = None,
    method: Annotated[Method, choice(Method, "Weight format.")] = DEFAULT_METHOD,
    recipe: Annotated[
        Path | None,
        option("Instead of --method: methods by layer, projection and expert.", "FILE.toml"),
    ] = None,
    target_size: Annotated[
        str | None,
        option(
            "Instead of --method: choose methods by measured errors so that OUTPUT has this size.",
            "SIZE",
        ),
    ] = None,
    target_bits: Annotated[
        float | None, option("The same: bits per weight of the experts, with scales.", "B")
    ] = None,
    engine: Annotated[
        MixEngine | None,
        choice(
            MixEngine,
            "What must load a chosen mix. vllm: one method in a layer; ktconv: the same, of those "
            "that its kernels have; compressed-tensors: any.",
        ),
    ] = None,
    methods: Annotated[
        str | None, option("What --target-size and --target-bits choose from.", "LIST")
    ] = None,
    write_recipe: Annotated[
        Path | None,
        option("Write the chosen recipe, to edit and run again; with --dry-run too.", "FILE.toml"),
    ] = None,
    numa: Annotated[
        int, option("NUMA parts; 0: one per NUMA node of this machine.", "N", min=0, max=MOST_PARTS)
    ] = 0,
    threads: common.ThreadsOption = 0,
    layers: common.LayersOption = "",
    reading: Reading = USUAL,
    layout: Annotated[
        Layout, choice(Layout, "Shards with an index, or _layer_L/_numa_N/*.kt folders.")
    ] = "safetensors",
    scale: Annotated[
        ScaleRule | None,
        choice(
            ScaleRule,
            "How row scales are chosen: by a search for the smallest squared error, or from the "
            "largest absolute weight (amax).",
        ),
    ] = None,
    importance: Annotated[
        str | None,
        option(
            "Weigh squared errors by the inputs of each expert: a file of stats --importance, an "
            "imatrix of llama.cpp in GGUF form, or the word weights: by the model's own weights.",
            "FILE|weights",
        ),
    ] = None,
    fold: Annotated[
        Literal["up-down"] | None,
        choice(
            Literal["up-down"],
            "Move factors between up and down of each expert, which make errors smaller and change "
            "nothing that it computes.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        option(
            "Choose codes that make up for one another's errors (GPTQ): on the second moments in a "
            "directory of stats --hessian, or on a text.",
            "DIR|FILE",
        ),
    ] = None,
    max_shard_size: common.ShardSizeOption = "5GB",
    max_memory: Annotated[str, option("Memory limit.", "SIZE")] = "8GiB",
    save_backward: Annotated[
        bool,
        flag(
            "--save-backward",
            "Add transposed matrices, which kt-kernel's fine-tuning (SFT) reads.",
        ),
    ] = False,
    experts_only: Annotated[bool, flag("--experts-only", "Omit non-expert tensors.")] = False,
    mtp: common.MtpOption = True,
    compat: Annotated[
        bool, flag("--compat", "Round to bf16 first, for the reference converter's bytes.")
    ] = False,
    requantize: common.RequantizeOption = False,
    verify: Annotated[
        bool, flag("--verify/--no-verify", "Read back and unpack everything written.")
    ] = True,
    overwrite: common.OverwriteOption = False,
    finalize: common.FinalizeOption = False,
    experts: Annotated[
        Path | None,
        option(
            "Convert only the experts listed in this file, not int4 or int8; needs "
            "--allow-partial.",
            "FILE",
        ),
    ] = None,
    exclude_experts: Annotated[
        Path | None, option("Omit the experts listed in this file; needs --allow-partial.", "FILE")
    ] = None,
    allow_partial: Annotated[
        bool, flag("--allow-partial", "Allow an output that KTransformers cannot load.")
    ] = False,
    allow_activation_mismatch: Annotated[
        bool,
        flag(
            "--allow-activation-mismatch",
            "Convert experts of which KTransformers would compute something else, such as those of "
            "DeepSeek-V4 and gpt-oss.",
        ),
    ] = False,
    ray: RayOption = None,
    ray_scratch: RayScratchOption = None,
    dry_run: common.DryRunOption = False,
    estimate: Annotated[
        bool,
        flag(
            "--estimate",
            "With --dry-run: predict the errors of methods and scales from a sample of rows.",
        ),
    ] = False,
    from_list: Annotated[
        Path | None,
        option("Convert several models: a line MODEL OUTPUT [options] for each.", "FILE"),
    ] = None,
    at_once: Annotated[
        int,
        option("With --from-list: so many models at the same time.", "N", min=1, max=_MOST_AT_ONCE),
    ] = 1,
    progress: common.ProgressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Convert the routed experts of a checkpoint into quantized CPU weights.

    Run the same command again to continue an interrupted run.

    Example: ktconv quantize-cpu Qwen/Qwen3-30B-A3B qwen3-int4 --method int4 --numa 2
    """
    with errors_shown(as_json, common.MODEL_HINTS, progress):
        if from_list is not None:
            convert_list(context, from_list, (model, output), at_once, as_json)
            return
        if "--at-once" in given_options(context):
            raise UsageError("--at-once belongs to --from-list", "omit it")
        if model is None or output is None:
            raise UsageError(
                f"missing argument {'MODEL' if model is None else 'OUTPUT'}",
                "give MODEL and OUTPUT, or --from-list FILE",
            )
        mix = Mix(recipe, target_size, target_bits, engine, methods, write_recipe, importance)
        mix.check(given_options(context))
        encoded = method in ENCODED_METHODS or bool(mix)
        if encoded:
            refuse_options_of_packed(context, mix or method)
        size = parse_size(max_shard_size, "--max-shard-size")
        source = reading.source(model, headers_only=dry_run, output=output)
        wanted: dict[str, Any] = {
            "model": source,
            "output": output,
            "layers": parse_ranges(layers, "--layers") if layers else None,
            "threads": threads or None,
            "max_memory": parse_size(max_memory, "--max-memory"),
            "verify": verify,
            "overwrite": overwrite,
            "finalize": finalize,
            "exclude_experts": exclude_experts,
        }
        kept: dict[str, Any] = {
            "mtp": mtp,
            "experts_only": experts_only,
            "max_shard_size": size,
            "requantize": requantize,
            "allow_activation_mismatch": allow_activation_mismatch,
        }
        if encoded:
            cluster = ray, ray_scratch, reading.cache_dir
            encode_experts(
                mix or method,
                scale,
                wanted,
                kept,
                experts,
                allow_partial,
                cluster,
                dry_run,
                as_json,
            )
            return
        if experts is not None:
            raise UsageError(
                f"--experts does not apply to --method {method}, whose loader wants all experts",
                "use --exclude-experts with --allow-partial, or another method",
            )
        from ktconv.cli.estimate import estimate_lines, estimated
        from ktconv.quantize.packed.run import Request, prepare, quantize_cpu
        from ktconv.targets.packed.target import Options

        options = Options(
            method=method,
            numa=numa,
            layout=layout,
            scale=scale or "",
            fold=fold or "",
            compat=compat,
            save_backward=save_backward,
            **kept,
        )
        request = Request(
            **wanted,
            options=options,
            allow_partial=allow_partial,
            importance=_source_of_importance(importance),
            calibrate=calibrate,
        )
        if estimate and not dry_run:
            raise UsageError(
                "--estimate predicts the errors of a conversion without converting",
                "add --dry-run",
            )
        on_nodes = on_cluster(
            ray, ray_scratch, request, reading.cache_dir, quantize_cpu, there="quantize_cpu_on"
        )
        with on_nodes as (request, job):
            preflight = prepare(request)
            facts, lines = dict[str, Any](), list[str]()
            for way in preflight.ways:
                more, words = way.about()
                facts, lines = facts | more, [*lines, *words]
            if estimate:
                predicted = estimated(preflight)
                facts = {**facts, "estimate": predicted}
                lines = [*lines, *estimate_lines(predicted)]
            common.convert(request, preflight, job, dry_run, as_json, facts=facts, lines=lines)


def _source_of_importance(given: str | None) -> Path | Literal["weights"] | None:
    """A file of that name is given as ./weights."""
    if given == "weights":
        return "weights"
    return None if given is None else Path(given)
