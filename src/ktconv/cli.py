"""The command line: options, one library call each, and everything that is printed.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 a check failed,
2 bad usage or input, 3 I/O or resources, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ktconv import __version__
from ktconv.errors import KtconvError, UsageError
from ktconv.units import format_ranges, format_size, parse_ranges, parse_size

if TYPE_CHECKING:
    from ktconv.conversion import Outlook, Report
    from ktconv.quantize_gpu import run as gpu

app = typer.Typer(
    name="ktconv",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Convert Mixture-of-Experts checkpoints into CPU expert weights, provably right.",
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


class Method(str, Enum):
    """Names of `formats.FORMATS`; a test keeps the two equal."""

    int4 = "int4"
    int8 = "int8"


class Layout(str, Enum):
    safetensors = "safetensors"
    layers = "layers"


class Scale(str, Enum):
    amax = "amax"


class GpuMethod(str, Enum):
    """Names of `quantize_gpu.run.METHODS`; a test keeps the two equal."""

    rtn = "rtn"
    gptq = "gptq"


class Scheme(str, Enum):
    """Names of `quantize_gpu.scheme.BITS`; a test keeps the two equal."""

    w4a16 = "W4A16"
    w8a16 = "W8A16"


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


def main() -> None:
    """Entry point of the `ktconv` command."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ktconv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command("quantize-cpu")
def quantize_cpu_command(
    model: Annotated[
        str, typer.Argument(help="Checkpoint directory, or hub id (org/name) in the local cache.")
    ],
    output: Annotated[Path, typer.Argument(help="Directory to write; made if it is missing.")],
    method: Annotated[Method, typer.Option(help="Weight format.")] = Method.int4,
    numa: Annotated[
        int,
        typer.Option(min=0, help="NUMA parts; 0: as many as this machine has nodes.", metavar="N"),
    ] = 0,
    threads: Annotated[
        int, typer.Option(min=0, help="Worker threads; 0: one per usable CPU.", metavar="T")
    ] = 0,
    layers: Annotated[
        str, typer.Option(help="Convert only these layers, e.g. 0-3,7.", metavar="LIST")
    ] = "",
    layout: Annotated[
        Layout, typer.Option(help="Shards with an index, or _layer_L/_numa_N/*.kt folders.")
    ] = Layout.safetensors,
    scale: Annotated[
        Scale, typer.Option(help="How row scales are chosen; amax: from the largest weight.")
    ] = Scale.amax,
    max_shard_size: Annotated[
        str, typer.Option(help="No shard is larger than this.", metavar="SIZE")
    ] = "5GB",
    max_memory: Annotated[
        str, typer.Option(help="Use no more memory than this.", metavar="SIZE")
    ] = "8GiB",
    experts_only: Annotated[
        bool, typer.Option("--experts-only", help="Leave non-expert tensors out.")
    ] = False,
    mtp: Annotated[
        bool, typer.Option("--mtp/--no-mtp", help="Convert multi-token-prediction layers too.")
    ] = True,
    compat: Annotated[
        bool,
        typer.Option("--compat", help="Round to bf16 first, for the reference converter's bytes."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Read back and unpack everything written."),
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove what ktconv wrote there and start again.")
    ] = False,
    finalize: Annotated[
        bool,
        typer.Option("--finalize", help="Only write the index of layers converted before."),
    ] = False,
    exclude_experts: Annotated[
        Path | None,
        typer.Option(help="Leave out the experts that this file names.", metavar="FILE"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert the routed experts of a checkpoint into quantized CPU weights.

    The same command again continues a run that was interrupted.

    Example: ktconv quantize-cpu Qwen/Qwen3-30B-A3B qwen3-int4 --method int4 --numa 2
    """
    with _errors_shown():
        from ktconv.plan import Options
        from ktconv.quantize_cpu import Request, prepare, quantize_cpu

        options = Options(
            method=method.value,
            numa=numa,
            layout=layout.value,
            scale=scale.value,
            compat=compat,
            mtp=mtp,
            experts_only=experts_only,
            max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
        )
        request = Request(
            model=model,
            output=output,
            options=options,
            layers=parse_ranges(layers, "--layers") if layers else None,
            threads=threads or None,
            max_memory=parse_size(max_memory, "--max-memory"),
            verify=verify,
            overwrite=overwrite,
            finalize=finalize,
            exclude_experts=exclude_experts,
        )
        outlook = prepare(request)
        if dry_run:
            _print_result(as_json, outlook_facts(outlook), lambda: _print_outlook(outlook))
            return
        _say_notes(outlook)
        with _interruptible(
            f"Finished layers are kept: run the same command again to continue in {output}."
        ):
            observer = _observer(outlook)
            with observer:
                report = quantize_cpu(request, observer, outlook)
        _print_result(as_json, report_facts(report), lambda: _print_report(report))


@app.command("quantize-gpu")
def quantize_gpu_command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Checkpoint directory, or hub id (org/name) in the local cache.")
    ],
    output: Annotated[Path, typer.Argument(help="Directory to write; made if it is missing.")],
    method: Annotated[
        GpuMethod, typer.Option(help="rtn: round to nearest; gptq: calibrated on a text.")
    ] = GpuMethod.rtn,
    scheme: Annotated[
        Scheme, typer.Option(help="4 or 8 bits per weight.", case_sensitive=False)
    ] = Scheme.w4a16,
    group_size: Annotated[
        int, typer.Option(help="Weights of a row that share a scale; -1: all.", metavar="N")
    ] = 128,
    experts: Annotated[
        Path | None, typer.Option(help="Only the experts that this file names.", metavar="FILE")
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            help="gptq: FILE.jsonl, FILE.txt, or NAME[:CONFIG] of a dataset.", metavar="TEXT"
        ),
    ] = "",
    split: Annotated[str, typer.Option(help="gptq: part of a named dataset.")] = "train",
    samples: Annotated[int, typer.Option(help="gptq: samples to calibrate on.", metavar="N")] = 512,
    max_seq_len: Annotated[
        int, typer.Option("--max-seq-len", help="gptq: most tokens per sample.", metavar="N")
    ] = 2048,
    dampening: Annotated[
        float, typer.Option(help="gptq: share of the mean diagonal added to it.", metavar="F")
    ] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="gptq: of the choice of samples.")] = 0,
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="gptq: try one layer first.")
    ] = True,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:1; auto: a GPU if there is one.")
    ] = "auto",
    layers: Annotated[
        str, typer.Option(help="Convert only these layers, e.g. 0-3,7.", metavar="LIST")
    ] = "",
    mtp: Annotated[
        bool, typer.Option("--mtp/--no-mtp", help="Convert multi-token-prediction layers too.")
    ] = True,
    max_shard_size: Annotated[
        str, typer.Option(help="No shard is larger than this.", metavar="SIZE")
    ] = "5GB",
    threads: Annotated[
        int, typer.Option(min=0, help="Worker threads; 0: one per usable CPU.", metavar="T")
    ] = 0,
    max_memory: Annotated[
        str, typer.Option(help="rtn: use no more memory than this.", metavar="SIZE")
    ] = "8GiB",
    max_gpu_memory: Annotated[
        str, typer.Option(help="gptq: use no more memory of the GPU.", metavar="SIZE")
    ] = "",
    max_cpu_memory: Annotated[
        str, typer.Option(help="gptq: weights beyond this go to disk.", metavar="SIZE")
    ] = "",
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read back everything written.")
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove what ktconv wrote there and start again.")
    ] = False,
    finalize: Annotated[
        bool,
        typer.Option("--finalize", help="Only write the index of layers converted before."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Quantize the routed experts of a checkpoint for GPUs, into the compressed-tensors format.

    Everything but routed experts stays as it is. The same command again continues a run that
    was interrupted.

    Example: ktconv quantize-gpu Qwen/Qwen3-30B-A3B qwen3-w4a16 --method rtn --scheme W4A16
    """
    with _errors_shown():
        from ktconv.quantize_gpu.calibration import Calibration
        from ktconv.quantize_gpu.classes import class_lines
        from ktconv.quantize_gpu.run import Request, prepare, quantize_gpu
        from ktconv.quantize_gpu.target import Options

        calibrated = method is GpuMethod.gptq
        _refuse_options_of(GpuMethod.rtn if calibrated else GpuMethod.gptq, _given(context))
        calibration = Calibration(dataset, split, samples, max_seq_len, seed) if dataset else None
        options = Options(
            method=method.value,
            scheme=scheme.value,
            group_size=group_size,
            mtp=mtp,
            max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
            calibration=calibration if calibrated else None,
            dampening=dampening if calibrated else None,
        )
        request = Request(
            model=model,
            output=output,
            options=options,
            layers=parse_ranges(layers, "--layers") if layers else None,
            experts=experts,
            device=device,
            threads=threads or None,
            max_memory=parse_size(max_memory, "--max-memory"),
            max_gpu_memory=_limit(max_gpu_memory, "--max-gpu-memory"),
            max_cpu_memory=_limit(max_cpu_memory, "--max-cpu-memory"),
            self_test=self_test,
            verify=verify,
            overwrite=overwrite,
            finalize=finalize,
        )
        outlook = prepare(request)
        if dry_run:
            facts = outlook_facts(outlook) | gpu_facts(outlook)
            _print_result(as_json, facts, lambda: _print_gpu_outlook(outlook))
            return
        for line in class_lines(outlook.classes):
            _say(line)
        _say_notes(outlook)
        with _interruptible(
            f"Finished layers are kept: run the same command again to continue in {output}."
        ):
            observer = _observer(outlook)
            with observer:
                report = quantize_gpu(request, observer, outlook, _say)
        facts = report_facts(report) | gpu_facts(outlook)
        _print_result(as_json, facts, lambda: _print_gpu_report(report))


_OPTIONS_OF = {
    GpuMethod.rtn: {"--max-memory"},
    GpuMethod.gptq: {
        "--dataset", "--split", "--samples", "--max-seq-len", "--dampening", "--seed",
        "--self-test", "--max-gpu-memory", "--max-cpu-memory",
    },
}  # fmt: skip


def _refuse_options_of(other: GpuMethod, given: frozenset[str]) -> None:
    """Who gives an option of another method means that one."""
    if wrong := sorted(given & _OPTIONS_OF[other]):
        limit = "; --max-cpu-memory is the limit of gptq" if other is GpuMethod.rtn else ""
        raise UsageError(
            f"{wrong[0]} belongs to --method {other.value}",
            f"add --method {other.value}, or leave it out{limit}",
        )


def _limit(text: str, option: str) -> int | None:
    return parse_size(text, option) if text else None


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A checkpoint, an output of ktconv, or a hub id.")],
    as_json: JsonOption = False,
) -> None:
    """Tell what a checkpoint or a converted output holds, from headers alone.

    Example: ktconv inspect qwen3-int4
    """
    with _errors_shown():
        from ktconv.inspection import inspect_path

        facts = inspect_path(path)
        _print_result(as_json, facts, lambda: _print_facts(facts))


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Tell what this machine can do: CPU, AMX, NUMA, memory, disk, optional packages.

    Example: ktconv doctor
    """
    with _errors_shown():
        from ktconv.doctor import examine

        facts = examine(Path.cwd())
        _print_result(as_json, facts, lambda: _print_facts(facts))


@app.command()
def bench(
    context: typer.Context,
    method: Annotated[
        str, typer.Option(help="Weight formats, e.g. int4,bf16; or all.", metavar="LIST")
    ] = "",
    shape: Annotated[
        list[str] | None,
        typer.Option(help="A model's name or hidden,intermediate,experts,top-k; may be repeated."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Measure a converted model's own weights.", metavar="DIR")
    ] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Which layer of --model.")] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Experts per token of --model.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Use only this many experts.", metavar="N")
    ] = None,
    routing: Annotated[
        str, typer.Option(help="balanced, concentrated, zipf:S or trace:FILE.")
    ] = "balanced",
    tokens: Annotated[
        str, typer.Option(help="Tokens per step, e.g. 1,16,1024.", metavar="LIST")
    ] = "1,4,16,64,1024",
    threads: Annotated[
        str, typer.Option(help="Threads, e.g. 1,2; default: one per core.", metavar="LIST")
    ] = "",
    isa: Annotated[
        str, typer.Option(help="auto, all, or levels: scalar, avx512, amx.", metavar="LIST")
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
    seconds: Annotated[float, typer.Option(min=0.0, help="Time per row.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, tokens and routing.")] = 0,
    stage: Annotated[
        BenchStage, typer.Option(help="forward: an MoE layer; pack: quantizing and packing.")
    ] = BenchStage.forward,
    form: Annotated[BenchFormat, typer.Option("--format", help="Of stdout.")] = BenchFormat.table,
    plot: Annotated[
        list[Path] | None,
        typer.Option(help="Draw a roofline, or tokens/s if the name starts with sweep."),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Compare with a report of --format json.", metavar="FILE")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="A row that is so much slower than then is a regression.")
    ] = 0.1,
    peers: Annotated[
        bool, typer.Option("--peers", help="Other implementations too, if they are installed.")
    ] = False,
) -> None:
    """Measure the MoE kernels against this machine's own limits.

    Every kernel is proven right before it is timed. Exit code 1: a kernel was wrong, or a row
    became slower than in --compare.

    Example: ktconv bench --method int4,int8 --shape deepseek-v3 --experts 32 --tokens 1,64
    """
    with _errors_shown():
        from ktconv.bench import command

        options = command.Options(
            methods=method,
            shapes=tuple(shape or ()),
            model=model,
            layer=layer,
            top_k=top_k,
            experts=experts,
            routing=routing,
            tokens=tokens,
            threads=threads,
            isas=isa,
            parts=numa,
            iterations=iters,
            seconds=seconds,
            seed=seed,
            plots=tuple(plot or ()),
            compare=compare,
            tolerance=tolerance,
            peers=peers,
            given=_given(context),
        )
        with _interruptible("Nothing was written."):
            if stage is BenchStage.pack:
                command.run_packing(options, form.value, _say, _print_text)
                return
            regressions = command.run(options, form.value, _say, _print_text)
        if regressions:
            raise typer.Exit(1)


def _given(context: typer.Context) -> frozenset[str]:
    """Options that were written, whatever their value: by their first long names."""
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(str(name)) for name in names}
    return frozenset(
        names[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"
    )


@app.command()
def stats(
    model: Annotated[
        str,
        typer.Argument(
            help="Checkpoint directory or hub id; or what --json or --trace wrote, to choose anew."
        ),
    ],
    text: Annotated[
        Path | None,
        typer.Option(help="Text to read instead of the one that ships.", metavar="FILE"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the text; default: 20480.", metavar="N"),
    ] = None,
    max_memory: Annotated[
        str,
        typer.Option(
            help="Keep no more of the weights in memory, the rest in TMPDIR.", metavar="SIZE"
        ),
    ] = "",
    layers: Annotated[
        str, typer.Option(help="Only these layers, e.g. 0-3,7.", metavar="LIST")
    ] = "",
    hot: Annotated[
        int | None, typer.Option(min=1, help="Choose the N most used of each layer.", metavar="N")
    ] = None,
    hot_share: Annotated[
        float | None,
        typer.Option(
            help="Choose the fewest of each layer that take this share, e.g. 0.9.", metavar="F"
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the chosen, for --experts and --exclude-experts.", metavar="FILE"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write all ids, for bench --routing trace:FILE.", metavar="FILE.safetensors"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count how often a model's own router chooses each expert on a text.

    Needs transformers, and memory for the model.

    Example: ktconv stats Qwen/Qwen3-30B-A3B --text prose.txt --hot 32 --write hot.json
    """
    with _errors_shown():
        from ktconv.stats import command

        options = command.Options(
            model=model,
            text=text,
            max_tokens=max_tokens,
            max_memory=parse_size(max_memory, "--max-memory") if max_memory else None,
            layers=parse_ranges(layers, "--layers") if layers else None,
            hot=hot,
            hot_share=hot_share,
            write=write,
            trace=trace,
        )
        with _interruptible("Nothing was written."):
            facts, lines = command.run(options, _say)
        _print_result(as_json, facts, lambda: print("\n".join(lines)))


class Level(str, Enum):
    """Names of `verify.LEVELS`; a test keeps the two equal."""

    structure = "structure"
    weights = "weights"
    layers = "layers"
    model = "model"


@app.command()
def verify(
    output: Annotated[
        Path,
        typer.Argument(help="What quantize-cpu, quantize-gpu or another converter wrote."),
    ],
    other: Annotated[
        Path | None, typer.Argument(help="Another conversion to compare OUTPUT with.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="The checkpoint that was converted: a directory or hub id.", metavar="MODEL"
        ),
    ] = None,
    level: Annotated[
        Level | None,
        typer.Option(help="How far to go; default: layers, or structure without --source."),
    ] = None,
    sample: Annotated[
        float, typer.Option(help="Share of experts and layers to read, more than 0, at most 1.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample and of random inputs.")] = 0,
    threads: Annotated[
        int, typer.Option(min=0, help="Worker threads; 0: one per usable CPU.", metavar="T")
    ] = 0,
    tokens: Annotated[
        int, typer.Option(min=1, max=2048, help="Tokens per layer of level layers.", metavar="N")
    ] = 16,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to read instead of the one that ships.", metavar="FILE"),
    ] = None,
    windows: Annotated[
        int, typer.Option(min=1, help="Windows of 512 tokens of level model.", metavar="N")
    ] = 40,
    max_ppl_increase: Annotated[
        float | None,
        typer.Option(min=0.0, help="Accepted growth of perplexity; 0.02 is 2 %.", metavar="F"),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(min=0.0, help="Accepted mean KL divergence, in nats.", metavar="F"),
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            "--with", help="Together with this one, is each expert there once?", metavar="OTHER"
        ),
    ] = None,
    tp: Annotated[
        str,
        typer.Option(
            help="Experts for GPUs must split evenly on these numbers of GPUs, e.g. 1,2,4.",
            metavar="LIST",
        ),
    ] = "",
    ep: Annotated[
        str,
        typer.Option(
            help="Numbers of GPUs that must hold equally many experts each.", metavar="LIST"
        ),
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="Write a self-contained HTML report.", metavar="FILE.html")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that a conversion is complete, uncorrupted and as good as its format allows.

    Levels, each with the ones before: structure (every tensor, checksum and copy), weights
    (every element against the source), layers (the kernels' results), model (perplexity). Experts
    for GPUs are held against how engines load and split them, too (--tp, --ep). With two
    conversions: whether they are equal, or where they differ. Exit code 1: something does not hold.

    Example: ktconv verify qwen3-int4 --source Qwen/Qwen3-30B-A3B --report report.html
    """
    with _errors_shown():
        from ktconv.verify import command

        options = command.Options(
            output=output,
            other=other,
            source=source,
            level=level.value if level else None,
            sample=sample,
            seed=seed,
            threads=threads or None,
            tokens=tokens,
            text=text,
            windows=windows,
            max_ppl_increase=max_ppl_increase,
            max_kl=max_kl,
            beside=beside,
            tp=parse_ranges(tp, "--tp") if tp else None,
            ep=parse_ranges(ep, "--ep") if ep else None,
            report=report,
        )
        with _interruptible("Nothing was written."):
            facts, lines, passed = command.run(options, _progression, _say)
        _print_result(as_json, facts, lambda: print("\n".join(lines)))
        if not passed:
            raise typer.Exit(1)


@app.command("merge")
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
    with _errors_shown():
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
            _print_result(as_json, outlook_facts(outlook), lambda: _print_outlook(outlook))
            return
        _say_notes(outlook)
        with _interruptible(
            f"Finished layers are kept: run the same command again to continue in {output}."
        ):
            observer = _observer(outlook)
            with observer:
                report = merge(request, observer, outlook)
        _print_result(as_json, report_facts(report), lambda: _print_report(report))


@app.command("reshard")
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
    with _errors_shown():
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
            _print_result(as_json, outlook_facts(outlook), lambda: _print_outlook(outlook))
            return
        _say_notes(outlook)
        with _interruptible(
            f"Finished layers are kept: run the same command again to continue in {output}."
        ):
            observer = _observer(outlook)
            with observer:
                report = reshard(request, observer, outlook)
        _print_result(as_json, report_facts(report), lambda: _print_report(report))


# ---- results ----


def outlook_facts(outlook: Outlook[Any]) -> dict[str, Any]:
    """The JSON of a dry run."""
    plan = outlook.plan
    chosen = [unit.layer for unit in outlook.units if unit.layer]
    units = [*outlook.units, *plan.others]
    return {
        "schema": 1,
        "model_type": plan.checkpoint.config.get("model_type"),
        **plan.target.facts(),
        "layers": len(chosen),
        "layer_indices": [layer.index for layer in chosen],
        "mtp_layers": [layer.index for layer in chosen if layer.is_mtp],
        "experts": max(len(unit.experts) for unit in outlook.units),
        "experts_left_out": sum(
            len(unit.layer.experts) - len(unit.experts) for unit in outlook.units if unit.layer
        ),
        "hidden_size": chosen[0].hidden_size,
        "intermediate_size": chosen[0].intermediate_size,
        "encodings": sorted({layer.encoding for layer in chosen}),
        "source_bytes": sum(unit.source_bytes for unit in units),
        "output_bytes": sum(unit.output_bytes for unit in units),
        "files": sum(len(unit.shard_counts) for unit in units),
        "copied_tensors": sum(len(unit.copies) for unit in plan.others),
        "copied_bytes": sum(unit.data_bytes for unit in plan.others),
        "copied_files": [str(path) for path in plan.sidecars],
        "skipped": list(plan.skipped),
        "notes": list(plan.notes),
        "threads": outlook.threads,
        "peak_memory_bytes": outlook.peak_memory,
        "disk_needed_bytes": sum(unit.output_bytes for unit in units),
        "disk_free_bytes": outlook.disk_free,
        "seconds": 0.0,
    }


def report_facts(report: Report) -> dict[str, Any]:
    """The JSON of a finished run."""
    from ktconv.conversion import peak_rss

    return outlook_facts(report.outlook) | {
        "seconds": round(report.seconds, 3),
        "source_bytes_read": report.source_bytes,
        "gb_per_second": round(report.source_bytes / 1e9 / max(report.seconds, 1e-9), 3),
        "peak_rss_bytes": peak_rss(),
        "complete": report.complete,
        "converted_units": list(report.converted),
        "kept_units": list(report.kept),
        "missing_units": list(report.missing),
        "mean_relative_rms_error": report.mean_error,
        "worst_tensor": report.worst[0] if report.worst else None,
        "worst_relative_rms_error": report.worst[1] if report.worst else None,
        **report.more,
    }


def _print_text(text: str) -> None:
    _print_result(False, {}, lambda: print(text))


def _print_result(as_json: bool, facts: dict[str, Any], show: Callable[[], None]) -> None:
    try:
        if as_json:
            print(json.dumps(facts, indent=1))
        else:
            show()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left, as `| head` does: the work is done all the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_outlook(outlook: Outlook[Any]) -> None:
    facts, request = outlook_facts(outlook), outlook.request
    layers = format_ranges(facts["layer_indices"])
    mtp = f", MTP: {format_ranges(facts['mtp_layers'])}" if facts["mtp_layers"] else ""
    copied = f"{facts['copied_tensors']} tensors, {format_size(facts['copied_bytes'])}"
    enough = "" if facts["disk_free_bytes"] > facts["disk_needed_bytes"] else "  NOT ENOUGH"
    container = f"{facts['files']} shards" if facts["files"] else "layer folders"
    rows = {
        "model": f"{request.model} ({facts['model_type']})",
        "MoE layers": f"{facts['layers']} ({layers}{mtp})",
        "experts": f"{facts['experts']} of hidden {facts['hidden_size']}, "
        f"intermediate {facts['intermediate_size']}, {', '.join(facts['encodings'])}",
        "write": f"{outlook.plan.target.description}, {container}",
        "source": f"{facts['source_bytes']} bytes ({format_size(facts['source_bytes'])})",
        "output": f"{facts['output_bytes']} bytes ({format_size(facts['output_bytes'])}), "
        f"plus index and manifest",
        "copied as is": copied if facts["copied_tensors"] else "nothing",
        "files copied": ", ".join(facts["copied_files"]) or "none",
        "skipped": "; ".join(facts["skipped"]) or "nothing",
        "memory": f"{format_size(facts['peak_memory_bytes'])} peak with {facts['threads']} threads",
        "disk": f"{format_size(facts['disk_needed_bytes'])} needed, "
        f"{format_size(facts['disk_free_bytes'])} free{enough}",
    }
    for note in facts["notes"]:
        rows[f"note {len(rows) - 10}"] = note
    _print_facts(rows)


def _print_report(report: Report) -> None:
    from ktconv.conversion import describe_units

    output = report.outlook.request.output
    if not report.converted and report.complete:
        print(f"{output} is complete: nothing to do.")
        return
    if report.converted:
        rate = report.source_bytes / 1e9 / max(report.seconds, 1e-9)
        print(
            f"Converted {describe_units(report.converted)} in {report.seconds:.1f} s "
            f"({rate:.2f} GB/s of source)."
        )
    if report.worst and report.mean_error is not None:
        print(
            f"Relative RMS error: mean {report.mean_error:.4f}, "
            f"worst {report.worst[1]:.4f} ({report.worst[0]})."
        )
    if report.complete:
        print(f"{output} is complete.")
    elif report.missing:
        print(f"{output} still lacks {describe_units(report.missing)}; the rest comes with them.")
    else:
        print(f"Another ktconv is at work in {output}; it completes it, else --finalize does.")


def gpu_facts(outlook: gpu.Outlook) -> dict[str, Any]:
    """What the JSON of quantize-gpu says beside that of any conversion."""
    return {"classes": [asdict(count) for count in outlook.classes]}


def _print_gpu_outlook(outlook: gpu.Outlook) -> None:
    from ktconv.quantize_gpu.classes import class_lines

    _print_outlook(outlook)
    print("\n".join(class_lines(outlook.classes)))


def _print_gpu_report(report: Report) -> None:
    if coverage := report.more.get("coverage"):
        from ktconv.quantize_gpu.coverage import LayerCoverage, coverage_lines

        seen = {int(layer): LayerCoverage.of_record(told) for layer, told in coverage.items()}
        print("\n".join(coverage_lines(seen)))
    _print_report(report)


def _print_facts(facts: dict[str, Any]) -> None:
    """Names and values as aligned lines; nested names indented."""
    for line in _fact_lines(facts, 0):
        print(line)


def _fact_lines(facts: dict[str, Any], indent: int) -> Iterator[str]:
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        label = " " * indent + name.replace("_", " ")
        if isinstance(value, dict):
            yield label
            yield from _fact_lines(value, indent + 2)
        else:
            yield f"{label:<{indent + width}}  {_fact_text(name, value)}"


def _fact_text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("bytes"):
        return f"{value} ({format_size(value)})"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else str(value)


# ---- progress and errors ----


def _say(text: str) -> None:
    """On stderr, if anybody still reads it: a lost log must not end an hour of work."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _say_notes(outlook: Outlook[Any]) -> None:
    for note in outlook.plan.notes:
        _say(f"note: {note}")
    for skipped in outlook.plan.skipped:
        _say(f"skipped: {skipped}")


def _observer(outlook: Outlook[Any]) -> Any:
    return _progression({unit.key: unit.source_bytes for unit in outlook.plan.units})


def _progression(sizes: dict[str, int]) -> Any:
    """Progress over units of these sizes, as the terminal allows."""
    from ktconv.progress import BarObserver, LineObserver

    return BarObserver(sizes) if BarObserver.fits() else LineObserver(sizes, _say)


@contextmanager
def _interruptible(way_out: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM end a run cleanly, with exit code 130."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        _say(f"\nInterrupted. {way_out}")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _errors_shown() -> Iterator[None]:
    """KtconvError as one sentence and a hint on stderr, with its exit code."""
    try:
        yield
    except KtconvError as error:
        _say(f"Error: {_sentence(str(error))}")
        if error.hint:
            _say(f"Hint: {_sentence(error.hint)}")
        raise typer.Exit(error.exit_code) from None
    except OSError as error:  # where no file or tensor was known; the library knows most
        where = f" {error.filename}" if error.filename else ""
        _say(f"Error: the system refused{where}: {_sentence(error.strerror or str(error))}")
        raise typer.Exit(3) from None
    except MemoryError:
        _say("Error: this machine has too little memory for this.")
        _say("Hint: use fewer --threads.")
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _sentence(text: str) -> str:
    """With one full stop at its end, and names of absurd length cut in the middle."""
    return re.sub(r"(\S{140})\S{21,}(\S{140})", r"\1...\2", text).rstrip(".") + "."


if __name__ == "__main__":
    main()
