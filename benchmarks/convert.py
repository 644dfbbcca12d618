#!/usr/bin/env python3
"""Measure whole conversions: speed, memory, start-up.

    convert.py MODEL... --work DIR [--reference 'CMD {model} {output}'] [--cold]
    convert.py MODEL --work DIR --startup
    convert.py --work DIR --memory
    convert.py --work DIR --encodings all [--preset deepseek-v3] [--experts 8] [--numa 2]

Every figure of a run is measured in that run: our time, the reference's time in
alternation with ours, and what the machine needs for reading the source and writing the
output alone. The markdown report goes to stdout, all details to --json FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import make_checkpoint
import measure
from weight_encodings import ENCODINGS

GB = 1e9
GIB = float(1 << 30)


class BenchmarkError(Exception):
    """A measured command failed, or an argument makes no sense."""


# --- commands ---------------------------------------------------------------------------


def ours_base(options: argparse.Namespace) -> list[str]:
    return [part.format(python=sys.executable) for part in shlex.split(options.ours)]


def ours_convert(options: argparse.Namespace, model: Path, output: Path) -> list[str]:
    settings = ["--method", options.method, "--numa", str(options.numa)]
    settings += ["--threads", str(options.threads), "--json"]
    more = shlex.split(options.ours_options)
    return [*ours_base(options), "quantize-cpu", str(model), str(output), *settings, *more]


def reference_convert(options: argparse.Namespace, model: Path, output: Path) -> list[str]:
    return [part.format(model=model, output=output) for part in shlex.split(options.reference)]


def tools(options: argparse.Namespace) -> list[str]:
    names = [] if options.skip_ours else ["ours"]
    names += ["reference"] if options.reference else []
    if not names:
        raise BenchmarkError("--skip-ours needs --reference")
    return names


def checked(run: measure.Run) -> measure.Run:
    if run.code != 0:
        tail = "\n".join((run.stdout + run.stderr).splitlines()[-15:])
        raise BenchmarkError(f"{shlex.join(run.command)} ended with {run.code}:\n{tail}")
    return run


def our_summary(stdout: str) -> dict[str, object]:
    """The plain values of our --json document."""
    try:
        document = json.loads(stdout)
    except ValueError:
        return {}
    plain = (str, int, float, bool)
    return {key: value for key, value in document.items() if isinstance(value, plain)}


# --- speed ------------------------------------------------------------------------------


@dataclass
class Limits:
    """What the machine needs, without any conversion, for one run's reading and writing."""

    read_seconds: float
    write_seconds: float
    both_seconds: float


@dataclass
class Comparison:
    """Every run on one checkpoint."""

    model: str
    source_bytes: int
    cold: bool
    output_bytes: dict[str, int] = field(default_factory=dict)
    runs: dict[str, list[measure.Run]] = field(default_factory=dict)
    limits: list[Limits] = field(default_factory=list)

    def seconds(self, tool: str) -> float:
        return statistics.median(run.seconds for run in self.runs[tool])

    def limit(self, name: str) -> float:
        values: list[float] = [getattr(limits, name) for limits in self.limits]
        return statistics.median(values)

    def ratios(self) -> list[float]:
        """How many times faster ours was, pair by pair."""
        pairs = zip(self.runs["reference"], self.runs["ours"], strict=True)
        return [theirs.seconds / ours.seconds for theirs, ours in pairs]


def prepare_source(files: list[Path], options: argparse.Namespace) -> float:
    """Bring the source into the page cache, or out of it; returns the share that is in it."""
    os.sync()
    if options.cold:
        measure.drop_from_cache(files)
    else:
        measure.read_all(files, options.threads)
    return measure.cached_share(files)


def measure_limits(files: list[Path], nbytes: int, options: argparse.Namespace) -> Limits:
    threads, work = options.threads, options.work
    prepare_source(files, options)
    read = measure.timed(lambda: measure.read_all(files, threads))
    os.sync()
    write = measure.timed(lambda: measure.write_and_sync(work, nbytes))
    prepare_source(files, options)
    both = measure.timed(lambda: measure.read_and_write(files, threads, work, nbytes))
    return Limits(read, write, both)


def convert_once(
    tool: str, model: Path, options: argparse.Namespace, watch: bool = False
) -> tuple[measure.Run, int]:
    """One conversion into a fresh directory, which is removed; the run and its output bytes."""
    output = options.work / f"output-{tool}"
    shutil.rmtree(output, ignore_errors=True)
    build = ours_convert if tool == "ours" else reference_convert
    share = prepare_source(measure.source_files(model), options)
    try:
        run = checked(
            measure.run_measured(build(options, model, output), output if watch else None)
        )
        # a command that leaves its output in the page cache has not paid for the disk yet
        run.extra["sync_seconds"] = measure.timed(os.sync)
        run.extra["source_cached_share"] = share
        run.extra["summary"] = our_summary(run.stdout) if tool == "ours" else {}
        run.stdout = run.stderr = ""  # logs have no place in the report
        return run, measure.directory_bytes(output)
    finally:
        shutil.rmtree(output, ignore_errors=True)


def compare(model: Path, options: argparse.Namespace) -> Comparison:
    files = measure.source_files(model)
    if not files:
        raise BenchmarkError(f"{model} holds no .safetensors files")
    result = Comparison(model.name, measure.total_bytes(files), options.cold)
    names = tools(options)
    for number in range(-options.warmup, options.repeats):
        for tool in names:
            run, written = convert_once(tool, model, options)
            note(f"{model.name} {number + 1}/{options.repeats} {tool}: {run.seconds:.2f} s")
            result.output_bytes[tool] = written
            if number >= 0:
                result.runs.setdefault(tool, []).append(run)
        if number >= 0:
            nbytes = result.output_bytes[names[0]]
            result.limits.append(measure_limits(files, nbytes, options))
    return result


def report_comparison(result: Comparison) -> Iterable[str]:
    state = "cold" if result.cold else "in the page cache"
    yield f"## {result.model}: {result.source_bytes / GB:.2f} GB, source {state}"
    yield ""
    yield from runs_table(result)
    yield ""
    yield from limits_lines(result)
    yield ""


def runs_table(result: Comparison) -> Iterable[str]:
    header = ["command", "median s", "min", "max", "GB/s of source", "sync after s", "CPU s"]
    header += ["others' CPU s", "anonymous GiB", "file-mapped GiB", "/dev/shm GiB", "output GB"]
    rows = []
    for tool, runs in result.runs.items():
        times = [run.seconds for run in runs]
        row = [statistics.median(times), min(times), max(times)]
        row += [result.source_bytes / GB / statistics.median(times)]
        row += [statistics.median(float(str(run.extra["sync_seconds"])) for run in runs)]
        row += [statistics.median(run.cpu_seconds for run in runs)]
        row += [statistics.median(run.other_cpu_seconds for run in runs)]
        row += [max(run.peak.anonymous for run in runs) / GIB]
        row += [max(run.peak.file_mapped for run in runs) / GIB]
        row += [max(run.peak.staging for run in runs) / GIB, result.output_bytes[tool] / GB]
        rows.append([tool, *(f"{value:.2f}" for value in row)])
    return table(header, rows)


def limits_lines(result: Comparison) -> Iterable[str]:
    read, write = result.limit("read_seconds"), result.limit("write_seconds")
    both, baseline = result.limit("both_seconds"), max(read, write)
    yield (
        f"- reading the source alone {read:.2f} s ({result.source_bytes / GB / read:.2f} GB/s), "
        f"writing and syncing the output alone {write:.2f} s, both at once {both:.2f} s"
    )
    for tool, runs in result.runs.items():
        shares = [float(str(run.extra["source_cached_share"])) for run in runs]
        seconds = result.seconds(tool)
        yield (
            f"- {tool} reaches {100 * baseline / seconds:.0f} % of the larger of the two, "
            f"{100 * both / seconds:.0f} % of both at once; source in the page cache before "
            f"the runs {100 * min(shares):.0f}-{100 * max(shares):.0f} %"
        )
    if len(result.runs) == 2:
        ratios = result.ratios()
        listed = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        yield f"- ours is {statistics.median(ratios):.1f} x as fast (pairs: {listed})"


# --- start-up ---------------------------------------------------------------------------


@dataclass
class Startup:
    """Median seconds of one command, from process start."""

    name: str
    seconds: float
    all_seconds: list[float]
    peak_bytes: int


def startup_of(name: str, runs: list[measure.Run], seconds: list[float]) -> Startup:
    peak = max(run.peak.high_water for run in runs)
    return Startup(name, statistics.median(seconds), seconds, peak)


def time_command(name: str, command: list[str], repeats: int) -> Startup:
    runs = [checked(measure.run_measured(command)) for _ in range(repeats + 1)][1:]
    return startup_of(name, runs, [run.seconds for run in runs])


def startup(model: Path, options: argparse.Namespace) -> list[Startup]:
    prepare_source(measure.source_files(model), options)
    output = options.work / "output-plan"
    plan = [*ours_convert(options, model, output), "--dry-run"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "ktconv --help": [*ours_base(options), "--help"],
        "quantize-cpu --dry-run": plan,
    }
    results = [time_command(name, line, options.repeats) for name, line in commands.items()]
    rounds = range(options.repeats)
    runs = [convert_once("ours", model, options, watch=True)[0] for _ in rounds]
    first = [run.first_write_seconds for run in runs if run.first_write_seconds is not None]
    if first:
        results.append(startup_of("quantize-cpu, first data in the output", runs, first))
    whole = [run.seconds for run in runs]
    return [*results, startup_of("quantize-cpu, whole run", runs, whole)]


def report_startup(model: Path, results: list[Startup]) -> Iterable[str]:
    yield f"## Start-up, {model.name}"
    yield ""
    rows = []
    for item in results:
        values = [item.seconds, min(item.all_seconds), max(item.all_seconds)]
        values += [item.peak_bytes / GIB]
        rows.append([item.name, *(f"{value:.3f}" for value in values)])
    yield from table(["command", "median s", "min", "max", "peak resident GiB"], rows)
    yield ""


# --- memory -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One checkpoint whose conversion must stay within the memory bound."""

    name: str
    preset: make_checkpoint.Preset
    dtype: str = "bf16"
    fused: str | None = None


def memory_cases() -> list[Case]:
    qwen, deepseek = make_checkpoint.PRESETS["qwen3-30b"], make_checkpoint.PRESETS["deepseek-v3"]
    mixtral = replace(make_checkpoint.PRESETS["mixtral-8x22b"], experts=2)
    few = replace(deepseek, experts=4)
    return [
        Case("qwen3-30b, 16 experts, 1 layer", replace(qwen, experts=16)),
        Case("qwen3-30b, 16 experts, 8 layers", replace(qwen, experts=16, layers=8)),
        Case("qwen3-30b, 384 experts, 1 layer", replace(qwen, experts=384)),
        Case(
            "qwen3-30b, 4 experts, vocabulary 151936",
            replace(qwen, experts=4, vocabulary=151936),
        ),
        Case("deepseek-v3, 4 experts, bf16", few),
        Case("deepseek-v3, 4 experts, fp32", few, "fp32"),
        Case("deepseek-v3, 4 experts, fp8", few, "fp8"),
        Case("deepseek-v3, 4 experts, fused [E,2I,H]", few, fused="out-in"),
        Case("deepseek-v3, 4 experts, fused [E,H,2I]", few, fused="in-out"),
        Case("mixtral-8x22b, 2 experts, bf16", mixtral),
    ]


@dataclass
class MemoryResult:
    case: str
    source_bytes: int
    run: measure.Run


def measure_case(case: Case, options: argparse.Namespace) -> MemoryResult:
    model = options.work / "memory-model"
    shutil.rmtree(model, ignore_errors=True)
    try:
        shard = make_checkpoint.parse_size("4GB")
        make_checkpoint.write_checkpoint(model, case.preset, case.dtype, case.fused, shard, seed=0)
        source = measure.total_bytes(measure.source_files(model))
        run, _ = convert_once("ours", model, options)
        note(f"{case.name}: {run.peak.anonymous / GIB:.2f} GiB anonymous")
        return MemoryResult(case.name, source, run)
    finally:
        shutil.rmtree(model, ignore_errors=True)


def interpreter_peak(options: argparse.Namespace) -> int:
    """Resident bytes of an interpreter that does nothing."""
    command = [sys.executable, "-c", "import time; time.sleep(0.2)"]
    return checked(measure.run_measured(command)).peak.total


def report_memory(results: list[MemoryResult], interpreter: int) -> Iterable[str]:
    yield f"## Peak memory (the interpreter alone: {interpreter / GIB:.3f} GiB)"
    yield ""
    header = ["checkpoint", "source GB", "anonymous GiB", "file-mapped GiB", "total GiB"]
    header += ["above the interpreter GiB", "announced GiB", "seconds"]
    rows = []
    for result in results:
        peak = result.run.peak
        summary = result.run.extra["summary"]
        announced = summary.get("peak_memory_bytes") if isinstance(summary, dict) else None
        values = [peak.anonymous, peak.file_mapped, peak.total, peak.total - interpreter]
        row = [result.case, f"{result.source_bytes / GB:.2f}"]
        row += [f"{value / GIB:.3f}" for value in values]
        row += [f"{announced / GIB:.3f}" if announced else "-", f"{result.run.seconds:.2f}"]
        rows.append(row)
    yield from table(header, rows)
    yield ""


# --- encodings --------------------------------------------------------------------------


@dataclass
class EncodingResult:
    """The fastest of several conversions of one made checkpoint."""

    encoding: str
    decoded_bytes: int  # of the experts, in bf16
    source_bytes: int
    seconds: float  # of the conversion, without start-up
    stages: dict[str, float]  # CPU seconds of all workers

    @property
    def worker_seconds(self) -> float:
        return sum(self.stages.values())


STAGES = Path(__file__).with_name("stages.py")


def measure_encoding(encoding: str, options: argparse.Namespace) -> EncodingResult:
    preset = replace(make_checkpoint.PRESETS[options.preset], experts=options.experts)
    model, output = options.work / "encoding-model", options.work / "output-ours"
    shutil.rmtree(model, ignore_errors=True)
    runs = []
    try:
        shard = make_checkpoint.parse_size("4GB")
        make_checkpoint.write_checkpoint(model, preset, encoding, None, shard, seed=0)
        convert = ours_convert(options, model, output)[len(ours_base(options)) :]
        command = [sys.executable, str(STAGES), *convert]
        for _ in range(options.repeats):
            prepare_source(measure.source_files(model), options)
            try:
                run = checked(measure.run_measured(command))
            finally:
                shutil.rmtree(output, ignore_errors=True)
            stages = json.loads(run.stderr.splitlines()[-1])
            runs.append((float(str(our_summary(run.stdout)["seconds"])), stages))
        source = measure.total_bytes(measure.source_files(model))
    finally:
        shutil.rmtree(model, ignore_errors=True)
    weights = 3 * preset.layers * preset.experts * preset.hidden * preset.intermediate
    stages = min((stages for _, stages in runs), key=lambda stages: sum(stages.values()))
    seconds = min(seconds for seconds, _ in runs)
    result = EncodingResult(encoding, 2 * weights, source, seconds, stages)
    note(f"{encoding}: {result.decoded_bytes / GB / seconds:.2f} GB/s of decoded bf16")
    return result


def report_encodings(results: list[EncodingResult]) -> Iterable[str]:
    yield "## Encodings: GB/s of decoded bf16, and what the workers' CPU time went to"
    yield ""
    names = list(results[0].stages)
    rows = []
    for result in results:
        row = [result.encoding, f"{result.decoded_bytes / GB:.2f}"]
        row += [f"{result.source_bytes / GB:.2f}"]
        row += [f"{result.decoded_bytes / GB / result.seconds:.2f}"]
        row += [f"{result.decoded_bytes / GB / result.worker_seconds:.2f}"]
        shares = (result.stages[name] / result.worker_seconds for name in names)
        rows.append([*row, *(f"{share:.0%}" for share in shares)])
    header = ["encoding", "decoded GB", "source GB", "GB/s", "GB/s per core of CPU time", *names]
    yield from table(header, rows)
    yield ""


# --- report -----------------------------------------------------------------------------


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(header: list[str], rows: list[list[str]]) -> Iterable[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def commit() -> str:
    """The commit of this file's repository, with a + when its tree has changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def report_machine(machine: dict[str, object]) -> Iterable[str]:
    rates = machine["memory_read_bytes_per_second"]
    assert isinstance(rates, dict)
    memory = ", ".join(f"{rate / GB:.1f} GB/s ({count} threads)" for count, rate in rates.items())
    yield f"- {machine['date']}, commit {machine['commit']}"
    yield f"- {machine['cpu']}, {machine['cores']} cores, flags {machine['cpu_flags']}"
    yield f"- kernel {machine['kernel']}, {machine['filesystem']}, Python {machine['python']}"
    yield f"- memory read {memory}; load at the start {machine['load_average_at_start']:.2f}"
    yield f"- `{machine['command']}`"
    yield ""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", nargs="*", type=Path, metavar="MODEL", help="checkpoint directories")
    add("--work", type=Path, required=True, help="directory for outputs, on the disk to measure")
    add("--ours", default="{python} -m ktconv", help="our command (default: %(default)s)")
    add("--ours-options", default="", help="more options for quantize-cpu, in one string")
    add("--skip-ours", action="store_true", help="measure the reference alone")
    add("--reference", help="the reference's command with {model} and {output}")
    add("--method", default="int4")
    add("--numa", type=int, default=1)
    add("--threads", type=int, default=2)
    add("--repeats", type=int, default=5)
    add("--warmup", type=int, default=1, help="rounds that are not counted (default: 1)")
    add("--cold", action="store_true", help="drop the source from the page cache before each run")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--startup", action="store_true", help="time --help, plan, first data")
    mode.add_argument("--memory", action="store_true", help="peak memory over made checkpoints")
    mode.add_argument(
        "--encodings", help="speed of made checkpoints: names separated by commas, or all"
    )
    add("--preset", choices=make_checkpoint.PRESETS, default="deepseek-v3", help="for --encodings")
    add("--experts", type=int, default=8, help="for --encodings (default: 8)")
    add("--json", type=Path, help="write every detail to this file")
    options = parser.parse_args(arguments)
    if not options.models and not options.memory and not options.encodings:
        parser.error("name at least one MODEL")
    unknown = set((options.encodings or "all").split(",")) - {"all", *ENCODINGS}
    if unknown:
        parser.error(f"--encodings: no such encoding: {', '.join(sorted(unknown))}")
    return options


def run_mode(options: argparse.Namespace) -> tuple[list[str], dict[str, object]]:
    """The report's lines and the JSON details of the chosen mode."""
    if options.memory:
        interpreter = interpreter_peak(options)
        results = [measure_case(case, options) for case in memory_cases()]
        details: dict[str, object] = {"interpreter_bytes": interpreter}
        details["memory"] = [asdict(result) for result in results]
        return list(report_memory(results, interpreter)), details
    if options.encodings:
        names = list(ENCODINGS) if options.encodings == "all" else options.encodings.split(",")
        found = [measure_encoding(name, options) for name in names]
        return list(report_encodings(found)), {"encodings": [asdict(item) for item in found]}
    if options.startup:
        started = {model: startup(model, options) for model in options.models}
        lines = [line for item in started.items() for line in report_startup(*item)]
        named = {model.name: [asdict(item) for item in items] for model, items in started.items()}
        return lines, {"startup": named}
    compared = [compare(model, options) for model in options.models]
    lines = [line for result in compared for line in report_comparison(result)]
    return lines, {"comparisons": [asdict(result) for result in compared]}


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    machine = measure.describe_machine(options.work, options.threads)
    machine |= {"commit": commit(), "command": shlex.join(sys.argv)}
    try:
        lines, details = run_mode(options)
    except BenchmarkError as error:
        note(f"error: {error}")
        return 1
    print("\n".join([*report_machine(machine), *lines]))
    if options.json:
        document = {"schema": 1, "machine": machine, **details}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
