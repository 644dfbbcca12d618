"""Experts as gpt-oss stores them: outputs of gate and up alternate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from helpers.encoded import e2m1, pairs, powers
from helpers.families import Tensor, Weights, bf16

F32 = NDArray[np.float32]
SOURCE = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INNER = 3, 128, 192
SIZES = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": INNER}


class Blocks:
    """A layer in MXFP4, the same in bf16, and its values: gate_up [E, 2I, H], whose outputs
    alternate, and down [E, H, I]."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.mxfp4: dict[str, Tensor] = {}
        self.bf16: dict[str, Tensor] = {}
        self.values: list[F32] = []
        biases: list[F32] = []
        for name, rows, cols in (
            ("gate_up_proj", 2 * INNER, HIDDEN),
            ("down_proj", HIDDEN, INNER),
        ):
            codes = rng.integers(0, 16, (EXPERTS * rows, cols), np.uint8)
            scale = rng.integers(110, 130, (EXPERTS, rows, cols // 32), np.uint8)
            values: F32 = e2m1(codes).reshape(EXPERTS, rows, cols) * powers(scale).repeat(
                32, axis=2
            )
            bias = rng.standard_normal((EXPERTS, rows)).astype(np.float16).astype(np.float32)
            blocks = pairs(codes).reshape(EXPERTS, rows, cols // 32, 16)
            self.mxfp4[f"{SOURCE}.{name}_blocks"] = blocks
            self.mxfp4[f"{SOURCE}.{name}_scales"] = scale
            self.bf16[f"{SOURCE}.{name}"] = bf16(np.ascontiguousarray(values.swapaxes(1, 2)))
            for tensors in (self.mxfp4, self.bf16):
                tensors[f"{SOURCE}.{name}_bias"] = bias
            self.values.append(values)
            biases.append(bias)
        self.biases = biases[0], biases[1]

    @property
    def weights(self) -> Weights:
        gate_up, down = self.values
        return Weights(gate_up[:, 0::2], gate_up[:, 1::2], down)
