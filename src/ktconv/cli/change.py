"""`ktconv merge` and `ktconv reshard`: conversions of what is converted already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktconv.cli.conversions import (
    outlook_facts,
    print_outlook,
    print_report,
    progress_of,
    report_facts,
    say_notes,
)
from ktconv.cli.show import JsonOption, errors_shown, interruptible, print_result
from ktconv.units import parse_size


def merge_command(
    layers_dir: Annotated[
        Path,
        typer.Argument(help="Directory of _layer_L/_numa_N/*.kt, ours or another converter's."),
    ],
    output: Annotated[Path, typer.Argument(help="Directory to write; made if it is missing.")],
    source: Annotated[
        str | None,
        typer.Option(help="The model: its other tensors, config and tokenizer.", metavar="MODEL"),
    ] = None,
    experts_only: Annotated[
        bool, typer.Option("--experts-only", help="Leave non-expert tensors out.")
    ] = False,
    mtp: Annotated[
        bool | None, typer.Option("--mtp/--no-mtp", help="Whether MTP layers belong to it.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="No shard is larger than this.", metavar="SIZE")
    ] = "5GB",
    threads: Annotated[
        int, typer.Option(min=0, help="Worker threads; 0: up to 8.", metavar="T")
    ] = 0,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read back everything written.")
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove what ktconv wrote there and start again.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Merge layer folders into safetensors shards, byte for byte what quantize-cpu writes.

    The same command again continues a run that was interrupted.

    Example: ktconv merge qwen3-layers qwen3-int4 --source Qwen/Qwen3-30B-A3B
    """
    with errors_shown():
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
        outlook = prepare(request)
        if dry_run:
            print_result(as_json, outlook_facts(outlook), lambda: print_outlook(outlook))
            return
        say_notes(outlook)
        with interruptible(
            f"Finished layers are kept: run the same command again to continue in {output}."
        ):
            observer = progress_of(outlook)
            with observer:
                report = merge(request, observer, outlook)
        print_result(as_json, report_facts(report), lambda: print_report(report))


def reshard_command(
    packed: Annotated[Path, typer.Argument(help="A conversion: shards or layer folders.")],
    output: Annotated[Path, typer.Argument(help="Directory to write; made if it is missing.")],
    numa: Annotated[int, typer.Option(min=1, help="NUMA parts to cut into.", metavar="N")],
    source: Annotated[
        str | None,
        typer.Option(
            help="Convert again from the model instead, which is always exact.", metavar="MODEL"
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="No shard is larger than this.", metavar="SIZE")
    ] = "5GB",
    threads: Annotated[
        int, typer.Option(min=0, help="Worker threads; 0: up to 8.", metavar="T")
    ] = 0,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read back everything written.")
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove what ktconv wrote there and start again.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Cut a conversion into another number of NUMA parts, where no weight changes by that.

    Splitting always works: the parts of down inherit the scales of its rows. Joining needs
    scales that agree, or --source.

    Example: ktconv reshard qwen3-int4 qwen3-int4-numa2 --numa 2
    """
    with errors_shown():
        from ktconv.reshard import Request, prepare, reshard

        request = Request(
            packed=packed,
            output=output,
            numa=numa,
            source=source,
            max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
            threads=threads or None,
            verify=verify,
            overwrite=overwrite,
        )
        outlook = prepare(request)
        if dry_run:
            print_result(as_json, outlook_facts(outlook), lambda: print_outlook(outlook))
            return
        say_notes(outlook)
        with interruptible(
            f"Finished layers are kept: run the same command again to continue in {output}."
        ):
            observer = progress_of(outlook)
            with observer:
                report = reshard(request, observer, outlook)
        print_result(as_json, report_facts(report), lambda: print_report(report))
