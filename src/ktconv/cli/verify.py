"""`ktconv verify`: options as a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ktconv.cli.exits import NOTHING_WRITTEN, Hints, errors_shown, interruptible
from ktconv.cli.options import (
    ProgressOption,
    SampleOption,
    SeedOption,
    TextOption,
    ThreadsOption,
    WindowsOption,
    network_facts,
    progress_over,
)
from ktconv.cli.output import JsonOption, notify, print_result
from ktconv.cli.parsing import argument, choice, flag, option
from ktconv.cli.ray import RayOption, reading_on
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.errors import MemoryShortError, SourceChangedError
from ktconv.system.units import parse_ranges, parse_size

Level = Literal["structure", "weights", "layers", "model"]  # as verify.LEVELS
_HINTS: Hints = {
    SourceChangedError: "make sure nothing writes there, then verify again",
    MemoryShortError: "run --level layers, or use a machine with more memory",
    MemoryError: "use fewer --threads or --tokens, or a lower --level",
}


@reads_source()
def verify(
    output: Annotated[
        Path, argument("Output of quantize-cpu, quantize-gpu or another converter.", "OUTPUT")
    ],
    other: Annotated[
        Path | None, argument("Another conversion to compare OUTPUT with.", "OTHER")
    ] = None,
    source: Annotated[
        str | None, option("The original checkpoint: a directory, GGUF file or hub id.", "MODEL")
    ] = None,
    reading: Reading = USUAL,
    importance: Annotated[
        Path | None,
        option("The file that quantize-cpu --importance was given, to prove scales by.", "FILE"),
    ] = None,
    calibrate: Annotated[
        Path | None,
        option("Second moments that quantize-cpu --calibrate used, to prove scales by.", "DIR"),
    ] = None,
    level: Annotated[
        Level | None,
        choice(Level, "How much to check; default: layers, or structure without --source."),
    ] = None,
    sample: SampleOption = 1.0,
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    max_memory: Annotated[
        str | None, option("Memory limit; default: headers plus 1.5GiB.", "SIZE")
    ] = None,
    tokens: Annotated[int, option("Tokens per layer at level layers.", "N", min=1, max=2048)] = 16,
    gradients: Annotated[
        bool, flag("--gradients", "At level layers, also check every gradient of LoRA.")
    ] = False,
    text: TextOption = None,
    windows: WindowsOption = 40,
    work_dir: Annotated[
        Path | None,
        option("Folder for hidden states at level model; default: in the cache.", "DIR"),
    ] = None,
    max_ppl_increase: Annotated[
        float | None, option("Maximum increase of perplexity; 0.02 is 2 %.", "F", min=0.0)
    ] = None,
    max_kl: Annotated[
        float | None, option("Maximum mean KL divergence, in nats.", "F", min=0.0)
    ] = None,
    beside: Annotated[
        Path | None,
        option(
            "Check that both outputs together contain every expert exactly once.", "OTHER", "--with"
        ),
    ] = None,
    tp: Annotated[
        str, option("Tensor-parallel sizes that GPU experts must support, e.g. 1,2,4.", "LIST")
    ] = "",
    ep: Annotated[
        str,
        option("Expert-parallel sizes that must divide the experts evenly, e.g. 1,2,4.", "LIST"),
    ] = "",
    report: Annotated[
        Path | None, option("Write a self-contained HTML report.", "FILE.html")
    ] = None,
    card: Annotated[
        bool, flag("--card", "Add the figures to OUTPUT's model card if all checks pass.")
    ] = False,
    ray: RayOption = None,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Check that a conversion is complete, uncorrupted and as accurate as its format allows.

    Levels, each including the previous ones: structure (every tensor, checksum and copy), weights
    (every element against the source), layers (the kernels' results), model (perplexity). For GPU
    experts, also checks how engines load and split them (--tp, --ep). With two outputs: reports
    whether they are equal, or where they differ. Exit code 1: a check failed.

    Example: ktconv verify qwen3-int4 --source Qwen/Qwen3-30B-A3B --report report.html
    """
    with errors_shown(as_json, _HINTS, progress):
        from ktconv.verify.command import run
        from ktconv.verify.request import Thresholds, VerifyRequest

        request = VerifyRequest(
            output=output,
            source=reading.source_if(source, output=output),
            importance=importance,
            calibrate=calibrate,
            level=level,
            sample=sample,
            seed=seed,
            threads=threads or None,
            tokens=tokens,
            gradients=gradients,
            text=text,
            windows=windows,
            work_dir=work_dir,
            thresholds=Thresholds(max_ppl_increase, max_kl),
            beside=beside,
            tp=parse_ranges(tp, "--tp") if tp else None,
            ep=parse_ranges(ep, "--ep") if ep else None,
            max_memory=None if max_memory is None else parse_size(max_memory, "--max-memory"),
        )
        with (
            interruptible(lambda: NOTHING_WRITTEN),
            reading_on(ray, request, other) as (
                request,
                read,
            ),
        ):
            facts, lines, passed = run(request, progress_over, notify, other, report, read, card)
        print_result(as_json, {**facts, **network_facts()}, lambda: lines)
        if not passed:
            raise typer.Exit(1)
