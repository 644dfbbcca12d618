"""The command line; benchmarks/README.md has examples."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.accuracy.variants import VARIANTS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.accuracy", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    outliers = commands.add_parser("outliers", help="write a checkpoint with outliers")
    outliers.add_argument("model", type=Path)
    outliers.add_argument("output", type=Path)
    outliers.add_argument("--seed", type=int, default=1)
    outliers.add_argument("--spread", type=float, default=0.5, help="scale of the exponents")

    run = commands.add_parser("run", help="convert and evaluate what the results lack")
    run.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    run.add_argument("--work", type=Path, required=True, help="folder for outputs and statistics")
    run.add_argument("--results", type=Path, required=True, help="JSON lines, which are added to")
    run.add_argument("--text", type=Path, help="default: eval.txt of the model")
    run.add_argument(
        "--split",
        choices=("halves", "swapped", "blocks"),
        default="halves",
        help="calibrate on its first half and evaluate on its second, the other way round, or on "
        "even and odd blocks of lines (default: halves)",
    )
    run.add_argument(
        "--calibration",
        default="split",
        help="comma-separated: split (what --split leaves to calibrate), subset:SEED, or files",
    )
    run.add_argument("--variants", default=",".join(VARIANTS), help="default: all")
    run.add_argument("--numa", default="1", help="numbers of parts, as 1,2,4")
    run.add_argument("--no-kernels", action="store_true", help="only with dequantized weights")

    limit = commands.add_parser("limit", help="compare the search with the best scale of each row")
    limit.add_argument("models", type=Path, nargs="+", metavar="MODEL")

    published = commands.add_parser("kt-kernel", help="layers of a conversion in kt-kernel")
    published.add_argument("model", type=Path)
    published.add_argument("outputs", type=Path, nargs="+", metavar="OUTPUT", help="of one part")
    published.add_argument("--text", type=Path, help="default: eval.txt of the model")

    engines = commands.add_parser("engines", help="layers of quantize-gpu in engines' kernels")
    engines.add_argument("outputs", type=Path, nargs="+", metavar="OUTPUT")
    engines.add_argument("--engine", required=True, choices=("vllm", "sglang", "sglang-kt"))
    engines.add_argument("--sources", type=Path, required=True, help="folder of its package")
    engines.add_argument("--tokens", default="1,64,512", help="default: 1,64,512")
    engines.add_argument("--layer", type=int, help="default: the first with experts")

    report = commands.add_parser("report", help="write tables and plots")
    report.add_argument("--results", type=Path, required=True)
    report.add_argument("--document", type=Path, required=True, help="its tables are replaced")
    report.add_argument("--plots", type=Path, required=True, help="folder for the SVG files")
    return parser


def _outliers(arguments: argparse.Namespace) -> None:
    from benchmarks.accuracy.evaluation import greatest_difference
    from benchmarks.accuracy.outliers import write_outliers

    write_outliers(arguments.model, arguments.output, arguments.seed, arguments.spread)
    apart = greatest_difference(arguments.model, arguments.output, arguments.model / "eval.txt")
    print(f"{arguments.output}: logits in float32 differ by at most {apart}")
    if apart:
        raise SystemExit("the two models do not compute the same function")


def _run(arguments: argparse.Namespace) -> None:
    from benchmarks.accuracy.run import Job, run

    unknown = set(arguments.variants.split(",")) - set(VARIANTS)
    if unknown:
        raise SystemExit(f"unknown variants: {', '.join(sorted(unknown))}")
    for model in arguments.models:
        job = Job(
            model,
            arguments.text or model / "eval.txt",
            arguments.split,
            arguments.calibration.split(","),
            [VARIANTS[key] for key in arguments.variants.split(",")],
            [int(number) for number in arguments.numa.split(",")],
            not arguments.no_kernels,
            arguments.work,
            arguments.results,
        )
        run(job)


def _kt_kernel(arguments: argparse.Namespace) -> None:
    from benchmarks.accuracy.published_kernel import print_errors

    print_errors(arguments.model, arguments.outputs, arguments.text or arguments.model / "eval.txt")


def _engines(arguments: argparse.Namespace) -> None:
    from benchmarks.accuracy.engine_kernels import print_errors

    counts = [int(number) for number in arguments.tokens.split(",")]
    print_errors(arguments.outputs, arguments.engine, arguments.sources, counts, arguments.layer)


def _limit(arguments: argparse.Namespace) -> None:
    from benchmarks.accuracy.limit import print_limit

    for model in arguments.models:
        print_limit(model)


def _report(arguments: argparse.Namespace) -> None:
    from benchmarks.accuracy.plots import write_plots
    from benchmarks.accuracy.results import read_results
    from benchmarks.accuracy.tables import write_tables

    rows = read_results(arguments.results)
    write_tables(arguments.document, rows)
    write_plots(arguments.plots, rows)


if __name__ == "__main__":
    given = _parser().parse_args()
    commands = {
        "outliers": _outliers,
        "run": _run,
        "limit": _limit,
        "engines": _engines,
        "kt-kernel": _kt_kernel,
        "report": _report,
    }
    commands[given.command](given)
