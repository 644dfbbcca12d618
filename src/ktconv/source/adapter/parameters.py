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

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import Projection
from ktconv.system.regular_files import MAX_CONFIG_BYTES, read_small

LAYOUT = "lora_B_layout"  # of adapter_config.json
Layout = Literal["rank_major", "grouped_by_expert"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


class ExpertParameter(NamedTuple):
    """A parameter with matrices of all experts of a layer, as adapters of parameters know it: [E,
    outputs, inputs], or [E, inputs, outputs] where `inputs_first`."""

    module: str  # what has it, in the experts' module: "" for that itself
    name: str  # gate_up_proj
    entries: int  # experts that it has matrices for; LongCat's has some for others, which are last
    projections: tuple[Projection, ...]  # whose outputs follow each other
    alternating: bool  # or alternate
    inputs_first: bool
    marked: bool  # its module says `is_transposed`, by which PEFT takes its inputs to be first

    @property
    def swapped(self) -> bool:
        """Whether PEFT has taken its outputs for inputs, so that A and B have changed places."""
        return self.inputs_first != self.marked

    def rows(self, projection: Projection, outputs: int) -> slice:
        """Outputs of a projection among those of the parameter."""
        place, count = self.projections.index(projection), len(self.projections)
        if self.alternating:
            return slice(place, outputs, count)
        return slice(place * (outputs // count), (place + 1) * (outputs // count))


def adapted_parameters(
    parameters: Sequence[ExpertParameter], names: Sequence[str], count: int, targets: Set[str]
) -> list[ExpertParameter] | None:
    """Parameters that `count` nested adapters of a module are of, the outermost first; None where
    that is not told. `names` are their full names, `targets` PEFT's target_parameters."""
    found = list(parameters)
    if count != len(found):
        found = [
            one for one, name in zip(parameters, names, strict=True) if is_named(name, targets)
        ]
    return found[::-1] if len(found) == count else None


def is_named(name: str, targets: Set[str]) -> bool:
    """Whether a module or parameter is named, by its whole name or the end of it, from a dot on."""
    words = name.split(".")
    return any(".".join(words[first:]) in targets for first in range(len(words)))


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
            'write "lora_B_layout": "grouped_by_expert" into its adapter_config.json (in Python: '
            'give lora_b_layout="grouped_by_expert") where Unsloth trained it before, else '
            '"rank_major"',
        )


def rank_of(shape: Sequence[int], experts: int) -> int:
    """Rank of lora_A [E * r, inputs]; 0 where that is no such matrix."""
    return shape[0] // experts if len(shape) == 2 and shape[0] % experts == 0 else 0
