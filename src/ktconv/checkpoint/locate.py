"""From the MODEL argument to a directory: a path, or a hub id in the local cache."""

from __future__ import annotations

import re
from pathlib import Path

from ktconv.checkpoint.shards import INDEX_SUFFIX
from ktconv.errors import CheckpointError

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


def locate_model(model: str | Path) -> Path:
    """The directory that `model` means; never touches the network.

    `model` is a directory or a hub id `org/name` of the local Hugging Face cache.
    Raises CheckpointError with a hint what to give instead.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise _is_a_file(path)
    if isinstance(model, str) and _HUB_ID.match(model):
        return _locate_in_cache(model)
    raise CheckpointError(
        f"{model} does not exist",
        "Give a checkpoint directory, or a hub id org/name from the local cache.",
    )


def _is_a_file(path: Path) -> CheckpointError:
    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        return CheckpointError(
            f"{path} is a file, not a checkpoint directory",
            f"Use its directory: {path.parent}",
        )
    if path.name.endswith(".gguf"):
        return CheckpointError(
            f"{path} is a GGUF file, which is not supported as an input yet",
            "Use the safetensors checkpoint that it was made from.",
        )
    return CheckpointError(f"{path} is not a directory", "Give a checkpoint directory.")


def _locate_in_cache(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download  # imports slowly; only needed here
    except ImportError:
        raise CheckpointError(
            f"{model} is not a directory, and without huggingface_hub the local Hugging Face "
            "cache cannot be searched for it",
            f"pip install huggingface_hub, then: hf download {model}",
        ) from None
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):  # not cached, cached in part, or not a valid id
        raise CheckpointError(
            f"{model} is neither a directory nor a model in the local Hugging Face cache",
            f"Check the path, or download it first: hf download {model}",
        ) from None
