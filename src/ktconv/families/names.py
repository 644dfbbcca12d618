"""Names, in a checkpoint, of what an MoE layer has beside its routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ktconv.errors import UsageError


@dataclass(frozen=True, slots=True)
class RouterTensors:
    """Names that a layer's router may have, likeliest first; of each kind at most one exists."""

    weight: tuple[str, ...]
    bias: tuple[str, ...]
    correction: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Names of a shared expert's matrices; `gating` [1, H], through a sigmoid, scales its output
    where it exists."""

    gate: str
    up: str
    down: str
    gating: str


def router_tensors(prefix: str) -> RouterTensors:
    """Candidates for the router of the layer whose experts lie under `prefix`.

    `prefix` is what comes before an expert's number, like model.layers.3.mlp.experts.
    """
    block = _block(prefix)
    gates = ("gate", "router", "gate.wg", "router.layer", "router.gate")
    return RouterTensors(
        weight=tuple(f"{block}.{gate}.weight" for gate in gates),
        bias=(f"{block}.router.bias",),
        correction=tuple(
            f"{block}.{name}"
            for name in (
                "gate.e_score_correction_bias",
                "e_score_correction_bias",
                "moe_statics.e_score_correction_bias",
                "experts.e_score_correction_bias",
                "gate.expert_bias",
                "expert_bias",
                "gate.bias",  # DeepSeek's own files; no family has a bias under this name
            )
        ),
    )


def shared_expert_tensors(prefix: str) -> tuple[SharedExpert, ...]:
    """Candidates for the shared expert beside the experts under `prefix`; a layer has one or none.

    Several shared experts are one wider expert in every family known here.
    """
    return tuple(_shared_experts(_block(prefix)))


def _shared_experts(block: str) -> Iterator[SharedExpert]:
    for name in ("shared_expert", "shared_experts", "shared_mlp"):
        gate, up, down = (f"{block}.{name}.{proj}_proj.weight" for proj in ("gate", "up", "down"))
        yield SharedExpert(gate, up, down, f"{block}.shared_expert_gate.weight")
    gate, up, down = (f"{block}.shared_experts.{proj}.weight" for proj in ("w1", "w3", "w2"))
    yield SharedExpert(gate, up, down, f"{block}.shared_expert_gate.weight")


def _block(prefix: str) -> str:
    """The MoE block that the experts are part of."""
    block = prefix.rstrip(".").removesuffix(".experts")
    if block == prefix.rstrip("."):
        raise UsageError(f"{prefix!r} is no prefix of experts", "it must end with .experts")
    return block
