"""Planting faults in compressed-tensors checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv.source import TensorRef, read_header

U8 = NDArray[np.uint8]


def find(output: Path, name: str) -> TensorRef:
    for shard in output.glob("*.safetensors"):
        for tensor in read_header(shard).tensors:
            if tensor.name == name:
                return tensor
    raise KeyError(name)


def read(output: Path, name: str) -> U8:
    tensor = find(output, name)
    data = tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    return np.frombuffer(data, np.uint8).copy()


def change(output: Path, name: str, how: Callable[[U8], None]) -> TensorRef:
    """`how` changes the tensor's bytes in place; the header and its checksum stay."""
    tensor, data = find(output, name), read(output, name)
    how(data)
    with tensor.file.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(data.tobytes())
    return tensor


def flip(data: U8) -> None:
    """One bit, in the middle: what `change` changes."""
    data[len(data) // 2] ^= 1


def swap(output: Path, one: str, two: str) -> None:
    """Exchange two modules of equal shape."""
    for part in ("weight_packed", "weight_scale"):
        first, second = read(output, f"{one}.{part}"), read(output, f"{two}.{part}")
        change(output, f"{one}.{part}", partial(np.copyto, src=second))
        change(output, f"{two}.{part}", partial(np.copyto, src=first))


def rename(output: Path, old: str, new: str) -> None:
    """Another name of the same length in a shard's header, and in the index."""
    assert len(old) == len(new)
    for path in [find(output, old).file, output / "model.safetensors.index.json"]:
        path.write_bytes(path.read_bytes().replace(f'"{old}"'.encode(), f'"{new}"'.encode()))


def edit_config(output: Path, how: Callable[[dict[str, Any]], None]) -> None:
    path = output / "config.json"
    content = json.loads(path.read_text())
    how(content)
    path.write_text(json.dumps(content))


def group(content: dict[str, Any]) -> dict[str, Any]:
    """The one quantization group of a config.json."""
    (found,) = content["quantization_config"]["config_groups"].values()
    return found
