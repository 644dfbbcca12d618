"""Every family that transformers has, converted, loaded again, and run on packed experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv
from helpers.convert import convert
from helpers.family_list import SAVED
from helpers.saved import written

from ktconv.errors import CheckpointError
from ktconv.model import load_model, replace_experts
from ktconv.model.load import check_language_model, load_language_model
from ktconv.model.sites import find_experts
from ktconv.stats.record import Recorder
from ktconv.verify import VerifyRequest, verify

pytestmark = [pytest.mark.slow, pytest.mark.torch]

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


@pytest.mark.parametrize("name", WHOLE)
def test_experts_of_a_family_need_not_be_loaded(name: str, tmp_path: Path, torch: Any) -> None:
    source = written(name, tmp_path)
    output, ids = packed(source), torch.arange(5, 14)[None]
    answers = []
    for experts in (True, False):
        model, _ = load_model(source, "float32", experts=experts)
        replaced = replace_experts(model, output, threads=1)
        assert replaced.untried == (() if experts else SAVED[name].layers)
        assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
        with torch.no_grad():
            answers.append(model(input_ids=ids, use_cache=False).logits)
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", FAMILIES)
def test_stats_of_a_family(name: str, tmp_path: Path, torch: Any) -> None:
    if name.startswith("deepseek_v4") and not hasattr(
        pytest.importorskip("transformers"), "BeamForCausalLM"
    ):
        pytest.skip("transformers before 5.23 cannot run DeepSeek-V4 in bf16")
    model = SAVED[name]
    recorder = Recorder(written(name, tmp_path))
    assert recorder.experts == dict.fromkeys(model.layers, model.experts)
    with recorder.prepare(["some words"] * 9, 40, work=tmp_path) as recording:
        found, _ = recording.run()
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
    import transformers

    source = written(WITHOUT_LANGUAGE_MODEL, tmp_path)
    output = packed(source)
    release = transformers.__version__
    says = f"openai_privacy_filter, for which transformers {release} has no language model"
    with pytest.raises(CheckpointError, match=says) as refusal:
        verify(VerifyRequest(output, str(source), level="model"))
    assert refusal.value.hint == "run --level layers, which needs no model code"
    with pytest.raises(CheckpointError, match=says):
        Recorder(source)

    model = transformers.AutoModelForTokenClassification.from_pretrained(source).float().eval()
    ids = torch.randint(5, 60, (1, 9))
    with torch.no_grad():
        own = model(input_ids=ids).logits
        with replace_experts(model, output, threads=1):
            ours = model(input_ids=ids).logits
    assert 1e-4 < float((ours - own).norm() / own.norm()) < 0.05


def test_the_part_that_reads_of_a_model_that_speaks(tmp_path: Path, torch: Any) -> None:
    """Qwen3-Omni: its thinker is loaded and converted, whatever else the checkpoint has."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    text = {
        "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64, "num_experts": 4,
        "moe_intermediate_size": 128, "num_experts_per_tok": 2,
    }  # fmt: skip
    audio = {
        "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "output_dim": 128, "num_mel_bins": 8, "downsample_hidden_size": 32,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 128, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    torch.manual_seed(1)
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=text, vision_config=vision, audio_config=audio
    )
    thinker = transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    for parameter in thinker.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    thinker.to(torch.bfloat16).save_pretrained(tmp_path / "thinker")
    source = tmp_path / "model"
    source.mkdir()
    tensors = load_file(tmp_path / "thinker/model.safetensors")
    named = {f"thinker.{name.removeprefix('thinker.')}": one for name, one in tensors.items()}
    save_file(named, source / "model.safetensors", metadata={"format": "pt"})
    section = json.loads((tmp_path / "thinker/config.json").read_text())
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": section}
    (source / "config.json").write_text(json.dumps(whole))
    output = packed(source)
    check_language_model(source)
    model, ids = load_language_model(source, torch.float32), torch.arange(5, 14)[None]
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits
        assert replace_experts(model, output, threads=1).layers == (0, 1)
        ours = model(input_ids=ids, use_cache=False).logits
    assert 1e-4 < float((ours - own).norm() / own.norm()) < 0.05


def test_transformers_reads_mxfp8(tmp_path: Path, torch: Any) -> None:
    """`verify` has it load the output, and compares what it computes with the tensors' values."""
    source, output = written("mixtral", tmp_path), tmp_path / "out"
    result = ktconv("quantize-cpu", source, output, "--method=mxfp8")
    assert result.exit_code == 0, result.stderr
    facts = verify(VerifyRequest(output, str(source), level="model", windows=1)).facts
    assert facts["model"]["loaded_by"] == "transformers"
    assert 0 < facts["model"]["kl_mean"] < 0.1
