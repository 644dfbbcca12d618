"""Our routers against those of transformers, and what holds for every router."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconv.errors import CheckpointError, UsageError
from ktconv.families import table
from ktconv.families.config import Config
from ktconv.families.family import SCORINGS, Router, RouterSpec
from ktconv.families.names import router_tensors, shared_expert_tensors
from ktconv.families.routers import find_router, router_of
from ktconv.families.routing import Stored, route, wanted
from ktconv.system.arrays import Array

pytestmark = pytest.mark.slow

TOKENS, HIDDEN, EXPERTS, VOCABULARY = 40, 32, 16, 64
GROUPS = {"n_group": 4, "topk_group": 2}
MUSE = {"num_attention_heads": 4}
SCALED = {"routed_scaling_factor": 1.5, "norm_topk_prob": False}

# model_type -> name of the router's class, of the model's config, and what its config says
# beside the sizes; a name twice is written "model_type:variant".
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralTopKRouter", "MixtralConfig", {}),
    "minimax": ("MiniMaxTopKRouter", "MiniMaxConfig", {}),
    "phimoe": ("PhimoeTopKRouter", "PhimoeConfig", {}),
    "phimoe:jitter": ("PhimoeTopKRouter", "PhimoeConfig", {"router_jitter_noise": 0.4}),
    "qwen2_moe": ("Qwen2MoeTopKRouter", "Qwen2MoeConfig", {}),
    "qwen2_moe:norm": ("Qwen2MoeTopKRouter", "Qwen2MoeConfig", {"norm_topk_prob": True}),
    "qwen3_moe": ("Qwen3MoeTopKRouter", "Qwen3MoeConfig", {"norm_topk_prob": True}),
    "qwen3_moe:plain": ("Qwen3MoeTopKRouter", "Qwen3MoeConfig", {}),
    "qwen3_next": ("Qwen3NextTopKRouter", "Qwen3NextConfig", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTopKRouter", "Qwen3_5MoeTextConfig", {}),
    "qwen3_vl_moe": ("Qwen3VLMoeTextTopKRouter", "Qwen3VLMoeTextConfig", {}),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerTextTopKRouter", "Qwen3OmniMoeTextConfig", {}),
    "qwen3_omni_moe_talker": (
        "Qwen3OmniMoeTalkerTextTopKRouter",
        "Qwen3OmniMoeTalkerTextConfig",
        {},
    ),
    "qwen4_exp": ("Qwen4ExpTextTopKRouter", "Qwen4ExpTextConfig", {}),
    "qwen4_exp:plain": ("Qwen4ExpTextTopKRouter", "Qwen4ExpTextConfig", {"norm_topk_prob": False}),
    "olmoe": ("OlmoeTopKRouter", "OlmoeConfig", {}),
    "flex_olmo": ("FlexOlmoTopKRouter", "FlexOlmoConfig", {}),
    "flex_olmo:norm": ("FlexOlmoTopKRouter", "FlexOlmoConfig", {"norm_topk_prob": True}),
    "mellum": ("MellumTopKRouter", "MellumConfig", {}),
    "mellum:plain": ("MellumTopKRouter", "MellumConfig", {"norm_topk_prob": False}),
    "jamba": ("JambaSparseMoeBlock", "JambaConfig", {"mamba_d_state": 4}),
    "dbrx": ("DbrxFFN", "DbrxConfig", {"moe_normalize_expert_weights": 1.0}),
    "dbrx:p-norm": ("DbrxFFN", "DbrxConfig", {"moe_normalize_expert_weights": 2.0}),
    "dbrx:plain": ("DbrxFFN", "DbrxConfig", {"moe_normalize_expert_weights": None}),
    "granitemoe": ("GraniteMoeTopKRouter", "GraniteMoeConfig", {}),
    "granitemoeshared": ("GraniteMoeSharedTopKRouter", "GraniteMoeSharedConfig", {}),
    "granitemoehybrid": (
        "GraniteMoeHybridTopKRouter",
        "GraniteMoeHybridConfig",
        {"mamba_n_heads": 4},
    ),
    "granitemoe_swa": ("GraniteMoeSWATopKRouter", "GraniteMoeSWAConfig", {}),
    "jetmoe": ("JetMoeTopKGating", "JetMoeConfig", {}),
    "aria": ("AriaTextTopKRouter", "AriaTextConfig", {}),
    "gpt_oss": ("GptOssTopKRouter", "GptOssConfig", {}),
    "openai_privacy_filter": ("OpenAIPrivacyFilterTopKRouter", "OpenAIPrivacyFilterConfig", {}),
    "cohere2_moe": ("Cohere2MoeTopKRouter", "Cohere2MoeConfig", {}),
    "cohere2_moe:sigmoid": (
        "Cohere2MoeTopKRouter",
        "Cohere2MoeConfig",
        {"expert_selection_fn": "sigmoid"},
    ),
    "cohere2_moe:plain": (
        "Cohere2MoeTopKRouter",
        "Cohere2MoeConfig",
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ),
    "gemma4": ("Gemma4TextRouter", "Gemma4TextConfig", {"rms_norm_eps": 0.1}),
    "diffusion_gemma": ("DiffusionGemmaTextRouter", "DiffusionGemmaTextConfig", {}),
    "deepseek_v2": ("DeepseekV2TopkRouter", "DeepseekV2Config", {"routed_scaling_factor": 16.0}),
    "deepseek_v2:groups": (
        "DeepseekV2TopkRouter",
        "DeepseekV2Config",
        {"topk_method": "group_limited_greedy", **GROUPS},
    ),
    "deepseek_ocr2": ("DeepseekOcr2TextTopkRouter", "DeepseekOcr2TextConfig", {}),
    "unlimited_ocr": (
        "UnlimitedOcrTextTopkRouter",
        "UnlimitedOcrTextConfig",
        {"num_attention_heads": 4},
    ),
    "deepseek_v3": ("DeepseekV3TopkRouter", "DeepseekV3Config", GROUPS),
    "deepseek_v3:default": ("DeepseekV3TopkRouter", "DeepseekV3Config", {}),
    "deepseek_v3:plain": ("DeepseekV3TopkRouter", "DeepseekV3Config", {"norm_topk_prob": False}),
    "deepseek_v32": ("DeepseekV32TopkRouter", "DeepseekV32Config", {"n_group": 4}),
    "deepseek_v4": ("DeepseekV4TopKRouter", "DeepseekV4Config", {"num_hash_layers": 1}),
    "deepseek_v4:sigmoid": (
        "DeepseekV4TopKRouter",
        "DeepseekV4Config",
        {"num_hash_layers": 0, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
    ),
    "deepseek_v4:hash": ("DeepseekV4HashRouter", "DeepseekV4Config", {"num_hash_layers": 2}),
    "kimi_linear": ("KimiLinearTopkRouter", "KimiLinearConfig", {}),
    "glm4_moe": ("Glm4MoeTopkRouter", "Glm4MoeConfig", {"routed_scaling_factor": 1.5}),
    "glm4_moe_lite": ("Glm4MoeLiteTopkRouter", "Glm4MoeLiteConfig", {}),
    "glm4v_moe": ("Glm4vMoeTextTopkRouter", "Glm4vMoeTextConfig", {}),
    "glm_moe_dsa": ("GlmMoeDsaTopkRouter", "GlmMoeDsaConfig", {}),
    "glm5_next": ("Glm5NextTextTopkRouter", "Glm5NextTextConfig", GROUPS),
    "minimax_m2": ("MiniMaxM2TopKRouter", "MiniMaxM2Config", {}),
    "minimax_m3_vl": ("MiniMaxM3VLTopKRouter", "MiniMaxM3VLTextConfig", {}),
    "ernie4_5_moe": ("Ernie4_5_MoeTopKRouter", "Ernie4_5_MoeConfig", {}),
    "ernie4_5_moe:floor": ("Ernie4_5_MoeTopKRouter", "Ernie4_5_MoeConfig", {"moe_norm_min": 0.6}),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeMoeTopKRouter", "Ernie4_5_VLMoeTextConfig", {}),
    "lfm2_moe": ("Lfm2MoeTopKRouter", "Lfm2MoeConfig", {}),
    "llama4": ("Llama4Router", "Llama4TextConfig", {}),
    "exaone_moe": ("ExaoneMoeTopkRouter", "ExaoneMoeConfig", {}),
    "dots1": ("Dots1TopkRouter", "Dots1Config", {}),
    "dots3_note": ("Dots3NoteTextTopkRouter", "Dots3NoteTextConfig", GROUPS),
    "solar_open": ("SolarOpenTopkRouter", "SolarOpenConfig", {}),
    "afmoe": ("AfmoeTokenChoiceRouter", "AfmoeConfig", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Gate", "HunYuanMoEV1Config", {}),
    "hy_v3": ("HYV3TopKRouter", "HYV3Config", {}),
    "hy_v4": ("HYV4TopkRouter", "HYV4Config", GROUPS),
    "hy_v4_vl": ("HYV4VLTopkRouter", "HYV4VLTextConfig", GROUPS),
    "bailing_hybrid": ("BailingHybridTopkRouter", "BailingHybridConfig", {}),
    "bailing_hybrid:plain": ("BailingHybridTopkRouter", "BailingHybridConfig", SCALED),
    "step3p7": ("Step3p7TopKRouter", "Step3p7TextConfig", {"moe_router_scaling_factor": 3.0}),
    "mimo_v2_flash": ("MiMoV2FlashTopkRouter", "MiMoV2FlashConfig", GROUPS),
    "longcat_flash": ("LongcatFlashTopkRouter", "LongcatFlashConfig", {"zero_expert_num": 8}),
    "axk1": ("AXK1TopkRouter", "AXK1Config", {}),
    "axk2": ("AXK2TopkRouter", "AXK2Config", {}),
    "axk2:groups": ("AXK2TopkRouter", "AXK2Config", GROUPS),
    "beam": ("BeamTopKRouter", "BeamConfig", {"routed_scaling_factor": 3}),
    "flint": ("FlintTopKRouter", "FlintConfig", {}),
    "flint:plain": ("FlintTopKRouter", "FlintConfig", {"norm_topk_prob": False}),
    "inkling": ("InklingTopkRouter", "InklingTextConfig", {"n_shared_experts": 3}),
    "inkling2": ("Inkling2TopKRouter", "Inkling2TextConfig", {"route_scale": 2.0}),
    "inkling2_loop": ("Inkling2LoopTopKRouter", "Inkling2LoopTextConfig", {"route_scale": 2.0}),
    "kolibri1": ("Kolibri1TopKRouter", "Kolibri1Config", {}),
    "kolibri1:norm": ("Kolibri1TopKRouter", "Kolibri1Config", {"norm_topk_prob": True}),
    "laguna": ("LagunaTopKRouter", "LagunaConfig", {"moe_routed_scaling_factor": 2.5}),
    "laguna:softcap": ("LagunaTopKRouter", "LagunaConfig", {"moe_router_logit_softcapping": 0.7}),
    "lara_mini": ("LaraMiniTopKRouter", "LaraMiniConfig", {}),
    "lara_mini:plain": ("LaraMiniTopKRouter", "LaraMiniConfig", {"norm_topk_prob": False}),
    "mistral4": ("Mistral4TopkRouter", "Mistral4Config", GROUPS),
    "mistral4:plain": ("Mistral4TopkRouter", "Mistral4Config", SCALED),
    "mistral_large4": ("MistralLarge4TextTopkRouter", "MistralLarge4TextConfig", GROUPS),
    "muse_spark": (
        "MuseSparkTopkRouter",
        "MuseSparkTextConfig",
        {**MUSE, "routed_scaling_factor": 2.0},
    ),
    "muse_spark:logits": (
        "MuseSparkTopkRouter",
        "MuseSparkTextConfig",
        {**MUSE, "output_multiplier": 2.0},
    ),
    "nemotron_h": ("NemotronHTopkRouter", "NemotronHConfig", {"routed_scaling_factor": 5.0}),
    "sarvam_mla": ("DeepseekV3TopkRouter", "SarvamMLAConfig", GROUPS),
    "sarvam_moe": ("Glm4MoeTopkRouter", "SarvamMoEConfig", {}),
}
# Whose models are of another family's class.
CLASSES_OF = {"sarvam_mla": "deepseek_v3", "sarvam_moe": "glm4_moe"}
# Whose layer multiplies what its experts add up to: by a number, or by what config.json says.
OUTSIDE = {
    "minimax_m3_vl": "routed_scaling_factor",
    "beam": "routed_scaling_factor",
    "step3p7": "moe_router_scaling_factor",
    "laguna": "moe_routed_scaling_factor",
    "openai_privacy_filter": "num_experts_per_tok",
}
# Of our names for what a router has, those of transformers.
THEIRS = {
    "bias": "bias",
    "correction": "e_score_correction_bias",
    "input_scale": "scale",
    "scale": "global_scale",
    "expert_scale": "per_expert_scale",
    "table": "tid2eid",
}
COUNTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_topk",
    "num_experts_per_tok", "top_k_experts", "moe_k",
)  # fmt: skip


def configuration(family: str, name: str) -> Any:
    """Not every release that ktconv works with has every family."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    package = family.removesuffix("_talker")
    module = pytest.importorskip(f"transformers.models.{package}.configuration_{package}")
    return getattr(module, name)


def transformers_router(case: str, top_k: int) -> tuple[Any, dict[str, Any]]:
    """The family's own router with random weights, and its config.json."""
    import torch

    family = case.split(":")[0]
    router_name, config_name, said = FAMILIES[case]
    config_class = configuration(family, config_name)
    if family == "dbrx":
        sizes = {"moe_num_experts": EXPERTS, "moe_top_k": top_k, "ffn_hidden_size": 64}
        said = {"ffn_config": {"hidden_size": HIDDEN, **sizes, **said}, "d_model": HIDDEN}
    config = config_class(**{"num_hidden_layers": 2, "hidden_size": HIDDEN, **said})
    for key in COUNTS if family != "dbrx" else ():
        if hasattr(config, key):
            setattr(config, key, top_k if "top" in key or key in COUNTS[-3:] else EXPERTS)
    package = CLASSES_OF.get(family, family.removesuffix("_talker"))
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    arguments = (HIDDEN, EXPERTS, top_k) if family == "jetmoe" else (config,)
    if not hasattr(module, router_name):
        pytest.skip(f"this release of transformers has no {router_name}")
    router = getattr(module, router_name)(*arguments).eval()
    generator = torch.Generator().manual_seed(len(case))
    for tensor in (*router.parameters(), *router.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.randn(tensor.shape, generator=generator) * 0.3
        else:
            choices = torch.rand((VOCABULARY, EXPERTS), generator=generator)
            tensor.data = choices.argsort(dim=1)[:, :top_k]
    return router, config.to_dict()


def their_choice(family: str, router: Any, x: Any, correction: Any, tokens: Any) -> tuple[Any, Any]:
    """(ids, weights) as the family's router gives them, in whatever order it does."""
    import torch

    name = type(router).__name__
    with torch.no_grad():
        if name == "Llama4Router":
            weights, ids = torch.topk(router(x)[0], router.top_k)
            return ids.numpy(), weights.numpy()
        if name == "JetMoeTopKGating":  # by expert, not by token
            _, token, weight, counts, _ = router(x)
            ids = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts))
            order = torch.sort(token, stable=True)[1]
            return ids[order].reshape(len(x), -1).numpy(), weight[order].reshape(len(x), -1).numpy()
        if name == "DbrxFFN":
            given = router.route_tokens_to_experts(router.router(x))
        elif name == "JambaSparseMoeBlock":
            given = router.router(x)
            if isinstance(given, torch.Tensor):  # transformers before 5.18
                given = router.route_tokens_to_experts(x, given)
        elif name == "AfmoeTokenChoiceRouter":
            given = router(x[None], correction)
        elif name == "DeepseekV4HashRouter":
            given = router(x, tokens)
        elif correction is None or "e_score" in " ".join(router.state_dict()):
            given = router(x)
        else:
            given = router(x, correction)
    (ids,) = (tensor for tensor in given if not tensor.is_floating_point())
    weights = next(
        tensor for tensor in given[::-1] if tensor.is_floating_point() and tensor.shape == ids.shape
    )
    return ids.numpy(), weights.numpy()


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("case", FAMILIES)
def test_routers_are_those_of_transformers(case: str, top_k: int) -> None:
    family = case.split(":")[0]
    top_k = 2 if family == "phimoe" else top_k
    configuration(family, FAMILIES[case][1])
    router, config = transformers_router(case, top_k)
    import torch

    spec = router_of(config, 1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((TOKENS, HIDDEN), generator=generator)
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    own = {name.split(".")[-1]: tensor for name, tensor in router.state_dict().items()}
    if spec.correction:  # some routers are called with it
        experts = EXPERTS + spec.identity_experts
        fallback = torch.randn((experts,), generator=generator) * 0.3
        own["e_score_correction_bias"] = own.get("e_score_correction_bias", fallback).reshape(-1)
    correction = own["e_score_correction_bias"] if spec.correction else None
    theirs, their_weights = their_choice(family, router, x, correction, tokens)
    factor = OUTSIDE.get(family)
    if factor is not None:
        their_weights = their_weights * config[factor]

    has = {ours: own[name].numpy() for ours, name in THEIRS.items() if wanted(spec)[ours]}
    ids, weights = route(spec, x.numpy(), own["weight"].numpy(), Stored(**has), tokens.numpy())
    assert ids.dtype == np.int64 and weights.dtype == np.float32
    compare(ids, weights, theirs, their_weights)


@pytest.mark.parametrize("case", ["minimax_m2", "minimax_m3_vl", "step3p7", "laguna"])
def test_weights_of_tiny_scores(case: str) -> None:
    """These families add nothing to the sum that they divide by."""
    configuration(case, FAMILIES[case][1])
    router, config = transformers_router(case, 4)
    import torch

    own = {name.split(".")[-1]: tensor for name, tensor in router.state_dict().items()}
    own["weight"].mul_(64).round_().div_(64).sub_(60)  # scores of 1e-26, of the same logits
    own.setdefault("e_score_correction_bias", torch.linspace(0, 1, EXPERTS))
    x = torch.eye(HIDDEN)
    correction = own["e_score_correction_bias"]
    theirs, their_weights = their_choice(case, router, x, correction, None)
    spec = router_of(config, 1)
    ids, weights = route(
        spec, x.numpy(), own["weight"].numpy(), Stored(correction=correction.numpy())
    )
    factor = config[OUTSIDE[case]] if case in OUTSIDE else 1
    np.testing.assert_allclose(weights.sum(axis=1), factor, rtol=1e-5)
    compare(ids, weights, theirs, their_weights * factor)


def compare(ids: Array, weights: Array, theirs: Array, their_weights: Array) -> None:
    """In the order of the experts' numbers."""
    order, their_order = np.argsort(ids), np.argsort(theirs)
    np.testing.assert_array_equal(
        np.take_along_axis(ids, order, 1), np.take_along_axis(theirs, their_order, 1)
    )
    np.testing.assert_allclose(
        np.take_along_axis(weights, order, 1),
        np.take_along_axis(their_weights, their_order, 1),
        rtol=3e-6,  # scaling factors make weights larger than 1
        atol=1e-6,
    )


@pytest.mark.parametrize("case", [case for case in FAMILIES if ":" not in case])
def test_defaults_are_those_of_transformers(case: str) -> None:
    """What a config.json without a key means."""
    config = configuration(case, FAMILIES[case][1])()
    for key in COUNTS:
        if hasattr(config, key):
            usual = 2 if key in COUNTS[-4:] else 64
            setattr(config, key, getattr(config, key) or usual)
    said = config.to_dict()
    sizes = (*COUNTS, "num_experts_per_token", "moe_top_k", "model_type", "mlp_layer_types")
    short = {key: value for key, value in said.items() if key in sizes}
    if case == "dbrx":
        short["ffn_config"] = {"moe_num_experts": 4, "moe_top_k": 1}
    assert router_of(short, 3) == router_of(said, 3)


# ---- formulas --------------------------------------------------------------------------

# For families that not every release of transformers has, a token at a time: z are the logits, b
# the correction bias. The result are experts and weights.
Choice = tuple[list[int], list[float]]


def best(values: Array, count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda e: -values[e])[:count]


def sigmoid(z: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-z)))


def deepseek(z: Array, b: Array, groups: int, kept: int, scale: float, k: int = 4) -> Choice:
    choice, size = sigmoid(z) + b, len(z) // groups
    marks = np.array([sum(sorted(choice[g * size :][:size])[-2:]) for g in range(groups)])
    allowed = [e for g in best(marks, kept) for e in range(g * size, (g + 1) * size)]
    ids = sorted(allowed, key=lambda e: -choice[e])[:k]
    total = sum(sigmoid(z)[ids])
    return ids, [scale * s / total for s in sigmoid(z)[ids]]


def flint(z: Array, b: Array) -> Choice:
    ids = best(z, 4)
    return ids, list(sigmoid(z)[ids] / sum(sigmoid(z)[ids]))


def aria(z: Array, b: Array) -> Choice:
    ids = best(z, 4)
    return ids, list(np.exp(z[ids]) / sum(np.exp(z[ids])))


def kolibri(z: Array, b: Array) -> Choice:
    ids = best(z + b, 4)
    return ids, list(sigmoid(z)[ids])


def softmax(z: Array, renormalised: bool) -> Choice:
    p = np.exp(z) / sum(np.exp(z))
    ids = best(p, 4)
    return ids, list(p[ids] / (sum(p[ids]) if renormalised else 1))


def nomic(z: Array, b: Array) -> Choice:
    return softmax(z, renormalised=False)


def muse(z: Array, b: Array) -> Choice:
    return deepseek(z * 32**-0.5, b, 1, 1, 1.0)


def sigmoid_alone(z: Array, b: Array) -> Choice:
    ids = best(sigmoid(z) + b, 4)
    return ids, list(sigmoid(z)[ids])


def mistral_large(z: Array, b: Array) -> Choice:
    p = np.exp(z) / sum(np.exp(z))
    marks = np.array([sum(sorted(p[g * 4 :][:4])[-2:]) for g in range(4)])
    ids = best(np.where([e // 4 in best(marks, 2) for e in range(len(p))], p, 0), 4)
    return ids, list(3 * p[ids] / sum(p[ids]))


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Array, Array], Choice]]] = {
    "kimi_k2": ({"n_group": 1, "topk_group": 1}, lambda z, b: deepseek(z, b, 1, 1, 2.5)),
    "kimi_k25": (GROUPS, lambda z, b: deepseek(z, b, 4, 2, 2.5)),
    "kimi_k3": ({"routed_scaling_factor": 2.0}, lambda z, b: deepseek(z, b, 1, 1, 2.0)),
    "deepseek": ({}, lambda z, b: softmax(z, renormalised=False)),
    "deepseek_v41": (
        {"scoring_func": "sigmoid", "num_hash_layers": 0},
        lambda z, b: deepseek(z, b, 1, 1, 1.5),
    ),
    "bailing_moe": ({}, lambda z, b: softmax(z, renormalised=True)),
    "k2_horizon": ({"router_scaling_factor": 2.0}, lambda z, b: deepseek(z, b, 1, 1, 2.0)),
    "xllm": (
        {"router_score_func": "softmax", "moe_gate_bias": False},
        lambda z, b: softmax(z, renormalised=True),
    ),
    "step3": ({"norm_expert_weight": True}, lambda z, b: softmax(z, renormalised=True)),
    "step3_vl": ({"norm_expert_weight": False}, lambda z, b: softmax(z, renormalised=False)),
    "bailing_moe_v2": (
        {"num_expert_group": 4, "topk_group": 2},
        lambda z, b: deepseek(z, b, 4, 2, 2.5),
    ),
    "bailing_hybrid": (
        {"num_expert_group": 4, "topk_group": 2, "moe_renormalize": True},
        lambda z, b: deepseek(z, b, 4, 2, 2.5),
    ),
    "llada2_moe": (
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        lambda z, b: deepseek(z, b, 4, 2, 2.5),
    ),
    "iquest_q1": ({}, lambda z, b: softmax(z, renormalised=True)),
    "minicpm": ({}, lambda z, b: softmax(z, renormalised=True)),
    "pangu_ultra_moe": (
        {
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "router_enable_expert_bias": True,
        },
        lambda z, b: deepseek(z, b, 1, 1, 2.5),
    ),
    "beam": (GROUPS, lambda z, b: deepseek(z, b, 4, 2, 2.5)),
    "deepseek_vl_v2": (
        {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            **GROUPS,
            "routed_scaling_factor": 2.0,
        },
        lambda z, b: deepseek(z, b, 4, 2, 2.0),
    ),
    "dots3_note": ({}, lambda z, b: deepseek(z, b, 1, 1, 1.0)),
    "step5": ({"norm_expert_weight": False}, sigmoid_alone),
    "step3p5": ({"moe_router_scaling_factor": 3}, lambda z, b: deepseek(z, b, 1, 1, 3.0)),
    "inkling2": ({}, lambda z, b: deepseek(z, b, 1, 1, 8.0)),
    "inkling_mm_model": ({"n_shared_experts": 0}, lambda z, b: deepseek(z, b, 1, 1, 8.0)),
    "aria": ({}, aria),
    "flint": ({}, flint),
    "kolibri1": ({}, kolibri),
    "muse_spark": ({}, muse),
    "nomic_bert": ({"moe_normalize_expert_weights": False, "expert_choice_router": False}, nomic),
    "mistral_large4": ({**GROUPS, "routed_scaling_factor": 3.0}, mistral_large),
}


@pytest.mark.parametrize("family", FORMULAS)
def test_routers_are_their_formulas(family: str) -> None:
    said, formula = FORMULAS[family]
    config = {"model_type": family, "num_experts_per_tok": 4, "num_experts": EXPERTS, **said}
    spec = router_of(config, 0)
    rng = np.random.default_rng(len(family))
    x = rng.standard_normal((TOKENS, HIDDEN), np.float32)
    gate = rng.standard_normal((EXPERTS, HIDDEN), np.float32) * np.float32(0.3)
    correction = rng.standard_normal(EXPERTS, np.float32) * np.float32(0.3)
    stored = Stored(
        correction=correction if spec.correction else None,
        scale=np.ones(1, np.float32) if spec.stored_scale else None,
    )
    ids, weights = route(spec, x, gate, stored)
    pairs = [formula(z, correction.astype(float)) for z in x.astype(float) @ gate.T.astype(float)]
    theirs, their_weights = (np.array(one) for one in zip(*pairs, strict=True))
    compare(ids, weights, theirs, their_weights)


def test_every_family_is_compared() -> None:
    """Also those that are added later."""
    compared = {case.split(":")[0] for case in FAMILIES} | FORMULAS.keys()
    rows = table.FAMILIES.rows
    routed = {kind for row in rows for kind in row.types if isinstance(row.routing, Router)}
    assert compared == routed
    reasons = {kind: row.routing for row in rows for kind in row.types if kind not in routed}
    assert reasons.keys() == {"zaya", "dots3_note_vision_encoder", "interns1_pro"}
    assert all(isinstance(reason, str) for reason in reasons.values())


# ---- what every router does ------------------------------------------------------------


@st.composite
def specs(draw: st.DrawFn) -> RouterSpec:
    groups = draw(st.sampled_from([1, 2, 4]))
    kept = draw(st.integers(1, groups))
    scoring = draw(st.sampled_from(SCORINGS))
    return RouterSpec(
        scoring=scoring,
        top_k=draw(st.integers(1, kept * EXPERTS // groups)),
        input_norm=draw(st.sampled_from([None, 1e-6])),
        logit_scale=draw(st.sampled_from([1.0, 0.2])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        by_logits=draw(st.booleans()),
        correction=draw(st.booleans()),
        n_group=groups,
        topk_group=kept,
        group_score=draw(st.sampled_from(["max", "top2"])),
        masked=draw(st.sampled_from([-np.inf, 0.0])),
        identity_experts=draw(st.sampled_from([0, 4])),
        sinks=0 if scoring == "softmax" else draw(st.sampled_from([0, 2])),
        renormalise=draw(st.booleans()),
        p_norm=draw(st.sampled_from([1.0, 2.0])),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
    )


@settings(max_examples=100, deadline=None)
@given(specs(), st.integers(0, 9), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 30.0]))
def test_any_router(spec: RouterSpec, tokens: int, seed: int, size: float) -> None:
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, HIDDEN), np.float32) * np.float32(size)
    gate = random.standard_normal((EXPERTS + spec.sinks, HIDDEN), np.float32)
    correction = random.standard_normal(EXPERTS, np.float32) if spec.correction else None
    scale = np.ones(HIDDEN, np.float32) if spec.input_norm is not None else None
    ids, weights = route(spec, x, gate, Stored(correction=correction, input_scale=scale))

    assert ids.shape == weights.shape == (tokens, spec.top_k)
    assert np.isfinite(weights).all() and (weights >= 0).all()
    assert ((ids >= 0) & (ids < EXPERTS)).all()
    groups = ids // (EXPERTS // spec.n_group)
    for row, used in zip(ids, groups, strict=True):
        assert len(set(row)) == spec.top_k
        assert spec.masked == 0 or len(set(used)) <= spec.topk_group
    factor = spec.routed_scaling_factor
    sums = np.linalg.norm(weights, ord=spec.p_norm if spec.renormalise else 1, axis=1)
    bounded = spec.renormalise or spec.scoring == "softmax"
    # The best experts' scores may underflow where groups or the correction shut others out.
    whole = spec.renormalise or (spec.by_logits and spec.scoring == "softmax")
    if whole and not spec.sinks and size <= 1:
        np.testing.assert_allclose(sums, factor, rtol=1e-5)
    elif bounded:
        assert (sums <= factor * (1 + 1e-5)).all()


def test_equal_scores_choose_the_lower_expert() -> None:
    gate = np.zeros((4, 8), np.float32)
    ids, weights = route(RouterSpec("softmax", 2), np.ones((1, 8), np.float32), gate)
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.5, 0.5]]
    grouped = RouterSpec("softmax", 2, n_group=2, masked=0.0)
    assert route(grouped, np.ones((1, 8), np.float32), gate)[0].tolist() == [[0, 1]]
    mixed = RouterSpec("softmax", 2, jitter=0.01)
    ids, weights = route(mixed, np.ones((1, 8), np.float32), gate)
    assert ids.tolist() == [[0, 1]] and weights[0] == pytest.approx([1 / 4, 1 / 3])


def test_saturated_scores_are_still_apart_where_logits_choose() -> None:
    """Both sigmoids are 1 in float32."""
    x, gate = np.ones((1, 1), np.float32), np.array([[30], [40]], np.float32)
    plain = RouterSpec("sigmoid", 1, renormalise=False)
    assert route(plain, x, gate)[0] == 0
    ids, weights = route(RouterSpec("sigmoid", 1, by_logits=True), x, gate)
    assert ids.tolist() == [[1]] and weights.tolist() == [[1]]


def test_sinks_of_tiny_scores_still_share() -> None:
    """exp(-200) is 0 in float32."""
    x, gate = np.ones((1, 1), np.float32), np.full((3, 1), -200, np.float32)
    spec = RouterSpec("sigmoid", 1, sinks=2, epsilon=0.0)
    assert route(spec, x, gate)[1] == pytest.approx(1 / 3)


def test_a_router_wants_its_own_arrays() -> None:
    x, gate = np.ones((1, 8), np.float32), np.ones((4, 8), np.float32)
    extra, table_of = np.zeros(4, np.float32), np.array([[0, 1], [2, 3]])
    with pytest.raises(CheckpointError, match="must not have a correction bias"):
        route(RouterSpec("softmax", 2), x, gate, Stored(correction=extra))
    with pytest.raises(CheckpointError, match="has no correction bias"):
        route(RouterSpec("sigmoid", 2, correction=True), x, gate)
    with pytest.raises(UsageError, match=r"must be \[4\]"):
        route(RouterSpec("sigmoid", 2, bias=True), x, gate, Stored(bias=extra[:3]))
    with pytest.raises(UsageError, match=r"input scale \[4\] must be \[8\]"):
        route(RouterSpec("softmax", 2, input_norm=0.0), x, gate, Stored(input_scale=extra))
    with pytest.raises(UsageError, match="do not fit"):
        route(RouterSpec("softmax", 2), x[:, :7], gate)
    with pytest.raises(CheckpointError, match="5 experts per token"):
        route(RouterSpec("softmax", 5), x, gate)
    with pytest.raises(CheckpointError, match="3 experts per token are more than the 2"):
        route(RouterSpec("sigmoid", 3, sinks=2), x, gate)
    with pytest.raises(CheckpointError, match="1 expert per token is more than the 0 there"):
        route(RouterSpec("sigmoid", 1, sinks=4), x, gate)
    by_token = RouterSpec("softmax", 2, by_token=True)
    with pytest.raises(CheckpointError, match="has no table of tokens"):
        route(by_token, x, gate)
    with pytest.raises(UsageError, match="needs the token of each row"):
        route(by_token, x, gate, Stored(table=table_of))
    with pytest.raises(UsageError, match="tokens must be from 0 to 1"):
        route(by_token, x, gate, Stored(table=table_of), np.array([2]))
    with pytest.raises(UsageError, match=r"must be \[tokens, 2\]"):
        route(by_token, x, gate, Stored(table=table_of.T[:1].T), np.array([0]))
    with pytest.raises(CheckpointError, match="has experts from 0 to 4, but there are 4"):
        route(by_token, x, gate, Stored(table=table_of + table_of // 3), np.array([0]))
    assert route(by_token, x, gate, Stored(table=table_of), np.array([1]))[0].tolist() == [[2, 3]]


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


def test_unknown_families_by_their_tensors() -> None:
    """Softmax is inferred only without a correction bias."""
    config: dict[str, Any] = {"model_type": "new_moe", "num_experts_per_tok": 2}
    found = find_router(Config({**config, "norm_topk_prob": True}), 0, corrected=False)
    assert found.spec == RouterSpec("softmax", 2)
    assert found.inferred == "norm_topk_prob True"
    found = find_router(Config({**config, "norm_topk_prob": True}), 0, corrected=True)
    assert found.spec == RouterSpec("sigmoid", 2, correction=True)
    assert found.inferred == "norm_topk_prob True and a correction bias"
    found = find_router(Config(config), 0, corrected=True)
    assert (found.spec.scoring, found.inferred) == ("sigmoid", "a correction bias")
    found = find_router(Config({**config, "scoring_func": "softmax"}), 0, corrected=True)
    assert found.spec == RouterSpec("softmax", 2, correction=True)
    with pytest.raises(CheckpointError, match="does not describe"):
        find_router(Config(config), 0, corrected=False)
    # whose bias is missing then, which whoever runs it refuses
    stated = Config({**config, "topk_method": "noaux_tc"})
    assert find_router(stated, 0, corrected=False).spec.correction
    known = Config({**config, "model_type": "mixtral"})
    assert find_router(known, 0, corrected=True).inferred == ""


def test_settings_of_single_layers() -> None:
    """Lists with a value for each layer, and layers whose tokens have experts of their own."""
    scaled = {"model_type": "glm4_moe", "num_experts_per_tok": 2}
    scaled["routed_scaling_factor"] = [1.0, 2.0]
    assert router_of(scaled, 1).routed_scaling_factor == 2.0
    assert router_of(scaled | {"routed_scaling_factor": False}, 1).routed_scaling_factor == 1.0
    hashed = {"model_type": "deepseek_v4", "num_experts_per_tok": 2}
    assert [router_of(hashed, layer).by_token for layer in (2, 3)] == [True, False]
    assert not router_of(hashed | {"num_hash_layers": 0}, 0).by_token
    assert not find_router(Config(hashed), 0, corrected=True).spec.by_token
    assert find_router(Config(hashed | {"num_hash_layers": 1}), 0, corrected=True).spec.by_token
    kinds = {"mlp_layer_types": ["moe", "hash_moe"], "num_hash_layers": 1}
    found = [router_of(hashed | kinds, layer) for layer in range(3)]
    assert [spec.by_token for spec in found] == [False, True, False]
    assert [spec.correction for spec in found] == [True, False, True]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "does not describe the router of new_moe"),
        ({"scoring_func": "tanh"}, "unknown router score function 'tanh'"),
        ({"model_type": "cohere2_moe", "expert_selection_fn": "tanh"}, "function 'tanh'"),
        ({"topk_method": "dice"}, "dice"),
        ({"topk_method": "noaux_tc", "scoring_func": "softmax"}, "contradicts itself"),
        ({"scoring_func": "softmax", "num_experts_per_tok": 0}, "is 0, not a number of experts"),
        ({"scoring_func": "softmax", "num_experts_per_tok": None}, "does not say how many"),
        ({"scoring_func": "softmax", "num_experts": 7, "n_group": 2}, "7 experts"),
        ({"scoring_func": "softmax", "num_experts": 1}, "2 experts per token"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "contradicts itself"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob"),
        ({"model_type": "deepseek_v2", "topk_method": "dice"}, "top-k method 'dice'"),
        ({"model_type": "deepseek_v2", "scoring_func": "sigmoid"}, "softmax, not sigmoid"),
        ({"model_type": "phimoe", "num_experts_per_tok": 3}, "sparsemixer chooses 2 experts"),
        ({"model_type": "zaya"}, "router of zaya is not supported: it adds up states"),
        (
            {"model_type": "laguna", "moe_apply_router_weight_on_input": True},
            "moe_apply_router_weight_on_input is not supported",
        ),
        ({"model_type": "longcat_flash", "zero_expert_num": 1, "n_routed_experts": 0}, "than the"),
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
        ("m.layers.3.mlp.experts", "correction", "m.layers.3.moe.router.expert_bias"),
        ("layers.3.ffn.experts", "table", "layers.3.ffn.gate.tid2eid"),
        ("model.llm.layers.3.mlp.experts", "scale", "model.llm.layers.3.mlp.gate.global_scale"),
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
        shared_expert_tensors("model.layers.3.attention")
