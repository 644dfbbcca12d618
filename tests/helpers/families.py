"""Tiny real checkpoints of every model family, and hand-made ones of any kind.

`write_family` goes through transformers' own classes and save_pretrained, so names and
config keys are what users have; `write_checkpoint` writes any bytes without torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktconv.source import ExpertMatrix
from ktconv.source.encodings.grids import load_block_scale, scale_span

HIDDEN = 128
EXPERTS = 4


class Raw(NamedTuple):
    """A tensor by its safetensors dtype and bytes, for what numpy has no dtype for."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensor = Raw | np.ndarray
_NUMPY_DTYPES = {
    "float16": "F16", "float32": "F32", "float64": "F64", "uint8": "U8", "int8": "I8",
    "int32": "I32", "int64": "I64", "bool": "BOOL",
}  # fmt: skip


# ---- hand-made checkpoints -------------------------------------------------------------


def raw(tensor: Tensor) -> Raw:
    if isinstance(tensor, Raw):
        return tensor
    data = np.ascontiguousarray(tensor)
    return Raw(_NUMPY_DTYPES[data.dtype.name], tensor.shape, data.tobytes())


def bf16(values: NDArray[Any]) -> Raw:
    """`values` cut (not rounded) to bfloat16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16
    return Raw("BF16", values.shape, bits.astype("<u2").tobytes())


def fp8(codes: NDArray[np.uint8]) -> Raw:
    return Raw("F8_E4M3", codes.shape, codes.tobytes())


def e8m0(codes: NDArray[np.uint8]) -> Raw:
    return Raw("F8_E8M0", codes.shape, codes.tobytes())


def file_bytes(header: bytes, data: bytes = b"") -> bytes:
    """A safetensors file with exactly this header, valid or not."""
    return struct.pack("<Q", len(header)) + header + data


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {}
    contents, end = [], 0
    for name, tensor in tensors.items():
        dtype, shape, content = raw(tensor)
        start, end = end, end + len(content)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        contents.append(content)
    path.write_bytes(file_bytes(json.dumps(header).encode(), b"".join(contents)))


def write_checkpoint(
    directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], shards: int = 1
) -> Path:
    """Write `tensors` in `shards` files, with an index if there are several, and config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return directory
    weight_map = {}
    names = list(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        write_safetensors(directory / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


# ---- experts by hand -------------------------------------------------------------------


class Weights(NamedTuple):
    """One layer's experts: gate and up [E, I, H], down [E, H, I], as exact bf16 values."""

    gate: NDArray[np.float32]
    up: NDArray[np.float32]
    down: NDArray[np.float32]


def random_weights(
    hidden: int = HIDDEN, inner: int = HIDDEN, experts: int = EXPERTS, seed: int = 0
) -> Weights:
    return Weights(*(one.copy() for one in _drawn(hidden, inner, experts, seed)))


@lru_cache(maxsize=64)
def _drawn(hidden: int, inner: int, experts: int, seed: int) -> Weights:
    """Most tests take the same few."""
    rng = np.random.default_rng(seed)

    def draw(rows: int, cols: int) -> NDArray[np.float32]:
        values = rng.standard_normal((experts, rows, cols), dtype=np.float32)
        return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)

    return Weights(draw(inner, hidden), draw(inner, hidden), draw(hidden, inner))


def numbered(
    source: str,
    weights: Weights,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    encode: Callable[[NDArray[Any]], Tensor] = bf16,
) -> dict[str, Tensor]:
    """`{source}.{e}.{name}.weight` for every expert and projection."""
    return {
        f"{source}.{expert}.{name}.weight": encode(matrix)
        for name, stack in zip(names, weights, strict=True)
        for expert, matrix in enumerate(stack)
    }


def fused(
    source: str,
    weights: Weights,
    transposed: bool,
    suffix: str = "",
    encode: Callable[[NDArray[Any]], Tensor] = bf16,
) -> dict[str, Tensor]:
    """gate_up_proj and down_proj, [out, in] or `transposed` to [in, out]."""
    gate_up = np.concatenate([weights.gate, weights.up], axis=1)
    down = weights.down
    if transposed:
        gate_up, down = gate_up.transpose(0, 2, 1), down.transpose(0, 2, 1)
    return {
        f"{source}.gate_up_proj{suffix}": encode(gate_up),
        f"{source}.down_proj{suffix}": encode(down),
    }


def simple_config(**changes: Any) -> dict[str, Any]:
    """A config of one MoE layer; a value of None leaves a key out."""
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": HIDDEN,
        "num_experts": EXPERTS,
        "num_hidden_layers": 1,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


# ---- reading back ----------------------------------------------------------------------


def fp8_values() -> NDArray[np.float32]:
    """The 256 values of E4M3FN: sign, exponent with bias 7, three mantissa bits; 7F is NaN."""
    values = []
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        value = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
        value = math.nan if code & 127 == 127 else value
        values.append(-value if code & 128 else value)
    return np.array(values, dtype=np.float32)


def read_matrix(matrix: ExpertMatrix) -> NDArray[np.float32]:
    """The values of `matrix` [rows, cols], element by element as its docstring says."""
    tensor = matrix.tensor
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.nbytes)
        flat = _decode(tensor.dtype, data)
        n, k = np.ogrid[: matrix.rows, : matrix.cols]
        values = flat[matrix.start + n * matrix.row_stride + k * matrix.col_stride]
        scale = matrix.scale
        if scale is None:
            return values
        offset, length = scale_span(scale, matrix.rows, matrix.cols)
        file.seek(scale.tensor.offset + offset)
        grid = load_block_scale(scale, matrix.rows, matrix.cols, file.read(length))
    rows = (scale.row_origin % scale.block_rows + n) // scale.block_rows
    cols = (scale.col_origin % scale.block_cols + k) // scale.block_cols
    return values * grid[rows, cols]


def _decode(dtype: str, data: bytes) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return fp8_values()[np.frombuffer(data, np.uint8)]
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32)


# ---- families through transformers -----------------------------------------------------

_DECODER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts_per_tok": 2,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
_QWEN = {**_DECODER, "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 4}
_LINEAR_ATTENTION = {
    "shared_expert_intermediate_size": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_DEEPSEEK = {
    **{key: value for key, value in _DECODER.items() if key != "head_dim"},
    "num_hidden_layers": 3, "intermediate_size": 256, "moe_intermediate_size": 128,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
    "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
    "out_hidden_size": HIDDEN, "num_position_embeddings": 16,
}  # fmt: skip


class Family(NamedTuple):
    """How to build a family, and what opening it must find."""

    classes: str  # before Config, ForCausalLM or ForConditionalGeneration
    settings: dict[str, Any]
    layers: tuple[int, ...]  # with experts, MTP included
    intermediate: int


_FAMILIES = {
    "mixtral": Family(
        "Mixtral", {**_DECODER, "intermediate_size": 256, "num_local_experts": 4}, (0, 1), 256
    ),
    "qwen2_moe": Family(
        "Qwen2Moe",
        {**_QWEN, "shared_expert_intermediate_size": 128, "mlp_only_layers": [0]},
        (1,),
        128,
    ),
    "qwen3_moe": Family("Qwen3Moe", _QWEN, (0, 1), 128),
    "qwen3_next": Family("Qwen3Next", {**_QWEN, **_LINEAR_ATTENTION}, (0, 1), 128),
    "qwen3_5_moe": Family(
        "Qwen3_5Moe",
        {"text_config": {**_QWEN, **_LINEAR_ATTENTION}, "vision_config": _VISION},
        (0, 1),
        128,
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoe",
        {"text_config": _QWEN, "vision_config": {**_VISION, "deepstack_visual_indexes": [0]}},
        (0, 1),
        128,
    ),
    "deepseek_v2": Family("DeepseekV2", _DEEPSEEK, (1, 2), 128),
    "deepseek_v3": Family("DeepseekV3", _DEEPSEEK, (1, 2, 3), 128),
    "glm4_moe": Family(
        "Glm4Moe",
        {**_DECODER, "num_hidden_layers": 3, "intermediate_size": 256, "n_shared_experts": 1,
         "moe_intermediate_size": 128, "n_routed_experts": 4, "first_k_dense_replace": 1},
        (1, 2),
        128,
    ),
    "minimax_m2": Family(
        "MiniMaxM2", {**_DECODER, "intermediate_size": 128, "num_local_experts": 4}, (0, 1), 128
    ),
    "olmoe": Family(
        "Olmoe", {**_DECODER, "intermediate_size": 128, "num_experts": 4}, (0, 1), 128
    ),
}  # fmt: skip
_BIASED = {
    "gpt_oss": Family(
        "GptOss", {**_DECODER, "intermediate_size": 128, "num_local_experts": 4}, (0, 1), 128
    ),
}
FAMILIES = tuple(_FAMILIES)  # gpt_oss can be written too, see source/test_gpt_oss.py


def family(name: str) -> Family:
    return {**_FAMILIES, **_BIASED}[name]


def write_family(name: str, directory: Path, dtype: str = "bfloat16") -> None:
    """Write a tiny checkpoint of family `name` with random weights into `directory`.

    deepseek_v3 gets an MTP layer beyond num_hidden_layers, as DeepSeek's own files have.
    """
    model = build_model(name, dtype)
    model.save_pretrained(directory, max_shard_size="400KB")
    if name == "deepseek_v3":
        _add_mtp_layer(directory, dtype)


def build_model(name: str, dtype: str = "bfloat16") -> Any:
    """The model that write_family saves: the same weights for the same name and dtype."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    classes, settings, _, _ = family(name)
    config = getattr(transformers, classes + "Config")(**settings)
    kind = "ForConditionalGeneration" if "vision_config" in settings else "ForCausalLM"
    torch.manual_seed(sum(name.encode()))
    return getattr(transformers, classes + kind)(config).to(getattr(torch, dtype))


def _add_mtp_layer(directory: Path, dtype: str) -> None:
    """A copy of the last layer behind it, with the tensors that DeepSeek's MTP layer adds."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(file))
    last, added = "model.layers.2.", "model.layers.3."
    mtp = {added + k[len(last) :]: v for k, v in tensors.items() if k.startswith(last)}
    generator = torch.Generator().manual_seed(3)
    for key, value in mtp.items():
        mtp[key] = torch.randn(value.shape, generator=generator).to(value.dtype)
    kind = getattr(torch, dtype)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        mtp[f"{added}{norm}.weight"] = torch.ones(HIDDEN, dtype=kind)
    mtp[f"{added}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator).to(kind)
    mtp[f"{added}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    mtp[f"{added}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(mtp, directory / "model-mtp.safetensors", metadata={"format": "pt"})
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(dict.fromkeys(mtp, "model-mtp.safetensors"))
    path.write_text(json.dumps(index))
