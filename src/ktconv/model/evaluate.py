"""Compares the predictions of a converted model with those of its source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktconv.errors import CheckpointError, MemoryShortError, UsageError
from ktconv.model.decoded import open_encoded
from ktconv.model.load import load_language_model, load_tokenizer, read_generation_config
from ktconv.model.module import Routing
from ktconv.model.replace import ReplacedExperts
from ktconv.model.sites import experts_watched, find_experts
from ktconv.model.streamed.compare import Predictions
from ktconv.model.streamed.parts import PartedModel
from ktconv.source import Checkpoint, Header, open_checkpoint
from ktconv.source.gguf.file import float32_bytes
from ktconv.source.gguf.parts import all_parts
from ktconv.source.model_source import ModelSource
from ktconv.source.shards import read_shards, select_shards
from ktconv.system import machine
from ktconv.system.arrays import F32, I64
from ktconv.system.stores import is_remote
from ktconv.system.units import counted, format_size

# Beside the weights: while a layer's experts are stacked, they are there twice.
_LOADING = 1.1

LayerInput = tuple[F32, I64, F32]


# ---- loading ---------------------------------------------------------------------------


def load_model(
    source: str | Path,
    dtype: str | torch.dtype = "auto",
    *,
    config_directory: Path | None = None,
    decode: bool = True,
    experts: bool = True,
    adapters: Sequence[str] = (),
) -> tuple[Any, Any]:
    """(model, tokenizer) of a local checkpoint, on the CPU, through transformers.

    `source` is a directory, or one GGUF file; then config.json and tokenizer are those of
    `config_directory`. Encoded weights are decoded by ktconv; without `decode`, by what
    transformers has for them. Without `experts` those of MoE layers are not loaded (they are on the
    meta device): `replace_experts` does not need them. `adapters`: DIR or DIR:WEIGHT of LoRA
    that is added to the weights, see `ModelSource.adapter`.

    Raises ResourceError, before anything is loaded, where the weights do not fit into the memory
    that is free; CheckpointError where transformers cannot load the checkpoint, or only
    with random weights in place of missing ones or with the checkpoint's own code, which is never
    run.
    """
    path = source if isinstance(source, Path) else Path(source)
    if not experts:
        directory_of(path, config_directory)
        given = ModelSource(path, config_directory, adapter=tuple(adapters))
        return load_without_experts(open_checkpoint(given), dtype)
    directory, gguf, decoded = path, None, None
    if directory.is_file():
        gguf, directory = directory, check_gguf(directory, config_directory)
    elif not directory.is_dir():
        raise UsageError(f"{directory} is not a directory")
    elif decode:
        decoded = open_encoded(directory, adapters)
    wanted = _dtype(dtype)
    if is_remote(directory):
        raise MemoryShortError(f"{directory} is not on this machine, and so not loaded as a whole")
    size = _bytes_in_memory(gguf or directory, wanted) if decoded is None else decoded.nbytes
    _check_memory(gguf or directory, size)
    tokenizer = load_tokenizer(directory)
    model = load_language_model(directory, wanted, gguf=gguf, decoded=decoded)
    return model, tokenizer


def load_without_experts(
    checkpoint: Checkpoint, dtype: str | torch.dtype = "auto"
) -> tuple[Any, Any]:
    """`load_model` without experts, of an opened checkpoint. Raises NotCut where the model's code
    does not allow that."""
    directory = directory_of(checkpoint.path, checkpoint.side_directory)
    tokenizer = load_tokenizer(directory, checkpoint.path)
    parted = PartedModel(checkpoint, _dtype(dtype))
    _check_memory(checkpoint.path, sum(parted.layer_bytes) + parted.outside_bytes)
    model: Any = parted.load()
    if (settings := read_generation_config(directory)) is not None:
        model.generation_config = settings
    return model, tokenizer


def check_gguf(file: Path, config_directory: Path | None) -> Path:
    """The directory of a GGUF model's config.json and tokenizer.

    Raises UsageError where that is missing, CheckpointError for a file that
    transformers does not read.
    """
    directory = directory_of(file, config_directory)
    if len(all_parts(file)) > 1:
        raise CheckpointError(
            f"{file} is part of a split, which transformers cannot load",
            "join the parts with llama-gguf-split --merge, or use the safetensors checkpoint",
        )
    return directory


def directory_of(source: Path, config_directory: Path | None) -> Path:
    """The directory of a model's config.json and tokenizer: next to its weights, or, for a GGUF
    file, `config_directory`. Raises UsageError where there is none."""
    if config_directory is not None:
        return config_directory
    if source.is_file():
        raise UsageError(
            f"{source} has no config.json and tokenizer that transformers can load",
            "give a directory with those of the model: --config DIR",
        )
    return source


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """ "auto" as it is, names as PyTorch's dtypes."""
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"{dtype!r} is not a supported dtype", "choose bfloat16, float32 or auto")
    return found


def _bytes_in_memory(place: Path, dtype: str | torch.dtype) -> int:
    """Size in memory, as `dtype`, of the weights in the directory `place` or of a GGUF file."""
    if place.is_file():
        return float32_bytes(place)
    return sum(_bytes_of(header, dtype) for header in read_shards(select_shards(place)).headers)


def _check_memory(place: Path, size: int) -> None:
    """ResourceError unless `size` bytes of weights can be loaded into free memory."""
    needed, free = int(_LOADING * size), machine.available_memory()
    if needed > free:
        raise MemoryShortError(
            f"loading {place} needs about {format_size(needed)} of memory, but "
            f"only {format_size(free)} are free"
        )


def _bytes_of(header: Header, dtype: str | torch.dtype) -> int:
    if isinstance(dtype, str):
        return sum(tensor.nbytes for tensor in header.tensors)
    return sum(dtype.itemsize * math.prod(tensor.shape) for tensor in header.tensors)


# ---- text ------------------------------------------------------------------------------


def windows(tokenizer: Any, text: str, length: int, limit: int | None = None) -> list[Tensor]:
    """The first `limit` runs of `length` tokens of `text`: int64 [1, length] each.

    They follow each other without gap or overlap, and without special tokens; what is left at
    the end is not used. A text of fewer tokens is one window. Raises UsageError for a text of
    less than two tokens or numbers that cannot be.
    """
    if length < 2 or (limit is not None and limit < 1):
        raise UsageError(
            f"windows of {counted(length, 'token')}, at most {limit}, cannot be evaluated"
        )
    # Else tokenizers warn of texts longer than the model's context, which windows cut.
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(tokens) < 2:
        raise UsageError("the text has less than two tokens", "give a longer text")
    length = min(length, len(tokens))
    count = min(len(tokens) // length, limit or len(tokens))
    ids = torch.tensor(tokens[: count * length], dtype=torch.int64)
    return list(ids.reshape(count, 1, length))


# ---- comparing -------------------------------------------------------------------------


def predictions_of_both(
    model: Any, replaced: ReplacedExperts, texts: Sequence[Tensor]
) -> Predictions:
    """Source and converted model on the same windows [1, T], each window once with both.

    `model` is on packed experts, and `replaced` kept its own. What is in memory at a time is the
    logits of two windows, whatever the number of windows. Raises UsageError without kept experts.
    """
    predictions = Predictions(texts)
    for number, ids in enumerate(texts):
        with replaced.originals():
            source = _logits(model, ids)
        predictions.add(number, [source, _logits(model, ids)])
    return predictions


def _logits(model: Any, ids: Tensor) -> Tensor:
    """[1, T, V]."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def greedy_side_by_side(
    model: Any, replaced: ReplacedExperts, tokenizer: Any, prompt: str, new_tokens: int
) -> tuple[str, str]:
    """Text that the source and the converted model add to `prompt`, always the likeliest token.

    Raises UsageError for a prompt without tokens or if the model's own experts were not kept.
    """
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"].long()
    if not ids.numel() or new_tokens < 1:
        raise UsageError("a prompt and a positive number of new tokens are needed")
    with replaced.originals():
        source = _continued(model, tokenizer, ids, new_tokens)
    return source, _continued(model, tokenizer, ids, new_tokens)


def _continued(model: Any, tokenizer: Any, ids: Tensor, new_tokens: int) -> str:
    pad = tokenizer.pad_token_id
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        pad_token_id=tokenizer.eos_token_id if pad is None else pad,
    )
    return str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))


# ---- what layers are given -------------------------------------------------------------


def capture_layer_inputs(
    model: Any, tokenizer: Any, text: str, tokens: int
) -> dict[int, LayerInput]:
    """Inputs of the experts of each MoE layer on the first `tokens` tokens of `text`.

    Layer -> hidden states float32 [M, H], ids int64 [M, K] and weights float32 [M, K], of the
    model as it is: its own experts or packed ones. Raises UsageError for experts that are not
    called with ids and weights (Llama 4).
    """
    found: dict[int, LayerInput] = {}

    def keep(layer: int, routing: Routing) -> None:
        found[layer] = _as_input(layer, routing)

    ids = windows(tokenizer, text, tokens, 1)[0]
    with experts_watched(find_experts(model), keep), torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    return found


def _as_input(layer: int, routing: Routing) -> LayerInput:
    """Copies, as NumPy arrays, of what an experts module got."""
    hidden, ids, weights = routing
    if hidden is None or weights is None:
        raise UsageError(f"the experts of layer {layer} are not called with ids and weights")
    rows = hidden.reshape(-1, hidden.shape[-1])
    return (
        rows.to(torch.float32, copy=True).numpy(),
        ids.reshape(len(rows), -1).to(torch.int64, copy=True).numpy(),
        weights.reshape(len(rows), -1).to(torch.float32, copy=True).numpy(),
    )
