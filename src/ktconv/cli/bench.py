"""`ktconv bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click

from ktconv.cli.conflicts import Conflict, apart, refuse_conflicts
from ktconv.cli.exits import NOTHING_WRITTEN, Hints, errors_shown, interruptible
from ktconv.cli.help import ADVANCED, CASES, OUTPUT
from ktconv.cli.output import notify, print_text
from ktconv.cli.parameters import MOST_PARTS, choice, flag, option
from ktconv.cli.sources import USUAL
from ktconv.errors import UsageError

BenchMode = Literal["infer", "sft"]
BenchStage = Literal["forward", "pack"]
BenchMemory = Literal["auto", "map", "copy", "shared"]  # as runtime.memory.MEMORY
BenchFormat = Literal["table", "markdown", "json", "jsonl", "csv"]  # as bench.render.FORMATS
_NOT_OF_PACKING = (
    "--compare", "--experts", "--layer", "--memory", "--mode", "--model", "--numa", "--peers",
    "--plot", "--routing", "--threads", "--tokens", "--tolerance", "--top-k",
)  # fmt: skip
_NOT_OF_WHOLE = (
    "--compare", "--iters", "--isa", "--layer", "--peers", "--plot", "--routing", "--seconds",
    "--tokens", "--tolerance", "--top-k",
)  # fmt: skip
CONFLICTS = (
    Conflict("--generate !--model", "--generate belongs to --model", "give --model DIR too"),
    Conflict("--source !--generate", "--source belongs to --generate", "give --generate 512,128"),
    Conflict(
        "--generate --model --mode=sft",
        "--generate does not belong to --mode sft",
        "leave --mode out",
    ),
    Conflict(
        "--generate --model --stage=pack",
        "--generate does not belong to --stage pack",
        "leave --stage out",
    ),
    *apart(_NOT_OF_WHOLE, "--generate", when="--generate --model"),
    *apart(("--compare", "--plot", "--stage", "--tolerance"), "--mode sft"),
    *apart(("--rank",), "--mode infer"),
    *apart(_NOT_OF_PACKING, "--stage pack"),
    *(
        Conflict(
            f"{name} !--model",
            "--layer, --top-k and --memory belong to --model",
            "give --model DIR too",
        )
        for name in ("--layer", "--top-k", "--memory")
    ),
    *(
        Conflict(
            f"{name} --model",
            "--model uses the converted model's own weights",
            "omit --method, --shape, --experts and --numa",
        )
        for name in ("--method", "--shape", "--experts", "--numa !--numa=0")
    ),
)
_HINTS: Hints = {MemoryError: "use fewer --experts, --tokens or --threads, or a smaller --method"}


def bench(
    context: click.Context,
    mode: Annotated[
        BenchMode,
        choice(
            BenchMode,
            "Kind of measurement.",
            panel=CASES,
            detail="- infer: the forward of an MoE layer\n- sft: forward and backward of LoRA on "
            "the experts, memory, and the errors of every gradient; needs torch",
        ),
    ] = "infer",
    method: Annotated[
        str,
        option(
            "Weight formats, e.g. int4,bf16; or all.",
            "LIST",
            panel=CASES,
            detail="Separated by commas: names of the kernels, which an unknown name lists, and "
            "those of quantize-cpu, compressed-tensors and KTransformers, such as rawint4, W4A16 "
            "and AMXINT4.",
        ),
    ] = "",
    shape: Annotated[
        list[str] | None,
        option(
            "A model's name, or hidden,intermediate,experts,top-k.",
            "SHAPE",
            panel=CASES,
            detail="May be repeated.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "Measure a converted model's own weights.",
            "DIR",
            panel=CASES,
            detail="Takes a checkpoint too whose numbers the kernels compute with: rawint4, fp8, "
            "mxfp4, bf16 and others.",
        ),
    ] = None,
    generate: Annotated[
        str,
        option(
            "Measure all of --model: prompt and new tokens.",
            "N,N",
            panel=CASES,
            detail="Tokens per second of the model on the kernels and of transformers alone, in "
            "the experts and outside, e.g. 512,128.",
        ),
    ] = "",
    source: Annotated[
        str | None,
        option(
            "The checkpoint of --model, for --generate.",
            "MODEL",
            panel=CASES,
        ),
    ] = None,
    memory: Annotated[
        BenchMemory,
        choice(
            BenchMemory,
            "Memory for the weights of --model.",
            panel=ADVANCED,
            detail="- map: in their files, pages moved to the NUMA nodes that compute them\n"
            "- copy: in memory of those nodes, on huge pages\n"
            "- shared: a copy that processes share\n"
            "- auto: map, or copy where pages cannot be moved",
        ),
    ] = "auto",
    layer: Annotated[
        int | None, option("Layer of --model to measure.", "N", panel=ADVANCED, min=0)
    ] = None,
    top_k: Annotated[
        int | None,
        option("Experts per token of --model.", "K", "--top-k", panel=ADVANCED, min=1),
    ] = None,
    experts: Annotated[
        int | None, option("Use only this many experts.", "N", panel=CASES, min=1)
    ] = None,
    routing: Annotated[
        str,
        option(
            "Experts that tokens go to.",
            "KIND",
            panel=CASES,
            detail="- balanced: all experts equally often\n- concentrated: few experts\n"
            "- zipf:S: by a power law\n- trace:FILE: as `ktconv stats --trace FILE` recorded",
        ),
    ] = "balanced",
    tokens: Annotated[
        str,
        option(
            "Tokens per step.",
            "LIST",
            panel=CASES,
            detail="The default is 1,4,16,64,1024, with --mode sft 256.",
        ),
    ] = "",
    rank: Annotated[str, option("Ranks of LoRA, e.g. 8,16,64 (sft).", "LIST", panel=CASES)] = "16",
    threads: Annotated[str, option("Threads, e.g. 1,2; default: one per core.", "LIST")] = "",
    isa: Annotated[
        str,
        option(
            "Instruction set levels.",
            "LIST",
            panel=CASES,
            detail="auto: the highest of this machine; all: those that have kernels, or that pack "
            "with --stage pack; or a list of scalar, avx2, avx512, amx, neon.",
        ),
    ] = "auto",
    numa: Annotated[
        int,
        option(
            "NUMA parts; 0: one per NUMA node.",
            "N",
            panel=CASES,
            min=0,
            max=MOST_PARTS,
        ),
    ] = 0,
    iters: Annotated[int | None, option("Iterations per row.", "N", min=1)] = None,
    seconds: Annotated[float, option("Time per row.", "S", min=0.0, max=3600.0)] = 0.5,
    seed: Annotated[
        int, option("Seed of weights, tokens and routing.", "N", panel=ADVANCED, min=0)
    ] = 0,
    stage: Annotated[
        BenchStage,
        choice(
            BenchStage,
            "Part of the work to measure.",
            panel=CASES,
            detail="- forward: an MoE layer\n- pack: quantizing and packing",
        ),
    ] = "forward",
    form: Annotated[
        BenchFormat,
        choice(BenchFormat, "Form of the result.", "--format", panel=OUTPUT, metavar="FORM"),
    ] = "table",
    plot: Annotated[
        list[Path] | None,
        option(
            "Draw a roofline.",
            "FILE",
            panel=OUTPUT,
            detail="If the name of the file starts with sweep: tokens per second over tokens. May "
            "be repeated.",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        option("Compare with a report of --format json.", "FILE", panel=OUTPUT),
    ] = None,
    tolerance: Annotated[
        float,
        option(
            "Slowdown that counts as a regression.",
            "F",
            panel=OUTPUT,
            min=0.0,
            detail="A fraction: of the time of a row in --compare.",
        ),
    ] = 0.1,
    peers: Annotated[
        bool,
        flag("--peers", "Measure other implementations too, if installed.", CASES),
    ] = False,
) -> None:
    """Measure the MoE kernels against this machine's own limits.
    The result of every kernel is checked before it is timed.

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
        refuse_conflicts(context, CONFLICTS)
        if stage == "pack":
            with interruptible(lambda: NOTHING_WRITTEN):
                command.run_packing(method, shapes, isa, effort, seed, *show)
            return
        if model is not None and not Path(model).is_dir():
            from ktconv.source.remote.urls import no_directory

            raise UsageError(f"--model {no_directory(Path(model))}")
        if generate:
            from ktconv.model import require_packages

            with interruptible(lambda: NOTHING_WRITTEN):
                require_packages()
                from ktconv.generate.figures import run_whole

                original = USUAL.source_if(source)
                run_whole(str(model), original, generate, threads, memory, seed, *show)
            return
        request = Request(
            methods=command.parse_methods(method),
            shapes=command.parse_shapes(shapes),
            tokens=command.parse_tokens(tokens, mode),
            threads=command.parse_threads(threads),
            isas=command.parse_isas(isa, tuple(FORMATS.values())),
            routing=parse_routing(routing),
            model=None if model is None else Path(model),
            memory=memory,
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
            raise click.exceptions.Exit(1)
