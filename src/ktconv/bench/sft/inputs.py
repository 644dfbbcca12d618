"""Calls that are measured: of a seed, so that the process of a peer draws the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from ktconv.bench.measure import Effort, make_batch
from ktconv.bench.presets import Shape
from ktconv.formats.decode import f32_to_bf16
from ktconv.system.arrays import I64
from ktconv.train.gradients import Call, from_bits, random_lora

ROUTINGS = 8  # drawn before timing starts; steps beyond them repeat


class Inputs(Struct, frozen=True):
    """A call, and the routings that its steps take in turn: `call.ids` is the first."""

    call: Call
    ids: list[Tensor]


def make_inputs(
    ids: Iterator[I64], tokens: int, shape: Shape, experts: int, rank: int, seed: int
) -> Inputs:
    """`experts` that have LoRA matrices: all of the layer, of which a shape may have fewer."""
    hidden = shape.hidden
    batch = make_batch(ids, tokens, hidden, shape.top_k, seed, Effort(iterations=ROUTINGS))
    dy = np.random.default_rng([seed, 1]).standard_normal((tokens, hidden), np.float32)
    lora = random_lora(
        experts,
        hidden,
        shape.intermediate,
        rank,
        torch.Generator().manual_seed(seed),
        shape.activation.gated,
    )
    kept = [torch.from_numpy(one.astype(np.int64)) for one in batch.ids[:ROUTINGS]]
    kept = kept[batch.checked :] + kept[: batch.checked]
    weights = torch.from_numpy(batch.weights)
    return Inputs(
        Call(from_bits(batch.x), kept[0], weights, from_bits(f32_to_bf16(dy)), lora), kept
    )
