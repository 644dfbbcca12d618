"""NumPy's routers against those of transformers, and what holds for every router."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconv.errors import CheckpointError, UsageError
from ktconv.families import table
from ktconv.families.family import Router, RouterSpec
from ktconv.families.names import router_tensors, shared_expert_tensors
from ktconv.families.routers import route, router_of

TOKENS, HIDDEN, EXPERTS = 40, 32, 16

# model_type -> name of the router's class, of the model's config, and what its config says
# beside the sizes; a name twice is written "model_type:variant".
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralTopKRouter", "MixtralConfig", {}),
    "minimax": ("MiniMaxTopKRouter", "MiniMaxConfig", {}),
    "qwen2_moe": ("Qwen2MoeTopKRouter", "Qwen2MoeConfig", {}),
    "qwen2_moe:norm": ("Qwen2MoeTopKRouter", "Qwen2MoeConfig", {"norm_topk_prob": True}),
    "qwen3_moe": ("Qwen3MoeTopKRouter", "Qwen3MoeConfig", {"norm_topk_prob": True}),
    "qwen3_moe:plain": ("Qwen3MoeTopKRouter", "Qwen3MoeConfig", {}),
    "qwen3_next": ("Qwen3NextTopKRouter", "Qwen3NextConfig", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTopKRouter", "Qwen3_5MoeTextConfig", {}),
    "qwen3_vl_moe": ("Qwen3VLMoeTextTopKRouter", "Qwen3VLMoeTextConfig", {}),
    "olmoe": ("OlmoeTopKRouter", "OlmoeConfig", {}),
    "jamba": ("JambaSparseMoeBlock", "JambaConfig", {}),
    "granitemoe": ("GraniteMoeTopKRouter", "GraniteMoeConfig", {}),
    "gpt_oss": ("GptOssTopKRouter", "GptOssConfig", {}),
    "deepseek_v2": ("DeepseekV2TopkRouter", "DeepseekV2Config", {"routed_scaling_factor": 16.0}),
    "deepseek_v2:groups": (
        "DeepseekV2TopkRouter",
        "DeepseekV2Config",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": ("DeepseekV3TopkRouter", "DeepseekV3Config", {"n_group": 4, "topk_group": 2}),
    "deepseek_v3:default": ("DeepseekV3TopkRouter", "DeepseekV3Config", {}),
    "deepseek_v3:plain": ("DeepseekV3TopkRouter", "DeepseekV3Config", {"norm_topk_prob": False}),
    "glm4_moe": ("Glm4MoeTopkRouter", "Glm4MoeConfig", {"routed_scaling_factor": 1.5}),
    "glm4_moe_lite": ("Glm4MoeLiteTopkRouter", "Glm4MoeLiteConfig", {}),
    "minimax_m2": ("MiniMaxM2TopKRouter", "MiniMaxM2Config", {}),
    "ernie4_5_moe": ("Ernie4_5_MoeTopKRouter", "Ernie4_5_MoeConfig", {}),
    "lfm2_moe": ("Lfm2MoeTopKRouter", "Lfm2MoeConfig", {}),
    "llama4": ("Llama4Router", "Llama4TextConfig", {}),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerTextTopKRouter", "Qwen3OmniMoeTextConfig", {}),
    "flex_olmo": ("FlexOlmoTopKRouter", "FlexOlmoConfig", {}),
    "flex_olmo:norm": ("FlexOlmoTopKRouter", "FlexOlmoConfig", {"norm_topk_prob": True}),
    "deepseek_v32": ("DeepseekV32TopkRouter", "DeepseekV32Config", {"n_group": 4}),
    "kimi_linear": ("KimiLinearTopkRouter", "KimiLinearConfig", {}),
    "glm4v_moe": ("Glm4vMoeTextTopkRouter", "Glm4vMoeTextConfig", {}),
    "glm_moe_dsa": ("GlmMoeDsaTopkRouter", "GlmMoeDsaConfig", {}),
    "exaone_moe": ("ExaoneMoeTopkRouter", "ExaoneMoeConfig", {}),
    "dots1": ("Dots1TopkRouter", "Dots1Config", {}),
    "solar_open": ("SolarOpenTopkRouter", "SolarOpenConfig", {}),
    "minimax_m3_vl": ("MiniMaxM3VLTopKRouter", "MiniMaxM3VLTextConfig", {}),
    "afmoe": ("AfmoeTokenChoiceRouter", "AfmoeConfig", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Gate", "HunYuanMoEV1Config", {}),
}


def transformers_router(case: str, top_k: int) -> tuple[Any, dict[str, Any]]:
    """The family's own router with random weights, and its config.json."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    family = case.split(":")[0]
    router_name, config_name, settings = FAMILIES[case]
    package = f"transformers.models.{family}"
    # Not every release that ktconv works with has every family.
    configuration = pytest.importorskip(f"{package}.configuration_{family}")
    config_class = getattr(configuration, config_name)
    config = config_class(
        hidden_size=HIDDEN, num_experts_per_tok=top_k, **{"num_hidden_layers": 2, **settings}
    )
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hasattr(config, key):
            setattr(config, key, EXPERTS)
    router = getattr(importlib.import_module(f"{package}.modeling_{family}"), router_name)(config)
    generator = torch.Generator().manual_seed(len(case))
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator) * 0.3
    return router, config.to_dict()


def their_choice(router: Any, x: Any, correction: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    """(ids, weights) as the family's router gives them, in whatever order it does."""
    import torch

    name = type(router).__name__
    with torch.no_grad():
        if name == "Llama4Router":
            weights, ids = torch.topk(router(x)[0], router.top_k)
            return ids.numpy(), weights.numpy()
        if name == "JambaSparseMoeBlock":
            given = router.router(x)
            if isinstance(given, torch.Tensor):  # transformers before 5.18
                given = router.route_tokens_to_experts(x, given)
        elif name == "AfmoeTokenChoiceRouter":
            given = router(x[None], correction)
        elif correction is None or "e_score" in str(dict(router.named_buffers()).keys()):
            given = router(x)
        else:
            given = router(x, *(() if hasattr(router, "moe_statics") else (correction,)))
    (ids,) = (tensor for tensor in given if not tensor.is_floating_point())
    *_, weights = (
        tensor for tensor in given if tensor.is_floating_point() and tensor.shape == ids.shape
    )
    if name == "MiniMaxM3VLTopKRouter":  # its block scales what the experts add up to
        weights = weights * config["routed_scaling_factor"]
    return ids.numpy(), weights.numpy()


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("case", FAMILIES)
def test_routers_are_those_of_transformers(case: str, top_k: int) -> None:
    router, config = transformers_router(case, top_k)
    import torch

    spec = router_of(config, 1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((TOKENS, HIDDEN), generator=generator)
    own = {name.split(".")[-1]: tensor for name, tensor in router.state_dict().items()}
    correction = None
    if spec.correction:
        fallback = torch.randn((EXPERTS,), generator=generator) * 0.3
        correction = own.get("e_score_correction_bias", fallback).reshape(-1)
    theirs, their_weights = their_choice(router, x, correction, config)

    ids, weights = route(
        spec,
        x.numpy(),
        own["weight"].numpy(),
        bias=own["bias"].numpy() if spec.bias else None,
        correction=None if correction is None else correction.numpy(),
    )
    order, their_order = np.argsort(ids), np.argsort(theirs)
    assert ids.dtype == np.int64 and weights.dtype == np.float32
    np.testing.assert_array_equal(
        np.take_along_axis(ids, order, 1), np.take_along_axis(theirs, their_order, 1)
    )
    np.testing.assert_allclose(
        np.take_along_axis(weights, order, 1),
        np.take_along_axis(their_weights, their_order, 1),
        rtol=2e-6,  # the scaling factor of DeepSeek-V2 makes weights larger than 1
        atol=1e-6,
    )


def test_every_family_is_compared() -> None:
    """Also those that are added later; DeepSeek's code is Kimi K2's too."""
    compared = {case.split(":")[0] for case in FAMILIES}
    rows = table.FAMILIES.rows
    routed = {kind for row in rows for kind in row.types if isinstance(row.routing, Router)}
    assert compared | {"kimi_k2"} == routed
    assert table.FAMILIES.of("kimi_k2") is table.FAMILIES.of("deepseek_v3")


# ---- what every router does ------------------------------------------------------------


@st.composite
def specs(draw: st.DrawFn) -> RouterSpec:
    groups = draw(st.sampled_from([1, 2, 4]))
    kept = draw(st.integers(1, groups))
    last = draw(st.booleans())
    return RouterSpec(
        scoring="softmax" if last else draw(st.sampled_from(["softmax", "sigmoid"])),
        top_k=draw(st.integers(1, kept * EXPERTS // groups)),
        softmax_last=last,
        correction=draw(st.booleans()),
        n_group=groups,
        topk_group=kept,
        group_score=draw(st.sampled_from(["max", "top2"])),
        renormalise=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
    )


@settings(max_examples=60, deadline=None)
@given(specs(), st.integers(0, 9), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 30.0]))
def test_any_router(spec: RouterSpec, tokens: int, seed: int, size: float) -> None:
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, HIDDEN), np.float32) * np.float32(size)
    gate = random.standard_normal((EXPERTS, HIDDEN), np.float32)
    correction = random.standard_normal(EXPERTS, np.float32) if spec.correction else None
    ids, weights = route(spec, x, gate, correction=correction)

    assert ids.shape == weights.shape == (tokens, spec.top_k)
    assert np.isfinite(weights).all() and (weights >= 0).all()
    assert ((ids >= 0) & (ids < EXPERTS)).all()
    groups = ids // (EXPERTS // spec.n_group)
    for row, used in zip(ids, groups, strict=True):
        assert len(set(row)) == spec.top_k
        assert len(set(used)) <= spec.topk_group
    sums, scale = weights.sum(axis=1), spec.routed_scaling_factor
    if spec.softmax_last or (spec.renormalise and size <= 1):
        np.testing.assert_allclose(sums, scale, rtol=1e-5)
    elif spec.renormalise or spec.scoring == "softmax":
        # The best experts' scores may underflow where groups or the correction shut others out.
        assert (sums <= scale * (1 + 1e-5)).all()


def test_equal_scores_choose_the_lower_expert() -> None:
    gate = np.zeros((4, 8), np.float32)
    ids, weights = route(RouterSpec("softmax", 2), np.ones((1, 8), np.float32), gate)
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.5, 0.5]]


def test_a_router_wants_its_own_arrays() -> None:
    x, gate = np.ones((1, 8), np.float32), np.ones((4, 8), np.float32)
    extra = np.zeros(4, np.float32)
    with pytest.raises(CheckpointError, match="must not have a correction bias"):
        route(RouterSpec("softmax", 2), x, gate, correction=extra)
    with pytest.raises(CheckpointError, match="has no correction bias"):
        route(RouterSpec("sigmoid", 2, correction=True), x, gate)
    with pytest.raises(UsageError, match=r"must be \[4\]"):
        route(RouterSpec("sigmoid", 2, bias=True), x, gate, bias=extra[:3])
    with pytest.raises(UsageError, match="do not fit"):
        route(RouterSpec("softmax", 2), x[:, :7], gate)
    with pytest.raises(CheckpointError, match="5 experts per token"):
        route(RouterSpec("softmax", 5), x, gate)


# ---- config.json -----------------------------------------------------------------------


def test_text_sections_and_lists_per_layer() -> None:
    text = {"model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": [1, 3]}
    spec = router_of({"model_type": "qwen3_5_moe", "text_config": text}, 1)
    assert spec == RouterSpec("softmax", 3)


def test_unknown_families_say_how_they_route() -> None:
    config: dict[str, Any] = {"model_type": "new_moe", "num_experts_per_tok": 2}
    assert router_of({**config, "norm_topk_prob": True}, 0) == RouterSpec("softmax", 2)
    noaux = {**config, "topk_method": "noaux_tc", "n_group": 2, "topk_group": 1}
    spec = router_of({**noaux, "routed_scaling_factor": 3}, 0)
    assert (spec.scoring, spec.correction, spec.n_group) == ("sigmoid", True, 2)
    assert spec.routed_scaling_factor == 3.0
    limited = {**config, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    assert router_of(limited, 0).group_score == "max"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "does not describe the router of new_moe"),
        ({"scoring_func": "sqrtsoftplus"}, "sqrtsoftplus"),
        ({"topk_method": "dice"}, "dice"),
        ({"topk_method": "noaux_tc", "scoring_func": "softmax"}, "contradicts itself"),
        ({"scoring_func": "softmax", "num_experts_per_tok": 0}, "is 0, not a number of experts"),
        ({"scoring_func": "softmax", "num_experts_per_tok": None}, "does not say how many"),
        ({"scoring_func": "softmax", "num_experts": 7, "n_group": 2}, "7 experts"),
        ({"scoring_func": "softmax", "num_experts": 1}, "2 experts per token"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "contradicts itself"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "noaux_tc"),
        ({"model_type": "phimoe"}, "phimoe"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], says: str) -> None:
    config = {"model_type": "new_moe", "num_experts_per_tok": 2, **changes}
    with pytest.raises(CheckpointError, match=says):
        router_of(config, 0)


# ---- names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "kind", "name"),
    [
        ("model.layers.3.mlp.experts", "weight", "model.layers.3.mlp.gate.weight"),
        ("model.layers.3.mlp.experts.", "weight", "model.layers.3.mlp.router.weight"),
        ("model.layers.3.mlp.experts", "bias", "model.layers.3.mlp.router.bias"),
        ("l.3.mlp.experts", "correction", "l.3.mlp.gate.e_score_correction_bias"),
        ("l.3.block_sparse_moe.experts", "weight", "l.3.block_sparse_moe.gate.weight"),
        (
            "l.3.block_sparse_moe.experts",
            "correction",
            "l.3.block_sparse_moe.e_score_correction_bias",
        ),
        ("l.3.mlp.experts", "correction", "l.3.mlp.moe_statics.e_score_correction_bias"),
        ("l.3.feed_forward.experts", "weight", "l.3.feed_forward.router.weight"),
    ],
)
def test_names_of_router_tensors(prefix: str, kind: str, name: str) -> None:
    assert name in getattr(router_tensors(prefix), kind)


def test_names_of_shared_experts() -> None:
    found = shared_expert_tensors("model.layers.3.mlp.experts")
    assert found[0].up == "model.layers.3.mlp.shared_expert.up_proj.weight"
    assert found[0].gating == "model.layers.3.mlp.shared_expert_gate.weight"
    assert found[1].down == "model.layers.3.mlp.shared_experts.down_proj.weight"
    with pytest.raises(UsageError, match="not a prefix of expert tensors"):
        shared_expert_tensors("model.layers.3.mlp")
