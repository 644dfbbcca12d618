"""Layers with different numbers of experts, through conversion, proofs, repacking and runtime."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import ktconv
from helpers.convert import convert
from helpers.families import Tensor, bf16, numbered, random_weights, simple_config, write_checkpoint

from ktconv.inspect.inspection import inspect_path
from ktconv.merge import Request as MergeRequest
from ktconv.merge import merge
from ktconv.runtime import MoELayer
from ktconv.verify import VerifyRequest, verify

pytestmark = pytest.mark.slow

COUNTS = (6, 4)
ENGINES = "Layers have different numbers of experts: KTransformers, vLLM, SGLang and transformers"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors: dict[str, Tensor] = {}
    for index, count in enumerate(COUNTS):
        block, rng = f"model.layers.{index}.mlp", np.random.default_rng(index)
        tensors |= numbered(f"{block}.experts", random_weights(experts=count, seed=index))
        tensors[f"{block}.gate.weight"] = bf16(rng.standard_normal((count, 128), np.float32))
        tensors[f"{block}.gate.e_score_correction_bias"] = np.zeros(count, np.float32)
    config = simple_config(
        model_type="glm4_moe", num_hidden_layers=2, num_experts=None, n_routed_experts=6,
        n_routed_experts_per_layer=list(COUNTS), num_experts_per_tok=2, first_k_dense_replace=0,
    )  # fmt: skip
    return write_checkpoint(tmp_path / "model", tensors, config)


def proven(output: Path, source: Path, level: str = "weights") -> None:
    facts = verify(VerifyRequest(output, str(source), level=level)).facts
    assert facts["failures"] == []


METHODS = ("int4", "int8", "rawint4", "int4-g64", "int8-g128", "fp8", "mxfp4", "nvfp4",
           "gptq-int4", "awq", "bf16")  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = ktconv("quantize-cpu", source, output, "--method", method, "--threads", 1,
                  *(("--numa", 1) if method in ("int4", "int8") else ()))  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "Serve it" not in done.stdout + done.stderr
    proven(output, source, "layers")
    card = (output / "README.md").read_text()
    assert ENGINES in card and "library_name: ktconv" in card
    for index, count in enumerate(COUNTS):
        layer = MoELayer.load(output, index)
        assert layer.experts == count
    config = json.loads((output / "config.json").read_text())
    assert config["n_routed_experts_per_layer"] == list(COUNTS)


def test_runtime_and_repacking(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "folders", method="int8", layout="layers", save_backward=True)
    proven(tmp_path / "folders", source)
    merge(MergeRequest(tmp_path / "folders", tmp_path / "merged", str(source)))
    proven(tmp_path / "merged", source)
    assert ENGINES in (tmp_path / "merged" / "README.md").read_text()
    cut = ktconv("reshard", tmp_path / "merged", tmp_path / "cut", "--numa", 2, "--source", source)
    assert cut.exit_code == 0, cut.stderr
    proven(tmp_path / "cut", source)
    assert inspect_path(str(tmp_path / "merged"))["experts"] == sorted(COUNTS)

    layers = MoELayer.load_all(tmp_path / "merged")
    own = MoELayer.load_all(source)
    x = np.random.default_rng(3).standard_normal((5, 128), np.float32)
    for index, count in enumerate(COUNTS):
        ids = np.array([[count - 1, row % (count - 1)] for row in range(5)])
        weights = np.full((5, 2), 0.5, np.float32)
        ours, theirs = layers[index](x, ids, weights), own[index](x, ids, weights)
        assert 0 < np.linalg.norm(ours - theirs) < 0.03 * np.linalg.norm(theirs)


def test_a_config_with_other_numbers_is_found(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    convert(source, output, method="int4")
    config = json.loads((output / "config.json").read_text())
    for changes in ({"n_routed_experts_per_layer": [6, 5]}, {"n_routed_experts": 8,
                     "n_routed_experts_per_layer": None}):  # fmt: skip
        (output / "config.json").write_text(json.dumps({**config, **changes}))
        failures = verify(VerifyRequest(output, level="structure")).facts["failures"]
        assert any("a number of experts of" in one["message"] for one in failures)


def test_hot_experts(source: Path, tmp_path: Path) -> None:
    """A plan counts each layer's own, and its file is what a conversion takes."""
    done = ktconv("plan", source, "--hot", 3, "--per-layer", "--write", tmp_path / "hot.json")
    assert done.exit_code == 0, done.stderr
    assert "layers 0-1 of 4 or 6 experts, 10 in all" in done.stdout
    assert "GPU: 6 of 10 experts" in done.stdout
    done = ktconv("quantize-cpu", source, tmp_path / "out", "--method", "int4", "--numa", 1,
                  "--exclude-experts", tmp_path / "hot.json", "--allow-partial")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    proven(tmp_path / "out", source)


def test_gpu_formats(source: Path, tmp_path: Path) -> None:
    done = ktconv("quantize-gpu", source, tmp_path / "out", "--scheme", "W4A16")
    assert done.exit_code == 0, done.stderr
    proven(tmp_path / "out", source)
    assert ENGINES in (tmp_path / "out" / "README.md").read_text()
