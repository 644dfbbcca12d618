"""The tensors of GGUF files in a directory, by their headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from msgspec import Struct

from ktconv.errors import CheckpointError
from ktconv.source import Projection, TensorRef
from ktconv.source.gguf.file import read_gguf_header
from ktconv.targets.packed.weights import PackedWeights

_EXPERTS = re.compile(r"blk\.([0-9]+)\.ffn_(gate|up|down)_exps\.(weight|bias)")


class GgufWeights(Struct, frozen=True):
    """Tensors of experts by layer and projection, others by name, and the files they are in."""

    files: PackedWeights  # `files.others` has all tensors
    experts: Mapping[tuple[int, Projection], TensorRef]
    biases: Mapping[tuple[int, Projection], TensorRef]  # of experts
    others: Mapping[str, TensorRef]


def open_gguf(directory: Path) -> GgufWeights:
    """The tensors of every GGUF file there; files that cannot be read are `files.damaged`."""
    files, others = PackedWeights(directory, "gguf"), {}
    of_experts: dict[str, dict[tuple[int, Projection], TensorRef]] = {"weight": {}, "bias": {}}
    for path in sorted(directory.glob("*.gguf")):
        try:
            header = read_gguf_header(path)
        except CheckpointError as error:
            files.damaged[path.name] = str(error)
            continue
        files.headers[path.name] = header
        for tensor in header.tensors:
            if (earlier := files.others.get(tensor.name)) is not None:
                files.doubles.append((tensor.name, earlier.file.name, path.name))
            files.others[tensor.name] = tensor
            match = _EXPERTS.fullmatch(tensor.name)
            if match:
                of_experts[match[3]][int(match[1]), cast(Projection, match[2])] = tensor
            else:
                others[tensor.name] = tensor
    return GgufWeights(files, of_experts["weight"], of_experts["bias"], others)
