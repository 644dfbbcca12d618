"""`ktconv merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktconv.cli.exits import errors_shown
from ktconv.cli.options import (
    PACKED_HINTS,
    CopyThreadsOption,
    DryRunOption,
    OutputArgument,
    OverwriteOption,
    ShardSizeOption,
    VerifyOption,
    convert,
)
from ktconv.cli.output import JsonOption
from ktconv.system.units import parse_size


def merge_command(
    layers_dir: Annotated[
        Path,
        typer.Argument(
            help="Directory of _layer_L/_numa_N/*.kt, from ktconv or another converter.",
            metavar="LAYERS_DIR",
        ),
    ],
    output: OutputArgument,
    source: Annotated[
        str | None,
        typer.Option(
            help="Original model, for its other tensors, config and tokenizer.", metavar="MODEL"
        ),
    ] = None,
    experts_only: Annotated[
        bool, typer.Option("--experts-only", help="Omit non-expert tensors.")
    ] = False,
    mtp: Annotated[
        bool | None, typer.Option("--mtp/--no-mtp", help="Include or omit MTP layers.")
    ] = None,
    max_shard_size: ShardSizeOption = "5GB",
    threads: CopyThreadsOption = 0,
    verify: VerifyOption = True,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Merge layer folders into safetensors shards, byte for byte what quantize-cpu writes.

    Run the same command again to continue an interrupted run.

    Example: ktconv merge qwen3-layers qwen3-int4 --source Qwen/Qwen3-30B-A3B
    """
    with errors_shown(as_json, PACKED_HINTS):
        from ktconv.merge import Request, merge, prepare

        request = Request(
            layers_dir=layers_dir,
            output=output,
            source=source,
            experts_only=experts_only,
            mtp=mtp,
            max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
            threads=threads or None,
            verify=verify,
            overwrite=overwrite,
        )
        preflight = prepare(request)
        convert(
            preflight,
            lambda observer: merge(request, observer, preflight),
            dry_run,
            as_json,
            "Merged",
        )
