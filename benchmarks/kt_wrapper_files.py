"""Files that ktconv and kt_kernel both read, and the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ktconv.formats import FORMATS, reference
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.targets.packed.target import Options

PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
GROUP = 32


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    experts: int
    top_k: int

    def matrix(self, projection: str) -> tuple[int, int]:
        wide = self.inner, self.hidden
        return wide[::-1] if projection == "down" else wide


Matrix = tuple[dict[str, torch.Tensor], np.ndarray]  # tensors by suffix, and values


def _bf16(values: np.ndarray) -> Matrix:
    stored = torch.from_numpy(values).bfloat16()
    return {"weight": stored}, stored.float().numpy()


def _of(key: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    fmt = FORMATS[key]
    codes, scale = reference.quantize(fmt, values)
    return codes, scale, reference.dequantize(fmt, codes, scale)


def _fp8(values: np.ndarray) -> Matrix:
    codes, scale, meant = _of("fp8", values)
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale_inv": torch.from_numpy(scale)}, meant


def _fp8_channel(values: np.ndarray) -> Matrix:
    codes, scale, meant = _of("fp8-channel", values)
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": torch.from_numpy(scale.reshape(-1, 1))}, meant


def _rawint4(values: np.ndarray) -> Matrix:
    codes, scale, meant = _of(f"gint4-{GROUP}", values)
    tensors = {
        "weight_packed": torch.from_numpy(codes.view(np.int32)),
        "weight_scale": torch.from_numpy(scale).view(torch.bfloat16),
        "weight_shape": torch.tensor(values.shape, dtype=torch.int64),
    }
    return tensors, meant


def _gptq(values: np.ndarray) -> Matrix:
    """Eight rows of the transposed matrix in a word; zero points are stored as 7, which is 8."""
    codes, scale, _ = _of(f"gint4-{GROUP}", values)
    rows, cols = values.shape
    nibbles = np.stack([codes & 15, codes >> 4], axis=2).reshape(rows, cols).T.astype(np.uint32)
    shifts = (4 * np.arange(8, dtype=np.uint32))[None, :, None]
    words = np.bitwise_or.reduce(nibbles.reshape(cols // 8, 8, rows) << shifts, axis=1)
    scales = torch.from_numpy(scale).view(torch.bfloat16).T.contiguous().half()
    integers = nibbles.astype(np.float32).T - 8
    meant = integers * np.repeat(scales.float().numpy().T, GROUP, axis=1)
    zeros = torch.full((cols // GROUP, rows // 8), 0x77777777, dtype=torch.int32)
    return {"qweight": torch.from_numpy(words.view(np.int32)), "scales": scales, "qzeros": zeros,
            "g_idx": torch.arange(cols, dtype=torch.int32) // GROUP}, meant  # fmt: skip


def _mxfp4(values: np.ndarray) -> Matrix:
    codes, scale, meant = _of("mxfp4", values)
    stored = torch.from_numpy(scale).view(torch.float8_e8m0fnu)
    return {"weight": torch.from_numpy(codes).view(torch.int8), "scale": stored}, meant


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
_PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True,
                                              "strategy": "group", "group_size": GROUP}}},
}  # fmt: skip
_CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "symmetric": True,
                                              "strategy": "channel"}}},
}  # fmt: skip
# method -> matrix, quantization_config
ENCODERS: dict[str, tuple[Callable[[np.ndarray], Matrix], dict[str, Any]]] = {
    "BF16": (_bf16, {}),
    "FP8": (_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "FP8_PERCHANNEL": (_fp8_channel, _CHANNELS),
    "RAWINT4": (_rawint4, _PACKED),
    "GPTQ_INT4": (_gptq, _GPTQ),
    "MXFP4": (_mxfp4, {"quant_method": "fp8", "expert_dtype": "fp4"}),
}
CONVERTED = {"AMXINT4": "int4", "AMXINT8": "int8"}
METHODS = [*CONVERTED, *ENCODERS, "LLAMAFILE"]


def write_files(
    folder: Path, method: str, shape: Shape, parts: int, seed: int, values: bool
) -> dict[str, np.ndarray]:
    """Writes weight_path; with `values` returns what the weights mean, [E, rows, cols] each."""
    if method == "LLAMAFILE":
        return _write_gguf(folder, shape, seed)
    encode, quantization = ENCODERS.get(method, (_bf16, {}))
    source = folder.with_name(f"{folder.name}-source") if method in CONVERTED else folder
    source.mkdir(parents=True)
    tensors, meant = _tensors(method, encode, shape, seed)
    save_file(tensors, source / "model.safetensors")
    config = _config(shape, quantization, method)
    (source / "config.json").write_text(json.dumps(config))
    if method in CONVERTED:
        options = Options(CONVERTED[method], parts, experts_only=True)
        quantize_cpu(Request(str(source), folder, options))
    return meant if values else {}


def _tensors(method: str, encode: Any, shape: Shape, seed: int) -> Any:
    rng, tensors = np.random.default_rng(seed), {}
    meant: dict[str, list[np.ndarray]] = {name: [] for name in PROJECTIONS}
    words = {"gate": "w1", "up": "w3", "down": "w2"} if method == "MXFP4" else PROJECTIONS
    prefix = "model.layers.0.ffn" if method == "MXFP4" else "model.layers.0.mlp"
    for expert in range(shape.experts):
        for name, word in words.items():
            found, values = encode(_random(rng, shape.matrix(name)))
            meant[name].append(values)
            for suffix, tensor in found.items():
                tensors[f"{prefix}.experts.{expert}.{word}.{suffix}"] = tensor.contiguous()
    return tensors, {name: np.stack(all_of) for name, all_of in meant.items()}


def _random(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)


def _config(shape: Shape, quantization: dict[str, Any], method: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "deepseek_v4" if method == "MXFP4" else "qwen3_moe",
        "hidden_size": shape.hidden, "moe_intermediate_size": shape.inner,
        "num_experts": shape.experts, "num_experts_per_tok": shape.top_k, "num_hidden_layers": 1,
    }  # fmt: skip
    return config | ({"quantization_config": quantization} if quantization else {})


def _write_gguf(folder: Path, shape: Shape, seed: int) -> dict[str, np.ndarray]:
    import gguf

    folder.mkdir(parents=True)
    rng, meant = np.random.default_rng(seed), {}
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3moe")
    for key, value in {
        "block_count": 1, "expert_count": shape.experts, "expert_used_count": shape.top_k,
        "expert_feed_forward_length": shape.inner, "embedding_length": shape.hidden,
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen3moe.{key}", value)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name in PROJECTIONS:
        values = np.stack([_random(rng, shape.matrix(name)) for _ in range(shape.experts)])
        blocks = gguf.quants.quantize(values, kind)
        meant[name] = np.asarray(gguf.quants.dequantize(blocks, kind), np.float32)
        writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant
