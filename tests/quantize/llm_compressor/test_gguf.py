"""Experts for GPUs from GGUF models: outputs are those of the safetensors checkpoint with the same
values, tensor by tensor."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import assert_same, read_json, read_model
from helpers.corrupt import bytes_of, overwrite
from helpers.families import HIDDEN, Tensor, bf16, family, simple_config, write_checkpoint
from helpers.gguf_files import ARCHITECTURE, Blocks, around, experts, metadata, write_gguf
from helpers.gpu import quantize
from helpers.gpu_corrupt import find
from helpers.harmless import assert_safe, run
from numpy.typing import NDArray

from ktconv.formats.decode import round_to_bf16

if find_spec("llmcompressor") is None:  # not imported: each process would, for its list of tests
    pytest.skip("llmcompressor is not installed", allow_module_level=True)

from helpers.ggml import HALVES, block_size, blocks_of

pytestmark = [pytest.mark.slow, pytest.mark.torch]

F32 = NDArray[np.float32]
SIZE = 256  # of every matrix, so that all types fit
LAYERS, EXPERTS = 2, 3
# model_type -> architecture, and how the experts of the unfused model are called
FAMILIES = {
    "qwen2_moe": ("qwen2moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen3_moe": ("qwen3moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "minimax_m2": ("minimax-m2", "block_sparse_moe.experts", ("w1", "w3", "w2")),
}
CORRECTION = "e_score_correction_bias"
KINDS = ("Q8_0", "Q4_K", "Q6_K", "IQ3_S")


def settings(name: str) -> dict[str, Any]:
    count = "num_local_experts" if name == "minimax_m2" else "num_experts"
    inner = "intermediate_size" if name == "minimax_m2" else "moe_intermediate_size"
    changes = {
        "hidden_size": SIZE, "num_hidden_layers": LAYERS, "vocab_size": 64, "mlp_only_layers": [],
        "shared_expert_intermediate_size": SIZE, count: EXPERTS, inner: SIZE,
    }  # fmt: skip
    own = family(name).settings
    return {**own, **{key: changes[key] for key in changes if key in own or key in (count, inner)}}


@cache
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Non-expert tensors of the checkpoint that transformers writes."""
    import torch
    import transformers

    classes = family(name).classes
    config = getattr(transformers, f"{classes}Config")(**settings(name))
    with torch.device("meta"):
        built = getattr(transformers, f"{classes}ForCausalLM")(config)
    block = FAMILIES[name][1].removesuffix(".experts")
    return {
        key.replace(".mlp.", f".{block}."): tuple(one.shape)
        for key, one in built.state_dict().items()
        if ".experts." not in key
    }


def gguf_name(architecture: str, name: str) -> str:
    """By the table of the package gguf, as llama.cpp's converter uses it."""
    import gguf

    number = next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    name = name.replace(CORRECTION, "e_score_correction.bias")
    module, _, end = name.rpartition(".")
    found = gguf.get_tensor_name_map(number, LAYERS).get_name(module)
    assert found is not None, name
    return f"{found}.{end}"


def blocks(rng: np.random.Generator, kind: str, *shape: int) -> Blocks:
    """Random blocks with scales of about the size that weights have."""
    data = blocks_of(rng, kind, int(np.prod(shape[:-1])), shape[-1])
    stored = data.reshape(-1, block_size(kind)[1])
    for at in HALVES[kind]:
        stored[:, at + 1] = rng.integers(0x10, 0x18, len(stored))
    return Blocks(kind, data.reshape(*shape[:-1], -1))


def write_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """A GGUF model, and the safetensors checkpoint of its values."""
    architecture, place, words = FAMILIES[name]
    rng = np.random.default_rng(5)
    stored: dict[str, Any] = {}
    plain: dict[str, Tensor] = {}
    for number, (key, shape) in enumerate(shapes(name).items()):
        values = rng.standard_normal(shape).astype(np.float32)
        there = gguf_name(architecture, key)
        kind = "Q8_0" if shape[-1] % SIZE else KINDS[number % len(KINDS)]
        if len(shape) == 1 or ".gate." in key or shape[0] == 1:  # llama.cpp leaves them in float32
            stored[there] = values.reshape(-1) if shape[0] == 1 else values
            exact = name == "minimax_m2" and ("moe.gate." in key or CORRECTION in key)
            plain[key] = values if exact else bf16(round_to_bf16(values))
        else:
            stored[there] = blocks(rng, kind, *shape)
            plain[key] = bf16(round_to_bf16(stored[there].values))
    for layer in range(LAYERS):
        for word, ours, kind in zip(("gate", "up", "down"), words, KINDS[layer:], strict=False):
            one = blocks(rng, kind, EXPERTS, SIZE, SIZE)
            stored[f"blk.{layer}.ffn_{word}_exps.weight"] = one
            for expert, values in enumerate(one.values):
                plain[f"model.layers.{layer}.{place}.{expert}.{ours}.weight"] = values
    pairs = metadata(
        LAYERS, expert_count=EXPERTS, embedding_length=SIZE, expert_feed_forward_length=SIZE
    )
    path = write_gguf(directory / "m.gguf", stored, pairs, architecture=architecture, per_file=20)
    config = {"model_type": name, **settings(name)}
    return path, write_checkpoint(directory / "reference", plain, config)


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_those_of_the_values(name: str, tmp_path: Path) -> None:
    path, reference = write_pair(tmp_path, name)
    (reference / "tokenizer.json").write_text("{}")
    output, expected = tmp_path / "out", tmp_path / "expected"
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}  # as in MiniMax-M2's own
    content = read_json(reference / "config.json") | {"quantization_config": fp8}
    original = write_config(tmp_path / "original", content)
    (original / "tokenizer.json").write_text("{}")
    quantize(path, output, group_size=32, config=original)
    quantize(reference, expected, group_size=32)
    tensors = read_model(output)
    assert_same(tensors, read_model(expected))
    for file in ("config.json", "tokenizer.json"):
        assert (output / file).read_bytes() == (expected / file).read_bytes()
    if name == "minimax_m2":
        corrections = [one.dtype for key, one in tensors.items() if CORRECTION in key]
        assert corrections == ["F32"] * LAYERS
    units = read_json(output / "ktconv.json")["units"].values()
    records = {key: one for unit in units for key, one in unit["tensors"].items()}
    origin = {key: one["decoded_from"] for key, one in records.items() if "decoded_from" in one}
    assert origin["model.norm.weight"] == "fp32"
    assert origin["model.embed_tokens.weight"] == "gguf-q8_0"
    assert_safe(run("verify", output, "--source", path, "--config", original), 0)


def test_verify_finds_changed_tensors(tmp_path: Path) -> None:
    """By the values of the source, without checksums."""
    path, reference = write_pair(tmp_path, "qwen2_moe")
    output = tmp_path / "out"
    quantize(path, output, group_size=32, config=reference)
    words = ("verify", output, "--source", path, "--level", "weights")
    result = run(*words)
    assert_safe(result, 2)
    assert "m-00001-of-00002.gguf has no config.json and tokenizer" in result.stderr
    (output / "ktconv.json").unlink()
    changed = (
        "layers.0.mlp.shared_expert_gate.weight",
        "layers.1.self_attn.q_proj.bias",
        "norm.weight",
    )
    for name in changed:
        place = find(output, f"model.{name}")
        overwrite(place, bytes([bytes_of(place)[-2] ^ 1]), place.nbytes - 2)
    result = run(*words, "--config", reference)
    assert_safe(result, 1)
    for name in changed:
        assert f"copied tensor: model.{name} in " in result.stdout
    assert result.stdout.count("differs from the decoded source") == len(changed)


# ---- what is refused -------------------------------------------------------------------

HEAD = {
    "token_embd.weight": np.ones((8, HIDDEN), np.float32),
    "output.weight": np.ones((8, HIDDEN), np.float32),
}


def small(directory: Path, changes: dict[str, Any] | None = None) -> Path:
    """`changes`: other tensors, None for one that is left out, and the architecture."""
    content = {**HEAD, **experts(), **around(), **(changes or {})}
    architecture = content.pop("architecture", ARCHITECTURE)
    given = {key: one for key, one in content.items() if one is not None}
    return write_gguf(directory / "small.gguf", given, architecture=architecture)


def config(directory: Path, **changes: Any) -> Path:
    return write_config(directory / "c", simple_config(moe_intermediate_size=192, **changes))


def write_config(directory: Path, content: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(content))
    return directory


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "no config": ({}, None, "small.gguf has no config.json and tokenizer"),
    "an architecture": (
        {"architecture": "deepseek2"}, {"model_type": "deepseek_v3"},
        "names and order of rows of architecture deepseek2 are not known",
    ),
    "another model": (
        {}, {"model_type": "mixtral"}, "is a model of type qwen3_moe, but config.json in",
    ),
    "no head": ({"output.weight": None}, {}, "small.gguf has no output.weight, but config.json"),
    "an unknown tensor": (
        {"rope_freqs.weight": np.ones(4, np.float32)}, {}, "rope_freqs.weight has no name in",
    ),
    "a tensor of another family": (
        {"blk.0.ffn_gate_shexp.weight": np.ones((4, HIDDEN), np.float32)}, {},
        "blk.0.ffn_gate_shexp.weight has no name in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_refused(fault: str, tmp_path: Path) -> None:
    tensors, changes, reason = REFUSED[fault]
    words = [] if changes is None else ["--config", config(tmp_path, **changes)]
    path, output = small(tmp_path, tensors), tmp_path / "out"
    result = run("quantize-gpu", path, output, "--group-size", 32, *words)
    assert_safe(result, 2)
    assert reason in result.stderr and "Hint: " in result.stderr
    assert not output.exists()


def test_gptq_of_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same experts as from the safetensors checkpoint, bit by bit."""
    from ktconv.quantize.llm_compressor.gptq import run as gptq
    from ktconv.targets.encoded.target import Calibration

    class Letters:
        def __call__(self, text: str, **_: Any) -> dict[str, Any]:
            return {"input_ids": [ord(letter) % 64 for letter in text]}

    monkeypatch.setattr(gptq, "load_tokenizer", lambda _: Letters())
    text = tmp_path / "text.txt"
    text.write_text("A text of some words, all of which are read as letters. " * 4)
    path, plain = write_pair(tmp_path, "qwen3_moe")
    options: dict[str, Any] = {
        "method": "gptq", "dampening": 0.1, "device": "cpu",
        "calibration": Calibration(str(text), samples=2, max_seq_len=96),
    }  # fmt: skip
    quantize(path, tmp_path / "out", config=plain, **options)
    quantize(plain, tmp_path / "expected", **options)
    found, expected = read_model(tmp_path / "out"), read_model(tmp_path / "expected")
    experts = [name for name in expected if ".experts." in name]
    assert len(experts) == LAYERS * EXPERTS * 9
    assert all(found[name] == expected[name] for name in experts)


def test_tied_embeddings(tmp_path: Path) -> None:
    path, output = small(tmp_path, {"output.weight": None}), tmp_path / "out"
    quantize(path, output, group_size=32, config=config(tmp_path, tie_word_embeddings=True))
    tensors = read_model(output)
    assert tensors["model.embed_tokens.weight"].dtype == "BF16"
    assert not any("lm_head" in name for name in tensors)
    assert read_json(output / "config.json")["tie_word_embeddings"] is True


def test_a_norm_that_is_not_finite(tmp_path: Path) -> None:
    bad = np.full(HIDDEN, np.nan, np.float32)
    path = small(tmp_path, {"blk.0.ffn_norm.weight": bad})
    words = ("--group-size", 32, "--config", config(tmp_path))
    result = run("quantize-gpu", path, tmp_path / "out", *words)
    assert_safe(result, 2)
    assert "blk.0.ffn_norm.weight" in result.stderr and "contains a NaN" in result.stderr
