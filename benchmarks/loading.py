"""Loading a layer straight from a checkpoint, against reading its bytes alone.

    python benchmarks/make_checkpoint.py DIR/fp8 --preset deepseek-v3 --experts 16 --dtype fp8
    python benchmarks/loading.py DIR/fp8 --threads 1,2

Loading and reading take turns. Reading is `pread` of the same files into a buffer of 4 MiB, with as
many threads; the files should be in the page cache. GB/s are of the source; those by CPU time are
what counts on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ktconv.runtime.layers import native_experts
from ktconv.source import Checkpoint, MoELayer, open_checkpoint
from ktconv.source.reading.matrices import experts_bytes, span_of
from ktconv.source.reading.reader import Span

BUFFER = 4 << 20


class Seconds(NamedTuple):
    wall: float
    cpu: float


def timed(work: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def fastest(runs: Iterable[Seconds]) -> Seconds:
    return Seconds(*map(min, zip(*runs, strict=True)))


def read(span: Span) -> None:
    descriptor, buffer = os.open(span.file, os.O_RDONLY), bytearray(BUFFER)
    try:
        for offset in range(span.offset, span.offset + span.nbytes, BUFFER):
            left = min(BUFFER, span.offset + span.nbytes - offset)
            os.preadv(descriptor, [memoryview(buffer)[:left]], offset)
    finally:
        os.close(descriptor)


def read_all(layer: MoELayer, threads: int) -> None:
    spans = [span_of(matrix) for expert in layer.experts for matrix in expert.values()]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, spans))


def report(checkpoint: Checkpoint, threads: int, parts: int, rounds: int) -> str:
    layer = checkpoint.layers[0]
    reading, loading = [], []
    for _ in range(rounds):
        reading.append(timed(lambda: read_all(layer, threads)))
        loading.append(timed(lambda: native_experts(checkpoint, parts=parts, threads=threads)))
    gigabytes = experts_bytes(layer) / 1e9
    speeds = [gigabytes / one for runs in (loading, reading) for one in fastest(runs)]
    figures = " | ".join(f"{speed:.2f}" for speed in speeds)
    key = native_experts(checkpoint, parts=parts, slots=[0]).format.key
    return f"| {layer.encoding} | {key} | {threads} | {gigabytes:.2f} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--threads", default="1", help="values to sweep")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| encoding | format | threads | GB | GB/s | by CPU time | reading GB/s | by CPU time |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for path in options.checkpoints:
        checkpoint = open_checkpoint(path)
        for threads in map(int, options.threads.split(",")):
            print(report(checkpoint, threads, options.parts, options.rounds), flush=True)


if __name__ == "__main__":
    main()
