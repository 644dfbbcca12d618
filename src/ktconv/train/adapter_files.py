"""Adapters in directories as tensors of PyTorch, with PEFT's names and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ktconv.errors import CheckpointError
from ktconv.families.family import Projection
from ktconv.source.adapter import files
from ktconv.source.adapter.names import SIDES
from ktconv.source.adapter.parameters import ExpertParameter
from ktconv.source.types import TensorRef
from ktconv.system.arrays import F32

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Pair(NamedTuple):
    """The matrices of one projection of all experts of a layer: W counts as W + scale * B A."""

    a: Tensor  # [E, rank, inputs]
    b: Tensor  # [E, outputs, rank]
    scale: float


class Linear(NamedTuple):
    """LoRA of a linear layer that is no expert's."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]
    scale: float


class Adapter(files.Adapter):
    """`ktconv.source.adapter.files.Adapter`, whose matrices are tensors with their own dtypes."""

    def pair(self, layer: int, projection: Projection, experts: int, shape: Sequence[int]) -> Pair:
        """The matrices of this many experts, all of them, whose own are [outputs, inputs]."""
        covered = self.covered(layer, projection, experts)
        if len(covered) < experts:
            missing = next(one for one in range(experts) if one not in covered)
            raise CheckpointError(
                f"{self.directory} leaves {projection} of expert {missing} in layer {layer} as it "
                "is, but the model has LoRA of all experts",
                "merge it with ktconv quantize-cpu MODEL MERGED --method bf16 --adapter "
                f"{self.directory}, and train a new adapter on MERGED",
            )
        scale = self.expert_scale(layer, projection, experts, shape)
        found = [self.expert(layer, projection, one) for one in range(experts)]
        dtypes = [self.dtype_of(layer, projection, side) for side in SIDES]
        a = _stacked([one.a for one in found], dtypes[0])
        return Pair(a, _stacked([one.b for one in found], dtypes[1]), scale)

    def linear(self, module: str, shape: Sequence[int]) -> Linear:
        """The matrices of another module, whose own is [outputs, inputs]."""
        (a, b), scale = self.other(module, shape)
        return Linear(self.read(a), self.read(b), scale)

    def read(self, tensor: TensorRef) -> Tensor:
        """A tensor as it is stored."""
        return torch.from_numpy(self.values(tensor)).to(_DTYPES[tensor.dtype])


def _stacked(matrices: Sequence[F32], dtype: str) -> Tensor:
    return torch.from_numpy(np.stack(matrices)).to(_DTYPES[dtype])


class Matrices(NamedTuple):
    """A and B of all experts, of one projection."""

    a: Tensor  # [E, rank, inputs]
    b: Tensor  # [E, outputs, rank]


def stacked(of: ExpertParameter, matrices: Mapping[Projection, Matrices]) -> tuple[Tensor, Tensor]:
    """lora_A and lora_B of a parameter, in PEFT's layout. Projections that have an A in common keep
    their rank; else those of each follow each other, and the rank is the sum."""
    found = list(matrices.values())
    count, rank, _ = found[0].a.shape
    same = all(torch.equal(one.a, found[0].a) for one in found)
    a = found[0].a if same else torch.cat([one.a for one in found], dim=1)
    b = a.new_zeros(count, found[0].b.shape[1] * len(of.projections), a.shape[1])
    for number, (projection, one) in enumerate(matrices.items()):
        first = 0 if same else number * rank
        b[:, of.rows(projection, b.shape[1]), first : first + rank] = one.b
    if others := of.entries - count:
        a, b = (torch.cat([one, one.new_zeros(others, *one.shape[1:])]) for one in (a, b))
    if of.swapped:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return a.reshape(-1, a.shape[2]), b.permute(1, 2, 0).reshape(b.shape[1], -1)
