"""Times of a layer's call on a CUDA stream: by threads of Python, by host functions, as a graph.

    python benchmarks/kt_graphs.py [--threads 16] [--layers 8] [--method AMXINT4]

Prints, for each number of tokens, microseconds of a layer: until the last result is on the GPU, of
which the CPU was kept, and of the kernels alone on the CPU. Medians of passes through all layers,
whose variants take turns.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch

from ktconv.compat.kt import KTMoEWrapper, calls, streams, wrapper
from ktconv.runtime import queued


def layers(args: argparse.Namespace) -> list[KTMoEWrapper]:
    """Wrappers that share one layer's weights: its calls differ in nothing else."""
    shape = args.experts, args.inner, args.hidden
    made = [
        KTMoEWrapper(
            n, args.experts, args.top_k, args.hidden, args.inner, None, args.threads, 1, f"{n}",
            4096, method=args.method,
        )
        for n in range(args.layers)
    ]  # fmt: skip
    gate, up = (torch.randn(shape, dtype=torch.bfloat16) / 30 for _ in "gu")
    down = torch.randn(args.experts, args.hidden, args.inner, dtype=torch.bfloat16) / 30
    made[0].load_weights_from_tensors(gate, up, down)
    for one in made[1:]:
        one._layer = made[0]._layer
    return made


def passed(own: list[KTMoEWrapper], given: list[Any]) -> list[Any]:
    """One pass."""
    found = []
    for one in own:
        one.submit_forward(*given)
        found.append(one.sync_forward(given[0]))
    return found


def timed(work: Any) -> tuple[float, float]:
    """Seconds until the GPU is done, and until the CPU is free."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    free = time.perf_counter() - begin
    torch.cuda.synchronize()
    return time.perf_counter() - begin, free


def in_thread(layer: Any, inputs: Any, mask: Any, share: Any, name: str) -> Any:
    return calls.start(layer, inputs, mask, share)


def graph_of(own: list[KTMoEWrapper], given: list[Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        passed(own, given)
    return graph


def ways_of(own: list[KTMoEWrapper], near: Any, given: list[Any]) -> dict[str, Any]:
    """Functions to be timed, by the names that the table has."""
    begin = wrapper.begin
    native_graph = graph_of(own, given)
    plain, queued.is_plain = queued.is_plain, lambda *_: False
    python_graph = graph_of(own, given)
    queued.is_plain = plain

    def by_threads() -> None:
        wrapper.begin = in_thread
        passed(own, given)
        wrapper.begin = begin

    def alone() -> None:
        for one in own:
            one.layer(*near)

    return {
        "kernels alone, on the CPU": alone,
        "threads of Python": by_threads,
        "host functions": lambda: passed(own, given),
        "graph": native_graph.replay,
        "graph, its work through Python": python_graph.replay,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (
        ("threads", 16), ("layers", 8), ("experts", 128), ("top_k", 8), ("hidden", 2048),
        ("inner", 768), ("passes", 40),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--method", default="AMXINT4")
    args = parser.parse_args()
    own = layers(args)
    print(f"{args.method} {args.experts} experts of {args.hidden} x {args.inner}, top-{args.top_k}")
    for tokens in (1, 8, 64):
        x = torch.randn(tokens, args.hidden).bfloat16()
        ids = torch.rand(tokens, args.experts).argsort(1)[:, : args.top_k].contiguous()
        near = x, ids, torch.rand(tokens, args.top_k)
        ways = ways_of(own, near, [one.cuda() for one in near])
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(args.passes + 5):
            for name, work in ways.items():
                found = timed(work)
                if number >= 5:
                    times[name].append(found)
        for name, each in times.items():
            whole, free = (1e6 * median(one[n] for one in each) / args.layers for n in (0, 1))
            print(f"{tokens:3} tokens, {name:32} {whole:8.1f} us, CPU kept {free:8.1f} us")
        del ways
        streams.forget_graphs()


if __name__ == "__main__":
    main()
