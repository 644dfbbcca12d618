"""LoRA of parameters with the matrices of all experts of a layer: PEFT's target_parameters.

    lora_A [E * r, inputs]    lora_B [outputs, E * r]

In lora_A the experts follow each other, in lora_B they alternate: `reshape(outputs, r, E)`. Unsloth
wrote lora_B expert after expert, `reshape(outputs, E, r)`, until September 2026 (unsloth-zoo pull
requests 1232 and 1269). From then on its adapter_config.json says `lora_B_layout`; shapes do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import Projection
from ktconv.model.own import ExpertParameter
from ktconv.system.regular_files import MAX_CONFIG_BYTES, read_small

LAYOUT = "lora_B_layout"  # of adapter_config.json
Layout = Literal["rank_major", "grouped_by_expert"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


class Matrices(NamedTuple):
    """A and B of all experts, of one projection."""

    a: Tensor  # [E, rank, inputs]
    b: Tensor  # [E, outputs, rank]


# ---- which of them ---------------------------------------------------------------------------


def adapted_parameters(
    parameters: Sequence[ExpertParameter], names: Sequence[str], count: int, targets: Set[str]
) -> list[ExpertParameter] | None:
    """Parameters that `count` nested adapters of a module are of, the outermost first; None where
    that is not told. `names` are their full names, `targets` PEFT's target_parameters."""
    found = list(parameters)
    if count != len(found):
        found = [
            one for one, name in zip(parameters, names, strict=True) if _is_named(name, targets)
        ]
    return found[::-1] if len(found) == count else None


def _is_named(name: str, targets: Set[str]) -> bool:
    """Whether it is named, by its whole name or the end of it, from a dot on."""
    words = name.split(".")
    return any(".".join(words[first:]) in targets for first in range(len(words)))


# ---- reading ---------------------------------------------------------------------------------


def chosen_layout(directory: Path, config: Mapping[str, Any], given: str | None) -> Layout | None:
    """Order of lora_B: as given, else as adapter_config.json says, else as PEFT has it; None where
    Unsloth may have written it either way. UsageError for a contradiction and for other words."""
    stated = config.get(LAYOUT)
    for where, one in (("lora_b_layout", given), (f"{LAYOUT} of {directory}", stated)):
        if one is not None and one not in LAYOUTS:
            raise UsageError(f"{where} is {one!r:.60}, not {' or '.join(LAYOUTS)}")
    if given is not None and stated not in (None, given):
        raise UsageError(
            f"{directory} says {LAYOUT} {stated}, not {given}", "leave lora_b_layout out"
        )
    found = given or stated or (None if _of_unsloth(directory, config) else LAYOUTS[0])
    return next((one for one in LAYOUTS if one == found), None)


def _of_unsloth(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether the adapter or what it was made of is said to be Unsloth's."""
    text = json.dumps(config)
    with suppress(CheckpointError):
        text += read_small(directory, "README.md", MAX_CONFIG_BYTES).decode(errors="replace")
    return "unsloth" in text.lower()


def check_layout(directory: Path, layout: Layout | None, experts: int, rank: int) -> None:
    """UsageError where both layouts are possible and they differ."""
    if layout is None and experts > 1 and rank > 1:
        raise UsageError(
            f"{directory} was made with Unsloth or of its models, and does not say how lora_B of "
            "its experts is ordered: Unsloth changed that in September 2026",
            'give lora_b_layout="grouped_by_expert" where Unsloth trained it before, else '
            '"rank_major"',
        )


def rank_of(a: Tensor, experts: int) -> int:
    """Rank of lora_A [E * r, inputs]; 0 where that is no such matrix."""
    return a.shape[0] // experts if a.ndim == 2 and a.shape[0] % experts == 0 else 0


def unstacked(
    of: ExpertParameter, a: Tensor, b: Tensor, experts: int, layout: Layout | None
) -> dict[Projection, Matrices] | None:
    """The matrices of the first experts, for each projection; None where a and b have other
    shapes."""
    rank = rank_of(a, of.entries)
    if not rank or b.ndim != 2 or b.shape[1] != a.shape[0]:
        return None
    stacked = a.reshape(of.entries, rank, -1)
    if layout == "grouped_by_expert":
        of_each = b.reshape(-1, of.entries, rank).permute(1, 0, 2)
    else:
        of_each = b.reshape(-1, rank, of.entries).permute(2, 0, 1)
    if of.inputs_first != of.marked:  # PEFT has taken outputs for inputs
        stacked, of_each = of_each.transpose(1, 2), stacked.transpose(1, 2)
    stacked, of_each = stacked[:experts], of_each[:experts]
    return {
        one: Matrices(
            stacked.contiguous(), of_each[:, _rows(of, one, of_each.shape[1])].contiguous()
        )
        for one in of.projections
    }


def _rows(of: ExpertParameter, projection: Projection, outputs: int) -> slice:
    """Outputs of a projection among those of the parameter."""
    place, count = of.projections.index(projection), len(of.projections)
    if of.alternating:
        return slice(place, outputs, count)
    return slice(place * (outputs // count), (place + 1) * (outputs // count))


# ---- writing -------------------------------------------------------------------------------


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
        b[:, _rows(of, projection, b.shape[1]), first : first + rank] = one.b
    if others := of.entries - count:
        a, b = (torch.cat([one, one.new_zeros(others, *one.shape[1:])]) for one in (a, b))
    if of.inputs_first != of.marked:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return a.reshape(-1, a.shape[2]), b.permute(1, 2, 0).reshape(b.shape[1], -1)
