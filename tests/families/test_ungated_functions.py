"""GELU and ReLU without a gate: of models that transformers runs, and of names from a map."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import assert_same, convert, read_json, read_model
from helpers.family_list import MODELS, SAVED
from helpers.family_models import EXPERTS, HIDDEN, INNER, TOP_K, write
from helpers.gguf_files import write_gguf
from helpers.nemotron import write_nemotron
from numpy.typing import NDArray

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.routers import UnknownRouter, router_of
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.inspect.inspection import inspect_path
from ktconv.merge import Request as MergeRequest
from ktconv.merge import merge
from ktconv.native import Activation
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.runtime.layers.experts import KERNEL_BOUND
from ktconv.runtime.layers.load import open_experts
from ktconv.runtime.layers.native_load import native_experts
from ktconv.runtime.layers.online import pack_online
from ktconv.source import ModelSource
from ktconv.system.pool import Pool
from ktconv.targets.packed.target import Options
from ktconv.verify import VerifyRequest, verify

# The AMX level runs too, where it is emulated.
pytestmark = [pytest.mark.usefixtures("tiles"), pytest.mark.slow]

F32 = NDArray[np.float32]
# config.json's name, and what kernels call it
FUNCTIONS = {
    "gelu": "ungated_gelu", "gelu_pytorch_tanh": "ungated_gelu_tanh", "relu": "relu",
}  # fmt: skip
INT8_ERROR = 0.03  # of an expert's output: 1 % each by both matrices and both activations


# ---- Nemotron-H's class, which takes any function ---------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_model_on_packed_experts(function: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from ktconv.model import load_model, replace_experts

    usual = SAVED["nemotron_h"]
    write(
        replace(usual, mtp="", config={**usual.config, "mlp_hidden_act": function}),
        tmp_path / "model",
    )
    output = tmp_path / "out"
    convert(tmp_path / "model", output, method="int8", numa=2, allow_activation_mismatch=True)
    assert open_experts(output).activation.function == FUNCTIONS[function]
    model, _ = load_model(tmp_path / "model", "float32")
    ids = torch.arange(5, 59).reshape(2, 27)

    def logits() -> Any:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    own = logits()
    with replace_experts(model, output, threads=1, keep=True) as replaced:
        assert replaced.layers == usual.layers
        error = float((logits() - own).norm() / own.norm())
    assert 1e-5 < error < INT8_ERROR
    assert torch.equal(logits(), own)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("method", ["bf16", "fp8"])
def test_layers_without_a_conversion(function: str, method: str, tmp_path: Path) -> None:
    """From a checkpoint whose encoding kernels compute, and from the same numbers as arrays."""
    kind = {"bf16": None, "fp8": "fp8 block"}[method]
    model, matrices = write_nemotron(tmp_path / "model", kind)
    settings = read_json(model / "config.json") | {"mlp_hidden_act": function}
    (model / "config.json").write_text(json.dumps(settings))
    loaded = native_experts(model, 1, parts=3)
    assert loaded.format.key == method and loaded.activation.function == FUNCTIONS[function]
    up, down = ([matrices[1, e, proj] for e in range(EXPERTS)] for proj in ("up", "down"))
    packed = pack_online(
        None, up, down, "bf16", parts=3, activation=Activation(FUNCTIONS[function])
    )
    rng = np.random.default_rng(3)
    x = f32_to_bf16(rng.standard_normal((20, loaded.hidden), np.float32))
    ids = np.argsort(rng.random((20, EXPERTS)), axis=1)[:, :2].copy()
    weights = rng.random((20, 2), np.float32)
    with Pool(2) as pool:
        found = [one.forward(x, ids, weights, pool) for one in (loaded, packed)]
    if method == "bf16":
        assert np.array_equal(found[0], found[1])
    for experts, y in zip((loaded, packed), map(bf16_to_f32, found), strict=True):
        expected = experts.reference(x, ids, weights, rounded=True)
        assert np.linalg.norm(y - expected) < KERNEL_BOUND * np.linalg.norm(expected)


def test_a_gate_that_the_function_does_not_take() -> None:
    up, down = np.ones((2, 128, 128), np.float32), np.ones((2, 128, 128), np.float32)
    with pytest.raises(UsageError, match="the activation ungated_gelu have no gate"):
        pack_online(up, up, down, "int8", activation=Activation("ungated_gelu"))
    with pytest.raises(UsageError, match="the activation gelu have a gate"):
        pack_online(None, up, down, "int8", activation=Activation("gelu"))


# ---- names that only a map knows --------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model whose experts have two matrices, as its class saves it."""

    build: Callable[[Path], Callable[[int, F32], F32]]  # of an expert of layer 1: its output
    names: Mapping[str, str]  # of the map
    config: Mapping[str, Any]
    function: str
    words: str


def nllb(directory: Path) -> Callable[[int, F32], F32]:
    """The encoder's; the decoder has experts of its own."""
    import transformers

    kind = transformers.NllbMoeForConditionalGeneration
    config = transformers.NllbMoeConfig(
        vocab_size=64, d_model=HIDDEN, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER, encoder_attention_heads=2, decoder_attention_heads=2,
        num_experts=EXPERTS, encoder_sparse_step=2, decoder_sparse_step=2,
    )  # fmt: skip
    return _saved(kind(config), directory, lambda model: model.model.encoder.layers[1].ffn)


def switch(directory: Path) -> Callable[[int, F32], F32]:
    import transformers

    kind = transformers.SwitchTransformersForConditionalGeneration
    config = transformers.SwitchTransformersConfig(
        vocab_size=64, d_model=HIDDEN, d_kv=32, d_ff=INNER, num_layers=2, num_decoder_layers=2,
        num_heads=2, num_experts=EXPERTS, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    )  # fmt: skip
    return _saved(kind(config), directory, lambda model: model.decoder.block[1].layer[2].mlp)


def _saved(model: Any, directory: Path, block: Callable[[Any], Any]) -> Callable[[int, F32], F32]:
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "expert" in name:
                one.copy_(torch.randn(one.shape, generator=generator) / 8)
    model.eval().to(torch.bfloat16).save_pretrained(directory)
    experts = block(model).experts.float()

    def output(expert: int, x: F32) -> F32:
        with torch.no_grad():
            found: F32 = experts[f"expert_{expert}"](torch.from_numpy(x)).numpy()
        return found

    return output


CASES = {
    "NLLB-MoE": Case(
        nllb,
        {"up": "model.encoder.layers.{layer}.ffn.experts.expert_{expert}.fc1",
         "down": "model.encoder.layers.{layer}.ffn.experts.expert_{expert}.fc2",
         "router": "model.encoder.layers.{layer}.ffn.router.classifier",
         "norm": "model.encoder.layers.{layer}.ff_layer_norm"},
        {}, "relu", "ReLU without a gate, with biases"),
    "Switch": Case(
        switch,
        {"up": "decoder.block.{layer}.layer.2.mlp.experts.expert_{expert}.wi",
         "down": "decoder.block.{layer}.layer.2.mlp.experts.expert_{expert}.wo",
         "router": "decoder.block.{layer}.layer.2.mlp.router.classifier",
         "norm": "decoder.block.{layer}.layer.2.layer_norm"},
        {"activation_function": "relu"}, "relu", "ReLU without a gate"),
}  # fmt: skip


def written_map(case: Case, directory: Path) -> Path:
    config = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
        "num_experts_per_tok": TOP_K, **case.config,
    }  # fmt: skip
    lines = ['like = "nomic_bert"', "[experts]"]
    lines += [f'{key} = "{case.names[key]}"' for key in ("up", "down")]
    lines += ["[others]", *(f'{key} = "{case.names[key]}"' for key in ("router", "norm"))]
    lines += ["[config]", *(f"{key} = {json.dumps(value)}" for key, value in config.items())]
    path = directory / "names.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("name", CASES)
def test_names_of_a_map(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    case, source, output = CASES[name], tmp_path / "model", tmp_path / "out"
    theirs = case.build(source)
    names = written_map(case, tmp_path)
    options = Options("int8", 2, allow_activation_mismatch=True)
    quantize_cpu(Request(ModelSource(str(source), map=names), output, options, threads=1))
    assert inspect_path(str(output))["activation"] == case.words
    result = verify(VerifyRequest(output, str(source), "layers", tokens=8, threads=1))
    assert result.passed, result.failures
    assert [row["routing"] for row in result.facts["layers"]["layers"]] == ["router"]

    experts = open_experts(output, 1)
    assert experts.activation.function == case.function
    x = f32_to_bf16(np.random.default_rng(2).standard_normal((8, HIDDEN), np.float32))
    ones = np.ones((8, 1), np.float32)
    with Pool(1) as pool:
        for expert in range(EXPERTS):
            ids = np.full((8, 1), expert, np.int64)
            ours = bf16_to_f32(experts.forward(x, ids, ones, pool))
            expected = theirs(expert, bf16_to_f32(x))
            assert np.linalg.norm(ours - expected) < INT8_ERROR * np.linalg.norm(expected)


# ---- Nomic ------------------------------------------------------------------------------


NOMIC = "nomic-embed-text-v2-moe"


def test_a_gguf_file_has_the_same_experts(tmp_path: Path) -> None:
    """With dense layers between those with experts, and the norm that is behind attention."""

    written = write(MODELS[NOMIC], tmp_path / "model")
    tensors: dict[str, Any] = {
        "blk.0.ffn_up.weight": np.ones((INNER, HIDDEN), np.float32),
        "blk.0.ffn_down.weight": np.ones((HIDDEN, INNER), np.float32),
        "blk.1.attn_output_norm.weight": np.ones(HIDDEN, np.float32),
        "blk.1.ffn_gate_inp.weight": np.eye(EXPERTS, HIDDEN, dtype=np.float32),
    }
    for proj in ("up", "down"):
        stack = np.stack([written.matrices[1, e, proj] for e in range(EXPERTS)])
        tensors[f"blk.1.ffn_{proj}_exps.weight"] = stack
    settings = {
        "block_count": 2, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "expert_count": EXPERTS, "expert_used_count": TOP_K, "moe_every_n_layers": 2,
    }  # fmt: skip
    path = write_gguf(tmp_path / "n.gguf", tensors, settings, architecture="nomic-bert-moe")
    for source, output in ((tmp_path / "model", "of model"), (path, "of gguf")):
        convert(source, tmp_path / output, method="int4", numa=2, allow_activation_mismatch=True)
    found, expected = (
        {name: one for name, one in read_model(tmp_path / output).items() if "_exps." in name}
        for output in ("of gguf", "of model")
    )
    assert_same(found, expected)
    result = verify(VerifyRequest(tmp_path / "of gguf", str(path), tokens=8, threads=1))
    assert result.passed, result.failures
    assert result.facts["layers"]["layers"][0]["routing"] == "router"


def test_routers_that_are_not_computed() -> None:
    config = {**MODELS[NOMIC].config}
    assert not router_of(config, 1).renormalise
    for key in ("moe_normalize_expert_weights", "expert_choice_router"):
        with pytest.raises(UnknownRouter, match=f"nomic_bert with {key} is not supported"):
            router_of({**config, key: 1}, 1)


def test_what_a_manifest_says(tmp_path: Path) -> None:
    """It is used before config.json, which may be another one."""
    write(MODELS[NOMIC], tmp_path / "model")
    output = tmp_path / "out"
    convert(tmp_path / "model", output, method="int8", allow_activation_mismatch=True)
    record = read_json(output / "ktconv.json")["geometry"]["activation"]
    assert record == {
        "description": "GELU without a gate", "function": "gelu", "gated": False
    }  # fmt: skip
    (output / "config.json").write_text(json.dumps({"model_type": "nemotron_h"}))
    assert open_experts(output).activation.function == "ungated_gelu"
    (output / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    assert open_experts(output).activation.function == "ungated_gelu"


@pytest.mark.parametrize(
    ("config", "function"),
    [
        ({"hidden_act": "gelu_new"}, "ungated_gelu_tanh"),
        ({"hidden_act": "relu"}, "relu"),
        ({"model_type": "nomic_bert"}, "ungated_gelu"),
        ({"hidden_act": "silu"}, None),
        ({}, "relu2"),
    ],
)
def test_folders_of_other_tools(
    config: dict[str, Any], function: str | None, tmp_path: Path
) -> None:
    """What their config.json names is a function of up, as the tensors have no gate."""
    write(MODELS[NOMIC], tmp_path / "model")
    folders = tmp_path / "folders"
    convert(
        tmp_path / "model", folders, method="int8", layout="layers", allow_activation_mismatch=True
    )
    for path in folders.iterdir():
        if path.is_file():
            path.unlink()
    (folders / "config.json").write_text(json.dumps({"model_type": "of_tomorrow", **config}))
    if function is None:
        with pytest.raises(CheckpointError, match="have no gate projection, but those of this"):
            merge(MergeRequest(folders, tmp_path / "out", threads=1))
        return
    merge(MergeRequest(folders, tmp_path / "out", threads=1))
    assert open_experts(tmp_path / "out").activation.function == function
