"""Measure what LoRA next to packed weights costs a call of a layer: with and without, in turns.

    python benchmarks/adapters.py int4 int8
    python benchmarks/adapters.py int4 --experts 32 --hidden 7168 --intermediate 2048
    python benchmarks/adapters.py int8 --experts 16 --tokens 256 --rounds 20

Each call goes to other experts, so that weights and adapters come from memory, as they do in a
model of many layers. Figures are medians over the rounds, and of the ratio of neighbours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ktconv import native
from ktconv.native import Layer, PackedMatrix
from ktconv.runtime import MoELayer, Pool
from ktconv.runtime.adapters import LayerAdapter, packed_pair
from ktconv.runtime.layers import Experts

_DISTINCT = 2  # experts that are quantized; the others are copies in memory of their own


def _copied(array: Any) -> Any:
    if array is None:
        return None
    memory = native.aligned_bytes(array.nbytes)
    memory[:] = array.view(np.uint8).reshape(-1)
    return memory.view(array.dtype).reshape(array.shape)


def _layer(method: str, experts: int, hidden: int, inner: int, pool: Pool) -> MoELayer:
    rng = np.random.default_rng(0)
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    stacks = [rng.standard_normal((_DISTINCT, *shape), np.float32) * 0.05 for shape in shapes]
    packed = MoELayer.pack(*stacks, method, parts=1, pool=pool).packed
    some = packed.layer._keep[0]
    every: list[Any] = []
    for number in range(experts):
        expert = some[number % _DISTINCT]
        assert expert is not None
        every.append(
            tuple(m and PackedMatrix(_copied(m.codes), _copied(m.scale), m.bias) for m in expert)
        )
    layer = Layer(packed.layer.layout, packed.activation, hidden, inner, [every])
    return MoELayer(
        Experts(packed.format, layer, packed.activation, list(range(experts)), packed.streams), pool
    )


def _adapter(rank: int, experts: int, hidden: int, inner: int, seed: int) -> LayerAdapter:
    rng = np.random.default_rng(seed)
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    pairs = [
        packed_pair(
            rng.standard_normal((rank, inputs), np.float32) / 50,
            rng.standard_normal((outputs, rank), np.float32) / 50,
            2.0,
        )
        for outputs, inputs in shapes
    ]
    return LayerAdapter(
        [
            tuple(one._replace(a=_copied(one.a), b=_copied(one.b)) for one in pairs)  # type: ignore[misc]
            for _ in range(experts)
        ]
    )


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(method: str, options: argparse.Namespace, pool: Pool) -> str:
    """A row of the table."""
    o = options
    layer = _layer(method, o.experts, o.hidden, o.intermediate, pool)
    for number in range(o.adapters):
        adapter = _adapter(o.rank, o.experts, o.hidden, o.intermediate, number)
        layer.add_adapter(f"a{number}", adapter)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((o.tokens, o.hidden), np.float32)
    ids = np.zeros((o.tokens, o.top_k), np.int64)
    weights = np.full((o.tokens, o.top_k), 1 / o.top_k, np.float32)
    numbers = (np.arange(o.tokens) % o.adapters).astype(np.int32)
    out = np.empty_like(x)
    without = layer.prepare(x, ids, weights, out=out)
    adapted = layer.prepare(x, ids, weights, out=out, adapter_ids=numbers)
    times: list[tuple[float, float]] = []
    for turn in range(o.rounds + 2):
        pair = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            for token in range(o.tokens):
                ids[token] = rng.permutation(o.experts)[: o.top_k]
            pair[which] = _seconds((without, adapted)[which])
        times.append((pair[0], pair[1]))
    found = np.array(times[2:])
    base, with_lora = np.median(found, axis=0) * 1e6
    low, middle, high = np.percentile(found[:, 1] / found[:, 0] - 1, [25, 50, 75]) * 100
    return (
        f"| {method} | {o.experts} × {o.hidden} × {o.intermediate} | {o.tokens} | {o.adapters} | "
        f"{base:.0f} | {with_lora:.0f} | {middle:+.1f} % ({low:+.1f} to {high:+.1f}) |"
    )


def main() -> None:
    """Prints a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="+")
    for name, default in (
        ("experts", 128), ("hidden", 2048), ("intermediate", 768), ("top-k", 8), ("rank", 16),
        ("tokens", 1), ("adapters", 1), ("threads", 2), ("rounds", 300),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--isa")
    options = parser.parse_args()
    if options.isa:
        native.use_isa(options.isa)
    print(f"{native.isa()}, {options.threads} threads, rank {options.rank}, top-{options.top_k}")
    print("| method | experts × hidden × intermediate | tokens | adapters | without, µs | with | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with Pool(options.threads) as pool:
        for method in options.methods:
            print(measure(method, options, pool), flush=True)


if __name__ == "__main__":
    main()
