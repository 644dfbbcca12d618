"""GGUF models in every command: the bytes are those of a float32 checkpoint with their values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import all_files, assert_same, convert, read_json, read_model
from helpers.families import Tensor, Weights, read_matrix, simple_config, write_checkpoint
from helpers.ggml import HALVES, block_size, blocks_of
from helpers.gguf_files import Blocks, around, experts, metadata, write_gguf
from helpers.harmless import assert_safe, run
from helpers.paths import EXAMPLE
from numpy.typing import NDArray

from ktconv.errors import ResourceError
from ktconv.merge import Request as MergeRequest
from ktconv.merge import merge
from ktconv.source import PROJECTIONS, ModelSource, open_checkpoint

pytestmark = pytest.mark.slow

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("transformers") is None, reason="needs transformers"
)

EXPERTS, HIDDEN, INNER = 3, 256, 512
SIZES = {
    "block_count": 2, "expert_count": EXPERTS, "expert_used_count": 2, "embedding_length": HIDDEN,
    "expert_feed_forward_length": INNER, "expert_weights_norm": True,
}  # fmt: skip
FACTORS = np.array([0.5, 2, 3], np.float32)
# gate, up and down of both layers: as llama.cpp mixes them, and types of other kinds.
MIXED = (("Q4_K", "Q4_K", "Q6_K"), ("MXFP4", "IQ4_NL", "Q8_0"))


def stack(rng: np.random.Generator, kind: str, rows: int, cols: int) -> Blocks:
    data = blocks_of(rng, kind, EXPERTS * rows, cols)
    blocks = data.reshape(-1, block_size(kind)[1])
    for at in HALVES[kind]:  # scales of about the size that weights have
        blocks[:, at + 1] = rng.integers(0x10, 0x18, len(blocks))
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(110, 120, len(blocks))
    return Blocks(kind, data.reshape(EXPERTS, rows, -1))


def layers_of(kinds: tuple[tuple[str, str, str], ...] = MIXED) -> list[dict[str, Blocks]]:
    """By layer: gate, up and down."""
    rng = np.random.default_rng(7)
    return [
        {
            word: stack(rng, kind, *((HIDDEN, INNER) if word == "down" else (INNER, HIDDEN)))
            for word, kind in zip(("gate", "up", "down"), one, strict=True)
        }
        for one in kinds
    ]


def float_model(directory: Path, layers: list[Weights]) -> Path:
    """The same values under the names of Hugging Face, one tensor for each expert's matrix."""
    tensors: dict[str, Tensor] = {
        f"model.layers.{index}.mlp.experts.{expert}.{word}_proj.weight": one[expert]
        for index, weights in enumerate(layers)
        for word, one in zip(("gate", "up", "down"), weights, strict=True)
        for expert in range(EXPERTS)
    }
    config = simple_config(
        num_hidden_layers=2, num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INNER
    )
    return write_checkpoint(directory, tensors, config)


def apart(index: int, layer: Mapping[str, Blocks]) -> dict[str, Any]:
    return {f"blk.{index}.ffn_{word}_exps.weight": one for word, one in layer.items()}


def together(index: int, layer: Mapping[str, Blocks]) -> dict[str, Any]:
    gate_up = np.concatenate([layer["gate"].data, layer["up"].data], axis=1)
    return {
        f"blk.{index}.ffn_gate_up_exps.weight": Blocks(layer["gate"].kind, gate_up),
        f"blk.{index}.ffn_down_exps.weight": layer["down"],
    }


def numbered(index: int, layer: Mapping[str, Blocks]) -> dict[str, Any]:
    return {
        f"blk.{index}.ffn_{word}.{expert}.weight": Blocks(one.kind, one.data[expert])
        for word, one in layer.items()
        for expert in range(EXPERTS)
    }


def with_factors(index: int, layer: Mapping[str, Blocks]) -> dict[str, Any]:
    """A factor for each expert; in layer 1 under the other name."""
    middle = ".weight" if index else ""
    return apart(index, layer) | {
        f"blk.{index}.ffn_{word}_exps{middle}.scale": FACTORS for word in layer
    }


FORMS = {"apart": apart, "together": together, "numbered": numbered, "factors": with_factors}


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_of_the_values(form: str, tmp_path: Path) -> None:
    same = (("Q5_K", "Q5_K", "Q4_0"), ("NVFP4", "NVFP4", "TQ2_0"))
    layers = layers_of(same if form == "together" else MIXED)
    tensors: dict[str, Any] = {"output.weight": np.ones((32, HIDDEN), np.float32)}
    values = []
    for index, layer in enumerate(layers):
        tensors |= FORMS[form](index, layer)
        factor = FACTORS[:, None, None] if form == "factors" else np.float32(1)
        values.append(Weights(*(one.values * factor for one in layer.values())))
    path = write_gguf(tmp_path / "m.gguf", tensors, SIZES)
    reference = float_model(tmp_path / "reference", values)
    for method, numa in (("int8", 1), ("int4", 2)):
        for source in (path, reference):
            convert(source, tmp_path / f"{source.stem}-{method}", method=method, numa=numa)
        outputs = [read_model(tmp_path / f"{name}-{method}") for name in ("m", "reference")]
        assert_same(*outputs)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split model of mixed types with routers and norms."""
    tensors: dict[str, Any] = {}
    for index, layer in enumerate(layers_of()):
        tensors |= apart(index, layer) | around(index, HIDDEN, EXPERTS)
    directory = tmp_path_factory.mktemp("mixed")
    return write_gguf(directory / "mixed.gguf", tensors, SIZES, per_file=4)


def test_plan_and_inspect(mixed: Path) -> None:
    result = run("inspect", mixed.parent, "--json")
    assert_safe(result, 0)
    facts = json.loads(result.stdout)
    assert facts["family"] == "qwen3_moe" and facts["files"] == 3
    assert facts["encodings"] == [
        "gguf-iq4_nl", "gguf-mxfp4", "gguf-q4_k", "gguf-q6_k", "gguf-q8_0",
    ]  # fmt: skip
    assert facts["experts_found_as"] == ["blk.N"] and facts["other_tensors"] == 4
    result = run("quantize-cpu", mixed, mixed.parent / "never", "--dry-run", "--numa", 1)
    assert_safe(result, 0)
    assert "gguf-q4_k" in result.stdout
    assert "4 non-expert tensors (8.2 kB): their names and types in GGUF files" in result.stdout
    assert not (mixed.parent / "never").exists()


@pytest.mark.usefixtures("tiles")  # the AMX level runs too, where it is emulated
def test_convert_and_verify(mixed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert_safe(run("quantize-cpu", mixed, output, "--method", "int8", "--numa", 1), 0)
    manifest = read_json(output / "ktconv.json")
    assert sorted(manifest["source"]["files"]) == [
        f"mixed-0000{part}-of-00003.gguf" for part in (1, 2, 3)
    ]
    assert manifest["geometry"]["model_type"] == "qwen3_moe"
    assert read_json(output / "config.json")["num_experts"] == EXPERTS
    assert "# mixed: CPU experts in" in (output / "README.md").read_text()
    result = run("verify", output, "--source", mixed, "--json")
    assert_safe(result, 0)
    facts = json.loads(result.stdout)
    assert [row["routing"] for row in facts["layers"]["layers"]] == ["router", "router"]
    assert not facts["failures"]
    again = run("quantize-cpu", mixed, output, "--method", "int8", "--numa", 1)
    assert_safe(again, 0)
    assert "nothing to do" in again.stdout


@pytest.mark.usefixtures("tiles")
def test_a_shared_expert_and_grid_types(tmp_path: Path) -> None:
    """Types that the package gguf decodes, and a gate of the shared expert that is a vector."""
    layer = layers_of((("IQ2_XXS", "IQ3_S", "IQ1_M"), MIXED[0]))[0]
    tensors: dict[str, Any] = apart(0, layer) | around(0, HIDDEN, EXPERTS)
    for word, one in layer.items():
        tensors[f"blk.0.ffn_{word}_shexp.weight"] = Blocks(one.kind, one.data[0])
    tensors["blk.0.ffn_gate_inp_shexp.weight"] = np.full(HIDDEN, 0.01, np.float32)
    pairs = {**SIZES, "block_count": 1}
    path = write_gguf(tmp_path / "m.gguf", tensors, pairs, architecture="qwen2moe")
    convert(path, tmp_path / "out", method="int8")
    result = run("verify", tmp_path / "out", "--source", path, "--json")
    assert_safe(result, 0)
    [row] = json.loads(result.stdout)["layers"]["layers"]
    assert row["routing"] == "router" and row["quantization_error_with_shared"] is not None


def test_a_changed_config_is_found(mixed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    convert(mixed, output, method="int8")
    config = read_json(output / "config.json") | {"num_experts_per_tok": 1}
    (output / "config.json").write_text(json.dumps(config))
    result = run("verify", output, "--source", mixed, "--level", "structure")
    assert_safe(result, 1)
    assert "config.json differs from the file that was written" in result.stdout


def test_a_config_directory(mixed: Path, tmp_path: Path) -> None:
    """config.json and tokenizer come from there, and verify needs it again."""
    directory, output = tmp_path / "c", tmp_path / "out"
    directory.mkdir()
    config = {**open_checkpoint(mixed).config.content, "architectures": ["Qwen3MoeForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    words = ("--method", "int8", "--numa", 1, "--config", directory)
    assert_safe(run("quantize-cpu", mixed, output, *words), 0)
    for name in ("config.json", "tokenizer.json"):
        assert (output / name).read_bytes() == (directory / name).read_bytes()
    assert "--max-shard-size 5000000000 --config DIR\n" in (output / "README.md").read_text()
    assert "config.json" in read_json(output / "ktconv.json")["source"]["files"]
    verify = ("verify", output, "--source", mixed, "--level", "structure")
    assert_safe(run(*verify, "--config", directory), 0)
    result = run(*verify)
    assert_safe(result, 1)
    assert "config.json of the source differs from the file that was converted" in result.stdout
    assert_safe(run("inspect", mixed, "--config", directory), 0)


def test_a_config_needs_a_source(tmp_path: Path) -> None:
    for words in (("verify", tmp_path), ("merge", tmp_path, tmp_path / "out"),
                  ("reshard", tmp_path, tmp_path / "out", "--numa", 2)):  # fmt: skip
        result = run(*words, "--config", tmp_path)
        assert_safe(result, 2)
        assert "--config belongs to --source" in result.stderr


def test_merge(mixed: Path, tmp_path: Path) -> None:
    convert(mixed, tmp_path / "direct", method="int4")
    convert(mixed, tmp_path / "layers", method="int4", layout="layers")
    merge(MergeRequest(tmp_path / "layers", tmp_path / "merged", str(mixed)))
    files = [all_files(tmp_path / name) for name in ("direct", "merged")]
    for found in files:
        for name in ("README.md", "ktconv.json"):  # which say how they were made
            found.pop(name)
    assert_same(*files)


# ---- with transformers -----------------------------------------------------------------

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate":
    "ffn_gate_inp", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model as a GGUF file, as llama.cpp's converter would write it."""
    source = open_checkpoint(EXAMPLE)
    numbers = {
        one.name: bf16_values(Path(one.file).read_bytes()[one.offset :][: one.nbytes], one.shape)
        for one in source.other_tensors
    }
    tensors: dict[str, Any] = {
        "token_embd.weight": numbers["model.embed_tokens.weight"],
        "output_norm.weight": numbers["model.norm.weight"],
        "output.weight": numbers["lm_head.weight"],
    }
    for layer in source.layers:
        for ours, theirs in NAMES.items():
            name = f"model.layers.{layer.index}.{ours}.weight"
            tensors[f"blk.{layer.index}.{theirs}.weight"] = numbers[name]
        for proj in PROJECTIONS:
            values = np.stack([read_matrix(one[proj]) for one in layer.experts])
            tensors[f"blk.{layer.index}.ffn_{proj}_exps.weight"] = values
    pairs = metadata(
        2, expert_count=8, embedding_length=128, expert_feed_forward_length=256,
        context_length=512, vocab_size=768, feed_forward_length=256,
        **{
            "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
            "attention.value_length": 32, "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10000.0,
        },
    )  # fmt: skip
    return write_gguf(tmp_path_factory.mktemp("example") / "tiny.gguf", tensors, pairs)


def bf16_values(data: bytes, shape: tuple[int, ...]) -> NDArray[np.float32]:
    high = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
    return high.view(np.float32).reshape(shape)


@needs_torch
@pytest.mark.usefixtures("tiles")
def test_the_model_itself(example: Path, tmp_path: Path) -> None:
    """Loaded by transformers, with the config and tokenizer of --config."""
    output = tmp_path / "out"
    convert(example, output, method="int8", config=EXAMPLE)
    words = ("verify", output, "--source", example, "--level", "model", "--windows", 1, "--json")
    result = run(*words, "--config", EXAMPLE)
    assert_safe(result, 0)
    assert json.loads(result.stdout)["layers"]["states"] == "captured"
    facts = json.loads(result.stdout)["model"]
    assert 0 < facts["kl_mean"] < 0.01 and facts["top1_agreement"] > 0.9
    result = run("verify", output, "--source", example, "--level", "model")
    assert_safe(result, 2)
    assert "give a directory with those of the model: --config DIR" in result.stderr


@needs_torch
@pytest.mark.usefixtures("tiles")
def test_a_model_of_unknown_names_is_loaded(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By transformers, where it fits into memory; the pass comes to the same but for rounding."""
    from ktconv.verify import VerifyRequest, verify
    from ktconv.verify import model as model_level

    convert(example, tmp_path / "out", method="int8", config=EXAMPLE)
    source = ModelSource(example, config=EXAMPLE)
    request = VerifyRequest(tmp_path / "out", source, "model", windows=1, threads=1)
    passed = verify(request).facts["model"]
    monkeypatch.setattr(model_level, "HUB_NAMES", {})
    facts = verify(request).facts
    assert any("architecture qwen3moe are not known" in note for note in facts["notes"])
    assert passed["layers"] and not facts["model"]["layers"]
    for name in ("perplexity_source", "perplexity_converted"):
        assert facts["model"][name] == pytest.approx(passed[name], rel=1e-2)
    monkeypatch.setattr(model_level, "level_model_bytes", lambda *_: 1 << 60)
    with pytest.raises(ResourceError, match="are not known, and loading the source model needs"):
        verify(request)


@needs_torch
def test_experts_for_gpus(example: Path, tmp_path: Path) -> None:
    """Both models, loaded by transformers: nothing but the experts differs."""
    if find_spec("llmcompressor") is None:  # without importing it, which takes long
        pytest.skip("llm-compressor is not installed")
    output, original = tmp_path / "out", tmp_path / "original"
    shutil.copytree(EXAMPLE, original)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}  # of the original's weights
    content = read_json(EXAMPLE / "config.json") | {"quantization_config": fp8}
    (original / "config.json").write_text(json.dumps(content))
    words = ("--scheme", "W8A16", "--group-size", 32, "--config", original)
    assert_safe(run("quantize-gpu", example, output, *words), 0)
    assert "--max-shard-size 5000000000 --config DIR\n" in (output / "README.md").read_text()
    verify = ("verify", output, "--source", example, "--config", original, "--windows", 1)
    result = run(*verify, "--level", "model", "--json")
    assert_safe(result, 0)
    facts = json.loads(result.stdout)["model"]
    assert 0 < facts["kl_mean"] < 0.01 and facts["top1_agreement"] > 0.9


@needs_torch
def test_counts_are_those_of_the_safetensors_checkpoint(example: Path) -> None:
    words = ("--max-tokens", 256, "--json")
    counts = []
    for command in (("stats", example, "--config", EXAMPLE), ("stats", EXAMPLE)):
        result = run(*command, *words)
        assert_safe(result, 0)
        counts.append(json.loads(result.stdout)["layers"])
    assert counts[0] == counts[1]
    result = run("stats", example)
    assert_safe(result, 2)
    assert "tiny.gguf has no config.json and tokenizer" in result.stderr
    result = run("stats", example, "--config", EXAMPLE, "--max-memory", "1MiB")
    assert_safe(result, 3)
    assert "--max-memory 1.0 MB is too small: running this model layer by layer" in result.stderr
    result = run("stats", EXAMPLE, "--config", EXAMPLE)
    assert_safe(result, 2)
    assert "--config is for GGUF models only" in result.stderr


BAD: dict[str, tuple[Any, str]] = {
    "a shape": ({"blk.0.ffn_up_exps.weight": np.ones((4, 64, 128), np.float32)}, "are not [E, I,"),
    "a missing tensor": ({"blk.0.ffn_up_exps.weight": None}, "ffn_up_exps is missing, although"),
    "a stray tensor": (
        {"blk.0.ffn_up_exps.extra": np.ones(4, np.float32)}, "blk.0.ffn_up_exps.extra (F32) is not",
    ),
    "an encoding": (
        {"blk.0.ffn_up_exps.weight": np.ones((4, 192, 128), np.int8)}, "has dtype I8, which is not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_bad_models(fault: str, tmp_path: Path) -> None:
    change, reason = BAD[fault]
    tensors = {k: v for k, v in {**experts(), **change}.items() if v is not None}
    path = write_gguf(tmp_path / "bad.gguf", tensors, metadata())
    result = run("quantize-cpu", path, tmp_path / "out", "--numa", 1)
    assert_safe(result, 2)
    assert reason in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_tensor_with_infinities(tmp_path: Path) -> None:
    layer = layers_of((MIXED[0], MIXED[0]))[0]
    layer["down"].data[1, 5, 208:210] = (0, 0x7C)  # d of the first block of a row
    path = write_gguf(tmp_path / "m.gguf", apart(0, layer), {**SIZES, "block_count": 1})
    result = run("quantize-cpu", path, tmp_path / "out", "--numa", 1)
    assert_safe(result, 2)
    assert "blk.0.ffn_down_exps.weight" in result.stderr
