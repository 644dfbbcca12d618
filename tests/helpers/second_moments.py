"""Second moments as `ktconv stats --hessian` writes them, of made-up inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ktconv.quantize.packed.gptq.inputs import FEWEST_TOKENS
from ktconv.source import Checkpoint, MoELayer
from ktconv.stats.hessian import HessianTap
from ktconv.stats.origin import Origin, Sizes, source_sha256
from ktconv.stats.router_sample import router_sample

F32 = NDArray[np.float32]
TOKENS = (0, 1, FEWEST_TOKENS - 1, FEWEST_TOKENS, 40, 200, 700, 1500)  # of the example's experts

# Of an expert of a layer: the inputs of gate and up [tokens, H], and those of down [tokens, I].
Inputs = Callable[[MoELayer, int], tuple[F32, F32]]


def correlated(tokens: int, size: int, seed: int) -> F32:
    """Inputs with a few directions that many channels share, and channels of different sizes."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((tokens, 12)) @ rng.standard_normal((12, size))
    found = (shared + rng.standard_normal((tokens, size))) * np.exp(rng.standard_normal(size))
    return found.astype(np.float32)


def of_example(layer: MoELayer, expert: int) -> tuple[F32, F32]:
    """So many TOKENS."""
    seed = 100 * layer.index + expert
    hidden, inner = (
        correlated(TOKENS[expert], size, seed)
        for size in (layer.hidden_size, layer.intermediate_size)
    )
    return hidden, inner


def record(
    directory: Path,
    checkpoint: Checkpoint,
    layers: Iterable[int] | None = None,
    inputs: Inputs = of_example,
    **about: Any,
) -> Path:
    """Writes those of `layers` (None: all) to a new directory; `about`: fields of Origin."""
    import torch

    origin = Origin(
        "model", source_sha256(checkpoint), "text", "1" * 64, 9, "2" * 64, router_sample(checkpoint)
    )
    chosen = [one for one in checkpoint.layers if layers is None or one.index in layers]
    tap = HessianTap(
        {one.index: Sizes.of(one) for one in chosen}, replace(origin, **about), directory
    )
    for layer in chosen:
        seen = {expert: inputs(layer, expert) for expert in range(len(layer.experts))}
        used = [expert for expert, (hidden, _) in seen.items() if len(hidden)]
        tap.chosen(layer.index, 0, torch.tensor([used]), torch.ones(1, len(used)))
        for expert in used:
            rows, inner = map(torch.from_numpy, seen[expert])
            tap.inputs(layer.index, expert, rows, inner, torch.ones(len(rows)))
        tap.layer_done(layer.index)
    return directory
