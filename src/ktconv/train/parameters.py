"""LoRA of parameters with the matrices of all experts of a layer, written in the layout of PEFT's
target_parameters; see `ktconv.source.adapter.parameters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ktconv.families.family import Projection
from ktconv.source.adapter.parameters import LAYOUT as LAYOUT
from ktconv.source.adapter.parameters import LAYOUTS as LAYOUTS
from ktconv.source.adapter.parameters import ExpertParameter
from ktconv.source.adapter.parameters import Layout as Layout


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
