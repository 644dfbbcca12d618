"""`ktconv merge` and `ktconv reshard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ktconv.cli import options as common
from ktconv.cli.exits import Hints, errors_shown
from ktconv.cli.help import OUTPUT, SOURCE
from ktconv.cli.output import JsonOption
from ktconv.cli.parameters import MOST_PARTS, argument, flag, option
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.errors import MemoryLimitError
from ktconv.system.units import parse_size

RESHARD_HINTS: Hints = {**common.PACKED_HINTS, MemoryLimitError: "use fewer --threads"}


@reads_source("revision", "download", "cache_dir")
def merge_command(
    layers_dir: Annotated[
        Path,
        argument(
            "Directory of _layer_L/_numa_N/*.kt.",
            "LAYERS_DIR",
            "Written by `quantize-cpu --layout layers` or another converter. Missing, duplicate "
            "and mixed files are errors that name the file.",
        ),
    ],
    output: common.OutputArgument,
    source: Annotated[
        str | None,
        option(
            "Original model.",
            "MODEL",
            panel=SOURCE,
            detail="Other tensors, config and tokenizer are copied from it.",
        ),
    ] = None,
    reading: Reading = USUAL,
    experts_only: Annotated[
        bool, flag("--experts-only", "Omit non-expert tensors.", OUTPUT)
    ] = False,
    mtp: Annotated[
        bool | None,
        flag(
            "--mtp/--no-mtp",
            "Include or omit MTP layers.",
            OUTPUT,
            "The default is what the manifest says, else all in LAYERS_DIR.",
        ),
    ] = None,
    max_shard_size: common.ShardSizeOption = "5GB",
    threads: common.CopyThreadsOption = 0,
    verify: common.VerifyOption = True,
    overwrite: common.OverwriteOption = False,
    dry_run: common.DryRunOption = False,
    progress: common.ProgressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Merge layer folders into safetensors shards, byte for byte what quantize-cpu writes.
    Run the same command again to continue an interrupted run.

    Example: ktconv merge qwen3-layers qwen3-int4 --source Qwen/Qwen3-30B-A3B
    """
    with errors_shown(as_json, common.PACKED_HINTS, progress):
        from ktconv.merge import Request, merge, prepare

        request = Request(
            layers_dir=layers_dir,
            output=output,
            source=reading.source_if(source),
            experts_only=experts_only,
            mtp=mtp,
            max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
            threads=threads or None,
            verify=verify,
            overwrite=overwrite,
        )
        common.convert(request, prepare(request), merge, dry_run, as_json, "Merged")


@reads_source("revision", "download", "cache_dir")
def reshard_command(
    packed: Annotated[Path, argument("Converted weights: shards or layer folders.", "PACKED")],
    output: common.OutputArgument,
    numa: Annotated[
        int, option("New number of NUMA parts.", "N", panel=OUTPUT, min=1, max=MOST_PARTS)
    ],
    source: Annotated[
        str | None,
        option(
            "Original model, to convert again from.",
            "MODEL",
            panel=SOURCE,
            detail="Always exact, also where parts are joined whose scales differ.",
        ),
    ] = None,
    reading: Reading = USUAL,
    importance: Annotated[
        Path | None,
        option(
            "File that quantize-cpu --importance was given.",
            "FILE",
            panel=SOURCE,
            detail="Needed with --source, if the conversion had one.",
        ),
    ] = None,
    max_shard_size: common.ShardSizeOption = "5GB",
    threads: common.CopyThreadsOption = 0,
    verify: common.VerifyOption = True,
    overwrite: common.OverwriteOption = False,
    dry_run: common.DryRunOption = False,
    progress: common.ProgressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Change the number of NUMA parts of a conversion without changing any weight.
    Splitting always works: the parts of down inherit the row scales. Joining needs equal scales in
    the joined parts, or --source.

    Example: ktconv reshard qwen3-int4 qwen3-int4-numa2 --numa 2
    """
    with errors_shown(as_json, RESHARD_HINTS, progress):
        from ktconv.repack.reshard import Request, prepare, reshard

        request = Request(
            packed=packed,
            output=output,
            numa=numa,
            source=reading.source_if(source),
            importance=importance,
            max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
            threads=threads or None,
            verify=verify,
            overwrite=overwrite,
        )
        common.convert(request, prepare(request), reshard, dry_run, as_json, "Resharded")
