"""The activations of a model's layers: in words, and in records."""

from __future__ import annotations

from collections.abc import Mapping

from ktconv.families.family import PLAIN, ExpertActivation, activation_of_record
from ktconv.system.units import format_ranges, listed

Activations = Mapping[int, ExpertActivation]  # by layer


def in_words(activations: Activations) -> str:
    """SiLU; or where layers differ: SiLU (layers 3-42); GELU (layers 43-44)."""
    groups = _groups(activations)
    if len(groups) == 1:
        return str(next(iter(groups)))
    return "; ".join(f"{one} ({listed('layer', layers)})" for one, layers in groups.items())


def by_ranges(activations: Activations) -> dict[str, dict[str, object]]:
    """Activations for JSON, by layers: {"3-42": {"description": "SiLU", "function": "silu"}}."""
    return {format_ranges(layers): one.as_record() for one, layers in _groups(activations).items()}


def usual(activations: Activations) -> ExpertActivation:
    """Activation of most layers."""
    groups = _groups(activations)
    return max(groups, key=lambda one: len(groups[one]), default=PLAIN)


def of_records(geometry: Mapping[str, object]) -> Activations | None:
    """Activations by the geometry of run.json or a manifest; None where it has none, or a damaged
    one."""
    found = {}
    layers = geometry.get("layers")
    for index, layer in layers.items() if isinstance(layers, dict) else ():
        own = layer.get("activation") if isinstance(layer, dict) else None
        activation = activation_of_record(geometry.get("activation") if own is None else own)
        if activation is None or not str(index).isdecimal():
            return None
        found[int(index)] = activation
    return found or None


def _groups(activations: Activations) -> dict[ExpertActivation, list[int]]:
    groups: dict[ExpertActivation, list[int]] = {}
    for layer, activation in sorted(activations.items()):
        groups.setdefault(activation, []).append(layer)
    return groups
