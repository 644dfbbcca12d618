"""Logits of a streamed pass are those of the model in memory, bit by bit, in every family."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.encoded import KINDS
from helpers.families import Tensor, build_model, write_checkpoint
from helpers.family_list import SAVED
from helpers.family_models import write
from helpers.gguf_files import metadata, write_gguf
from helpers.gpt_oss import EXPERTS, HIDDEN, INNER, Blocks
from helpers.passes import Passed, in_memory, windows
from helpers.paths import EXAMPLE
from helpers.saved import written

from ktconv.errors import CheckpointError
from ktconv.model import load_model
from ktconv.source import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.torch]

WITHOUT_LANGUAGE_MODEL = "openai_privacy_filter"
NOT_RUN_BEFORE_5_23 = "deepseek_v4, resaved"
IN_LOOPS = "inkling2_loop"
NOT_STREAMED = (WITHOUT_LANGUAGE_MODEL, NOT_RUN_BEFORE_5_23, IN_LOOPS)
FAMILIES = [name for name in SAVED if name not in NOT_STREAMED]


def same_logits(
    torch: Any, source: Path, folder: Path, dtype: str = "auto", config: Path | None = None
) -> None:
    passed, ids = Passed(source, folder, dtype, config=config), windows()
    model, _ = load_model(source, dtype, config_directory=config)
    model.set_experts_implementation("eager")
    expected = in_memory(model, ids)
    found = passed.run(ids)
    assert passed.parted.dtype == next(model.parameters()).dtype
    for (own,), theirs in zip(found.outputs, expected, strict=True):
        assert theirs.isfinite().all() and theirs.std() > 0
        assert own.dtype == theirs.dtype and torch.equal(own, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, torch: Any, tmp_path: Path) -> None:
    same_logits(torch, written(name, tmp_path), tmp_path / "states")


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "gpt_oss"])
def test_in_float32(name: str, torch: Any, tmp_path: Path) -> None:
    """Of a bf16 checkpoint: its weights are converted as they are read."""
    same_logits(torch, written(name, tmp_path), tmp_path / "states", "float32")


def test_a_family_that_transformers_runs_since_5_23(torch: Any, tmp_path: Path) -> None:
    import transformers

    source = written(NOT_RUN_BEFORE_5_23, tmp_path)
    if hasattr(transformers, "BeamForCausalLM"):
        same_logits(torch, source, tmp_path / "states")
        return
    with pytest.raises(CheckpointError, match="model cannot be run by transformers: "):
        Passed(source, tmp_path / "states").run(windows())


def test_a_family_that_goes_through_layers_again(torch: Any, tmp_path: Path) -> None:
    source = written(IN_LOOPS, tmp_path)
    with pytest.raises(CheckpointError, match="its layers do not follow each other: 1, not 2"):
        Passed(source, tmp_path / "states").run(windows())


def test_a_family_without_a_language_model(torch: Any, tmp_path: Path) -> None:
    source = written(WITHOUT_LANGUAGE_MODEL, tmp_path)
    with pytest.raises(CheckpointError, match=r"model is of type openai_privacy_filter, for which"):
        Passed(source, tmp_path / "states")


def test_rotary_embeddings_that_grow(torch: Any, tmp_path: Path) -> None:
    """With the longest window that was seen; here each window is as if there were no other."""
    model = replace(SAVED["qwen3_moe"], config={"max_position_embeddings": 8})
    write(model, tmp_path / "model")
    file = tmp_path / "model/config.json"
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": rope}))
    ids = windows((12, 20, 10))
    kept = Passed(tmp_path / "model", tmp_path / "states").run(ids)
    for one, (found,) in zip(ids, kept.outputs, strict=True):
        alone, _ = load_model(tmp_path / "model")
        alone.set_experts_implementation("eager")
        (expected,) = in_memory(alone, [one])
        assert torch.equal(found, expected)


# ---- encoded weights, decoded as they are read -----------------------------------------

ENCODED = ("fp8 block", "int4 packed, group 32", "gptq by activation", "awq", "nvfp4, ModelOpt")


def encoded(source: Path, directory: Path, kind: str) -> Path:
    """A copy with other values in place of all projections of experts and of attention."""
    from safetensors.torch import load_file

    rng = np.random.default_rng(5)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj." in name:
            parts, _ = KINDS[kind].of(rng, *tensor.shape)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": one for part, one in parts.items()}
        else:
            tensors[name] = tensor.float().numpy()
    config = json.loads((source / "config.json").read_text()) | {
        "quantization_config": dict(KINDS[kind].quantization)
    }
    write_checkpoint(directory, tensors, config)
    shutil.copy(source / "tokenizer.json", directory)
    return directory


@pytest.mark.parametrize("kind", ENCODED)
def test_encoded_weights(kind: str, torch: Any, tmp_path: Path) -> None:
    source = encoded(written("qwen3_moe", tmp_path), tmp_path / "encoded", kind)
    layers = {layer.encoding for layer in open_checkpoint(source).layers}
    assert layers == {KINDS[kind].name}
    same_logits(torch, source, tmp_path / "states")


def test_gpt_oss_as_it_is_released(torch: Any, tmp_path: Path) -> None:
    """Experts in MXFP4, with biases; gate and up alternate."""
    model = build_model("gpt_oss")
    sizes = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INNER}
    config = {**model.config.to_dict(), **sizes, "num_hidden_layers": 1, "layer_types": None}
    changed = type(model)(type(model.config)(**config))
    others = {k: v.numpy() for k, v in changed.state_dict().items() if ".experts." not in k}
    config = {**changed.config.to_dict(), "dtype": "bfloat16"}
    source = write_checkpoint(
        tmp_path / "encoded",
        {**others, **Blocks().mxfp4},
        config | {"quantization_config": {"quant_method": "mxfp4"}},
    )
    shutil.copy(EXAMPLE / "tokenizer.json", source)
    same_logits(torch, source, tmp_path / "states")


def test_gguf(torch: Any, tmp_path: Path) -> None:
    """With config.json and tokenizer of the model that it was made from."""
    from safetensors.torch import load_file

    source = written("qwen3_moe", tmp_path)
    own = {
        name: one.float().numpy() for name, one in load_file(source / "model.safetensors").items()
    }
    names = {
        "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight", "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "ffn_gate_inp.weight": "mlp.gate.weight",
    }  # fmt: skip
    tensors: dict[str, Any] = {
        "token_embd.weight": own["model.embed_tokens.weight"],
        "output_norm.weight": own["model.norm.weight"],
        "output.weight": own["lm_head.weight"],
    }
    for layer in (0, 1):
        at = f"model.layers.{layer}"
        for name, hub in names.items():
            tensors[f"blk.{layer}.{name}"] = own[f"{at}.{hub}"]
        for word in ("gate", "up", "down"):
            experts = (own[f"{at}.mlp.experts.{e}.{word}_proj.weight"] for e in range(4))
            tensors[f"blk.{layer}.ffn_{word}_exps.weight"] = np.stack(list(experts))
    of_model = metadata(
        2, expert_feed_forward_length=256, **{
            "context_length": 128, "attention.head_count": 2, "attention.head_count_kv": 2,
            "attention.key_length": 32, "attention.value_length": 32,
            "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e4,
        },
    )  # fmt: skip
    file = write_gguf(
        tmp_path / "gguf/model.gguf", tensors, of_model,
        types={"_exps": "Q8_0", "attn_q.": "Q8_0", "attn_output": "Q8_0"},
        vocabulary=[f"w{n}" for n in range(64)],
    )  # fmt: skip
    same_logits(torch, file, tmp_path / "states", "bfloat16", source)
