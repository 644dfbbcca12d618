"""GGUF files of small MoE models, written by the `gguf` package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from helpers.families import HIDDEN, Weights, random_weights
from helpers.ggml import number_of, values_of

F32 = NDArray[np.float32]
ARCHITECTURE = "qwen3moe"
EXPERTS, INNER = 4, 192


class Blocks(NamedTuple):
    """A tensor of blocks of ggml: the name of its type, and bytes [..., rows, bytes of a row]."""

    kind: str
    data: NDArray[np.uint8]

    @property
    def values(self) -> F32:
        return values_of(self.kind, self.data)


def metadata(layers: int = 1, **changes: Any) -> dict[str, Any]:
    """Of a model whose layers all have experts; None leaves a key out."""
    own = {
        "block_count": layers, "expert_count": EXPERTS, "expert_used_count": 2,
        "expert_feed_forward_length": INNER, "embedding_length": HIDDEN, **changes,
    }  # fmt: skip
    return {key: value for key, value in own.items() if value is not None}


def experts(index: int = 0, weights: Weights | None = None) -> dict[str, Any]:
    """blk.L.ffn_{gate,up,down}_exps.weight"""
    weights = weights or random_weights(inner=INNER, seed=index)
    words = ("gate", "up", "down")
    return {
        f"blk.{index}.ffn_{word}_exps.weight": one for word, one in zip(words, weights, strict=True)
    }


def biases(index: int = 0) -> dict[str, F32]:
    """blk.L.ffn_{gate,up,down}_exps.bias, as gpt-oss has them."""
    rng = np.random.default_rng(index)
    widths = {"gate": INNER, "up": INNER, "down": HIDDEN}
    return {
        f"blk.{index}.ffn_{word}_exps.bias": rng.standard_normal((EXPERTS, width), np.float32)
        for word, width in widths.items()
    }


def around(index: int = 0, hidden: int = HIDDEN, count: int = EXPERTS) -> dict[str, F32]:
    """Router and norm of a layer."""
    rng = np.random.default_rng(index)
    return {
        f"blk.{index}.ffn_gate_inp.weight": rng.standard_normal((count, hidden), np.float32),
        f"blk.{index}.ffn_norm.weight": np.ones(hidden, np.float32),
    }


def write_gguf(
    path: Path,
    tensors: Mapping[str, Any],
    pairs: Mapping[str, Any] | None = None,
    *,
    architecture: str = ARCHITECTURE,
    types: Mapping[str, str] | None = None,
    per_file: int = 0,
    general: Mapping[str, str] | None = None,
    vocabulary: Iterable[str] = (),
) -> Path:
    """Write `tensors`: Blocks, or numbers, which are quantized to `types` by parts of their names.
    With `per_file` the model is split; the path is that of the first part."""
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=per_file)
    for key, value in (general or {}).items():
        writer.add_string(f"general.{key}", value)
    for key, value in (metadata() if pairs is None else pairs).items():
        _add(writer, f"{architecture}.{key}", value)
    if words := list(vocabulary):
        writer.add_token_list(words)
    for name, values in tensors.items():
        if isinstance(values, Blocks):
            writer.add_tensor(name, values.data, raw_dtype=number_of(values.kind))
            continue
        kind = next((kind for part, kind in (types or {}).items() if part in name), None)
        if kind is None:
            writer.add_tensor(name, values)
            continue
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if per_file:
        return next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))))
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def model(directory: Path, layers: int = 1, **options: Any) -> Path:
    """A model of `layers` MoE layers with router and norm."""
    tensors: dict[str, Any] = {"token_embd.weight": np.ones((8, HIDDEN), np.float32)}
    for index in range(layers):
        tensors |= experts(index) | around(index)
    return write_gguf(directory / "tiny-moe.gguf", tensors, metadata(layers), **options)


def link_into_cache(cache: Path, repository: str, files: Iterable[Path], below: str = "") -> Path:
    """A repository of the hub's cache with links to these files."""
    commit = "0" * 40
    repo = cache / f"models--{repository.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit / below
    snapshot.mkdir(parents=True, exist_ok=True)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    for file in files:
        (snapshot / file.name).symlink_to(file)
    return snapshot
