"""The weights of a layer of an output of quantize-gpu, as an engine loads them, and with faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ktconv.formats import PROJECTIONS
from ktconv.runtime.layers.native_load import layer_of, open_stored
from ktconv.source.config import read_config
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.source.types import ExpertMatrix


@dataclass(frozen=True)
class Stored:
    """Tensors of one layer by expert, gate before up: `w13` [E, 2I, ...] and `w2` [E, H, ...],
    codes as they are in the file, and their scales."""

    scheme: str
    group: int  # columns with one scale in a row of W4A16 and W8A16
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor

    def changed(self, tensors: Mapping[str, Tensor]) -> Stored:
        by_name: Mapping[str, Any] = tensors
        return replace(self, **by_name)

    def loaded(self, device: str, dtype: torch.dtype) -> Stored:
        """The tensors on a device; scales of BF16 get the dtype of the model, as in engines."""
        moved = {name: getattr(self, name).to(device) for name in TENSORS}
        for name in ("w13_scale", "w2_scale"):
            if moved[name].dtype == torch.bfloat16:
                moved[name] = moved[name].to(dtype)
        return self.changed(moved)


TENSORS = ("w13", "w2", "w13_scale", "w2_scale")


@dataclass(frozen=True)
class Decoded:
    """The same weights in float32, as ktconv reads them: [E, 2I, H] and [E, H, I]."""

    w13: Tensor
    w2: Tensor


def read_layer(
    output: Path, number: int | None, scheme: str, group: int
) -> tuple[Stored, Decoded, int]:
    """Codes and scales of a layer (None: the first with experts), its weights, and its number."""
    checkpoint = open_stored(output)
    layer = layer_of(checkpoint, number)
    reader = SourceReader(checkpoint.files, checkpoint.sources)
    tensors: dict[str, list[Tensor]] = {name: [] for name in (*TENSORS, "d13", "d2")}
    with _stored_tensors(output) as tensor:
        for matrices in (layer.experts[e] for e in range(len(layer.experts))):
            of = [matrices[projection] for projection in PROJECTIONS]
            names = [matrix.tensor.name for matrix in of]
            scales = [f"{name.rpartition('.')[0]}.weight_scale" for name in names]
            both = {"": [tensor(name) for name in names], "_scale": [tensor(s) for s in scales]}
            decoded = [_decoded(reader, matrix) for matrix in of]
            for key, (gate, up, down) in both.items():
                tensors[f"w13{key}"].append(torch.cat([gate, up]))
                tensors[f"w2{key}"].append(down)
            tensors["d13"].append(torch.cat(decoded[:2]))
            tensors["d2"].append(decoded[2])
    found = {name: torch.stack(parts) for name, parts in tensors.items()}
    stored = Stored(scheme, group, **{name: found[name] for name in TENSORS})
    return stored, Decoded(found["d13"], found["d2"]), layer.index


@contextmanager
def _stored_tensors(output: Path) -> Iterator[Callable[[str], Tensor]]:
    with ExitStack() as stack:
        paths = sorted(output.glob("*.safetensors"))
        files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        yield lambda name: where[name].get_tensor(name)


def _decoded(reader: SourceReader, matrix: ExpertMatrix) -> Tensor:
    chunks = [values.copy() for _, values in MatrixReader(reader, matrix).decoded()]
    return torch.from_numpy(np.concatenate(chunks))


def scheme_of(output: Path) -> tuple[str, int]:
    """The scheme of an output, or its format where none of the kernels here is for it, and the size
    of its groups."""
    config = read_config(output).content["quantization_config"]
    (section,) = config["config_groups"].values()
    weights = section["weights"]
    group = weights.get("group_size") or 0
    if config["format"] == "pack-quantized":
        return f"W{weights['num_bits']}A16", group
    if config["format"] in ("float-quantized", "mxfp8-quantized"):
        schemes = {"channel": "FP8_DYNAMIC", "block": "FP8_BLOCK", "group": "MXFP8"}
        return schemes[weights["strategy"]], group
    return config["format"], group


def damaged(stored: Stored) -> Iterator[tuple[str, Stored]]:
    """The weights as an output with a fault would have them: each must be seen."""
    halves = {name: _exchanged(getattr(stored, name)) for name in ("w13", "w13_scale")}
    yield "gate and up exchanged", stored.changed(halves)
    reverse = {name: _reversed(getattr(stored, name)) for name in ("w13_scale", "w2_scale")}
    yield "scales in reverse", stored.changed(reverse)
    if stored.scheme in ("W4A16", "W8A16"):
        moved = {name: _moved(getattr(stored, name), stored.scheme) for name in ("w13", "w2")}
        yield "zero point moved by one", stored.changed(moved)
    if stored.scheme == "W4A16":
        turned = {name: _turned(getattr(stored, name)) for name in ("w13", "w2")}
        yield "nibbles exchanged", stored.changed(turned)


def _exchanged(of: Tensor) -> Tensor:
    return torch.cat(of.chunk(2, 1)[::-1], 1)


def _reversed(of: Tensor) -> Tensor:
    return of.flip(1, 2)


def _moved(codes: Tensor, scheme: str) -> Tensor:
    data = codes.view(torch.uint8)
    if scheme == "W8A16":
        return (data + 1).view(codes.dtype)
    return (data + 1 & 0x0F | data + 0x10 & 0xF0).view(codes.dtype)


def _turned(codes: Tensor) -> Tensor:
    data = codes.view(torch.uint8)
    return (data >> 4 | data << 4).view(codes.dtype)
