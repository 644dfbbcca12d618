"""Whether packed experts are those of a model, by layers, sizes and answers to a trial."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ktconv.errors import CheckpointError
from ktconv.model.own import OwnExperts
from ktconv.runtime.layers import Experts, expert_output
from ktconv.runtime.layers.load import (
    ConvertedModel,
    Hold,
    activation_of,
    moe_layers,
)
from ktconv.source.reading.streamed import whole
from ktconv.source.settings import ModelSettings
from ktconv.system.arrays import F32
from ktconv.targets.packed.weights import no_packed_experts

_LEAST_LIKENESS = 0.5  # cosine; INT4 stays above 0.9, experts of another model are near 0
_MOST_APART = 0.03  # relative, of the same weights; bf16 rounds to 0.01, GELU for SiLU gives 0.1


class UnlikeExperts(CheckpointError):
    """Packed experts whose outputs differ from those of the model's own."""


def open_layers(
    directory: Path,
    layers: Iterable[int],
    settings: ModelSettings,
    hold: Hold | None = None,
) -> dict[int, Experts]:
    """Each layer's experts; headers are read for all of them at once, not once per layer.
    Where `directory` does not say what experts compute, `settings` of the model do. `hold` puts
    them into memory, else they are mapped."""
    model = ConvertedModel(directory, settings)
    return dict(model.open_layer(layer, hold=hold) for layer in sorted(layers))


def check_layers(
    settings: ModelSettings, layers: Collection[int], directory: Path, built: int = 0
) -> None:
    """CheckpointError unless `directory` has the experts of these layers, which are all that the
    model has, and of no others but such for multi-token prediction. `built`: how many layers the
    model has, with experts or without, where `settings` do not say that."""
    converted = moe_layers(directory)
    if not converted:
        raise CheckpointError(*no_packed_experts(directory))
    check_numbers(settings, layers, converted, directory, built)


def check_numbers(
    settings: ModelSettings,
    layers: Collection[int],
    converted: Collection[int],
    directory: Path,
    built: int = 0,
) -> None:
    """`check_layers` of a directory that has the experts of the layers `converted`."""
    lacking = sorted(set(layers) - set(converted))
    if lacking:
        raise CheckpointError(
            f"{directory} does not contain the experts of layers {lacking} of the model",
            "convert all layers of the checkpoint that the model was loaded from",
        )
    count = settings.num_layers or built or max(layers) + 1
    extra = sorted(layer for layer in set(converted) - set(layers) if layer < count)
    if extra:
        raise CheckpointError(
            f"{directory} has experts of layers {extra}, which are not MoE layers of the model",
            "give the model that was converted",
        )


def check_match(
    settings: ModelSettings,
    layer: int,
    own: OwnExperts,
    experts: Experts,
    directory: str | Path,
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


def _features(own: OwnExperts, experts: Experts) -> Iterator[tuple[str, bool, bool]]:
    yield "biases", own.biased, experts.biased
    yield "a gate projection", own.gated, experts.activation.gated


def trial_token(hidden: int, dtype: torch.dtype) -> Tensor:
    """A random token [1, H], always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((1, hidden), generator=generator, device="cpu").to(dtype)


def check_function(
    own: OwnExperts, answer: Tensor, expert: int, tokens: Tensor, experts: Experts, layer: int
) -> None:
    """CheckpointError unless the model's own expert answers `tokens` [M, H] as its matrices do with
    the activation of the packed ones. For models whose config does not say what experts compute."""
    biases = {name: _array(bias) for name, bias in own.biases(expert).items()}
    matrices = {
        name: whole(_array(matrix), biases.get(name))
        for name, matrix in own.matrices(expert).items()
    }
    streams = matrices.get("gate"), matrices["up"], matrices["down"]
    ours = torch.from_numpy(expert_output(streams, experts.activation, _array(tokens)))
    theirs = answer.detach().float().cpu()
    apart = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
    if bool((apart > _MOST_APART).any()):
        raise CheckpointError(
            f"the model's experts in layer {layer} do not compute what those that were converted "
            f"do: {experts.activation.function} between the products",
            "compare the activation in the model's code with hidden_act in the config.json that "
            "the checkpoint was converted with",
        )


def _array(tensor: Tensor) -> F32:
    found: F32 = tensor.detach().float().cpu().numpy()
    return found


def check_likeness(theirs: Tensor, ours: Tensor, layer: int, source: str | Path) -> None:
    """UnlikeExperts unless an expert's output is close to that of the model's own for the same
    token. Packed weights of another checkpoint can have the very same sizes."""
    theirs, ours = theirs.float().flatten(), ours.float().flatten()
    likeness = torch.nn.functional.cosine_similarity(theirs, ours, dim=0)
    if theirs.any() and not likeness > _LEAST_LIKENESS:
        raise UnlikeExperts(
            f"the experts of layer {layer} in {source} are not those of the model",
            "give the model that was converted",
        )
