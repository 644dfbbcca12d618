"""Encoded checkpoints in transformers: the model is that of the values that they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.encoded import KINDS, in_int8
from helpers.families import (
    Tensor,
    build_model,
    fp8,
    fp8_values,
    simple_config,
    write_checkpoint,
)
from helpers.gpt_oss import EXPERTS, HIDDEN, INNER, SOURCE, Blocks
from helpers.paths import EXAMPLE

from ktconv.cli.app import app
from ktconv.errors import CheckpointError, ResourceError
from ktconv.model import decoded, load_model
from ktconv.source import open_checkpoint
from ktconv.system import machine

pytestmark = [pytest.mark.slow, pytest.mark.torch]

EXPERT_WORDS = {
    "qwen3_moe": (".gate_proj.", ".up_proj.", ".down_proj."),
    "mixtral": (".w1.", ".w3.", ".w2."),
}
ATTENTION = ("q_proj.", "k_proj.", "v_proj.", "o_proj.")


class Pair(NamedTuple):
    """A checkpoint with encoded weights, and one of the values that they stand for in float32."""

    encoded: Path
    plain: Path


def write_pair(
    directory: Path, name: str, kind: str, attention: bool = False, dtype: str = "bfloat16"
) -> Pair:
    from safetensors.torch import load_file

    model = build_model(name)
    model.save_pretrained(directory / "base")
    (file,) = (directory / "base").glob("*.safetensors")
    config = json.loads((directory / "base/config.json").read_text()) | {"dtype": dtype}
    rng = np.random.default_rng(5)
    encoded: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for key, tensor in load_file(file).items():
        values = tensor.float().numpy()
        words = ATTENTION if attention else ()
        if any(word in key for word in (*EXPERT_WORDS[name], *words)):
            module = key.removesuffix(".weight")
            parts, values = KINDS[kind].of(rng, *values.shape)
            encoded |= {f"{module}.{part}": one for part, one in parts.items()}
        else:
            encoded[key] = values
        plain[key] = values
    quantization = {"quantization_config": dict(KINDS[kind].quantization)}
    pair = Pair(directory / "encoded", directory / "plain")
    write_checkpoint(pair.plain, plain, config)
    write_checkpoint(pair.encoded, encoded, config | quantization, shards=2)
    with_tokenizer(pair)
    return pair


def with_tokenizer(pair: Pair) -> None:
    for place in pair:
        for file in EXAMPLE.glob("tokenizer*"):
            shutil.copy(file, place)


@pytest.mark.parametrize(
    ("kind", "name", "attention"),
    [
        ("fp8 block", "qwen3_moe", True),
        ("int4 packed, group 32", "mixtral", False),
        ("gptq by activation", "qwen3_moe", True),
        ("nvfp4, ModelOpt", "qwen3_moe", True),
        ("mxfp4, compressed-tensors", "mixtral", True),
        ("int8 channel", "qwen3_moe", False),
        ("awq", "qwen3_moe", True),
    ],
)
def test_the_model_is_that_of_the_values(
    kind: str, name: str, attention: bool, torch: Any, tmp_path: Path
) -> None:
    pair = write_pair(tmp_path, name, kind, attention)
    (ours, _), (theirs, _) = load_model(pair.encoded), load_model(pair.plain)
    assert not hasattr(ours.config, "quantization_config")
    ids = torch.arange(12)[None] % 64
    with torch.inference_mode():
        logits = ours(ids).logits, theirs(ids).logits
    same(torch, ours, theirs)
    assert logits[1].isfinite().all() and torch.equal(*logits)


def same(torch: Any, ours: Any, theirs: Any) -> None:
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    for key, tensor in mine.items():
        assert tensor.dtype == other[key].dtype and torch.equal(tensor, other[key]), key


def test_gpt_oss(torch: Any, tmp_path: Path) -> None:
    """Blocks are stored [out, in], what they stand for [in, out], and gate and up alternate."""
    blocks = Blocks()
    model = build_model("gpt_oss")
    sizes = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INNER}
    config = {**model.config.to_dict(), **sizes, "num_hidden_layers": 1, "layer_types": None}
    changed = type(model)(type(model.config)(**config))
    others = {k: v.numpy() for k, v in changed.state_dict().items() if ".experts." not in k}
    quantization = {"quantization_config": {"quant_method": "mxfp4"}}
    pair = Pair(tmp_path / "encoded", tmp_path / "plain")
    config = {**changed.config.to_dict(), "dtype": "bfloat16"}
    write_checkpoint(pair.encoded, {**others, **blocks.mxfp4}, config | quantization)
    write_checkpoint(pair.plain, {**others, **blocks.bf16}, config)
    with_tokenizer(pair)
    (ours, _), (theirs, _) = load_model(pair.encoded), load_model(pair.plain)
    same(torch, ours, theirs)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_weights_keep_their_orientation(
    transposed: bool, torch: Any, tmp_path: Path
) -> None:
    """In FP8 with a scale for each block of a part of an expert."""
    rng = np.random.default_rng(2)
    tensors: dict[str, Tensor] = {}
    expected: dict[str, Any] = {}
    for name, rows, cols in (("gate_up_proj", 512, 128), ("down_proj", 128, 256)):
        codes = rng.integers(0, 0x7F, (2, rows, cols), np.uint8)
        scale = rng.uniform(0.5, 2, (2, rows // 128, cols // 128)).astype(np.float32)
        values = fp8_values()[codes] * scale.repeat(128, axis=1).repeat(128, axis=2)
        if transposed:
            codes, scale, values = (one.swapaxes(1, 2) for one in (codes, scale, values))
        key = f"{SOURCE}.{name}"
        tensors |= {key: fp8(np.ascontiguousarray(codes)), f"{key}_scale_inv": scale}
        expected[key] = values
    tensors["model.embed_tokens.weight"] = rng.random((4, 128), np.float32)
    sizes = {"num_experts": 2, "hidden_size": 128, "moe_intermediate_size": 256}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = simple_config(**sizes, quantization_config=quantization)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    found = decoded.SourceWeights(open_checkpoint(model)).state_dict(torch.float32)
    assert found.keys() == {*expected, "model.embed_tokens.weight"}
    for key, values in expected.items():
        assert np.array_equal(found[key][...].numpy(), values), key


def test_memory_is_that_of_the_decoded_model(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = write_pair(tmp_path, "mixtral", "mxfp4, compressed-tensors")
    checkpoint = open_checkpoint(pair.encoded)
    model, _ = load_model(pair.encoded)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    stored = sum(one.nbytes for one in checkpoint.sources)
    assert stored < size <= decoded.loaded_bytes(checkpoint) < 1.3 * size
    monkeypatch.setattr(machine, "available_memory", lambda: size)
    with pytest.raises(ResourceError, match="needs about"):
        load_model(pair.encoded)


def test_what_cannot_be_loaded(torch: Any, tmp_path: Path) -> None:
    """A NaN as scale, in experts and in attention; a missing weight."""
    pair = write_pair(tmp_path, "qwen3_moe", "int8 channel", attention=True)
    for part in ("self_attn.q_proj", "mlp.experts.3.down_proj"):
        name = f"model.layers.1.{part}.weight_scale"
        changed = change(pair.encoded, name, lambda scale: scale * np.float32("nan"))
        with pytest.raises(CheckpointError, match=rf"{name}.*(NaN|not a )"):
            load_model(changed)
    name = "model.layers.1.self_attn.o_proj.weight"
    with pytest.raises(CheckpointError, match=f"does not contain {name}"):
        load_model(change(pair.encoded, name, None))
    other = change(pair.encoded, "model.layers.0.self_attn.q_proj.weight_scale", None)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight"):
        load_model(other)


def change(model: Path, name: str, with_: Any) -> Path:
    """A copy with another tensor `name`, or without it."""
    from safetensors.numpy import load_file, save_file

    copy = model.with_name(f"changed-{name}")
    shutil.copytree(model, copy)
    tensors: dict[str, Any] = {}
    for shard in sorted(copy.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (copy / "model.safetensors.index.json").unlink()
    old = tensors.pop(name)
    if with_ is not None:
        tensors[name] = with_(old)
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.usefixtures("tiles")
def test_commands(torch: Any, tmp_path: Path) -> None:
    """The trained example in INT8: counts are those of its values, and its conversion is exact."""
    from safetensors.torch import load_file

    pair = Pair(tmp_path / "encoded", tmp_path / "plain")
    encoded: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for shard in EXAMPLE.glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            encoded[name] = plain[name] = tensor.float().numpy()
            if "_proj." in name:
                parts, plain[name] = in_int8(tensor.float().numpy())
                encoded |= {name.removesuffix("weight") + part: one for part, one in parts.items()}
    config = json.loads((EXAMPLE / "config.json").read_text())
    write_checkpoint(pair.plain, plain, config)
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    write_checkpoint(pair.encoded, encoded, config | {"quantization_config": quantization})
    with_tokenizer(pair)
    counts = [run("stats", model, "--max-tokens", "64")["layers"] for model in pair]
    assert counts[0] == counts[1]
    run("quantize-cpu", pair.encoded, tmp_path / "out", "--method", "int8")
    words = ["--source", pair.encoded, "--level", "model", "--windows", "2", "--tokens", "4"]
    found = run("verify", tmp_path / "out", *words)
    assert not any("random hidden states" in note for note in found["notes"])
    assert found["model"]["kl_mean"] < 0.01


def run(*words: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found
