"""Errors of the experts of an OUTPUT of quantize-gpu in the Triton kernels of serving engines.

    python -m benchmarks.accuracy engines OUTPUT --engine vllm --sources FOLDER

FOLDER has the engine's package, as its wheel has it. On a GPU that torch sees the kernels are
compiled, elsewhere Triton interprets them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.accuracy.engines.inputs import Routed, as_given, routed, sorted_tokens
from benchmarks.accuracy.engines.kernels import Call, Engine, import_engine
from benchmarks.accuracy.engines.stored import Decoded, Stored, damaged, read_layer, scheme_of
from ktconv.runtime import MoELayer
from ktconv.runtime.layers.load import experts_per_token

# Triton's interpreter multiplies bf16 as integers, so it computes in float16, as the engines with
# `--dtype float16`. Products are rounded to the dtype, by 0.0017 or 0.0002, and so is each decoded
# weight of W4A16 and W8A16.
PRODUCT_LIMITS = {torch.bfloat16: 0.006, torch.float16: 0.0008}
# ktconv's kernels round activations otherwise: not at all, or to INT8; engines to E4M3, 0.045.
LAYER_LIMIT = 0.07
_FEW = 8  # tokens that faults are shown with


class Errors(NamedTuple):
    """||y - y'|| / ||y'||: of both products against those in float32 with the weights that ktconv
    decodes and the activations that the kernel gets, of the layer against ktconv's kernels."""

    first: float
    second: float
    layer: float

    def lie_within_limits(self, dtype: torch.dtype) -> bool:
        limits = PRODUCT_LIMITS[dtype], PRODUCT_LIMITS[dtype], LAYER_LIMIT
        return all(error <= limit for error, limit in zip(self, limits, strict=True))


def measure(
    engine: Engine, stored: Stored, decoded: Decoded, tokens: Routed, wanted: Tensor
) -> Errors:
    """`stored` as read; `wanted` [M, H]: what ktconv's kernels make of the tokens."""
    scheme, ids = stored.scheme, tokens.ids
    count, chosen = ids.shape
    rows, hidden = decoded.w13.shape[1:]
    config = engine.config(stored, count, chosen)
    places = sorted_tokens(ids, len(stored.w2), config["BLOCK_SIZE_M"])
    device, dtype = engine.device, engine.dtype
    there = Routed(tokens.x.to(device, dtype), ids.to(device), tokens.weights.to(device))
    on_device = places[0].to(device), places[1].to(device), places[2].to(device)
    call = Call(engine.prepare(stored.loaded(device, dtype)), config, there, on_device)

    first = torch.zeros(count, chosen, rows, dtype=dtype, device=device)
    engine.multiply(call, there.x, first, second=False)
    inner = engine.activated(call, first.view(-1, rows))
    second = torch.zeros(count, chosen, hidden, dtype=dtype, device=device)
    engine.multiply(call, inner, second, second=True)

    owners = ids.flatten()
    given = as_given(scheme, tokens.x).repeat_interleave(chosen, 0)
    ours = _products(decoded.w13, given, owners)
    ours_second = _products(decoded.w2, as_given(scheme, inner.cpu()), owners)
    ours_second *= tokens.weights.flatten().unsqueeze(-1)
    return Errors(
        _apart(first.view(-1, rows), ours),
        _apart(second.view(-1, hidden), ours_second),
        _apart(second.float().sum(1), wanted),
    )


def _products(weights: Tensor, a: Tensor, owners: Tensor) -> Tensor:
    """[P, N] of weights [E, N, K], a [P, K] and the expert of each row."""
    out = torch.empty(len(a), weights.shape[1])
    for expert in owners.unique():
        rows = owners == expert
        out[rows] = a[rows] @ weights[expert].T
    return out


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu().double() - wanted.double()).norm() / wanted.double().norm())


def print_errors(
    outputs: Sequence[Path], name: str, sources: Path, tokens: Sequence[int], layer: int | None
) -> None:
    """A table of each output's errors; ends with 1 where one is over its limit, and where a fault
    that was put in is not seen."""
    if torch.cuda.is_available():
        device, hopper = "cuda", torch.cuda.get_device_capability()[0] == 9
    else:
        device, hopper = "cpu", True
        os.environ["TRITON_INTERPRET"] = "1"
    engine = import_engine(name, sources, device, hopper)
    limits = PRODUCT_LIMITS[engine.dtype], LAYER_LIMIT
    print(f"{name}, {engine.dtype}, {_place(device)}; limits of a product and a layer: {limits}")
    print("| output | scheme | tokens | gate and up | down | layer |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    wrong = [line for output in outputs for line in _rows(engine, output, tokens, layer)]
    if wrong:
        raise SystemExit("\n".join(wrong))


def _place(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter"


def _rows(engine: Engine, output: Path, tokens: Sequence[int], number: int | None) -> Iterator[str]:
    """Prints the rows of an output; what is wrong with it."""
    scheme, group = scheme_of(output)
    if scheme not in engine.schemes:
        print(f"| {output.name} | {scheme} | no Triton kernel | | | |")
        return
    stored, decoded, layer = read_layer(output, number, scheme, group)
    kernels = MoELayer.load(output, layer)
    experts, hidden = decoded.w2.shape[:2]
    chosen = experts_per_token(output, layer)

    def errors(of: Stored, count: int) -> Errors:
        given = routed(count, hidden, experts, chosen)
        ours = kernels(given.x, given.ids, given.weights).float()
        return measure(engine, of, decoded, given, ours)

    for count in tokens:
        found = errors(stored, count)
        start = f"| {output.name} | {scheme} | {count}"
        print(f"{start} | {' | '.join(f'{e:.4f}' for e in found)} |", flush=True)
        if not found.lie_within_limits(engine.dtype):
            yield f"{output}: {count} tokens are over the limit"
    for fault, weights in damaged(stored):
        found = errors(weights, _FEW)
        start = f"| {output.name} | {fault} | {_FEW}"
        print(f"{start} | {' | '.join(f'{e:.4f}' for e in found)} |", flush=True)
        if found.lie_within_limits(engine.dtype):
            yield f"{output}: {fault} is not seen"
