#!/usr/bin/env python3
"""Write a synthetic Hugging Face MoE checkpoint, fast and in bounded memory.

The values are random, finite and normal-like, with a different scale per row, so that
row maxima and rounding behave as on trained weights. They come from a pool of rows
computed once per row length; every tensor starts at its own row of the pool, so several
gigabytes are written at the speed of the disk. Only numpy is needed.

    make_checkpoint.py OUTPUT --preset qwen3-30b --layers 2
    make_checkpoint.py OUTPUT --preset deepseek-v3 --layers 1 --experts 32 --dtype fp8
    make_checkpoint.py OUTPUT --preset qwen3-30b --layers 4 --attention
    make_checkpoint.py OUTPUT --many-tensors
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from weight_encodings import ENCODINGS, ITEM_BYTES, Tensor

Array = npt.NDArray[np.generic]

POOL_ELEMENTS = 16 << 20
FP8_MAX = 448.0
TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class Preset:
    """The shape of one model family's experts, and how its checkpoints name things."""

    family: str
    architecture: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    layers: int = 1
    vocabulary: int = 1024


PRESETS = {
    "qwen3-30b": Preset("qwen3_moe", "Qwen3MoeForCausalLM", 128, 2048, 768, 8),
    "deepseek-v3": Preset("deepseek_v3", "DeepseekV3ForCausalLM", 256, 7168, 2048, 8),
    "v4-flash": Preset("deepseek_v3", "DeepseekV3ForCausalLM", 256, 4096, 2048, 6),  # its shape
    "mixtral-8x22b": Preset("mixtral", "MixtralForCausalLM", 8, 6144, 16384, 2),
    "kimi-k2": Preset("kimi_k2", "DeepseekV3ForCausalLM", 384, 7168, 2048, 8),
}
HEADS, KEY_HEADS, HEAD_WIDTH = 32, 4, 128
CORRECTED = ("deepseek_v3", "kimi_k2")  # families whose routers have a correction bias
# 3 * 384 * 87 = 100 224 expert matrices
MANY = Preset("qwen3_moe", "Qwen3MoeForCausalLM", 384, 128, 128, 8, layers=87)


# --- values -----------------------------------------------------------------------------


def to_bf16(values: npt.NDArray[np.float32]) -> Array:
    """Round to bfloat16 (nearest, ties to even), returned as its bit pattern."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def e4m3_values() -> npt.NDArray[np.float32]:
    """The 127 non-negative finite values of E4M3FN, in the order of their codes."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal).astype(np.float32)


def to_e4m3(values: npt.NDArray[np.float32]) -> Array:
    """Round to the nearest E4M3FN code; what lies beyond 448 becomes 448."""
    table = e4m3_values()
    middles = (table[1:] + table[:-1]) / 2
    codes = np.searchsorted(middles, np.abs(values)).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << 7)


def encode(values: npt.NDArray[np.float32], dtype: str) -> Array:
    """float32 values in the bytes of a safetensors dtype."""
    if dtype == "BF16":
        return to_bf16(values)
    if dtype == "F16":
        return values.astype(np.float16)
    if dtype == "F8_E4M3":
        return to_e4m3(values)
    return values


def as_bytes(values: Array) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


class Pool:
    """Rows of random values per (dtype, row length), computed at first use."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.base = self.random.standard_normal(POOL_ELEMENTS, dtype=np.float32)
        self.rows: dict[tuple[str, int], memoryview] = {}

    def _make(self, dtype: str, width: int) -> memoryview:
        count = max(1, POOL_ELEMENTS // width)
        values = np.resize(self.base, (count, width))
        spread = np.exp(self.random.normal(0.0, 0.4, (count, 1))).astype(np.float32)
        typical = np.float32(FP8_MAX / 8 if dtype == "F8_E4M3" else 0.02)
        return as_bytes(encode(values * (spread * typical), dtype))

    def _made(self, tensor: Tensor) -> Array:
        """What does not come from rows of the pool."""
        kind, *numbers = tensor.content.split()
        if kind == "shape":
            return np.array(numbers, np.int64)
        if kind == "symmetric":
            return self.random.integers(-127, 128, tensor.shape, np.int8)
        if kind == "eights":
            return np.full(tensor.nbytes, 0x88, np.uint8)
        if kind == "codes":
            return np.frombuffer(self.random.bytes(tensor.nbytes), np.uint8)
        if tensor.dtype in ("F8_E8M0", "U8"):
            return self.random.integers(115, 123, tensor.shape, np.uint8)
        if tensor.dtype == "F8_E4M3":
            return self.random.integers(0x38, 0x58, tensor.shape, np.uint8)
        scales = np.exp(self.random.normal(-6.0, 0.3, tensor.shape)).astype(np.float32)
        return encode(scales, tensor.dtype)

    def pieces(self, tensor: Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor, as views of the pool that follow one another."""
        if tensor.content != "weights":
            yield as_bytes(self._made(tensor))
            return
        width = tensor.shape[-1]
        key = (tensor.dtype, width)
        if key not in self.rows:
            self.rows[key] = self._make(*key)
        row_bytes = width * ITEM_BYTES[tensor.dtype]
        pool = self.rows[key]
        start = int(self.random.integers(len(pool) // row_bytes)) * row_bytes
        left = tensor.nbytes
        while left:
            piece = pool[start : start + left]
            yield piece
            left -= len(piece)
            start = 0


# --- names ------------------------------------------------------------------------------


def expert_tensors(preset: Preset, prefix: str, dtype: str) -> Iterator[Tensor]:
    hidden, inner = preset.hidden, preset.intermediate
    mixtral = preset.family == "mixtral"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    tensors = ENCODINGS[dtype].tensors
    for expert in range(preset.experts):
        base = f"{prefix}.experts.{expert}"
        yield from tensors(f"{base}.{names[0]}", inner, hidden)
        yield from tensors(f"{base}.{names[1]}", inner, hidden)
        yield from tensors(f"{base}.{names[2]}", hidden, inner)


def fused_tensors(preset: Preset, prefix: str, dtype: str, orientation: str) -> Iterator[Tensor]:
    experts, hidden, inner = preset.experts, preset.hidden, preset.intermediate
    gate_up, down = (experts, 2 * inner, hidden), (experts, hidden, inner)
    if orientation == "in-out":
        gate_up, down = (experts, hidden, 2 * inner), (experts, inner, hidden)
    yield Tensor(f"{prefix}.experts.gate_up_proj", dtype, gate_up)
    yield Tensor(f"{prefix}.experts.down_proj", dtype, down)


def attention_tensors(preset: Preset, base: str, dtype: str) -> Iterator[Tensor]:
    """With these and what every checkpoint gets, transformers runs a model of Qwen3 MoE."""
    queries, keys = HEADS * HEAD_WIDTH, KEY_HEADS * HEAD_WIDTH
    yield Tensor(f"{base}.self_attn.k_norm.weight", dtype, (HEAD_WIDTH,))
    yield Tensor(f"{base}.self_attn.q_proj.weight", dtype, (queries, preset.hidden))
    yield Tensor(f"{base}.self_attn.k_proj.weight", dtype, (keys, preset.hidden))
    yield Tensor(f"{base}.self_attn.v_proj.weight", dtype, (keys, preset.hidden))
    yield Tensor(f"{base}.self_attn.o_proj.weight", dtype, (preset.hidden, queries))


def plan(preset: Preset, dtype: str, fused: str | None, attention: bool) -> Iterator[Tensor]:
    """Every tensor of the checkpoint, in the order in which it is written."""
    other = ENCODINGS[dtype].other
    root = "model.language_model" if fused else "model"
    block = "block_sparse_moe" if preset.family == "mixtral" and not fused else "mlp"
    yield Tensor(f"{root}.embed_tokens.weight", other, (preset.vocabulary, preset.hidden))
    for layer in range(preset.layers):
        base = f"{root}.layers.{layer}"
        yield Tensor(f"{base}.input_layernorm.weight", other, (preset.hidden,))
        yield Tensor(f"{base}.self_attn.q_norm.weight", other, (HEAD_WIDTH,))
        if attention:
            yield from attention_tensors(preset, base, other)
        yield Tensor(f"{base}.post_attention_layernorm.weight", other, (preset.hidden,))
        yield Tensor(f"{base}.{block}.gate.weight", other, (preset.experts, preset.hidden))
        if preset.family in CORRECTED:
            yield Tensor(f"{base}.{block}.gate.e_score_correction_bias", "F32", (preset.experts,))
        if fused:
            yield from fused_tensors(preset, f"{base}.{block}", other, fused)
        else:
            yield from expert_tensors(preset, f"{base}.{block}", dtype)
    yield Tensor(f"{root}.norm.weight", other, (preset.hidden,))
    yield Tensor("lm_head.weight", other, (preset.vocabulary, preset.hidden))


# --- files ------------------------------------------------------------------------------


def split(tensors: Iterator[Tensor], limit: int) -> list[list[Tensor]]:
    """Fill shards in order; a tensor above the limit gets a shard of its own."""
    shards: list[list[Tensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return shards


def header(tensors: list[Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, tensors: list[Tensor], pool: Pool | None) -> None:
    """Headers, then data of the pool, or a hole of their size."""
    with path.open("wb") as file:
        file.write(header(tensors))
        if pool is None:
            file.truncate(file.tell() + sum(tensor.nbytes for tensor in tensors))
            return
        for tensor in tensors:
            for piece in pool.pieces(tensor):
                file.write(piece)


def write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")


def text_config(preset: Preset, dtype: str) -> dict[str, object]:
    """The keys that transformers writes for this family, as far as experts go."""
    config: dict[str, object] = {
        "model_type": preset.family,
        "hidden_size": preset.hidden,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_WIDTH,
        "num_experts_per_tok": preset.top_k,
        "vocab_size": preset.vocabulary,
        "hidden_act": "silu",
        "torch_dtype": TORCH_NAMES[ENCODINGS[dtype].other],
    }
    if preset.family == "mixtral":
        config |= {"num_local_experts": preset.experts, "intermediate_size": preset.intermediate}
        return config
    config |= {"moe_intermediate_size": preset.intermediate, "intermediate_size": 4 * preset.hidden}
    if preset.family in CORRECTED:
        config |= {"n_routed_experts": preset.experts, "first_k_dense_replace": 0}
        config |= {"moe_layer_freq": 1, "num_nextn_predict_layers": 0}
    else:
        config |= {"num_experts": preset.experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config


def model_config(preset: Preset, dtype: str, fused: str | None) -> dict[str, object]:
    config: dict[str, object] = {"architectures": [preset.architecture]}
    if fused:
        # the two fused orientations belong to these two families
        family = "qwen3_5_moe" if fused == "out-in" else "qwen3_vl_moe"
        inner = text_config(replace(preset, family="qwen3_moe"), dtype)
        inner["model_type"] = f"{family}_text"
        config |= {"model_type": family, "text_config": inner}
        config["architectures"] = [
            "Qwen3_5MoeForConditionalGeneration"
            if fused == "out-in"
            else "Qwen3VLMoeForConditionalGeneration"
        ]
    else:
        config |= text_config(preset, dtype)
    if ENCODINGS[dtype].config:
        config["quantization_config"] = dict(ENCODINGS[dtype].config)
    return config


def write_side_files(output: Path, preset: Preset, dtype: str, fused: str | None) -> None:
    write_json(output / "config.json", model_config(preset, dtype, fused))
    write_json(output / "generation_config.json", {"do_sample": False, "eos_token_id": 0})
    vocabulary = {"<unk>": 0, "a": 1, "b": 2}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    write_json(output / "tokenizer.json", tokenizer)
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    write_json(output / "tokenizer_config.json", tokenizer_config)
    write_json(output / "special_tokens_map.json", {"unk_token": "<unk>"})
    (output / "chat_template.jinja").write_text("{{ messages }}\n")


def write_checkpoint(
    output: Path,
    preset: Preset,
    dtype: str,
    fused: str | None,
    shard_size: int,
    seed: int,
    attention: bool = False,
    holes: bool = False,
) -> int:
    """Write the whole checkpoint; returns the bytes of its tensors. `holes`: headers alone, in
    files of full size, which take no room on the disk and read as zeros."""
    output.mkdir(parents=True)
    shards = split(plan(preset, dtype, fused, attention), shard_size)
    pool = None if holes else Pool(seed)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(output / name, tensors, pool)
        weight_map |= dict.fromkeys((t.name for t in tensors), name)
    total = sum(t.nbytes for tensors in shards for t in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(output / "model.safetensors.index.json", index)
    write_side_files(output, preset, dtype, fused)
    return total


# --- command line -----------------------------------------------------------------------


def parse_size(text: str) -> int:
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "MIB": 1 << 20, "GIB": 1 << 30}
    digits = text.rstrip("KMGiBkmgb")
    unit = text[len(digits) :].upper()
    if unit not in units:
        raise argparse.ArgumentTypeError(f"unknown size {text!r} (try 4GB or 512MiB)")
    return int(float(digits) * units[unit])


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path, help="directory to create")
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-30b")
    parser.add_argument("--layers", type=int, help="number of layers (default 1)")
    parser.add_argument("--experts", type=int, help="experts per layer (default: the preset's)")
    parser.add_argument("--hidden", type=int, help="hidden size (default: the preset's)")
    parser.add_argument("--intermediate", type=int, help="expert size (default: the preset's)")
    parser.add_argument("--vocabulary", type=int, help="rows of embed_tokens and lm_head (1024)")
    parser.add_argument("--dtype", choices=ENCODINGS, default="bf16")
    parser.add_argument(
        "--fused",
        choices=["out-in", "in-out"],
        help="3-D experts: gate_up_proj [E,2I,H] (out-in) or [E,H,2I] (in-out)",
    )
    parser.add_argument(
        "--attention",
        action="store_true",
        help="with the weights of attention, so that transformers runs the model (qwen3-30b)",
    )
    parser.add_argument("--shard-size", type=parse_size, help="default 4GB; 32MB for many tensors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--many-tensors",
        action="store_true",
        help="100 000 tiny expert matrices, to measure start-up",
    )
    return parser.parse_args(arguments)


def choose_preset(options: argparse.Namespace) -> Preset:
    preset = MANY if options.many_tensors else PRESETS[options.preset]
    fields = ("layers", "experts", "hidden", "intermediate", "vocabulary")
    given = {name: getattr(options, name) for name in fields if getattr(options, name)}
    return replace(preset, **given)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.fused and ENCODINGS[options.dtype].config:
        sys.exit("--fused is for bf16, fp16 and fp32")
    if options.output.exists() and any(options.output.iterdir()):
        sys.exit(f"{options.output} is not empty")
    preset = choose_preset(options)
    if options.attention and (preset.family != "qwen3_moe" or options.fused):
        sys.exit("--attention is for qwen3-30b, not fused")
    shard_size = options.shard_size or parse_size("32MB" if options.many_tensors else "4GB")
    if options.output.exists():
        options.output.rmdir()
    total = write_checkpoint(
        options.output,
        preset,
        options.dtype,
        options.fused,
        shard_size,
        options.seed,
        options.attention,
    )
    print(f"{options.output}: {total} bytes, {preset.layers} layers, {preset.experts} experts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
