"""Outputs with encoded experts: made, read by plain NumPy, and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from helpers.encoded import e2m1, powers, spread
from helpers.families import Raw, fp8_values
from helpers.gpu_corrupt import change, find
from ktconv.source import ModelSource

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
_REQUEST = {"layers", "threads", "verify", "overwrite", "experts", "exclude_experts"}


def encode(model: Path, output: Path, scheme: str, **options: Any) -> Any:
    """`encode` with fields of Request and Options by name, on two threads."""
    from ktconv.quantize.encoded import run
    from ktconv.quantize.encoded.request import Request
    from ktconv.targets.encoded.scheme import group_size_of
    from ktconv.targets.encoded.target import Options

    source = ModelSource(str(model), options.pop("config", None))
    request = {key: options.pop(key) for key in _REQUEST & options.keys()}
    chosen = Options(scheme=scheme, **{"group_size": group_size_of(scheme), **options})
    return run.encode(Request(source, output, chosen, **{"threads": 2, **request}))


# ---- reading ---------------------------------------------------------------------------


def _nibbles(data: U8, rows: int) -> U8:
    split = np.stack([data & 15, data >> 4], -1)
    return split.reshape(rows, -1)


def _scales(tensor: Raw) -> F32:
    if tensor.dtype == "BF16":
        return (
            (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16)
            .view("<f4")
            .reshape(tensor.shape)
        )
    if tensor.dtype == "F8_E4M3":
        return fp8_values()[np.frombuffer(tensor.data, np.uint8)].reshape(tensor.shape)
    if tensor.dtype in ("U8", "F8_E8M0"):
        return powers(np.frombuffer(tensor.data, np.uint8)).reshape(tensor.shape)
    kind = {"F16": "<f2", "F32": "<f4"}[tensor.dtype]
    return np.frombuffer(tensor.data, kind).astype(np.float32).reshape(tensor.shape)


def values_of(tensors: Mapping[str, Raw], module: str, rows: int, cols: int) -> F32:
    """What a matrix stands for, by the layouts of docs/formats.md section 10."""
    mine = {
        name.removeprefix(f"{module}."): tensor
        for name, tensor in tensors.items()
        if name.rpartition(".")[0] == module
    }
    data = {part: np.frombuffer(tensor.data, np.uint8) for part, tensor in mine.items()}
    if "qweight" in mine:  # GPTQ
        words = data["qweight"].view("<u4").reshape(cols // 8, rows)
        codes = words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)[:, None] & 15
        scale = _scales(mine["scales"]).T
        zero = data["qzeros"].view("<u4").reshape(-1, rows // 8)[:, :, None]
        zero = ((zero >> np.arange(0, 32, 4, dtype=np.uint32)) & 15).reshape(-1, rows).T + 1
        index = data["g_idx"].view("<i4")
        level = codes.reshape(cols, rows).T.astype(np.float32) - zero[:, index]
        return (level * scale[:, index]).astype(np.float32)
    if "qzeros" in mine:  # KTransformers' AWQ
        codes = _nibbles(data["weight"], rows).astype(np.float32)
        scale = np.frombuffer(mine["scale"].data, "<f2").reshape(-1, rows).T.astype(np.float32)
        zero = _nibbles(data["qzeros"], len(scale.T)).T.astype(np.float32)
        return (codes - spread(zero, rows, cols)) * spread(scale, rows, cols)
    if list(mine) == ["weight"]:
        return _scales(mine["weight"])
    name = next(part for part in ("weight_packed", "weight") if part in mine)
    scale = _scales(
        next(mine[part] for part in ("weight_scale", "weight_scale_inv", "scale") if part in mine)
    )
    if "weight_global_scale" in mine:
        scale = scale / data["weight_global_scale"].view("<f4")[0]
    if "weight_scale_2" in mine:
        scale = scale * data["weight_scale_2"].view("<f4")[0]
    spread_scale = spread(scale, rows, cols)
    if mine[name].dtype == "F8_E4M3":
        return fp8_values()[data[name]].reshape(rows, cols) * spread_scale
    if mine[name].dtype == "I32":
        bits = 32 * mine[name].shape[1] // cols
        stored = data[name].reshape(rows, -1) if bits == 8 else _nibbles(data[name], rows)
        return (stored.astype(np.float32) - 2 ** (bits - 1)) * spread_scale
    return e2m1(_nibbles(data[name], rows)) * spread_scale


# ---- damaging --------------------------------------------------------------------------


def change_recorded(output: Path, name: str, how: Callable[[U8], None]) -> None:
    """Change a tensor's bytes and its checksum, so that only its meaning is wrong."""
    change(output, name, how)
    tensor = find(output, name)
    data = tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    path = output / "ktconv.json"
    manifest = json.loads(path.read_text())
    for unit in manifest["units"].values():
        if name in unit["tensors"]:
            unit["tensors"][name]["blake3"] = blake3(data).hexdigest()
            for claim in ("relative_rms_error", "max_error_steps", "zero_share"):
                unit["tensors"][name].pop(claim, None)
    path.write_text(json.dumps(manifest))
