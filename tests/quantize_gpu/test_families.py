"""Experts for GPUs of families with names, layouts or modules of their own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.convert import read_model
from helpers.family_list import SAVED
from helpers.family_models import write
from helpers.gpu import modules, quantize

from ktconv.errors import CheckpointError
from ktconv.verify import VerifyRequest, verify

# Transformers has other modules than the checkpoint's names say, or reads experts in fused form.
RENAMED = ("minimax_m3_vl", "phimoe", "kimi_k25, resaved", "hy_v3", "axk2", "llama4")
FUSED = ("gemma4", "granitemoe", "step3p7", "hy_v4")
REFUSED = ("aria", "dbrx", "jetmoe")


def written(name: str, directory: Path) -> Path:
    pytest.importorskip("llmcompressor")
    if not hasattr(pytest.importorskip("transformers"), SAVED[name].saved_by):
        pytest.skip(f"transformers has no {SAVED[name].saved_by} yet")
    write(SAVED[name], directory / "model")
    return directory / "model"


@pytest.mark.parametrize("name", [*RENAMED, *FUSED, "nemotron_h, latent"])
def test_the_quantized_model_answers_as_its_source(name: str, tmp_path: Path, torch: Any) -> None:
    source, output = written(name, tmp_path), tmp_path / "out"
    quantize(source, output, scheme="W8A16", group_size=32)
    facts = verify(VerifyRequest(output, str(source), level="model", windows=1)).facts
    assert facts["model"]["loaded_by"] == ("ktconv" if name in FUSED else "transformers")
    # Models of random numbers in bf16 have 0.0001 to 0.02, depending on how sure they are.
    assert 0 < facts["model"]["kl_mean"] < 0.1
    assert {failure["check"] for failure in facts["failures"]} <= {"perplexity", "divergence"}


def test_names_that_only_transformers_has_are_recorded(tmp_path: Path, torch: Any) -> None:
    """Phi's routers are linear layers of another name; verify refuses names that nothing has."""
    source, output = written("phimoe", tmp_path), tmp_path / "out"
    quantize(source, output, group_size=32)
    config = json.loads((output / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    names = json.loads((output / "ktconv.json").read_text())["ignored_by_transformers"]
    assert names == [f"model.layers.{layer}.mlp.router" for layer in (0, 1)]
    assert set(names) <= set(ignored)
    ignored.append("model.layers.0.mlp.other")
    (output / "config.json").write_text(json.dumps(config))
    result = verify(VerifyRequest(output, str(source), level="structure"))
    says = 'ignore names "model.layers.0.mlp.other", which is not a non-expert module'
    assert any(says in failure["message"] for failure in result.facts["failures"])


def test_engines_spell_stacked_matrices_of_granite_as_mixtral(tmp_path: Path, torch: Any) -> None:
    quantize(written("granitemoe", tmp_path), tmp_path / "out", group_size=32)
    found = modules(read_model(tmp_path / "out"))
    assert "model.layers.0.block_sparse_moe.experts.0.w1" in found
    assert {name.rpartition(".")[2] for name in found} == {"w1", "w2", "w3"}


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_no_engine_reads_one_by_one(name: str, tmp_path: Path, torch: Any) -> None:
    source = written(name, tmp_path)
    with pytest.raises(CheckpointError, match=f"is of type {name}, whose experts inference"):
        quantize(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_that_llm_compressor_computes_otherwise(tmp_path: Path, torch: Any) -> None:
    """MiniMax-M3's gate function has settings that it does not know; one with other weights."""
    source = written("minimax_m3_vl", tmp_path)
    from ktconv.model.load import load_language_model
    from ktconv.quantize_gpu.gptq import calibration_model

    with pytest.raises(CheckpointError, match="llm-compressor cannot take the experts of"):
        calibration_model.load_linear_model(source)
    write(SAVED["qwen3_moe"], tmp_path / "usual")
    fused = load_language_model(tmp_path / "usual", torch.bfloat16).model.layers[0].mlp.experts
    other = copy.deepcopy(fused)
    calibration_model._check_alike("experts", fused, other)
    other.down_proj.data[0].neg_()
    with pytest.raises(ValueError, match="experts would compute something else"):
        calibration_model._check_alike("experts", fused, other)
