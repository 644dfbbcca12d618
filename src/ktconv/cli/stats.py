"""`ktconv stats`: options as a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from ktconv.cli.conflicts import Conflict, one_of, refuse_conflicts
from ktconv.cli.exits import Hints, errors_shown, interruptible
from ktconv.cli.help import OUTPUT, SELECTION, SOURCE
from ktconv.cli.options import ProgressOption, network_facts, progress_over
from ktconv.cli.output import JsonOption, notify, print_result
from ktconv.cli.parameters import argument, flag, option
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.errors import DiskFullError
from ktconv.system.units import parse_ranges, parse_size

_AGAIN = "Finished layers are kept: run the same command again to continue."
CONFLICTS = (
    *one_of("--hot", "--hot-share", "--hot-total", hint="use one of them"),
    Conflict(
        "--write !--hot !--hot-share !--hot-total",
        "--write needs a number of experts to select",
        "add --hot N or --hot-share F",
    ),
    Conflict("--placement --layers", "--placement needs all layers", "omit --layers"),
)
_HINTS: Hints = {
    DiskFullError: "free some space or use another disk, then run the same command again: finished "
    "layers are kept",
}


@reads_source("config", "map", "tower")
def stats(
    context: click.Context,
    model: Annotated[
        str,
        argument(
            "Checkpoint directory, GGUF file or hub id.",
            "MODEL",
            "Or a file that --json or --trace wrote: the selection is changed without running the "
            "model again.",
        ),
    ],
    reading: Reading = USUAL,
    config: Annotated[
        Path | None,
        option(
            "Directory with config.json and tokenizer to use.",
            "DIR",
            panel=SOURCE,
            detail="Needed for a GGUF model: docs/encodings.md.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        option("Text to read instead of the built-in sample.", "FILE", panel=SOURCE),
    ] = None,
    max_tokens: Annotated[
        int | None,
        option("Maximum tokens to read; default: 20480.", "N", panel=SOURCE, min=1),
    ] = None,
    max_memory: Annotated[str, option("Memory limit; default: what is free.", "SIZE")] = "",
    work_dir: Annotated[
        Path | None,
        option(
            "Folder for hidden states.",
            "DIR",
            detail="An interrupted run continues from there. The default is in the user's cache.",
        ),
    ] = None,
    layers: Annotated[
        str,
        option(
            "Count only these layers, e.g. 0-3,7.",
            "LIST",
            panel=SOURCE,
            detail="The model is read up to the last of them.",
        ),
    ] = "",
    hot: Annotated[
        int | None,
        option("Select the N most used experts of each layer.", "N", panel=SELECTION, min=1),
    ] = None,
    hot_share: Annotated[
        float | None,
        option(
            "Select experts with this share of routed tokens.",
            "F",
            panel=SELECTION,
            detail="The fewest of each layer that receive it, for example 0.9.",
        ),
    ] = None,
    hot_total: Annotated[
        int | None,
        option(
            "Select the N most used experts of all layers.",
            "N",
            panel=SELECTION,
            min=1,
            detail="Chooses the experts of sglang-kt's frequency placement.",
        ),
    ] = None,
    write: Annotated[
        Path | None,
        option(
            "Write the selected experts.",
            "FILE",
            panel=SELECTION,
            detail="Read by --experts and --exclude-experts of the converting commands.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        option(
            "Write the ids of all chosen experts.",
            "FILE.safetensors",
            panel=OUTPUT,
            detail="int32 [layers, tokens, top-k], for `ktconv bench --routing trace:FILE`, which "
            "replays the layers one after the other.",
        ),
    ] = None,
    placement: Annotated[
        Path | None,
        option(
            "Write counts for sglang-kt's frequency placement.",
            "FILE.pt",
            panel=OUTPUT,
            detail="docs/hot-experts.md has the file and the strategies.",
        ),
    ] = None,
    importance: Annotated[
        Path | None,
        option(
            "Write the importance of each expert's inputs.",
            "FILE.safetensors",
            panel=OUTPUT,
            detail="The mean square of each input channel of its matrices, for `quantize-cpu "
            "--importance FILE`: docs/calibration.md.",
        ),
    ] = None,
    hessian: Annotated[
        Path | None,
        option(
            "Write the Hessians of each expert's inputs.",
            "DIR",
            panel=OUTPUT,
            detail="Their second moments, a large file for each layer, for `quantize-cpu "
            "--calibrate DIR`: docs/calibration.md.",
        ),
    ] = None,
    scores: Annotated[
        Path | None,
        option(
            "Write scores of the experts, for `ktconv prune`.",
            "FILE.json",
            panel=OUTPUT,
            detail="REAP's saliency, frequency, router weight and output norm of each expert: "
            "docs/pruning.md.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, flag("--dry-run", "Print what the pass takes and run nothing.")
    ] = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Count how often a model's own router chooses each expert on a text.
    Needs transformers. The model is read once, layer by layer, and need not fit into memory.
    Run the same command again to continue an interrupted run.

    Example: ktconv stats Qwen/Qwen3-30B-A3B --text prose.txt --hot 32 --write hot.json
    """
    with errors_shown(as_json, _HINTS, progress):
        from msgspec.structs import replace

        from ktconv.stats.command import StatsRequest, run

        refuse_conflicts(context, CONFLICTS)
        request = StatsRequest(
            model=replace(reading.source(model), config=config),
            text=text,
            max_tokens=max_tokens,
            max_memory=parse_size(max_memory, "--max-memory") if max_memory else None,
            layers=parse_ranges(layers, "--layers") if layers else None,
            hot=hot,
            hot_share=hot_share,
            hot_total=hot_total,
            write=write,
            trace=trace,
            placement=placement,
            importance=importance,
            hessian=hessian,
            scores=scores,
            work_dir=work_dir,
            dry_run=dry_run,
        )
        with interruptible(lambda: _AGAIN):
            facts, lines = run(request, notify, progress_over)
        print_result(as_json, {**facts, **network_facts()}, lambda: lines)
