"""`ktconv bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ktconv.cli.exits import NOTHING_WRITTEN, Hints, errors_shown, interruptible
from ktconv.cli.output import given_options, notify, print_text
from ktconv.cli.parsing import MOST_PARTS, choice, flag, option
from ktconv.errors import UsageError

BenchMode = Literal["infer", "sft"]
BenchStage = Literal["forward", "pack"]
BenchFormat = Literal["table", "markdown", "json", "jsonl", "csv"]  # as bench.render.FORMATS
_HINTS: Hints = {MemoryError: "use fewer --experts, --tokens or --threads, or a smaller --method"}


def bench(
    context: typer.Context,
    mode: Annotated[
        BenchMode,
        choice(BenchMode, "infer: forward; sft: LoRA's forward and backward, and its errors."),
    ] = "infer",
    method: Annotated[str, option("Weight formats, e.g. int4,bf16; or all.", "LIST")] = "",
    shape: Annotated[
        list[str] | None,
        option("A model's name or hidden,intermediate,experts,top-k; may be repeated.", "SHAPE"),
    ] = None,
    model: Annotated[str | None, option("Measure a converted model's own weights.", "DIR")] = None,
    layer: Annotated[int | None, option("Which layer of --model.", "N", min=0)] = None,
    top_k: Annotated[
        int | None, option("Experts per token of --model.", "K", "--top-k", min=1)
    ] = None,
    experts: Annotated[int | None, option("Use only this many experts.", "N", min=1)] = None,
    routing: Annotated[
        str, option("balanced, concentrated, zipf:S or trace:FILE.", "KIND")
    ] = "balanced",
    tokens: Annotated[
        str, option("Tokens per step; default: 1,4,16,64,1024, with --mode sft 256.", "LIST")
    ] = "",
    rank: Annotated[str, option("Ranks of LoRA, e.g. 8,16,64.", "LIST")] = "16",
    threads: Annotated[str, option("Threads, e.g. 1,2; default: one per core.", "LIST")] = "",
    isa: Annotated[
        str, option("auto, all, or levels: scalar, avx2, avx512, amx, neon.", "LIST")
    ] = "auto",
    numa: Annotated[
        int,
        option(
            "Parts of the weights; 0: as many as this machine has nodes.",
            "N",
            min=0,
            max=MOST_PARTS,
        ),
    ] = 0,
    iters: Annotated[int | None, option("Iterations per row.", "N", min=1)] = None,
    seconds: Annotated[float, option("Time per row.", "S", min=0.0, max=3600.0)] = 0.5,
    seed: Annotated[int, option("Random seed of weights, tokens and routing.", "N", min=0)] = 0,
    stage: Annotated[
        BenchStage, choice(BenchStage, "forward: an MoE layer; pack: quantizing and packing.")
    ] = "forward",
    form: Annotated[BenchFormat, choice(BenchFormat, "Output format.", "--format")] = "table",
    plot: Annotated[
        list[Path] | None,
        option("Draw a roofline, or tokens/s if the name starts with sweep.", "FILE"),
    ] = None,
    compare: Annotated[
        Path | None, option("Compare with a report of --format json.", "FILE")
    ] = None,
    tolerance: Annotated[
        float,
        option("Slowdown of a row, as a fraction, that counts as a regression.", "F", min=0.0),
    ] = 0.1,
    peers: Annotated[
        bool, flag("--peers", "Also measure other implementations, if installed.")
    ] = False,
) -> None:
    """Measure the MoE kernels against this machine's own limits.

    The result of every kernel is checked before it is timed; with --mode sft, which needs torch,
    every gradient. Exit code 1: a kernel was wrong, or a row became slower than in --compare.

    Example: ktconv bench --method int4,int8 --shape deepseek-v3 --experts 32 --tokens 1,64
    """
    with errors_shown(form == "json", _HINTS):
        from ktconv.bench import command
        from ktconv.bench.cases import Request
        from ktconv.bench.measure import Effort
        from ktconv.bench.routing import parse_routing
        from ktconv.formats import FORMATS
        from ktconv.system.machine import numa_nodes

        effort, shapes, show = Effort(seconds, iters), shape or (), (form, notify, print_text)
        command.check_mode_options(mode, given_options(context))
        if stage == "pack":
            command.check_packing_options(given_options(context))
            with interruptible(lambda: NOTHING_WRITTEN):
                command.run_packing(method, shapes, isa, effort, seed, *show)
            return
        weights = bool(method or shape or experts or numa)
        _check_model(model, weights, choice=(layer, top_k) != (None, None))
        request = Request(
            methods=command.parse_methods(method),
            shapes=command.parse_shapes(shapes),
            tokens=command.parse_tokens(tokens, mode),
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
            if mode == "sft":
                bad = command.run_training(request, command.parse_ranks(rank), *show)
            else:
                bad = command.run(
                    request, *show, plots=plot or (), baseline=compare, tolerance=tolerance
                )
        if bad:
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
