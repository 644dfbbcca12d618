"""Whether packed experts are those of a model, by layers, sizes and answers to a trial."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.config import family_of, text_section
from ktconv.model.stored import StoredExperts
from ktconv.moe import Experts, open_experts
from ktconv.moe.load import activation_of, moe_layers, output_activation, packed_experts
from ktconv.packed.weights import open_packed

_LEAST_LIKENESS = 0.5  # cosine; INT4 stays above 0.9, experts of another model are near 0


class UnlikeExperts(CheckpointError):
    """Packed experts whose outputs differ from those of the model's own."""


def open_layers(
    directory: Path, layers: Iterable[int], settings: Mapping[str, Any]
) -> dict[int, Experts]:
    """Each layer's experts; headers are read for all of them at once, not once per layer.
    Where `directory` does not say what experts compute, `settings` of the model do."""
    first, *others = sorted(layers)
    experts = {first: open_experts(directory, first, settings)}
    packed = open_packed(directory)
    for layer in others:
        activation = output_activation(directory, layer, settings)
        experts[layer] = packed_experts(packed, layer, activation)
    return experts


def _layers(settings: Mapping[str, Any]) -> int | None:
    """How many layers a model has, without those for multi-token prediction."""
    text = text_section(settings)
    given = (text.get(key) for key in table.FAMILIES.keys("layers", family_of(settings)))
    return next((value for value in given if isinstance(value, int)), None)


def check_layers(settings: Mapping[str, Any], layers: Collection[int], directory: Path) -> None:
    """CheckpointError unless `directory` has the experts of these layers, which are all that the
    model has, and of no others but such for multi-token prediction."""
    converted = moe_layers(directory)
    if not converted:
        raise CheckpointError(
            f"{directory} contains no packed experts", "give an OUTPUT of ktconv quantize-cpu"
        )
    lacking = sorted(set(layers) - set(converted))
    if lacking:
        raise CheckpointError(
            f"{directory} does not contain the experts of layers {lacking} of the model",
            "convert all layers of the checkpoint that the model was loaded from",
        )
    count = _layers(settings) or max(layers) + 1
    extra = sorted(layer for layer in set(converted) - set(layers) if layer < count)
    if extra:
        raise CheckpointError(
            f"{directory} has experts of layers {extra}, which are not MoE layers of the model",
            "give the model that was converted",
        )


def check_match(
    settings: Mapping[str, Any],
    layer: int,
    own: StoredExperts,
    experts: Experts,
    directory: Path,
) -> None:
    """CheckpointError unless the model's own experts have the same matrices and activation."""
    for what, has, packed in _features(own, experts):
        if has != packed:
            those = f"those of the model {'have' if has else 'do not have'} {what}"
            raise CheckpointError(
                f"layer {layer} does not match: {those}, those in {directory} "
                f"{'have' if packed else 'do not'}",
                "give the model that was converted",
            )
    theirs = own.count, own.hidden, own.intermediate
    ours = experts.count, experts.hidden, experts.intermediate
    for what, size, found in zip(("experts", "hidden", "intermediate"), theirs, ours, strict=True):
        if size != found:
            raise CheckpointError(
                f"layer {layer} does not match: {what} is {size} in the model and {found} "
                f"in {directory}",
                "give the model that was converted",
            )
    if settings and activation_of(settings, layer) != experts.activation:
        raise CheckpointError(
            f"the model and {directory} do not have the same activation in layer {layer}",
            "compare hidden_act, and settings of limits, in both config.json",
        )


def _features(own: StoredExperts, experts: Experts) -> Iterator[tuple[str, bool, bool]]:
    yield "biases", own.biased, experts.biased
    yield "a gate projection", own.gated, experts.activation.gated


def trial_token(hidden: int, dtype: torch.dtype) -> Tensor:
    """A random token [1, H], always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((1, hidden), generator=generator).to(dtype)


def check_likeness(theirs: Tensor, ours: Tensor, layer: int, directory: Path) -> None:
    """UnlikeExperts unless an expert's output is close to that of the model's own for the same
    token. Packed weights of another checkpoint can have the very same sizes."""
    theirs, ours = theirs.float().flatten(), ours.float().flatten()
    likeness = torch.nn.functional.cosine_similarity(theirs, ours, dim=0)
    if theirs.any() and not likeness > _LEAST_LIKENESS:
        raise UnlikeExperts(
            f"the experts of layer {layer} in {directory} are not those of the model",
            "give the model that was converted",
        )
