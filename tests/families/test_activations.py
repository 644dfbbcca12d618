"""Activations as config.json names them, and our arithmetic against transformers' experts."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import numbered, random_weights, simple_config, write_checkpoint

from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.activations import (
    NAMES,
    expert_activation,
    post_norm_epsilon,
    shared_activation,
)
from ktconv.families.config import Config
from ktconv.families.family import PLAIN, ExpertActivation, activation_of_record
from ktconv.native import Activation
from ktconv.runtime.layers.experts import OutputNorm, expert_output
from ktconv.runtime.layers.load import activation_of, expert_activation_of, kernel_activation
from ktconv.source import open_checkpoint
from ktconv.source.reading.streamed import whole
from ktconv.source.settings import ModelSettings

pytestmark = pytest.mark.slow

HIDDEN, INNER, EXPERTS, TOKENS = 32, 48, 2, 24
CLAMP10, OAI = ExpertActivation(limit=10.0), ExpertActivation(alpha=1.702, limit=7.0)
SQUARED = ExpertActivation("relu2", gated=False)
STEP = {"num_hidden_layers": 4, "swiglu_limits": [0.0, None, 7.0, 5]}


# ---- config.json -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "layer", "expected"),
    [
        ({}, 0, PLAIN),
        ({"model_type": "glm_moe_dsa"}, 0, PLAIN),
        ({"model_type": "deepseek_v4"}, 5, CLAMP10),
        ({"model_type": "deepseek_v4", "swiglu_limit": 0}, 5, PLAIN),
        ({"model_type": "deepseek_v4", "swiglu_limit": None}, 5, CLAMP10),
        ({"model_type": "glm5_next", "text_config": {"hidden_act": "silu"}}, 0, CLAMP10),
        ({"model_type": "minimax_m3_vl", "hidden_act": "swigluoai"}, 0, OAI),
        ({"hidden_act": "swigluoai"}, 0, OAI),
        ({"model_type": "minimax_m3_vl", "swiglu_alpha": 0}, 0, ExpertActivation(limit=7.0)),
        ({"swiglu_limit": [0, 7.0]}, 1, ExpertActivation(limit=7.0)),
        ({"swiglu_limit": [0, 7.0]}, 0, PLAIN),
        (STEP, 0, PLAIN),
        (STEP, 1, PLAIN),
        (STEP, 2, ExpertActivation(limit=7.0, limit_after=True)),
        (STEP, 4, PLAIN),  # an MTP layer behind the list
        ({"model_type": "step3p5", **STEP}, 3, ExpertActivation(limit=5.0, limit_after=True)),
        ({"hidden_act": "gelu"}, 0, ExpertActivation("gelu")),
        ({"hidden_activation": "gelu_pytorch_tanh"}, 0, ExpertActivation("gelu_tanh")),
        # of an unknown family, outside of the section about its language model too
        ({"hidden_act": "gelu", "text_config": {"model_type": "new_text"}}, 0,
         ExpertActivation("gelu")),
        ({"hidden_act": "gelu", "text_config": {"model_type": "qwen3_moe"}}, 0, PLAIN),
        ({"model_type": "gemma4_text"}, 0, ExpertActivation("gelu_tanh")),
        # whose class does not read hidden_act, which older Gemmas have
        ({"model_type": "gemma4_text", "hidden_act": "silu",
          "hidden_activation": "gelu_pytorch_tanh"}, 0, ExpertActivation("gelu_tanh")),
        ({"model_type": "dbrx", "ffn_config": {"ffn_act_fn": "gelu"}}, 0,
         ExpertActivation("gelu")),
        ({"model_type": "nemotron_h", "hidden_act": "silu"}, 0, SQUARED),
        ({"model_type": "nemotron_h", "mlp_hidden_act": "gelu"}, 0,
         ExpertActivation("gelu", gated=False)),
        ({"model_type": "nemotron_h", "mlp_hidden_act": "silu"}, 0, ExpertActivation(gated=False)),
        ({"model_type": "nomic_bert"}, 0, ExpertActivation("gelu", gated=False)),
        ({"model_type": "nomic_bert", "activation_function": "gelu_new"}, 0,
         ExpertActivation("gelu_tanh", gated=False)),
        # of its class in transformers, which has no experts
        ({"model_type": "nomic_bert", "hidden_act": "silu"}, 0,
         ExpertActivation("gelu", gated=False)),
        ({"mlp_hidden_act": "relu2"}, 0, SQUARED),
        ({"model_type": "jetmoe", "activation_function": "gelu"}, 0, ExpertActivation("gelu")),
        ({"model_type": "dbrx", "ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, 0,
         ExpertActivation("gelu")),
        ({"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear"}}, 0,
         ExpertActivation(gate_cap=4.0, up_cap=25.0)),
        ({"model_type": "kimi_linear", "hidden_act": "situ"}, 0,
         ExpertActivation(gate_cap=4.0, up_cap=25.0)),
        ({"model_type": "kimi_k3", "activation_situ_beta": 3.0}, 0, ExpertActivation(gate_cap=3.0)),
        ({"activation_situ_beta": 3.0, "activation_situ_linear_beta": 20}, 0,
         ExpertActivation(gate_cap=3.0, up_cap=20.0)),
        ({"model_type": "inkling2", "mlp_gate_softcap": 5.0}, 0,
         ExpertActivation(gate_cap=5.0, up_cap=25.0)),
        ({"model_type": "inkling_mm_model"}, 0, PLAIN),
        ({"model_type": "llama4"}, 0, ExpertActivation(weight_on_input=True)),
        ({"model_type": "muse_spark"}, 0, ExpertActivation(post_norm=True)),
        ({"model_type": "gpt_oss"}, 0, ExpertActivation(alpha=1.702, limit=7.0, biases=True)),
    ],
)  # fmt: skip
def test_settings(config: dict[str, Any], layer: int, expected: ExpertActivation) -> None:
    assert expert_activation(Config(config), layer) == expected
    assert activation_of_record(json.loads(json.dumps(expected.as_record()))) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "deepseek_v4"}, CLAMP10),
        ({"model_type": "hy_v4"}, PLAIN),
        ({"model_type": "hy_v4_vl"}, PLAIN),
        ({"model_type": "step3p5", **STEP}, PLAIN),
        ({**STEP, "swiglu_limits_shared": [0, 0, 16.0, 0]},
         ExpertActivation(limit=16.0, limit_after=True)),
        ({"model_type": "muse_spark"}, PLAIN),
        ({"model_type": "llama4"}, PLAIN),
        ({"model_type": "nemotron_h"}, SQUARED),
    ],
)  # fmt: skip
def test_settings_of_shared_experts(config: dict[str, Any], expected: ExpertActivation) -> None:
    assert shared_activation(Config(config), 2) == expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"swiglu_limits": [7.0], "num_hidden_layers": 3},
         r"swiglu_limits is \[7.0\], not a number for each of the 3 layers"),
        ({"swiglu_limit": [7.0], "num_hidden_layers": 3}, "a number for each of the 3 layers"),
        ({"swiglu_limits": [0.0, "7"]}, "swiglu_limits is .*, not a number"),
        ({"swiglu_limits": [0.0, -7.0]}, "swiglu_limits is .*, not a number"),
        ({"swiglu_limits": [math.nan]}, "swiglu_limits is .*, not a number"),
        ({"swiglu_limits": {"0": 7}}, "swiglu_limits is .*, not a number"),
        ({"swiglu_limit": 7.0, "swiglu_limits": [7.0]}, "contradicts itself: swiglu_limit is 7"),
        ({"model_type": "of_tomorrow", "hidden_act": "silu", "hidden_activation": "gelu"},
         "contradicts itself: hidden_act is 'silu' but hidden_activation is 'gelu'"),
        ({"activation_situ_beta": "4"}, "activation_situ_beta is '4', not a number"),
        ({"mlp_gate_softcap": 0.0}, "mlp_gate_softcap is 0.0, not a number above 0"),
        ({"mlp_up_softcap": -1}, "mlp_up_softcap is -1, not a number above 0"),
        ({"swiglu_limits_shared": [True]}, "swiglu_limits_shared is .*, not a number"),
    ],
)  # fmt: skip
def test_values_that_are_none(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    """When a checkpoint is opened: by every command."""
    layers = {"num_hidden_layers": 1, **config}["num_hidden_layers"]
    tensors: dict[str, Any] = {}
    for layer in range(layers):
        tensors |= numbered(f"model.layers.{layer}.mlp.experts", random_weights())
    model = write_checkpoint(tmp_path, tensors, simple_config(num_hidden_layers=layers))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(model)


def test_an_assumption_is_noted(tmp_path: Path) -> None:
    tensors = numbered("model.layers.0.mlp.experts", random_weights())
    noted = {}
    for name, config in (
        ("unknown", {"model_type": "nobody_knows"}),
        ("named", {"model_type": "nobody_knows", "hidden_act": "silu"}),
        ("known", {"model_type": "qwen3_moe"}),
    ):
        model = write_checkpoint(tmp_path / name, tensors, simple_config(**config))
        noted[name] = [note for note in open_checkpoint(model).notes if "activation" in note]
    assert noted == {
        "unknown": ["the activation of nobody_knows is not known, and config.json does not name "
                    "it: SiLU is assumed"],
        "named": [],
        "known": [],
    }  # fmt: skip


def test_a_record_from_before_other_functions_had_no_gate() -> None:
    assert activation_of_record({"description": "squared", "function": "relu2"}) == SQUARED


def test_a_record_that_is_damaged() -> None:
    damaged: list[Any] = [
        None,
        [],
        {"alpha": "1"},
        {"limit": 7},
        {"biases": 1},
        {"function": None},
        {"gated": 0},
    ]
    for record in damaged:
        assert activation_of_record(record) is None


def test_what_kernels_call_it() -> None:
    kernel = {
        PLAIN: Activation(),
        CLAMP10: Activation(limit=10.0),
        OAI: Activation("swiglu", 1.702, 1.0, 7.0),
        ExpertActivation(limit=7.0, limit_after=True): Activation("swiglu_clamped", limit=7.0),
        ExpertActivation(gate_cap=4.0): Activation("softcap", 4.0, math.inf),
        SQUARED: Activation("relu2"),
        ExpertActivation("relu", gated=False): Activation("relu"),
        ExpertActivation("gelu", gated=False): Activation("ungated_gelu"),
        ExpertActivation("gelu_tanh", gated=False, limit=3.0): Activation(
            "ungated_gelu_tanh", limit=3.0),
    }  # fmt: skip
    assert {one: kernel_activation(one) for one in kernel} == kernel
    assert {expert_activation_of(one): one for one in kernel.values()} == kernel
    for name, one in NAMES.items():
        assert one.supported, name
        assert kernel_activation(one).gated == one.gated
    for odd in ({"function": "relu"}, {"function": "gelu", "alpha": 1.0}, {"gated": False},
                {"alpha": 1.0, "gate_cap": 4.0}, {"function": "relu2"}):  # fmt: skip
        odd_one = ExpertActivation(**odd)
        assert not odd_one.supported
        with pytest.raises(CheckpointError, match="the kernels do not support"):
            kernel_activation(odd_one)


# ---- transformers ----------------------------------------------------------------------

# Of rows whose experts are not plain; all others are.
DEFAULTS: dict[str, ExpertActivation] = {
    "deepseek_v4": CLAMP10,
    "deepseek_v41": CLAMP10,
    "diffusion_gemma": ExpertActivation("gelu_tanh"),
    "gemma4": ExpertActivation("gelu_tanh"),
    "glm5_next": CLAMP10,
    "gpt_oss": ExpertActivation(alpha=1.702, limit=7.0, biases=True),
    "hy_v4": CLAMP10,
    "hy_v4_vl": CLAMP10,
    "inkling2": ExpertActivation(gate_cap=4.0, up_cap=25.0),
    "inkling2_loop": ExpertActivation(gate_cap=4.0, up_cap=25.0),
    "kimi_k3": ExpertActivation(gate_cap=4.0, up_cap=25.0),
    "llama4": ExpertActivation(weight_on_input=True),
    "minimax_m3_vl": OAI,
    "muse_spark": ExpertActivation(post_norm=True),
    "nemotron_h": SQUARED,
    "nomic_bert": ExpertActivation("gelu", gated=False),
    "openai_privacy_filter": ExpertActivation(alpha=1.702, limit=7.0, biases=True),
}


def test_defaults_of_transformers() -> None:
    """With the settings of each family's own class, and without any."""
    mapping = pytest.importorskip("transformers").models.auto.configuration_auto.CONFIG_MAPPING
    compared = 0
    for row in table.FAMILIES.rows:
        for kind in row.types:
            expected = DEFAULTS.get(kind, PLAIN)
            assert expert_activation(Config({"model_type": kind}), 0) == expected, kind
            if kind in mapping:
                config = mapping[kind]().to_dict()
                assert expert_activation(Config(config), 0) == expected, kind
                compared += 1
    assert compared > 45


def sizes() -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "intermediate_size": INNER,
        "num_hidden_layers": 4, "n_routed_experts": EXPERTS, "num_experts": EXPERTS,
        "num_local_experts": EXPERTS, "num_experts_per_tok": 1,
    }  # fmt: skip


# The module, its classes of configuration and of experts, settings, arguments of the latter.
MODULES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4Experts", {"swiglu_limit": 2.0}, {}),
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextTextExperts", {}, {}),
    "hy_v4": ("HYV4Config", "HYV4Experts", {}, {}),
    "hy_v4_vl": ("HYV4VLTextConfig", "HYV4VLExperts", {}, {}),
    "minimax_m3_vl": ("MiniMaxM3VLTextConfig", "MiniMaxM3VLExperts", {"swiglu_alpha": 1.25}, {}),
    "step3p7": ("Step3p7TextConfig", "Step3p7Experts", {"swiglu_limits": [0, 0, 3.0, 0]},
                {"swiglu_limit": 3.0}),
    "gpt_oss": ("GptOssConfig", "GptOssExperts", {}, {}),
    "openai_privacy_filter": ("OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterExperts", {}, {}),
    "gemma4": ("Gemma4TextConfig", "Gemma4TextExperts", {}, {}),
    "nemotron_h": ("NemotronHConfig", "NemotronHExperts", {}, {}),
    "inkling": ("InklingTextConfig", "InklingExperts", {}, {}),
    "inkling2": ("Inkling2TextConfig", "Inkling2Experts", {"mlp_gate_softcap": 1.5}, {}),
    "muse_spark": ("MuseSparkTextConfig", "MuseSparkExperts",
                   {"moe_hidden_size": HIDDEN, "hidden_size": 128}, {}),
    "beam": ("BeamConfig", "BeamExperts", {}, {}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeExperts", {}, {}),
}  # fmt: skip


# Of shared experts: the class, settings, arguments behind config, the layer.
SHARED: dict[str, tuple[str, dict[str, Any], tuple[Any, ...]]] = {
    "deepseek_v4": ("DeepseekV4MLP", {"swiglu_limit": 2.0}, ()),
    "glm5_next": ("Glm5NextTextMLP", {}, ()),
    "hy_v4": ("HYV4MLP", {"swiglu_limit": 2.0}, ()),
    "hy_v4_vl": ("HYV4VLMLP", {"swiglu_limit": 2.0}, ()),
    "minimax_m3_vl": ("MiniMaxM3VLDenseMLP", {}, ()),
    "step3p7": ("Step3p7MLP", {"swiglu_limits_shared": [0, 0, 3.0, 0], "share_expert_dim": INNER},
                (2, True)),
}  # fmt: skip


def module_of(name: str, kind: str, settings: dict[str, Any], *arguments: Any, **named: Any) -> Any:
    """A module of transformers with random weights, those, and its config."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    package = f"transformers.models.{name}"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"this transformers has no {name}")
    configuration = importlib.import_module(f"{package}.configuration_{name}")
    modeling = importlib.import_module(f"{package}.modeling_{name}")
    config = getattr(configuration, MODULES[name][0])(**(sizes() | settings))
    module = getattr(modeling, kind)(config, *arguments, **named)
    rng, weights = np.random.default_rng(3), {}
    with torch.no_grad():
        for key, tensor in module.named_parameters():
            weights[key] = rng.standard_normal(tensor.shape, np.float32)
            tensor.copy_(torch.from_numpy(weights[key]))
    return module, weights, config.to_dict()


def inputs() -> Any:
    return np.random.default_rng(4).standard_normal((TOKENS, HIDDEN), np.float32)


@pytest.mark.parametrize("name", SHARED)
def test_shared_experts_of_transformers(name: str) -> None:
    kind, settings, arguments = SHARED[name]
    module, weights, config = module_of(name, kind, settings, *arguments)
    import torch

    x = inputs()
    with torch.no_grad():
        theirs = module(torch.from_numpy(x)).numpy()
    if "gate_up_proj.weight" in weights:
        gate, up = np.split(weights["gate_up_proj.weight"], 2)
    else:
        gate, up = weights["gate_proj.weight"], weights["up_proj.weight"]
    matrices = whole(gate), whole(up), whole(weights["down_proj.weight"])
    ours = expert_output(matrices, kernel_activation(shared_activation(Config(config), 2)), x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


# What Nemotron's class computes without a gate, by what config.json calls it.
_UNGATED: dict[str, dict[str, Any]] = {
    f"nemotron_h:{function}": {"mlp_hidden_act": function}
    for function in ("relu2", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
}


@pytest.mark.parametrize("case", [*MODULES, *_UNGATED])
def test_experts_of_transformers(case: str) -> None:
    name = case.partition(":")[0]
    _, kind, settings, arguments = MODULES[name]
    settings = settings | _UNGATED.get(case, {})
    module, weights, config = module_of(name, kind, settings, **arguments)
    import torch

    x, ids = inputs(), torch.ones((TOKENS, 1), dtype=torch.int64)
    with torch.no_grad():
        theirs = module(torch.from_numpy(x), ids, torch.full((TOKENS, 1), 0.5)).numpy()
    found, norm = activation_of(ModelSettings(config), 2), None
    if "post_expert_norm.weight" in weights:
        norm = OutputNorm(weights["post_expert_norm.weight"], post_norm_epsilon(Config(config)))
    ours = 0.5 * expert_output(streams(name, weights), found, x, norm=norm)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def streams(name: str, weights: dict[str, Any]) -> Any:
    """Gate, up and down of expert 1 by the layout of the family's module."""
    down, bias = weights["down_proj"][1], {"gate": None, "up": None, "down": None}
    if name == "nemotron_h":
        return None, whole(weights["up_proj"][1]), whole(down)
    both = weights["gate_up_proj"][1]
    gate, up = both[:INNER], both[INNER:]
    if "gate_up_proj_bias" in weights:
        both_bias, down = weights["gate_up_proj_bias"][1], down.T
        apart = (slice(0, None, 2), slice(1, None, 2))
        if name != "gpt_oss":
            apart = (slice(INNER), slice(INNER, None))
        gate, up = (both.T[rows] for rows in apart)
        bias = dict(zip(bias, (*(both_bias[rows] for rows in apart), weights["down_proj_bias"][1]),
                        strict=True))  # fmt: skip
    return whole(gate, bias["gate"]), whole(up, bias["up"]), whole(down, bias["down"])
