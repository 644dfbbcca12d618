"""`ktconv quantize-cpu`: options, turned into a request for `quantize_cpu`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ktconv.cli.exits import errors_shown
from ktconv.cli.options import (
    MODEL_HINTS,
    DryRunOption,
    FinalizeOption,
    LayersOption,
    ModelArgument,
    MtpOption,
    OutputArgument,
    OverwriteOption,
    ShardSizeOption,
    ThreadsOption,
    convert,
)
from ktconv.cli.output import JsonOption
from ktconv.cli.parsing import choice
from ktconv.formats import output_formats
from ktconv.system.units import parse_ranges, parse_size

Method = Enum("Method", {key: key for key in output_formats()}, type=str)  # type: ignore[misc]
DEFAULT_METHOD = Method(next(iter(output_formats())))  # as in Options; a test compares them


class Layout(str, Enum):
    safetensors = "safetensors"
    layers = "layers"


class Scale(str, Enum):
    amax = "amax"


def quantize_cpu_command(
    model: ModelArgument,
    output: OutputArgument,
    method: Annotated[Method, choice(Method, "Weight format.")] = DEFAULT_METHOD,
    numa: Annotated[
        int,
        typer.Option(min=0, help="NUMA parts; 0: one per NUMA node of this machine.", metavar="N"),
    ] = 0,
    threads: ThreadsOption = 0,
    layers: LayersOption = "",
    layout: Annotated[
        Layout, choice(Layout, "Shards with an index, or _layer_L/_numa_N/*.kt folders.")
    ] = Layout.safetensors,
    scale: Annotated[
        Scale,
        choice(Scale, "How row scales are chosen; amax: from the row's largest absolute weight."),
    ] = Scale.amax,
    max_shard_size: ShardSizeOption = "5GB",
    max_memory: Annotated[str, typer.Option(help="Memory limit.", metavar="SIZE")] = "8GiB",
    experts_only: Annotated[
        bool, typer.Option("--experts-only", help="Omit non-expert tensors.")
    ] = False,
    mtp: MtpOption = True,
    compat: Annotated[
        bool,
        typer.Option("--compat", help="Round to bf16 first, for the reference converter's bytes."),
    ] = False,
    requantize: Annotated[
        bool,
        typer.Option(
            "--requantize",
            help="Quantize INT8 and INT4 sources anew, also where they could be kept unchanged.",
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Read back and unpack everything written."),
    ] = True,
    overwrite: OverwriteOption = False,
    finalize: FinalizeOption = False,
    exclude_experts: Annotated[
        Path | None,
        typer.Option(
            help="Omit the experts listed in this file; needs --allow-partial.",
            metavar="FILE",
        ),
    ] = None,
    allow_partial: Annotated[
        bool,
        typer.Option("--allow-partial", help="Allow an output that KTransformers cannot load."),
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert the routed experts of a checkpoint into quantized CPU weights.

    Run the same command again to continue an interrupted run.

    Example: ktconv quantize-cpu Qwen/Qwen3-30B-A3B qwen3-int4 --method int4 --numa 2
    """
    with errors_shown(as_json, MODEL_HINTS):
        from ktconv.quantize_cpu.run import Request, prepare, quantize_cpu
        from ktconv.targets.ktransformers import Options

        options = Options(
            method=method.value,
            numa=numa,
            layout=layout.value,
            scale=scale.value,
            compat=compat,
            mtp=mtp,
            experts_only=experts_only,
            max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
            requantize=requantize,
        )
        request = Request(
            model=model,
            output=output,
            options=options,
            layers=parse_ranges(layers, "--layers") if layers else None,
            threads=threads or None,
            max_memory=parse_size(max_memory, "--max-memory"),
            verify=verify,
            overwrite=overwrite,
            finalize=finalize,
            exclude_experts=exclude_experts,
            allow_partial=allow_partial,
        )
        convert(request, prepare(request), quantize_cpu, dry_run, as_json)
