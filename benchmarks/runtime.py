"""What calls of layers cost in Python, against the C call and torch, and the memory of a layer.

    python benchmarks/runtime.py                     # calls
    python benchmarks/runtime.py --memory OUTPUT     # a converted model: pages, and who shares them

Calls: all ways of a row compute the same batches, which take turns so that caches do not hold their
experts, and the ways take turns too; a figure is the smallest of the medians of those. Weights are
random, and experts beyond the fourth copies at other addresses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import measure
import numpy as np

from ktconv.formats import FORMATS
from ktconv.formats.decode import f32_to_bf16
from ktconv.runtime import MoELayer, Pool
from ktconv.runtime.layers import pack_experts
from ktconv.system import machine

# hidden, intermediate, experts, top-k: Qwen3-30B-A3B with 32 of 128 experts, and one so small that
# little but the call itself is left.
SHAPES = {"qwen3-30b-a3b": (2048, 768, 32, 8), "tiny": (256, 128, 8, 2)}
DISTINCT, BATCHES = 4, 16
Work = Callable[[], object]
Sizes = tuple[int, int, int, int]
Batch = tuple[Any, Any, Any]


@dataclass
class Row:
    """Microseconds."""

    shape: str
    method: str
    threads: int
    tokens: int
    way: str
    time: float
    over_c: float


class Layers:
    """The same random weights for our layer and for torch."""

    def __init__(self, sizes: Sizes, method: str, pool: Pool) -> None:
        hidden, inner, experts, self.top_k = sizes
        self.hidden, self.experts = hidden, experts
        rng = np.random.default_rng(0)
        shapes = (inner, hidden), (inner, hidden), (hidden, inner)
        drawn = [
            tuple(rng.standard_normal(shape, np.float32) / 32 for shape in shapes)
            for _ in range(DISTINCT)
        ]
        self.drawn = drawn
        origins = [number % DISTINCT for number in range(experts)]
        packed = pack_experts(FORMATS[method], drawn.__getitem__, origins, hidden, inner)
        self.native, self.layer, self.pool = packed.layer, MoELayer(packed, pool), pool

    def of_torch(self) -> list[tuple[Any, ...]]:
        import torch

        return [
            tuple(torch.from_numpy(matrix).bfloat16() for matrix in self.drawn[n % DISTINCT])
            for n in range(self.experts)
        ]

    def batch(self, tokens: int, seed: int) -> Batch:
        """x as bits of bf16, ids, weights."""
        rng = np.random.default_rng([tokens, seed])
        x = f32_to_bf16(rng.standard_normal((tokens, self.hidden), np.float32))
        ids = np.argsort(rng.random((tokens, self.experts)), axis=1)[:, : self.top_k]
        weights = rng.random((tokens, self.top_k), np.float32)
        return x, np.ascontiguousarray(ids.astype(np.int64)), weights


def loop_of_torch(experts: list[tuple[Any, ...]], x: Any, ids: Any, weights: Any) -> Any:
    """Experts that have tokens one after the other, in bf16."""
    import torch
    from torch.nn.functional import linear, silu

    y = torch.zeros_like(x)
    with torch.inference_mode():
        for number in ids.unique().tolist():
            gate, up, down = experts[number]
            token, slot = (ids == number).nonzero(as_tuple=True)
            one = x[token]
            out = linear(silu(linear(one, gate)) * linear(one, up), down)
            y.index_add_(0, token, out * weights[token, slot, None].to(x.dtype))
    return y


def ways(layers: Layers, tokens: int, torch_loop: bool) -> Iterator[tuple[str, list[Work]]]:
    """Each with a call of every batch."""
    import torch

    layer, pool = layers.layer, layers.pool
    batches = [layers.batch(tokens, seed) for seed in range(BATCHES)]
    y = np.empty_like(batches[0][0])
    scratch = layers.native.scratch(tokens, layers.top_k, pool)
    yield "C call", [layers.native.call(pool, *batch, y, scratch) for batch in batches]
    yield "layer, NumPy", [partial(layer, *batch) for batch in batches]
    tensors = [
        (torch.from_numpy(x.view(np.int16)).view(torch.bfloat16), *map(torch.from_numpy, others))
        for x, *others in batches
    ]
    out = torch.empty_like(tensors[0][0])
    yield "layer, torch", [partial(layer, *batch) for batch in tensors]
    yield "layer, torch, out=", [partial(layer, *batch, out=out) for batch in tensors]
    yield "prepared, torch", [layer.prepare(*batch, out=out) for batch in tensors]
    yield "submit and wait, torch", [partial(submit_and_wait, layer, *batch) for batch in tensors]
    if torch_loop:
        experts = layers.of_torch()
        torch.set_num_threads(pool.threads)
        yield "loop of torch, bf16", [partial(loop_of_torch, experts, *batch) for batch in tensors]


def submit_and_wait(layer: MoELayer, *batch: Any) -> Any:
    return layer.submit(*batch).wait()


def median(works: list[Work], seconds: float) -> float:
    """Of calls in so many seconds, at least one."""
    times, end = [], time.perf_counter() + seconds
    for work in cycle(works):
        start = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - start)
        if time.perf_counter() > end:
            break
    return statistics.median(times) / 1000


def timed(found: list[tuple[str, list[Work]]], turns: int, seconds: float) -> dict[str, float]:
    for _, works in found:
        works[0]()
    best: dict[str, float] = {}
    for _ in range(turns):
        for way, works in found:
            best[way] = min(best.get(way, float("inf")), median(works, seconds))
    return best


def rows(options: argparse.Namespace) -> Iterator[Row]:
    for shape, sizes in SHAPES.items():
        small = shape == "tiny"
        with Pool(1 if small else options.threads) as pool:
            layers = Layers(sizes, options.method, pool)
            for tokens in (1,) if small else options.tokens:
                found = list(ways(layers, tokens, torch_loop=not small))
                times = timed(found, options.turns, options.seconds)
                for way, value in times.items():
                    over = value - times["C call"]
                    yield Row(shape, options.method, pool.threads, tokens, way, value, over)


# ---- memory ----------------------------------------------------------------------------

MAPPED = ("Rss", "Pss", "Anonymous", "Private_Clean", "Private_Dirty")


def mapped(output: Path) -> dict[str, int]:
    """Bytes of this process's pages of the files of `output`."""
    sums, ours = dict.fromkeys(MAPPED, 0), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split()[0]:
            ours = str(output.resolve()) in line
        elif ours and name in sums:
            sums[name] += 1024 * int(rest.split()[0])
    return sums


def load_and_wait(output: Path) -> None:
    """One of several processes: says when it has read all pages, and what it has when asked."""
    before = measure.status_bytes(os.getpid())["RssAnon"]
    layers = MoELayer.load_all(output)
    for layer in layers.values():
        layer.touch()
    print("ready", flush=True)
    sys.stdin.readline()
    after = measure.status_bytes(os.getpid())["RssAnon"]
    weights = sum(layer.weight_bytes for layer in layers.values())
    found = {"weights": weights, "anonymous": after - before, **mapped(output)}
    print(json.dumps(found), flush=True)
    sys.stdin.read()  # its pages are to be there until all processes have looked


def print_memory(output: Path, count: int) -> None:
    command = [sys.executable, __file__, "--child", "--memory", str(output)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(count)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    print("| process | weights | mapped | its share | private | anonymous, added |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for number, process in enumerate(processes, 1):
        process.stdin.write("\n")
        process.stdin.flush()
        found = json.loads(process.stdout.readline())
        private = found["Private_Clean"] + found["Private_Dirty"]
        sizes = found["weights"], found["Rss"], found["Pss"], private, found["anonymous"]
        print(f"| {number} of {count} |", " | ".join(f"{size / 1e6:.1f} MB" for size in sizes), "|")
    for process in processes:
        process.communicate()


def measure_calls(options: argparse.Namespace) -> None:
    before, started = measure.machine_cpu_seconds(), time.perf_counter()
    print(f"{measure.cpu_model()}, {machine.usable_cores()} cores for this process\n")
    print("| shape | method | threads | tokens | way | us | above the C call |")
    print("| --- | --- | ---: | ---: | --- | ---: | ---: |")
    found = []
    for row in rows(options):
        found.append(asdict(row))
        sizes = f"| {row.shape} | {row.method} | {row.threads} | {row.tokens} | {row.way}"
        print(f"{sizes} | {row.time:.1f} | {row.over_c:.1f} |", flush=True)
    busy = measure.machine_cpu_seconds() - before
    print(f"\n{time.perf_counter() - started:.0f} s; the whole machine used {busy:.0f} CPU s.")
    if options.json:
        options.json.write_text(json.dumps({"schema": 1, "rows": found}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=FORMATS, default="int4")
    parser.add_argument("--threads", type=int, default=machine.usable_cores())
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 256, 2048])
    parser.add_argument("--seconds", type=float, default=0.3, help="of a way in each turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", type=Path, metavar="OUTPUT")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        load_and_wait(options.memory)
    elif options.memory:
        print_memory(options.memory, options.processes)
    else:
        measure_calls(options)


if __name__ == "__main__":
    main()
