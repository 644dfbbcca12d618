"""`ktconv verify`: options as a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click

from ktconv.cli.conflicts import Conflict, refuse_conflicts
from ktconv.cli.exits import NOTHING_WRITTEN, Hints, errors_shown, interruptible
from ktconv.cli.help import ADVANCED, CHECKS, OUTPUT, RUN, SOURCE
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
from ktconv.cli.parameters import argument, choice, flag, option
from ktconv.cli.ray import RayOption, reading_on
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.errors import MemoryShortError, SourceChangedError
from ktconv.system.units import parse_ranges, parse_size

Level = Literal["structure", "weights", "layers", "model"]  # as verify.LEVELS
_OF_ONE = (
    "--source", "--config", "--map", "--tower", "--importance", "--calibrate", "--level",
    "--gradients", "--text", "--work-dir", "--max-ppl-increase", "--max-kl", "--with", "--tp",
    "--ep", "--ray",
)  # fmt: skip
_ONE_ALONE = "omit it, or verify each against its --source"
_CARD = "omit it, or verify OUTPUT against its --source"
CONFLICTS = (
    *(
        Conflict(
            f"{name} OTHER", f"{name} does not apply when comparing two conversions", _ONE_ALONE
        )
        for name in _OF_ONE
    ),
    Conflict("--card OTHER", "--card does not apply when comparing two conversions", _CARD),
    Conflict("--card !--source", "--card does not apply without --source", _CARD),
)
_HINTS: Hints = {
    SourceChangedError: "make sure nothing writes there, then verify again",
    MemoryShortError: "run --level layers, or use a machine with more memory",
    MemoryError: "use fewer --threads or --tokens, or a lower --level",
}


@reads_source()
def verify(
    context: click.Context,
    output: Annotated[
        Path,
        argument(
            "Output of quantize-cpu, quantize-gpu or another tool.",
            "OUTPUT",
            "An output without a manifest can be verified too, with --source.",
        ),
    ],
    other: Annotated[Path | None, argument("A conversion to compare OUTPUT with.", "OTHER")] = None,
    source: Annotated[
        str | None,
        option(
            "The original checkpoint.",
            "MODEL",
            panel=SOURCE,
            detail="A directory, GGUF file, hub id or URL. Without it only the structure is "
            "checked.",
        ),
    ] = None,
    reading: Reading = USUAL,
    importance: Annotated[
        Path | None,
        option(
            "File that quantize-cpu --importance was given.",
            "FILE",
            panel=ADVANCED,
            detail="Scales are proven by it; without it they are only proven to be possible.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        option(
            "Hessians that quantize-cpu --calibrate was given.",
            "DIR",
            panel=ADVANCED,
            detail="Scales are proven by them; without them they are only proven to be possible.",
        ),
    ] = None,
    level: Annotated[
        Level | None,
        choice(
            Level,
            "Depth of the check.",
            panel=CHECKS,
            metavar="LEVEL",
            detail="Each level includes those before it. The default is layers, or structure "
            "without --source.\n\n- structure: every tensor, checksum and copied file\n"
            "- weights: every element against the source\n- layers: the kernels' results\n"
            "- model: perplexity and KL divergence",
        ),
    ] = None,
    sample: SampleOption = 1.0,
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    max_memory: Annotated[
        str | None,
        option("Memory limit; default: headers plus 1.5GiB.", "SIZE", panel=RUN),
    ] = None,
    tokens: Annotated[
        int,
        option("Tokens per layer at level layers.", "N", panel=ADVANCED, min=1, max=2048),
    ] = 16,
    gradients: Annotated[
        bool,
        flag(
            "--gradients",
            "Check every gradient of LoRA at level layers.",
            CHECKS,
            "Runs LoRA with a fixed seed, forward and backward, on every instruction set, and "
            "reports the errors that quantization causes in gradients. Needs torch.",
        ),
    ] = False,
    text: TextOption = None,
    windows: WindowsOption = 40,
    work_dir: Annotated[
        Path | None,
        option(
            "Folder for hidden states at level model.",
            "DIR",
            panel=ADVANCED,
            detail="An interrupted run continues from there. The default is in the user's cache.",
        ),
    ] = None,
    max_ppl_increase: Annotated[
        float | None,
        option(
            "Maximum increase of perplexity; 0.02 is 2 %.",
            "F",
            panel=CHECKS,
            min=0.0,
            detail="The default is 0.05 for INT4 and 0.01 for INT8.",
        ),
    ] = None,
    max_kl: Annotated[
        float | None,
        option(
            "Maximum mean KL divergence, in nats.",
            "F",
            panel=CHECKS,
            min=0.0,
            detail="The default is 0.05 for INT4 and 0.01 for INT8.",
        ),
    ] = None,
    beside: Annotated[
        Path | None,
        option(
            "Output that has the other experts of the model.",
            "OTHER",
            "--with",
            panel=CHECKS,
            detail="Checks that both together have every expert exactly once: docs/hot-experts.md.",
        ),
    ] = None,
    tp: Annotated[
        str,
        option(
            "Tensor-parallel sizes to support, e.g. 1,2,4.",
            "LIST",
            panel=CHECKS,
            detail="Checked for GPU experts: a size that they cannot be cut into fails.",
        ),
    ] = "",
    ep: Annotated[
        str,
        option(
            "Expert-parallel sizes to support, e.g. 1,2,4.",
            "LIST",
            panel=CHECKS,
            detail="Checked for GPU experts: a size that does not divide them evenly fails.",
        ),
    ] = "",
    report: Annotated[
        Path | None,
        option("Write a self-contained HTML report.", "FILE.html", panel=OUTPUT),
    ] = None,
    card: Annotated[
        bool,
        flag(
            "--card",
            "Add the figures to OUTPUT's model card.",
            OUTPUT,
            "If all checks pass. A section that is there is replaced, or removed where one fails.",
        ),
    ] = False,
    ray: RayOption = None,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Check that a conversion is complete, uncorrupted and as accurate as its format allows.
    With two outputs: report whether they are equal, or where they differ.

    Example: ktconv verify qwen3-int4 --source Qwen/Qwen3-30B-A3B --report report.html
    """
    with errors_shown(as_json, _HINTS, progress):
        from ktconv.verify.command import run
        from ktconv.verify.request import Thresholds, VerifyRequest

        refuse_conflicts(context, CONFLICTS)
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
            reading_on(ray, request) as (request, read),
        ):
            facts, lines, passed = run(request, progress_over, notify, other, report, read, card)
        print_result(as_json, {**facts, **network_facts()}, lambda: lines)
        if not passed:
            raise click.exceptions.Exit(1)
