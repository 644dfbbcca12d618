"""Every family that transformers has, converted, loaded again, and run on packed experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import convert
from helpers.family_list import SAVED
from helpers.family_models import write

from ktconv.errors import CheckpointError
from ktconv.model import load_model, replace_experts
from ktconv.model.sites import find_experts
from ktconv.stats.record import Recorder
from ktconv.verify import VerifyRequest, verify

WITHOUT_LANGUAGE_MODEL = "openai_privacy_filter"
SKIPPING = {"zaya", "longcat_flash"}  # experts without weights count as none
FAMILIES = [name for name in SAVED if name != WITHOUT_LANGUAGE_MODEL]
# One for each way in which experts are called, stored or loaded.
WHOLE = (
    "qwen3_vl_moe, resaved",
    "gpt_oss",
    "llama4",
    "dbrx",
    "aria",
    "jetmoe",
    "nemotron_h, latent",
)


def written(name: str, directory: Path) -> Path:
    """The checkpoint, if the installed release of transformers has its class."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, SAVED[name].saved_by):
        pytest.skip(f"transformers has no {SAVED[name].saved_by} yet")
    write(SAVED[name], directory / "model")
    return directory / "model"


def packed(source: Path) -> Path:
    output = source.parent / "int8"
    convert(source, output, method="int8", allow_activation_mismatch=True)
    return output


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_experts_in_a_family(name: str, tmp_path: Path, torch: Any) -> None:
    source = written(name, tmp_path)
    output = packed(source)
    model, _ = load_model(source, "float32")
    ids = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))

    def logits() -> Any:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    own = logits()
    with replace_experts(model, output, threads=1, keep=True) as replaced:
        assert replaced.layers == SAVED[name].layers
        ours = logits()
        for site in find_experts(model).values():
            site.module.forward = lambda hidden, *_: torch.zeros_like(hidden)
        without = logits()
    assert torch.equal(logits(), own)
    # Random experts lose 1.2 % by each matrix, and as much by their activations, in two layers; the
    # median, as a token or two may get another expert in the second layer.
    per_token = (ours - own).norm(dim=-1) / own.norm(dim=-1)
    assert 1e-4 < np.median(per_token) < 0.05
    assert float((without - own).norm() / own.norm()) > 0.2


@pytest.mark.parametrize("name", FAMILIES)
def test_stats_of_a_family(name: str, tmp_path: Path, torch: Any) -> None:
    if name.startswith("deepseek_v4") and not hasattr(
        pytest.importorskip("transformers"), "BeamForCausalLM"
    ):
        pytest.skip("transformers before 5.23 cannot run DeepSeek-V4 in bf16")
    model = SAVED[name]
    with Recorder(written(name, tmp_path)) as recorder:
        assert recorder.experts == dict.fromkeys(model.layers, model.experts)
        found, _ = recorder.read(["some words"] * 9, 40)
    for layer in found.layers:
        assert layer.tokens == 40
        chosen = layer.routed / layer.tokens
        assert chosen == round(chosen) > 0 or name in SKIPPING


@pytest.mark.usefixtures("tiles")  # all levels run, that of AMX where it is emulated
@pytest.mark.parametrize("name", WHOLE)
def test_level_model_of_a_family(name: str, tmp_path: Path, torch: Any) -> None:
    source = written(name, tmp_path)
    request = VerifyRequest(packed(source), str(source), level="model", windows=1)
    facts = verify(request).facts
    assert 0 < facts["model"]["kl_mean"] < 0.1
    assert {failure["check"] for failure in facts["failures"]} <= {"perplexity", "divergence"}


@pytest.mark.usefixtures("tiles")
def test_a_family_without_a_language_model(tmp_path: Path, torch: Any) -> None:
    source = written(WITHOUT_LANGUAGE_MODEL, tmp_path)
    output = packed(source)
    says = "openai_privacy_filter, for which transformers has no language model"
    with pytest.raises(CheckpointError, match=says) as refusal:
        verify(VerifyRequest(output, str(source), level="model"))
    assert refusal.value.hint == "run --level layers, which needs no model code"
    with pytest.raises(CheckpointError, match=says):
        Recorder(source)
    import transformers

    model = transformers.AutoModelForTokenClassification.from_pretrained(source).float().eval()
    ids = torch.randint(5, 60, (1, 9))
    with torch.no_grad():
        own = model(input_ids=ids).logits
        with replace_experts(model, output, threads=1):
            ours = model(input_ids=ids).logits
    assert 1e-4 < float((ours - own).norm() / own.norm()) < 0.05
