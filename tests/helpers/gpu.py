"""Helpers of the tests of quantize-gpu: run it, and unpack what it wrote, element by element."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.convert import read_model
from helpers.families import Raw
from ktconv.source import ModelSource

REQUEST_OPTIONS = {
    "layers", "threads", "max_memory", "verify", "overwrite", "experts", "device",
}  # fmt: skip


def quantize(model: Path, output: Path, **options: Any) -> Any:
    """`quantize_gpu` with fields of Request and Options by name, on one thread."""
    from ktconv.quantize.encoded.request import Request
    from ktconv.quantize.llm_compressor.run import quantize_gpu
    from ktconv.targets.encoded.target import Options

    source = ModelSource(str(model), options.pop("config", None))
    request = {key: options.pop(key) for key in REQUEST_OPTIONS & options.keys()}
    chosen = Request(source, output, Options(**options), **{"threads": 1, **request})
    return quantize_gpu(chosen)


def floats(tensor: Raw) -> NDArray[np.float32]:
    """A stored tensor's values."""
    if tensor.dtype == "BF16":
        bits = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor.shape)
    return np.frombuffer(tensor.data, {"F16": "<f2", "F32": "<f4"}[tensor.dtype]).astype(
        np.float32
    ).reshape(tensor.shape)  # fmt: skip


def dequantize(tensors: Mapping[str, Raw], module: str) -> NDArray[np.float32]:
    """The values of one packed matrix, bit by bit as docs/quantize-gpu.md draws them."""
    rows, cols = np.frombuffer(tensors[f"{module}.weight_shape"].data, "<i8")
    packed = tensors[f"{module}.weight_packed"]
    words = np.frombuffer(packed.data, "<u4").reshape(packed.shape)
    scale = floats(tensors[f"{module}.weight_scale"])
    bits = int(32 * packed.shape[1] // cols)
    per_word = 32 // bits
    values = np.empty((rows, cols), np.float32)
    for col in range(cols):
        code = (words[:, col // per_word] >> np.uint32(bits * (col % per_word))) & (2**bits - 1)
        level = code.astype(np.int64) - 2 ** (bits - 1)
        values[:, col] = level * scale[:, col * scale.shape[1] // cols]
    return values


def modules(tensors: Mapping[str, Raw]) -> list[str]:
    """Names of all packed matrices."""
    return [key.removesuffix(".weight_packed") for key in tensors if key.endswith("_packed")]


def experts_of(directory: Path) -> dict[str, NDArray[np.float32]]:
    """Every packed matrix of an output, dequantized."""
    tensors = read_model(directory)
    return {module: dequantize(tensors, module) for module in modules(tensors)}


# ---- stacked ---------------------------------------------------------------------------

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")


def ending(layout: str, part: str) -> str:
    """The end of a stacked tensor's name, behind gate_up_proj or down_proj."""
    if layout == "stacked":
        return f".{part}"
    return "" if part == "weight" else part.replace("weight_", "_", 1)


def stacked(numbered: Mapping[str, Raw], layout: str) -> dict[str, Raw]:
    """What the tensors of numbered experts become: by expert, gate before up."""
    some: dict[tuple[str, str, str], dict[tuple[int, str], Raw]] = {}
    others = {}
    for name, tensor in numbered.items():
        if (match := _EXPERT.fullmatch(name)) is None:
            others[name] = tensor
        elif not (layout == "stacked-flat" and match[4] == "weight_shape"):
            word = "down" if match[3] == "down" else "wide"
            some.setdefault((match[1], word, match[4]), {})[int(match[2]), match[3]] = tensor
    for (where, word, part), parts in some.items():
        both = len({proj for _, proj in parts}) > 1
        name = "down_proj" if word == "down" else "gate_up_proj" if both else "up_proj"
        first = next(iter(parts.values()))
        experts = 1 + max(expert for expert, _ in parts)
        height = first.shape[0] * len(parts) // experts
        data = b"".join(parts[key].data for key in sorted(parts))  # gate < up
        shape = (experts, height, *first.shape[1:])
        others[f"{where}.{name}{ending(layout, part)}"] = Raw(first.dtype, shape, data)
    return others
