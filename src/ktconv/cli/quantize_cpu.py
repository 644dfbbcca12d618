"""`ktconv quantize-cpu`: options, turned into a request for `quantize_cpu`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from ktconv.cli import options as common
from ktconv.cli.conflicts import Conflict, belongs, one_of, refuse_conflicts
from ktconv.cli.encode import (
    ENCODED_METHODS,
    GGUF_METHODS,
    INTEGERS,
    convert_to_gguf,
    encode_experts,
)
from ktconv.cli.exits import errors_shown
from ktconv.cli.fleet import convert_list
from ktconv.cli.help import ACCURACY, ADVANCED, FORMAT, OUTPUT
from ktconv.cli.mix import Mix, MixEngine
from ktconv.cli.output import JsonOption
from ktconv.cli.parameters import MOST_PARTS, choice, flag, option
from ktconv.cli.ray import RAY_CONFLICTS, RayOption, RayScratchOption, on_cluster
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.cli.ways import NO_WAYS, Ways, chooses_codes, values_of
from ktconv.errors import UsageError
from ktconv.formats import output_formats
from ktconv.formats.dialects import ROWS, Names, all_names, folded, translated
from ktconv.formats.gguf import GGUF_FORMATS
from ktconv.quantize.ways import WAYS
from ktconv.system.units import parse_ranges, parse_size

if TYPE_CHECKING:
    Method = str
_METHODS = (*output_formats(), *ENCODED_METHODS, *GGUF_METHODS)
if not TYPE_CHECKING:
    Method = Literal[_METHODS]
ScaleRule = Literal["amax", "search"]  # as in ktransformers.py; a test compares them
DEFAULT_METHOD = next(iter(output_formats()))  # as in Options; a test compares them
Layout = Literal["safetensors", "layers"]
_MOST_AT_ONCE = 64  # processes, each with threads and buffers of its own


def list_of_methods() -> str:
    """List the methods, what they are, and their names in other programs."""
    rows = {row.method: row for row in ROWS}
    gguf = {name: f": {row.words}" for name, row in GGUF_FORMATS.items()}
    about = "Names in other programs, in brackets, are known too: docs/methods.md.\n\n"
    words = {name: gguf.get(name) or _about(rows.get(name)) for name in _METHODS}
    return about + "\n".join(f"- {name}{said}" for name, said in words.items())


def _about(row: Names | None) -> str:
    """A method in words; nothing for a format without a row."""
    return f": {row.words}{_others(row)}" if row else ""


def _others(row: Names) -> str:
    """The names of other programs by which --method knows a format."""
    names = [one for one in all_names(row) if translated(one, "method") == row.method]
    own = {folded(row.method), folded(row.kernel)}
    others = [one for one in names if folded(one) not in own and not one.startswith("gint")]
    return f" ({', '.join(others)})" if others else ""


# ---- options that exclude or need one another --------------------------------------------

_MIXES = ("--recipe", "--target-size", "--target-bits")
# Options of int4 and int8, and why the other methods do not have them.
_OF_PACKED = {
    "--compat": "the reference converter does not write it",
    "--estimate": "only errors of int4 and int8 are predicted",
    "--layout": "these weights are always shards",
    "--numa": "KTransformers cuts these weights into NUMA parts when it loads them",
    **{f"--{row.option.replace('_', '-')}": row.others for row in WAYS if row.option},
}
_OTHERS = f"--method={','.join(ENCODED_METHODS)}"  # than int4 and int8
_GGUF = f"--method={','.join(GGUF_METHODS)}"
_FLOATS = [name for name in ENCODED_METHODS if name not in INTEGERS]  # have no search
_FIXED = f"--method={','.join((*_FLOATS, *GGUF_METHODS))}"
_NO_MIX = " ".join(f"!{name}" for name in _MIXES)
_PARTIAL = "engines cannot load an output without all experts"

CONFLICTS = (
    *belongs(["--at-once"], "--from-list", "omit it"),
    *one_of(*_MIXES),
    *belongs(
        ["--engine"], "--target-size and --target-bits", "omit --engine",
        why="; a recipe names its engine", when="--recipe",
    ),
    *(
        row
        for name in ("--engine", "--methods", "--write-recipe")
        for row in belongs(
            [name], "--target-size and --target-bits", f"omit {name}",
            when="!--target-size !--target-bits",
        )
    ),
    *(
        Conflict(
            f"--importance=weights {mix}",
            f"--importance weights cannot be combined with {mix}",
            "give a file of ktconv stats --importance, or omit it",
        )
        for mix in _MIXES[1:]
    ),
    *(
        Conflict(f"{name} {mix}", f"{name} cannot be combined with {mix}", f"omit {name}")
        for mix in _MIXES
        for name in sorted(["--method", "--with", *_OF_PACKED])
        if (name, mix) not in [("--importance", one) for one in _MIXES[1:]]
    ),
    Conflict(
        f"--scale {_FIXED} {_NO_MIX}",
        "--scale does not apply to --method {--method}, whose rule for scales is fixed",
        "omit it",
    ),
    *(
        Conflict(
            f"{name} {methods} {_NO_MIX}",
            f"{name} does not apply to --method {{--method}}: {why}",
            "omit it, or use --method int4 or int8",
        )
        for methods in (_OTHERS, _GGUF)
        for name, why in sorted(_OF_PACKED.items())
        if (name, methods) != ("--importance", _GGUF)
    ),
    *(
        Conflict(
            f"{name} {_GGUF}",
            f"{name} does not apply to --method {{--method}}: its tensors have all experts of a "
            "layer",
            "omit it",
        )
        for name in ("--experts", "--exclude-experts")
    ),
    Conflict(
        "--with --experts-only",
        "--with and --experts-only cannot be combined",
        "give one of them",
    ),
    Conflict(
        f"--with --method={','.join((*output_formats(), *ENCODED_METHODS))} {_NO_MIX}",
        "--with names the GGUF file of a whole model, and does not apply to --method {--method}",
        "omit it, or use --method gguf-q4_k or another one that writes GGUF files",
    ),
    *(
        Conflict(
            f"{name} !--allow-partial {mixed}",
            _PARTIAL,
            f"omit {name}; or add --allow-partial to convert for ktconv's own runtime",
        )
        for name in ("--experts", "--exclude-experts")
        for mixed in (_OTHERS, *_MIXES)
    ),
    Conflict(
        f"--experts --method={','.join(output_formats())} {_NO_MIX}",
        "--experts does not apply to --method {--method}, whose loader wants all experts",
        "use --exclude-experts with --allow-partial, or another method",
    ),
    Conflict(
        "--estimate !--dry-run",
        "--estimate predicts the errors of a conversion without converting",
        "add --dry-run",
    ),
    *RAY_CONFLICTS,
)  # fmt: skip


@reads_source()
@chooses_codes
def quantize_cpu_command(
    context: click.Context,
    model: common.OptionalModelArgument = None,
    output: common.OptionalOutputArgument = None,
    method: Annotated[
        Method,
        choice(Method, "Weight format.", metavar="METHOD", panel=FORMAT, detail=list_of_methods()),
    ] = DEFAULT_METHOD,
    recipe: Annotated[
        Path | None,
        option(
            "Methods by layer, projection and expert.",
            "FILE.toml",
            panel=FORMAT,
            detail="Instead of --method: docs/recipes.md.",
        ),
    ] = None,
    target_size: Annotated[
        str | None,
        option(
            "Choose methods so that OUTPUT has this size.",
            "SIZE",
            panel=FORMAT,
            detail="Instead of --method. Methods are chosen for layers and projections by their "
            "measured errors. The size is that of the whole output, and is not exceeded: "
            "docs/recipes.md.",
        ),
    ] = None,
    target_bits: Annotated[
        float | None,
        option(
            "Choose methods by bits per weight, with scales.",
            "B",
            panel=ADVANCED,
            detail="Instead of --method. The bits are those of the experts.",
        ),
    ] = None,
    engine: Annotated[
        MixEngine | None,
        choice(
            MixEngine,
            "Engine that must load the chosen mix.",
            panel=ADVANCED,
            detail="Used with --target-size and --target-bits.\n\n"
            "- vllm: one method in each layer\n"
            "- ktconv: the same, of the methods that its kernels have\n"
            "- compressed-tensors: a method for each projection of a layer",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        option(
            "Methods that --target-size may choose.",
            "LIST",
            panel=ADVANCED,
            detail="Used with --target-bits too: names, or NAME:GROUP for a method with several "
            "group sizes. The default is int4-g128, int4-g64, rawint4, int8-g128 and bf16.",
        ),
    ] = None,
    write_recipe: Annotated[
        Path | None,
        option(
            "Write the chosen recipe, to edit and run again.",
            "FILE.toml",
            panel=ADVANCED,
            detail="Used with --target-size and --target-bits. Measured errors are comments. With "
            "--dry-run nothing else is written. A recipe that was edited is not overwritten.",
        ),
    ] = None,
    numa: Annotated[
        int,
        option(
            "NUMA parts; 0: one per NUMA node.",
            "N",
            panel=OUTPUT,
            min=0,
            max=MOST_PARTS,
            detail="Applies to int4 and int8; the nodes are this machine's. `ktconv reshard` "
            "changes it later, without the model.",
        ),
    ] = 0,
    with_: Annotated[
        Path | None,
        option(
            "GGUF file from which the rest of the model is taken.",
            "FILE.gguf",
            "--with",
            panel=ADVANCED,
            detail="Used with the GGUF methods: the output is a whole model for llama.cpp, with "
            "all tensors but the experts, and the metadata, of FILE. Without it the output has "
            "the experts alone, as KTransformers' LLAMAFILE reads them: docs/gguf.md.",
        ),
    ] = None,
    threads: common.ThreadsOption = 0,
    layers: common.LayersOption = "",
    reading: Reading = USUAL,
    layout: Annotated[
        Layout,
        choice(
            Layout,
            "Files of int4 and int8.",
            panel=OUTPUT,
            detail="- safetensors: shards with an index\n- layers: folders "
            "`_layer_L/_numa_N` of .kt files",
        ),
    ] = "safetensors",
    scale: Annotated[
        ScaleRule | None,
        choice(
            ScaleRule,
            "Rule for the scales of integers.",
            panel=ACCURACY,
            detail="- search: for the smallest squared error of each row or group (the default)\n"
            "- amax: from the largest absolute weight, as KTransformers and llm-compressor do; "
            "takes less than half the CPU time\n\nThe format is the same.",
        ),
    ] = None,
    ways: Ways = NO_WAYS,
    max_shard_size: common.ShardSizeOption = "5GB",
    max_memory: Annotated[str, option("Memory limit.", "SIZE")] = "8GiB",
    experts_only: Annotated[
        bool, flag("--experts-only", "Omit non-expert tensors.", OUTPUT)
    ] = False,
    mtp: common.MtpOption = True,
    compat: Annotated[
        bool,
        flag(
            "--compat",
            "Write the bytes of KTransformers' own converter.",
            ADVANCED,
            "Rounds FP8, FP16 and FP32 to bf16 first, and chooses scales by amax.",
        ),
    ] = False,
    requantize: common.RequantizeOption = False,
    verify: common.VerifyOption = True,
    overwrite: common.OverwriteOption = False,
    finalize: common.FinalizeOption = False,
    experts: Annotated[
        Path | None,
        option(
            "Convert only the experts in this file.",
            "FILE",
            panel=ADVANCED,
            detail="Needs --allow-partial; not with int4 and int8: docs/hot-experts.md.",
        ),
    ] = None,
    exclude_experts: Annotated[
        Path | None,
        option(
            "Omit the experts in this file.",
            "FILE",
            panel=ADVANCED,
            detail="Needs --allow-partial. For ktconv's own runtime, where GPUs have these "
            "experts: docs/hot-experts.md.",
        ),
    ] = None,
    allow_partial: Annotated[
        bool,
        flag(
            "--allow-partial",
            "Allow an output that KTransformers cannot load.",
            ADVANCED,
            "An output that lacks experts is for ktconv's own runtime only.",
        ),
    ] = False,
    allow_activation_mismatch: Annotated[
        bool,
        flag(
            "--allow-activation-mismatch",
            "Allow an activation that KTransformers lacks.",
            ADVANCED,
            "Converts a model whose activation is not supported by KTransformers' INT4 and INT8 "
            "kernels, which compute plain SiLU: other activations, clamps, biases, no gate. For "
            "ktconv's own runtime; docs/families.md has every family.",
        ),
    ] = False,
    ray: RayOption = None,
    ray_scratch: RayScratchOption = None,
    dry_run: common.DryRunOption = False,
    estimate: Annotated[
        bool,
        flag(
            "--estimate",
            "Predict errors from a sample, with --dry-run.",
            ADVANCED,
            "Compares int4, int8 and the rules for scales by a sample of rows, in less than a "
            "minute: docs/estimate.md.",
        ),
    ] = False,
    from_list: Annotated[
        Path | None,
        option(
            "Convert the models in a list.",
            "FILE",
            panel=ADVANCED,
            detail="A line `MODEL OUTPUT [options]` for each, comments after `#`, quotes as in a "
            "shell. Options of the command are for all models, those of a line overrule them. "
            "Instead of MODEL and OUTPUT.",
        ),
    ] = None,
    at_once: Annotated[
        int,
        option(
            "Models of --from-list to convert in parallel.",
            "N",
            panel=ADVANCED,
            min=1,
            max=_MOST_AT_ONCE,
        ),
    ] = 1,
    progress: common.ProgressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Convert the routed experts of a checkpoint into weights for CPUs.
    Run the same command again to continue an interrupted run.

    Example: ktconv quantize-cpu Qwen/Qwen3-30B-A3B qwen3-int4 --numa 2
    """
    with errors_shown(as_json, common.MODEL_HINTS, progress):
        if from_list is not None:
            convert_list(context, from_list, (model, output), at_once, as_json)
            return
        refuse_conflicts(context, CONFLICTS)
        if model is None or output is None:
            raise UsageError(
                f"missing argument {'MODEL' if model is None else 'OUTPUT'}",
                "give MODEL and OUTPUT, or --from-list FILE",
            )
        mix = Mix(
            recipe, target_size, target_bits, engine, methods, write_recipe, ways["importance"]
        )
        encoded = method in ENCODED_METHODS or bool(mix)
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
        cluster = ray, ray_scratch
        if method in GGUF_METHODS and not mix:
            del kept["experts_only"], kept["allow_activation_mismatch"], wanted["exclude_experts"]
            kept["method"] = method
            convert_to_gguf(wanted, kept, ways["importance"], with_, cluster, dry_run, as_json)
            return
        if encoded:
            encode_experts(
                mix or method,
                scale,
                wanted,
                kept,
                experts,
                cluster,
                dry_run,
                as_json,
            )
            return
        from ktconv.quantize.packed.run import Request, prepare, quantize_cpu
        from ktconv.targets.packed.target import Options

        options = Options(
            method=method,
            numa=numa,
            layout=layout,
            scale=scale or "",
            compat=compat,
            **values_of(ways, "options"),
            **kept,
        )
        request = Request(
            **wanted,
            options=options,
            allow_partial=allow_partial,
            ways=values_of(ways, "ways"),
            **values_of(ways, "request"),
        )
        with on_cluster(*cluster, request, quantize_cpu) as (request, job):
            preflight = prepare(request)
            facts, lines = dict[str, Any](), list[str]()
            for way in preflight.ways:
                more, words = way.about()
                facts, lines = facts | more, [*lines, *words]
            if estimate:
                from ktconv.cli.estimate import estimate_lines, estimated

                predicted = estimated(preflight)
                facts = {**facts, "estimate": predicted}
                lines = [*lines, *estimate_lines(predicted)]
            common.convert(request, preflight, job, dry_run, as_json, facts=facts, lines=lines)
