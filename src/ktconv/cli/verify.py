"""`ktconv verify`: options as a request."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ktconv.cli.exits import NOTHING_WRITTEN, Hints, errors_shown, interruptible
from ktconv.cli.options import ThreadsOption, progress_over
from ktconv.cli.output import JsonOption, notify, print_result
from ktconv.cli.parsing import choice
from ktconv.errors import MemoryShortError, SourceChangedError
from ktconv.system.units import parse_ranges, parse_size


class Level(str, Enum):
    """Names of `verify.LEVELS`; a test keeps the two equal."""

    structure = "structure"
    weights = "weights"
    layers = "layers"
    model = "model"


_HINTS: Hints = {
    SourceChangedError: "make sure nothing writes there, then verify again",
    MemoryShortError: "run --level layers, or use a machine with more memory",
    MemoryError: "use fewer --threads or --tokens, or a lower --level",
}


def verify(
    output: Annotated[
        Path,
        typer.Argument(
            help="Output of quantize-cpu, quantize-gpu or another converter.", metavar="OUTPUT"
        ),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(help="Another conversion to compare OUTPUT with.", metavar="OTHER"),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="The original checkpoint: a directory or hub id.", metavar="MODEL"),
    ] = None,
    level: Annotated[
        Level | None,
        choice(Level, "How much to check; default: layers, or structure without --source."),
    ] = None,
    sample: Annotated[
        float,
        typer.Option(help="Fraction of experts and layers to read, in (0, 1].", metavar="F"),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed for the sample and random inputs.", metavar="N")
    ] = 0,
    threads: ThreadsOption = 0,
    max_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory limit; default: headers plus 1.5GiB.",
            metavar="SIZE",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=2048, help="Tokens per layer at level layers.", metavar="N")
    ] = 16,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to read instead of the built-in sample.", metavar="FILE"),
    ] = None,
    windows: Annotated[
        int, typer.Option(min=1, help="Windows of 512 tokens at level model.", metavar="N")
    ] = 40,
    max_ppl_increase: Annotated[
        float | None,
        typer.Option(min=0.0, help="Maximum increase of perplexity; 0.02 is 2 %.", metavar="F"),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(min=0.0, help="Maximum mean KL divergence, in nats.", metavar="F"),
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            "--with",
            help="Check that both outputs together contain every expert exactly once.",
            metavar="OTHER",
        ),
    ] = None,
    tp: Annotated[
        str,
        typer.Option(
            help="Tensor-parallel sizes that GPU experts must support, e.g. 1,2,4.",
            metavar="LIST",
        ),
    ] = "",
    ep: Annotated[
        str,
        typer.Option(
            help="Expert-parallel sizes that must divide the experts evenly, e.g. 1,2,4.",
            metavar="LIST",
        ),
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="Write a self-contained HTML report.", metavar="FILE.html")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that a conversion is complete, uncorrupted and as accurate as its format allows.

    Levels, each including the previous ones: structure (every tensor, checksum and copy), weights
    (every element against the source), layers (the kernels' results), model (perplexity). For GPU
    experts, also checks how engines load and split them (--tp, --ep). With two outputs: reports
    whether they are equal, or where they differ. Exit code 1: a check failed.

    Example: ktconv verify qwen3-int4 --source Qwen/Qwen3-30B-A3B --report report.html
    """
    with errors_shown(as_json, _HINTS):
        from ktconv.verify.command import run
        from ktconv.verify.request import Thresholds, VerifyRequest

        request = VerifyRequest(
            output=output,
            source=source,
            level=level.value if level else None,
            sample=sample,
            seed=seed,
            threads=threads or None,
            tokens=tokens,
            text=text,
            windows=windows,
            thresholds=Thresholds(max_ppl_increase, max_kl),
            beside=beside,
            tp=parse_ranges(tp, "--tp") if tp else None,
            ep=parse_ranges(ep, "--ep") if ep else None,
            max_memory=None if max_memory is None else parse_size(max_memory, "--max-memory"),
        )
        with interruptible(lambda: NOTHING_WRITTEN):
            facts, lines, passed = run(request, progress_over, notify, other, report)
        print_result(as_json, facts, lambda: lines)
        if not passed:
            raise typer.Exit(1)
