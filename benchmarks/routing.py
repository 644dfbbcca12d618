"""Routers: ours against the same steps in PyTorch, and against the MoE layer behind them.

    python benchmarks/routing.py

Each case takes turns: ours, then PyTorch's, on the same logits and one thread each. Printed are the
best of each, and the median ratio of the pairs. The layer is INT4 (gpt-oss: MXFP4), on all threads;
of large models it has fewer experts, which take as many tokens together as all of them would.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import measure
import numpy as np
import torch

from ktconv import native
from ktconv.bench.presets import PRESETS
from ktconv.bench.weights import RandomWeights
from ktconv.formats import FORMATS
from ktconv.formats.decode import f32_to_bf16
from ktconv.runtime import route
from ktconv.runtime.layers import pack_experts
from ktconv.system import machine
from ktconv.system.pool import Pool

ROUNDS = 41


@dataclass(frozen=True)
class Router:
    """A router, and the preset whose layer is behind it."""

    name: str
    preset: str
    experts: int
    k: int
    scoring: str
    groups: int = 1
    keep: int = 1
    by_logits: bool = False


ROUTERS = (
    Router("softmax", "qwen3-30b-a3b", 128, 8, "softmax"),
    Router("top-k of logits", "gpt-oss-120b", 128, 4, "softmax", by_logits=True),
    Router("sigmoid, bias, 8 groups", "deepseek-v3", 256, 8, "sigmoid", 8, 4),
    Router("sigmoid, bias", "kimi-k2", 384, 8, "sigmoid"),
    Router("sigmoid, bias, 8 groups", "kimi-k2", 384, 8, "sigmoid", 8, 4),
    Router("softmax", "kimi-k2", 384, 8, "softmax"),
    Router("sqrt-softplus, bias", "deepseek-v4-flash", 256, 6, "sqrtsoftplus"),
)


@dataclass
class Row:
    """Milliseconds, the best; `ratio`: PyTorch's over ours, of the pairs; `share` of the layer."""

    router: str
    preset: str
    experts: int
    k: int
    tokens: int
    ours: float
    torch: float
    ratio: float
    layer: float
    share: float


def in_torch(router: Router, logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As modules of transformers do it."""
    if router.by_logits:
        return torch.softmax(torch.topk(logits, router.k)[0], -1)
    scores = {
        "softmax": lambda: torch.softmax(logits, -1),
        "sigmoid": lambda: torch.sigmoid(logits),
        "sqrtsoftplus": lambda: torch.nn.functional.softplus(logits).sqrt(),
    }[router.scoring]()
    choice = scores if bias is None else scores + bias
    if router.groups > 1:
        parts = choice.view(len(choice), router.groups, -1)
        kept = parts.topk(2, -1)[0].sum(-1).topk(router.keep, -1, sorted=False)[1]
        mask = torch.zeros(parts.shape[:2], dtype=torch.bool).scatter_(1, kept, True)
        choice = parts.masked_fill(~mask[:, :, None], float("-inf")).view_as(choice)
    weights = scores.gather(1, choice.topk(router.k, -1, sorted=False)[1])
    return weights / (weights.sum(-1, keepdim=True) + 1e-20)


def in_turns(*calls: Callable[[], object]) -> Iterator[tuple[float, ...]]:
    for call in calls * 3:
        call()
    for _ in range(ROUNDS):
        yield tuple(measure.timed(call) for call in calls)


def routed(router: Router, tokens: int) -> tuple[float, float, float]:
    """Ours and PyTorch's milliseconds, and the ratio."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((tokens, router.experts), np.float32))
    chosen = router.scoring != "softmax"
    bias = torch.from_numpy(rng.standard_normal(router.experts, np.float32)) if chosen else None
    ours = route.ScoredRouter(router.scoring)  # type: ignore[arg-type]
    options = {"groups": router.groups, "keep": router.keep, "by_logits": router.by_logits}
    torch.set_num_threads(1)
    pairs = list(
        in_turns(
            lambda: ours(logits, router.k, bias=bias, **options),
            lambda: in_torch(router, logits, bias),
        )
    )
    mine, theirs = (min(one) * 1e3 for one in zip(*pairs, strict=True))
    return mine, theirs, statistics.median(b / a for a, b in pairs)


def layer_time(preset: str, tokens: int, experts: int, pool: Pool) -> float:
    """Milliseconds of a layer on random weights, with the model's tokens per expert and matrix."""
    shape = PRESETS[preset]
    source = RandomWeights(0, shape.hidden, shape.intermediate)
    packed = pack_experts(
        FORMATS["mxfp4" if preset.startswith("gpt-oss") else "int4"],
        source.expert,
        [0] * experts,
        shape.hidden,
        shape.intermediate,
        activation=shape.activation,
    )
    rng = np.random.default_rng(1)
    x = f32_to_bf16(rng.standard_normal((tokens, shape.hidden), np.float32))
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, : shape.top_k].astype(np.int64)
    weights = np.full(ids.shape, 1 / shape.top_k, np.float32)
    call = packed.layer.call(
        pool, x, ids, weights, np.empty_like(x), packed.layer.scratch(tokens, shape.top_k, pool)
    )
    call()
    return min(measure.timed(call) for _ in range(3)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=32, help="of the layer, at most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before, started = measure.machine_cpu_seconds(), time.perf_counter()
    print(f"{measure.cpu_model()}, {machine.usable_cores()} cores, level {native.isa()}\n")
    print("| router | model | experts, k | ours ms | PyTorch ms | ratio | layer ms | share |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    layers: dict[str, float] = {}
    rows = []
    with Pool() as pool:
        for router in ROUTERS:
            if router.preset not in layers:
                experts = min(options.experts, router.experts)
                layers[router.preset] = layer_time(router.preset, options.tokens, experts, pool)
            ours, theirs, ratio = routed(router, options.tokens)
            layer = layers[router.preset]
            row = Row(
                router.name, router.preset, router.experts, router.k, options.tokens,
                ours, theirs, ratio, layer, ours / layer,
            )  # fmt: skip
            rows.append(asdict(row))
            print(
                f"| {row.router} | {row.preset} | {row.experts}, {row.k} | {ours:.3f} | "
                f"{theirs:.3f} | {ratio:.1f} | {layer:.0f} | {row.share:.2%} |",
                flush=True,
            )
    busy = measure.machine_cpu_seconds() - before
    print(f"\n{time.perf_counter() - started:.0f} s; the whole machine used {busy:.0f} CPU s.")
    if options.json:
        options.json.write_text(json.dumps({"schema": 1, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
