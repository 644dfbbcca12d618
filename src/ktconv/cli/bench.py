"""`ktconv bench`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ktconv.cli.exits import NOTHING_WRITTEN, Hints, errors_shown, interruptible
from ktconv.cli.output import given_options, notify, print_text
from ktconv.cli.parsing import choice
from ktconv.errors import UsageError


class BenchStage(str, Enum):
    forward = "forward"
    pack = "pack"


class BenchFormat(str, Enum):
    """Names of `bench.render.FORMATS`; a test keeps the two equal."""

    table = "table"
    markdown = "markdown"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


_HINTS: Hints = {MemoryError: "use fewer --experts, --tokens or --threads, or a smaller --method"}


def bench(
    context: typer.Context,
    method: Annotated[
        str, typer.Option(help="Weight formats, e.g. int4,bf16; or all.", metavar="LIST")
    ] = "",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="A model's name or hidden,intermediate,experts,top-k; may be repeated.",
            metavar="SHAPE",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Measure a converted model's own weights.", metavar="DIR")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(min=0, help="Which layer of --model.", metavar="N")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=1, help="Experts per token of --model.", metavar="K"),
    ] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Use only this many experts.", metavar="N")
    ] = None,
    routing: Annotated[
        str, typer.Option(help="balanced, concentrated, zipf:S or trace:FILE.", metavar="KIND")
    ] = "balanced",
    tokens: Annotated[
        str, typer.Option(help="Tokens per step, e.g. 1,16,1024.", metavar="LIST")
    ] = "1,4,16,64,1024",
    threads: Annotated[
        str, typer.Option(help="Threads, e.g. 1,2; default: one per core.", metavar="LIST")
    ] = "",
    isa: Annotated[
        str,
        typer.Option(help="auto, all, or levels: scalar, avx2, avx512, amx, neon.", metavar="LIST"),
    ] = "auto",
    numa: Annotated[
        int,
        typer.Option(
            min=0, help="Parts of the weights; 0: as many as this machine has nodes.", metavar="N"
        ),
    ] = 0,
    iters: Annotated[
        int | None, typer.Option(min=1, help="Iterations per row.", metavar="N")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="Time per row.", metavar="S")
    ] = 0.5,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of weights, tokens and routing.", metavar="N")
    ] = 0,
    stage: Annotated[
        BenchStage, choice(BenchStage, "forward: an MoE layer; pack: quantizing and packing.")
    ] = BenchStage.forward,
    form: Annotated[
        BenchFormat, choice(BenchFormat, "Output format.", "--format")
    ] = BenchFormat.table,
    plot: Annotated[
        list[Path] | None,
        typer.Option(
            help="Draw a roofline, or tokens/s if the name starts with sweep.", metavar="FILE"
        ),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Compare with a report of --format json.", metavar="FILE")
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Slowdown of a row, as a fraction, that counts as a regression.",
            metavar="F",
        ),
    ] = 0.1,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also measure other implementations, if installed.")
    ] = False,
) -> None:
    """Measure the MoE kernels against this machine's own limits.

    The result of every kernel is checked before it is timed. Exit code 1: a kernel was wrong, or
    a row became slower than in --compare.

    Example: ktconv bench --method int4,int8 --shape deepseek-v3 --experts 32 --tokens 1,64
    """
    with errors_shown(form is BenchFormat.json, _HINTS):
        from ktconv.bench import command
        from ktconv.bench.cases import Request
        from ktconv.bench.measure import Effort
        from ktconv.bench.routing import parse_routing
        from ktconv.formats import FORMATS
        from ktconv.system.machine import numa_nodes

        effort, shapes, show = Effort(seconds, iters), shape or (), (form.value, notify, print_text)
        if stage is BenchStage.pack:
            command.check_packing_options(given_options(context))
            with interruptible(lambda: NOTHING_WRITTEN):
                command.run_packing(method, shapes, isa, effort, seed, *show)
            return
        weights = bool(method or shape or experts or numa)
        _check_model(model, weights, choice=(layer, top_k) != (None, None))
        request = Request(
            methods=command.parse_methods(method),
            shapes=command.parse_shapes(shapes),
            tokens=command.parse_tokens(tokens),
            threads=command.parse_threads(threads),
            isas=command.parse_isas(isa, tuple(FORMATS.values())),
            routing=parse_routing(routing),
            model=None if model is None else Path(model),
            layer=layer,
            top_k=top_k,
            experts=experts,
            parts=numa or numa_nodes(),
            effort=effort,
            seed=seed,
            skip=method.strip().lower() in ("", "all"),
            peers=peers,
        )
        with interruptible(lambda: NOTHING_WRITTEN):
            regressions = command.run(
                request, *show, plots=plot or (), baseline=compare, tolerance=tolerance
            )
        if regressions:
            raise typer.Exit(1)


def _check_model(model: str | None, weights: bool, choice: bool) -> None:
    """`weights`: options that define weights are given; `choice`: --layer or --top-k is given."""
    if model is None:
        if choice:
            raise UsageError("--layer and --top-k belong to --model", "give --model DIR too")
    elif weights:
        raise UsageError(
            "--model uses the converted model's own weights",
            "omit --method, --shape, --experts and --numa",
        )
    elif not model or not Path(model).is_dir():
        raise UsageError(f"--model {model or '(an empty name)'} is not a directory")
