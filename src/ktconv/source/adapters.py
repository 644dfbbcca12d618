"""Files of LoRA adapters, which are no part of the model that they lie next to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from ktconv.errors import CheckpointError
from ktconv.source.strict_json import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of PEFT
FUSED = "fused_expert_lora.safetensors"  # of KTransformers, without alpha and rank

# Those, their pickled and sharded forms, and the names of MLX and diffusers.
_NAME = re.compile(
    r"adapter_config\.json|adapter_model[.-].+|fused_expert_lora\..+|pytorch_lora_weights\..+"
    r"|([0-9]+_)?adapters\.(safetensors|npz)"
)
# Weights of a model; optimizers and schedulers of a training are pickled too.
_MODEL = re.compile(r".+\.(safetensors|safetensors\.index\.json|gguf)|pytorch_model.*\.bin")


def is_adapter_file(name: str) -> bool:
    """Whether a file is a part of an adapter, by its name."""
    return _NAME.fullmatch(name) is not None


def adapter_notes(*directories: Path | None) -> list[str]:
    """Notes about adapter files in the directories of a model, which may be one; others than
    directories have none."""
    notes = []
    for directory in dict.fromkeys(filter(None, directories)):
        there: list[Path] = []
        with contextlib.suppress(OSError):  # what is needed there was read
            there = [one for one in directory.iterdir() if is_adapter_file(one.name)]
        if names := sorted(one.name for one in there if not one.is_dir()):
            notes.append(
                f"a LoRA adapter lies in {directory} and is not merged; its files are neither read "
                f"nor copied: {', '.join(names)}"
            )
    return notes


def refuse_adapter(directory: Path, names: Sequence[str]) -> None:
    """CheckpointError for a directory that has an adapter and no weights of a model."""
    adapter = [name for name in names if is_adapter_file(name)]
    if not adapter or any(_MODEL.fullmatch(name) for name in set(names) - set(adapter)):
        return
    kind, base = None, ""
    if CONFIG in adapter:
        with contextlib.suppress(CheckpointError):  # that it is an adapter is enough
            config = read_object(directory, CONFIG, "").content
            kind = config.get("peft_type")
            if isinstance(config.get("base_model_name_or_path"), str):
                base = f" of {config['base_model_name_or_path']:.200}"
    raise CheckpointError(
        f"{directory} is a LoRA adapter{base}, not a model"
        if kind in (None, "LORA")
        else f"{directory} is an adapter of type {kind!r:.40}{base}, not a model",
        "Give the model that it was trained on. To convert both as one, merge the adapter into "
        "that model first (docs/fine-tuning.md, Adapters).",
    )
