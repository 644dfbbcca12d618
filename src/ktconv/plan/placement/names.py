"""Maps names of tensors in a checkpoint to an engine's parameters and the places of experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from ktconv.errors import CheckpointError, UsageError
from ktconv.plan.placement.balance import initial_map
from ktconv.plan.placement.slices import Shard

EXPERTS = "experts"


class ExpertParam(NamedTuple):
    """A row: tensors with `weight` in their name belong to `parameter`."""

    parameter: str  # "experts.w13_"
    weight: str  # "experts.0.gate_proj."
    physical: int  # the place of the expert
    shard: Shard


class Target(NamedTuple):
    """Destination of a tensor of a checkpoint."""

    parameter: str  # "model.layers.3.mlp.experts.w13_weight"
    physical: int
    shard: Shard


class ExpertParams(Struct, frozen=True, dict=True):
    """The rows, by physical expert, and what a name belongs to."""

    rows: Sequence[ExpertParam]

    def targets(self, name: str) -> list[Target]:
        """Destinations of the tensor `name`: each copy of its expert, ascending.

        Whole components of names are compared: `shared_experts.0.gate_proj.weight` is no routed
        expert's. CheckpointError for a name that belongs to no row.
        """
        components = name.split(".")
        for start, component in enumerate(components):
            for length in self._lengths if component == EXPERTS else ():
                rows = self._by_weight.get(".".join(components[start : start + length]) + ".")
                rest = ".".join(components[start + length :])
                if rows and rest:
                    prefix = "".join(f"{one}." for one in components[:start])
                    return [Target(prefix + r.parameter + rest, r.physical, r.shard) for r in rows]
        raise CheckpointError(
            f"{name} is not a tensor of one of the {len(self._by_weight)} expert matrices",
            f"their names have {self.rows[0].weight} to {self.rows[-1].weight} in them",
        )

    @cached_property
    def _by_weight(self) -> Mapping[str, Sequence[ExpertParam]]:
        found = defaultdict(list)
        for row in self.rows:
            found[row.weight].append(row)
        return dict(found)

    @cached_property
    def _lengths(self) -> set[int]:
        """Numbers of components that the names of rows have."""
        return {weight.count(".") for weight in self._by_weight}


def expert_params_mapping(
    gate: str | None, down: str, up: str, experts: int, redundant: int = 0
) -> ExpertParams:
    """The rows of experts whose projections have these names; `gate` is None where there is none.

    For each of experts + redundant places, which hold the experts of `initial_map`, w1, w2 and w3
    (without a gate: w1, which is up, and w2), as vLLM's make_expert_params_mapping.
    """
    shards: list[tuple[Shard, str | None]] = [("w1", gate), ("w2", down), ("w3", up)]
    if gate is None:
        shards = [("w1", up), ("w2", down)]
    if not all(name for _, name in shards) or len({name for _, name in shards}) < len(shards):
        raise UsageError(f"projections named {gate}, {down} and {up} cannot be told apart")
    rows = [
        ExpertParam(
            f"{EXPERTS}.{'w2' if shard == 'w2' else 'w13'}_",
            f"{EXPERTS}.{expert}.{name}.",
            physical,
            shard,
        )
        for physical, expert in enumerate(initial_map(experts, redundant).tolist())
        for shard, name in shards
    ]
    return ExpertParams(rows)
