"""`ktconv stats`: options as a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ktconv.cli.exits import Hints, errors_shown, interruptible
from ktconv.cli.options import ProgressOption, network_facts, progress_over
from ktconv.cli.output import JsonOption, notify, print_result
from ktconv.cli.parsing import argument, flag, option
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.errors import DiskFullError
from ktconv.system.units import parse_ranges, parse_size

_AGAIN = "Finished layers are kept: run the same command again to continue."
_HINTS: Hints = {
    DiskFullError: "free some space or use another disk, then run the same command again: finished "
    "layers are kept",
}


@reads_source("config", "map", "tower")
def stats(
    model: Annotated[
        str,
        argument(
            "Checkpoint directory, GGUF file or hub id; or a file written by --json or --trace, "
            "to change the selection.",
            "MODEL",
        ),
    ],
    reading: Reading = USUAL,
    config: Annotated[
        Path | None, option("Directory with config.json and tokenizer of a GGUF model.", "DIR")
    ] = None,
    text: Annotated[
        Path | None, option("Text to read instead of the built-in sample.", "FILE")
    ] = None,
    max_tokens: Annotated[
        int | None, option("Maximum number of tokens to read; default: 20480.", "N", min=1)
    ] = None,
    max_memory: Annotated[
        str, option("Memory limit of the process; default: what is free.", "SIZE")
    ] = "",
    work_dir: Annotated[
        Path | None,
        option("Keep hidden states, and what an interrupted run continues from, here.", "DIR"),
    ] = None,
    layers: Annotated[str, option("Only these layers, e.g. 0-3,7.", "LIST")] = "",
    hot: Annotated[
        int | None, option("Select the N most used experts of each layer.", "N", min=1)
    ] = None,
    hot_share: Annotated[
        float | None,
        option(
            "Select the fewest experts of each layer that receive this share of "
            "routed tokens, e.g. 0.9.",
            "F",
        ),
    ] = None,
    hot_total: Annotated[
        int | None,
        option("Select the N most used experts of all layers, as sglang-kt does.", "N", min=1),
    ] = None,
    write: Annotated[
        Path | None,
        option("Write the selected experts, for --experts and --exclude-experts.", "FILE"),
    ] = None,
    trace: Annotated[
        Path | None,
        option(
            "Write the ids of all chosen experts, for bench --routing trace:FILE.",
            "FILE.safetensors",
        ),
    ] = None,
    placement: Annotated[
        Path | None, option("Write counts for sglang-kt's frequency placement.", "FILE.pt")
    ] = None,
    importance: Annotated[
        Path | None,
        option("Write the mean square of each input channel of each expert.", "FILE.safetensors"),
    ] = None,
    hessian: Annotated[
        Path | None,
        option("Write the second moments of each expert's inputs: large files.", "DIR"),
    ] = None,
    dry_run: Annotated[
        bool, flag("--dry-run", "Print what the pass takes, and run nothing.")
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
        from dataclasses import replace

        from ktconv.stats.command import StatsRequest, run

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
            work_dir=work_dir,
            dry_run=dry_run,
        )
        with interruptible(lambda: _AGAIN):
            facts, lines = run(request, notify, progress_over)
        print_result(as_json, {**facts, **network_facts()}, lambda: lines)
