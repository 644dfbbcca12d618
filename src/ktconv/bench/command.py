"""`ktconv bench` behind its options: parse lists, measure, show the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from ktconv import native
from ktconv.bench.cases import Request
from ktconv.bench.compare import compare, read_report
from ktconv.bench.measure import Effort
from ktconv.bench.pack_stage import bench_packing, render_packing
from ktconv.bench.plots import plot
from ktconv.bench.presets import Shape, parse_shape
from ktconv.bench.render import render
from ktconv.bench.run import bench
from ktconv.errors import UsageError
from ktconv.formats import FORMATS, Format, format_named, output_formats
from ktconv.native.training import MAX_RANK
from ktconv.system import machine
from ktconv.system.text import Notify
from ktconv.system.units import counted, parse_ranges
from ktconv.writer.option_files import check_written
from ktconv.writer.pictures import picture_file

Show = Callable[[str], None]

DEFAULT_METHODS = "int4,int8,bf16"
DEFAULT_SHAPE = "qwen3-30b-a3b"
MOST_TOKENS = 1 << 20
DEFAULT_TOKENS = {"infer": "1,4,16,64,1024", "sft": "256"}  # by --mode


def run(
    request: Request,
    form: str,
    notify: Notify,
    show: Show,
    *,
    plots: Sequence[Path] = (),
    baseline: Path | None = None,
    tolerance: float = 0.1,
) -> int:
    """Shows the report in one of render.FORMATS; returns how many rows regressed against the
    `baseline`, an old report."""
    check_written([picture_file(path) for path in plots], (request.model, baseline))
    old = read_report(baseline) if baseline else None
    # Rows of peers are known when they are measured.
    report = bench(request, notify, old.expect_any if old and not request.peers else None)
    if old is not None:
        for note in compare(report, old, tolerance):
            notify(note)
    show(render(report, form))
    for path in plots:
        plot(report, path)
    return sum(bool(row.regressed) for row in report.rows)


def run_training(
    request: Request, ranks: tuple[int, ...], form: str, notify: Notify, show: Show
) -> int:
    """Shows what `--mode sft` measures; returns how many rows have an error beyond its bound."""
    if find_spec("torch") is None:
        raise UsageError(
            "--mode sft compares gradients with those of torch, which is not installed",
            "install it with: pip install 'ktconv[model]'",
        )
    from ktconv.bench.sft import render as sft_render
    from ktconv.bench.sft.run import Request as SftRequest
    from ktconv.bench.sft.run import bench as sft_bench

    report = sft_bench(SftRequest(request, ranks), notify)
    show(sft_render.render(report, form))
    for row in report.rows:
        for name in row.beyond_bound:
            notify(
                f"{row.method} on {row.isa}, {counted(row.tokens, 'token')}, rank {row.rank}: "
                f"{name} has a "
                f"relative error of {row.kernel_errors[name]:.2g}, at most {row.bounds[name]:g} is "
                "right"
            )
    return sum(bool(row.beyond_bound) for row in report.rows)


def run_packing(
    methods: str,
    shapes: Sequence[str],
    isas: str,
    effort: Effort,
    seed: int,
    form: str,
    notify: Notify,
    show: Show,
) -> None:
    """Shows what `--stage pack` measures."""
    names = list(output_formats())
    if methods.strip().lower() not in ("", "all"):
        names = [method.key for method in parse_methods(methods)]
    asked = parse_shapes(shapes), parse_isas(isas)
    show(render_packing(bench_packing(names, *asked, notify, effort=effort, seed=seed), form))


# ---- lists as they are written on the command line ----


def parse_methods(text: str) -> tuple[Format, ...]:
    text = text or DEFAULT_METHODS
    if text.strip().lower() == "all":
        return tuple(FORMATS.values())
    return tuple(format_named(name.strip()) for name in dict.fromkeys(text.split(",")))


def parse_shapes(texts: Sequence[str]) -> tuple[Shape, ...]:
    return tuple(dict.fromkeys(parse_shape(text) for text in texts or (DEFAULT_SHAPE,)))


def parse_numbers(text: str, option: str, most: int) -> tuple[int, ...]:
    numbers = tuple(parse_ranges(text, option))
    if numbers[0] < 1 or numbers[-1] > most:
        raise UsageError(f"{option} {text!r} must be numbers from 1 to {most}")
    return numbers


def parse_tokens(text: str, mode: str) -> tuple[int, ...]:
    return parse_numbers(text or DEFAULT_TOKENS[mode], "--tokens", MOST_TOKENS)


def parse_ranks(text: str) -> tuple[int, ...]:
    return parse_numbers(text, "--rank", MAX_RANK)


def parse_threads(text: str) -> tuple[int, ...]:
    return (
        parse_numbers(text, "--threads", machine.MAX_THREADS) if text else (machine.usable_cores(),)
    )


def parse_isas(text: str, methods: Sequence[Format] = ()) -> tuple[str, ...]:
    """`all` leaves out levels at which all `methods`, if given, run the code of a lower one."""
    available, highest = native.isa_available(), native.isa()
    levels = list(native.ISA_NAMES.values())
    allowed = [name for name in available if levels.index(name) <= levels.index(highest)]
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    if names == ("auto",):
        return (highest,)
    if names == ("all",):
        if methods:
            distinct = native.kernel_levels(*(method.layout for method in methods))
            allowed = [name for name in allowed if name in distinct]
        return tuple(allowed)  # KTCONV_ISA only lowers
    for name in names:
        if name not in native.ISA_NAMES.values():
            raise UsageError(
                f"--isa {name!r} is not known",
                f"choose auto, all, or from: {', '.join(native.ISA_NAMES.values())}",
            )
        if name not in available:
            raise UsageError(
                f"this machine does not support {name}", f"it has: {', '.join(available)}"
            )
        if name not in allowed:
            raise UsageError(
                f"--isa {name} is above KTCONV_ISA={highest}, which only lowers",
                "unset KTCONV_ISA, or leave the level out",
            )
    return names
