"""Which differences of two config.json matter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ktconv.verify.side_content import config_differences

OLD: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 1,
    "hidden_act": "silu", "model_type": "qwen3_moe", "norm_topk_prob": True, "num_experts": 128,
    "num_experts_per_tok": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "scoring_func": "softmax", "sliding_window": 4096, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_sliding_window": False, "layers": [1, 2],
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
# As transformers 5 writes it.
NEW: dict[str, Any] = {
    **{key: value for key, value in OLD.items()
       if key not in ("rope_scaling", "rope_theta", "torch_dtype", "num_experts")},
    "dtype": "bfloat16", "num_local_experts": 128, "pad_token_id": None, "sliding_window": 0,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "layer_types": ["full_attention"] * 3, "transformers_version": "5.17.0",
}  # fmt: skip
YARN = {"factor": 40, "type": "yarn"}


def test_a_rewritten_file_is_equal() -> None:
    assert config_differences(OLD, NEW) == config_differences(NEW, OLD) == []
    assert config_differences(OLD, dict(reversed(OLD.items()))) == []
    assert config_differences({"text_config": OLD}, {"text_config": NEW}) == []


def test_deepseek_as_transformers_5_writes_it() -> None:
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    old = {**sizes, "rope_theta": 10000, "rope_scaling": YARN}
    new = {
        **sizes, "head_dim": 64, "qk_head_dim": 192, "pretraining_tp": 1, "rope_interleave": True,
        "rope_parameters": {**YARN, "rope_theta": 10000.0, "rope_type": "yarn"},
    }  # fmt: skip
    assert config_differences(old, new) == []
    assert config_differences(old, new | {"qk_head_dim": 128})
    assert config_differences(old, new | {"rope_interleave": False})
    assert config_differences(old, new | {"rope_theta": 1.0})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is 3, but 8 in the source"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, but true in the source"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, but 1e-06 in the source"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", but "silu" in the source'),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"rope_theta": 5.0}, "rope_parameters.rope_theta is 5.0, but 1000000.0"),
        ({"rope_scaling": YARN}, "rope_parameters.factor is 40, but not given in the source"),
        ({"torch_dtype": "float16"}, 'dtype is "float16", but "bfloat16"'),
        ({"dtype": "float16"}, 'dtype is "float16", but "bfloat16"'),
        ({"architectures": ["Other"]}, "architectures"),
        ({"auto_map": {"AutoConfig": "a.B"}}, "auto_map.AutoConfig"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias is true, but not given"),
        ({"num_experts": 64}, "num_experts is 64, but 128"),
        ({"num_local_experts": 64}, "num_local_experts is 64, but not given"),
        ({"layers": [1, 3]}, "layers is [1, 3], but [1, 2]"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.weight_block_size"),
        ({"never_heard_of": 1}, "never_heard_of is 1, but not given"),
        ({"long": "x" * 100}, f'long is "{"x" * 59}..., but'),
    ],
)  # fmt: skip
def test_what_computes_differs(changes: dict[str, Any], words: str) -> None:
    assert any(words in one for one in config_differences(OLD | changes, OLD))


@pytest.mark.parametrize("key", [key for key in OLD if key not in
                                 ("rope_scaling", "transformers_version", "attention_bias",
                                  "sliding_window")])  # fmt: skip
def test_every_key_that_is_lost(key: str) -> None:
    assert config_differences({k: v for k, v in OLD.items() if k != key}, OLD)


def test_nan_is_nan() -> None:
    """Python's json reads and writes it, and so do tools that save models."""
    nan = float("nan")
    assert config_differences({"a": nan, "b": [nan, 1]}, {"a": float("nan"), "b": [nan, 1]}) == []
    assert config_differences({"a": nan}, {"a": 1.0}) == ["a is NaN, but 1.0 in the source"]
    assert config_differences({"a": 1.0}, {"a": nan}) == ["a is 1.0, but NaN in the source"]


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_floats_that_json_has_not(value: float) -> None:
    """Nemotron-3's time_step_limit as transformers 5 writes it, huggingface/transformers#42959."""
    word = json.dumps(value)
    old = {"time_step_limit": [0.0, value], "section": {"limit": value}}
    new = {
        "time_step_limit": [0.0, {"__float__": word}], "section": {"limit": {"__float__": word}}
    }  # fmt: skip
    assert config_differences(old, new) == config_differences(new, old) == []
    assert config_differences(old, json.loads(json.dumps(new).replace(word, "5"))) == [
        f"section.limit is {word}, but not given in the source",
        'section.limit.__float__ is not given, but "5" in the source',
        f'time_step_limit is [0.0, {word}], but [0.0, {{"__float__": "5"}}] in the source',
    ]
