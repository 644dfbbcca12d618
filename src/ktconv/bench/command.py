"""The options of `ktconv bench` as written, and the run that they ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ktconv import native
from ktconv.bench.measure import Effort
from ktconv.bench.presets import Shape, parse_shape
from ktconv.bench.render import render
from ktconv.bench.routing import parse_routing
from ktconv.bench.run import Request, bench, prepare
from ktconv.errors import UsageError
from ktconv.moe import METHODS, Method, method_named
from ktconv.system import machine
from ktconv.system.units import parse_ranges

# Rarely needed, and heavier than the rest: compare, plots and pack_stage are imported where used.

Say = Callable[[str], None]
Show = Callable[[str], None]

DEFAULT_METHODS = "int4,int8,bf16"
DEFAULT_SHAPE = "qwen3-30b-a3b"
MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class Options:
    """As the command line has them: lists are still text, empty where not given."""

    methods: str = ""
    shapes: tuple[str, ...] = ()
    model: str | None = None
    layer: int | None = None
    top_k: int | None = None
    experts: int | None = None
    routing: str = "balanced"
    tokens: str = "1"
    threads: str = ""
    isas: str = "auto"
    parts: int = 0  # 0: as many as this machine has NUMA nodes
    iterations: int | None = None
    seconds: float = 0.5
    seed: int = 0
    plots: tuple[Path, ...] = ()
    compare: Path | None = None
    tolerance: float = 0.1
    peers: bool = False
    given: frozenset[str] = frozenset()  # names of those that were written, as --top-k


def run(options: Options, form: str, say: Say, show: Show) -> int:
    """Shows the report in one of render.FORMATS; returns how many rows regressed against
    --compare."""
    request = prepare(_request(options))
    for path in options.plots:
        from ktconv.bench.plots import check_plot

        check_plot(path)
    old = None
    if options.compare is not None:
        from ktconv.bench.compare import read_report

        old = read_report(options.compare)
    foreseen = old and not request.peers  # peers' rows are known when they are measured
    report = bench(request, say, old.expect_any if old and foreseen else None)
    if old is not None:
        from ktconv.bench.compare import compare

        for note in compare(report, old, options.tolerance):
            say(note)
    show(render(report, form))
    for path in options.plots:
        from ktconv.bench.plots import plot

        plot(report, path)
    return sum(bool(row.regressed) for row in report.rows)


_PACKING = {"--stage", "--method", "--shape", "--isa", "--iters", "--seconds", "--seed", "--format"}


def run_packing(options: Options, form: str, say: Say, show: Show) -> None:
    """Shows what `--stage pack` measures."""
    from ktconv.bench.pack_stage import bench_packing, packable, render_packing

    for name in sorted(options.given - _PACKING):
        raise UsageError(f"{name} does not belong to --stage pack", f"leave {name} out")
    text = options.methods.strip().lower()
    methods = packable() if text in ("", "all") else [method.name for method in _methods(text)]
    effort = Effort(options.seconds, options.iterations)
    rows = bench_packing(
        methods, _shapes(options), _isas(options.isas), say, effort=effort, seed=options.seed
    )
    show(render_packing(rows, form))


def _request(options: Options) -> Request:
    if options.model is not None:
        if options.methods or options.shapes or options.experts or options.parts:
            raise UsageError(
                "--model brings its own weights",
                "leave --method, --shape, --experts and --numa out",
            )
        if not options.model or not Path(options.model).is_dir():
            raise UsageError(f"there is no directory {options.model or '(an empty name)'}")
    elif options.layer is not None or options.top_k is not None:
        raise UsageError("--layer and --top-k belong to --model", "give --model DIR too")
    return Request(
        methods=_methods(options.methods or DEFAULT_METHODS),
        shapes=_shapes(options),
        tokens=_numbers(options.tokens, "--tokens", MOST_TOKENS),
        threads=_threads(options.threads),
        isas=_isas(options.isas),
        routing=parse_routing(options.routing),
        model=None if options.model is None else Path(options.model),
        layer=options.layer,
        top_k=options.top_k,
        experts=options.experts,
        parts=options.parts or machine.numa_nodes(),
        effort=Effort(options.seconds, options.iterations),
        seed=options.seed,
        skip=options.methods.strip().lower() in ("", "all"),
        peers=options.peers,
    )


def _methods(text: str) -> tuple[Method, ...]:
    if text.strip().lower() == "all":
        return tuple(METHODS.values())
    return tuple(method_named(name.strip()) for name in dict.fromkeys(text.split(",")))


def _shapes(options: Options) -> tuple[Shape, ...]:
    texts = options.shapes or (DEFAULT_SHAPE,)
    return tuple(dict.fromkeys(parse_shape(text) for text in texts))


def _numbers(text: str, option: str, most: int) -> tuple[int, ...]:
    numbers = tuple(parse_ranges(text, option))
    if numbers[0] < 1 or numbers[-1] > most:
        raise UsageError(f"{option} {text!r} must be numbers from 1 to {most}")
    return numbers


def _threads(text: str) -> tuple[int, ...]:
    return _numbers(text, "--threads", machine.MAX_THREADS) if text else (machine.usable_cores(),)


def _isas(text: str) -> tuple[str, ...]:
    available, highest = native.isa_available(), native.isa()
    levels = list(native.ISA_NAMES.values())
    allowed = [name for name in available if levels.index(name) <= levels.index(highest)]
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    if names == ("auto",):
        return (highest,)
    if names == ("all",):
        return tuple(allowed)  # KTCONV_ISA only lowers
    for name in names:
        if name not in native.ISA_NAMES.values():
            raise UsageError(
                f"--isa {name!r} is not known",
                f"choose auto, all, or from: {', '.join(native.ISA_NAMES.values())}",
            )
        if name not in available:
            raise UsageError(f"this machine lacks {name}", f"it has: {', '.join(available)}")
        if name not in allowed:
            raise UsageError(
                f"--isa {name} is above KTCONV_ISA={highest}, which only lowers",
                "unset KTCONV_ISA, or leave the level out",
            )
    return names
