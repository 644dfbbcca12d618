"""`ktconv compare`: options as a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click

from ktconv.cli.exits import NOTHING_WRITTEN, Hints, errors_shown, interruptible
from ktconv.cli.help import CHECKS, OUTPUT, SOURCE, SPEED
from ktconv.cli.options import (
    ProgressOption,
    SampleOption,
    SeedOption,
    TextOption,
    ThreadsOption,
    WindowsOption,
    progress_over,
)
from ktconv.cli.output import JsonOption, notify, print_result
from ktconv.cli.parameters import argument, choice, flag, option
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.errors import MemoryShortError, SourceChangedError
from ktconv.system.units import parse_size

CompareLevel = Literal["weights", "layers", "model"]  # as compare.request.LEVELS
_HINTS: Hints = {
    SourceChangedError: "make sure nothing writes there, then compare again",
    MemoryShortError: "run --level layers, or use a machine with more memory",
    MemoryError: "use fewer --threads, or a lower --level",
}


@reads_source()
def compare(
    outputs: Annotated[list[Path], argument("Conversions of one model, by any tool.", "OUTPUT")],
    source: Annotated[
        str,
        option(
            "The original checkpoint.",
            "MODEL",
            panel=SOURCE,
            detail="A directory, GGUF file, hub id or URL: what the outputs were converted from.",
        ),
    ],
    reading: Reading = USUAL,
    level: Annotated[
        CompareLevel | None,
        choice(
            CompareLevel,
            "Depth of the comparison.",
            panel=CHECKS,
            metavar="LEVEL",
            detail="Each level includes those before it. The default is model, layers without "
            "torch and transformers, or weights where an output has GGUF files.\n\n- weights: "
            "errors of weights\n- layers: errors of layers' "
            "outputs\n- model: KL divergence and perplexity",
        ),
    ] = None,
    sample: SampleOption = 1.0,
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    max_memory: Annotated[str | None, option("Memory limit of each output.", "SIZE")] = None,
    text: TextOption = None,
    windows: WindowsOption = 40,
    tokens: Annotated[
        str, option("Tokens per step to measure speed at.", "LIST", panel=SPEED)
    ] = "1,64",
    seconds: Annotated[
        float,
        option("Time for each measurement of speed.", "S", panel=SPEED, min=0.0, max=3600.0),
    ] = 0.5,
    speed: Annotated[
        bool,
        flag("--speed/--no-speed", "Measure the experts in ktconv's kernels.", SPEED),
    ] = True,
    report: Annotated[
        Path | None,
        option(
            "Write the table and the plots as an HTML page.",
            "FILE.html",
            panel=OUTPUT,
            detail="One page that needs nothing else.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        option(
            "Draw error and speed over size (png, svg, pdf).",
            "FILE",
            panel=OUTPUT,
            detail="Needs `pip install 'ktconv[plot]'`.",
        ),
    ] = None,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare conversions of one model: size, errors, KL divergence and tokens per second.
    Each OUTPUT is verified against the model, and its experts are measured in ktconv's kernels.

    Example: ktconv compare qwen3-rawint4 qwen3-mix qwen3-fp8 --source Qwen/Qwen3-30B-A3B
    """
    with errors_shown(as_json, _HINTS, progress):
        from ktconv.bench.command import parse_tokens
        from ktconv.verify.side_by_side.command import run
        from ktconv.verify.side_by_side.request import CompareRequest

        steps = parse_tokens(tokens, "infer")
        request = CompareRequest(
            outputs=outputs,
            source=reading.source(source),
            level=level,
            sample=sample,
            seed=seed,
            threads=threads or None,
            max_memory=None if max_memory is None else parse_size(max_memory, "--max-memory"),
            text=text,
            windows=windows,
            tokens=steps if speed else (),
            seconds=seconds,
        )
        with interruptible(lambda: NOTHING_WRITTEN):
            facts, lines, passed = run(request, progress_over, notify, report, plot)
        print_result(as_json, facts, lambda: lines)
        if not passed:
            raise click.exceptions.Exit(1)
