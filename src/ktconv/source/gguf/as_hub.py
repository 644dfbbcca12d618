"""A GGUF model as the safetensors checkpoint of its family: names of its tensors there."""

from __future__ import annotations

from ktconv.errors import CheckpointError, UsageError
from ktconv.source import Checkpoint, gguf_refusal
from ktconv.source.config import CONFIG_NAME
from ktconv.source.gguf.architectures import ARCHITECTURES
from ktconv.source.gguf.hub_names import HUB_NAMES, HubNames


def hub_names_of(checkpoint: Checkpoint) -> HubNames | None:
    """None for safetensors.

    Raises CheckpointError for a GGUF model whose names are not known, or whose config.json is of
    another one; UsageError where it has no config.json and tokenizer.
    """
    if checkpoint.architecture is None:
        return None
    path, name = checkpoint.path, checkpoint.architecture
    names = HUB_NAMES.get(name)
    if names is None:
        raise gguf_refusal(
            path,
            f"names and order of rows of architecture {name} are not known (those of "
            f"{', '.join(HUB_NAMES)} are)",
        )
    if checkpoint.side_directory is None:
        raise UsageError(
            f"{path} has no config.json and tokenizer",
            "give a directory with those of the model: --config DIR",
        )
    kind, given = ARCHITECTURES[name].model_type, checkpoint.config.model_type
    if given != kind:
        raise CheckpointError(
            f"{path} is a model of type {kind}, but {CONFIG_NAME} in {checkpoint.side_directory} "
            f"is of type {given}",
            "Give the config.json of this model.",
        )
    has_head = any(tensor.name == "output.weight" for tensor in checkpoint.other_tensors)
    if not has_head and checkpoint.config.content.get("tie_word_embeddings") is not True:
        raise CheckpointError(
            f"{path} has no output.weight, but {CONFIG_NAME} in {checkpoint.side_directory} does "
            "not say tie_word_embeddings",
            "Give the config.json of this model.",
        )
    return names


def hub_name(names: HubNames, tensor: str) -> str:
    """The output name of a non-expert tensor. CheckpointError for one that is not known."""
    found = names.find(tensor)
    if found is None:
        raise CheckpointError(
            f"{tensor} has no name in safetensors checkpoints of this architecture that is known",
            "Use the safetensors checkpoint of the same model.",
        )
    return found
