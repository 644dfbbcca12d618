"""What it costs to run a job that does nothing on all threads of a pool.

    python benchmarks/pool.py

Each row runs the empty job many times and times every call from Python (about 0.2 us of it).
"busy processes" do nothing but count, and are not ours to slow down: where there are as many
as CPUs, a time slice of the kernel's scheduler (milliseconds) now and then is only fair.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import measure
import numpy as np

from ktconv.system import machine
from ktconv.system.pool import Pool

SECONDS = 2.0  # of each row
SETTLE = 0.2  # for the scheduler to spread the busy processes


@dataclass
class Row:
    """Microseconds of a job, over one case."""

    case: str
    threads: int
    jobs: int
    median: float
    p99: float
    mean: float


def row_of(case: str, threads: int, seconds: list[float]) -> Row:
    found = np.array(seconds) * 1e6
    p99 = float(np.percentile(found, 99))
    return Row(case, threads, len(seconds), float(np.median(found)), p99, float(found.mean()))


def run_case(case: str, pool: Pool, idle: float = 0.0) -> Row:
    """Jobs one after the other, or with `idle` seconds of sleep before each."""
    times = []
    end = time.perf_counter() + SECONDS
    while (start := time.perf_counter()) < end:
        if idle:
            time.sleep(idle)
            start = time.perf_counter()
        pool.empty(1)
        times.append(time.perf_counter() - start)
    return row_of(case, pool.threads, times)


def start_pools(threads: int) -> Row:
    """Pools from the call that makes one to the end of its first job."""
    times = []
    for _ in range(50):
        start = time.perf_counter()
        with Pool(threads) as pool:
            pool.empty(1)
            times.append(time.perf_counter() - start)
    return row_of("start", threads, times)


def count_forever() -> None:
    while True:
        pass


def run_jobs_forever(threads: int) -> None:
    with Pool(threads) as pool:
        while True:
            pool.empty(1000)


@contextmanager
def beside(count: int, work: object, *args: object) -> Iterator[None]:
    """`count` processes that do this work meanwhile."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=args, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    time.sleep(1 + SETTLE)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_all(threads: int) -> Iterator[Row]:
    with Pool(threads) as pool:
        yield run_case("hot", pool)
        yield run_case("after 0.3 ms idle", pool, 0.3e-3)
        yield run_case("after 1 ms idle", pool, 1e-3)
        with beside(1, count_forever):
            yield run_case("hot, a busy process", pool)
            yield run_case("after 1 ms idle, a busy process", pool, 1e-3)
        with beside(threads, count_forever):
            yield run_case("hot, as many busy processes as threads", pool)
        with beside(1, run_jobs_forever, threads):
            yield run_case("hot, another process's pool", pool)
    for factor in (2, 4, 32, 128):
        with Pool(factor * threads) as pool:
            yield run_case(f"hot, {factor} threads per core", pool)
            yield run_case(f"after 3 ms idle, {factor} threads per core", pool, 3e-3)
    yield start_pools(128 * threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=machine.usable_cores())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = measure.machine_cpu_seconds()
    started = time.perf_counter()
    print(f"{measure.cpu_model()}, {machine.usable_cores()} cores for this process\n")
    print("| case | threads | median us | p99 us | mean us |")
    print("| --- | --- | --- | --- | --- |")
    rows = []
    for row in run_all(options.threads):
        rows.append(asdict(row))
        print(
            f"| {row.case} | {row.threads} | {row.median:.1f} | {row.p99:.1f} | {row.mean:.1f} |",
            flush=True,
        )
    busy = measure.machine_cpu_seconds() - before
    print(f"\n{time.perf_counter() - started:.0f} s; the whole machine used {busy:.0f} CPU s.")
    if options.json:
        options.json.write_text(json.dumps({"schema": 1, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
