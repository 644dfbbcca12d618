"""The model families that ktconv knows, one row each.

To add a family, add a row; fields left out have the defaults of most families. A row's lines are
about, in this order: types and names of tensors, activation, router, keys of config.json.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktconv.families.family import (
    INPUT_OUTPUT,
    NUMBERED_W,
    ExpertActivation,
    Family,
    Matrices,
    Router,
    RouterSpec,
)

_SOFTMAX = RouterSpec("softmax")
_PLAIN = RouterSpec("softmax", renormalise=False)
_CORRECTED = RouterSpec("sigmoid", correction=True)
_LOGITS = replace(_PLAIN, by_logits=True)


def _router(spec: RouterSpec, *reads: str) -> Router:
    return Router(spec, frozenset(reads))


def _noaux(**changes: Any) -> Router:
    """As DeepSeek-V3 and those that took it over: sigmoid, correction bias, groups, factor."""
    return _router(replace(_CORRECTED, **changes), "renormalise", "groups", "scale")


_CLAMPED = ExpertActivation(limit=10.0)
_OAI = ExpertActivation(alpha=1.702, limit=7.0)

# As Mixtral stores its experts, and those that took that over.
_MIXTRAL: dict[str, Any] = {"block": "block_sparse_moe", "matrices": NUMBERED_W}

# As GraniteMoE does: two tensors for all experts, in the block itself.
_LINEAR: dict[str, Any] = {"experts": "", "matrices": INPUT_OUTPUT, "router": "router.layer"}

_INKLING: dict[str, Any] = {
    "matrices": Matrices("w1", "w3", "w2", "w13"), "interleaved": True, "correction": "gate.bias",
    "norm": "mlp_norm", "mtp_inside": "transformer_block",
}  # fmt: skip

_GPT_OSS: dict[str, Any] = {
    "router": "router", "router_bias": "router.bias", "expert_biases": True,
    "activation": _OAI,
}  # fmt: skip

# As DeepSeek-V2 has it. Implementations do not agree on what it is to renormalise.
_GREEDY = Router(
    replace(_PLAIN, group_score="max"),
    frozenset(("groups", "scale")),
    methods=("greedy", "group_limited_greedy"),
    never=("renormalise",),
)

_ERNIE = _router(replace(_SOFTMAX, correction=True, epsilon=0.0, least_sum=1e-12), "least sum")

# Tensors of GGUF files, whatever the model is; `blk.3.ffn_gate.5.weight` is of old ones.
_GGUF = Family(
    (),
    layers="blk",
    block="",
    experts="",
    matrices=Matrices("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"),
    before_number=Matrices("ffn_gate", "ffn_up", "ffn_down"),
    router="ffn_gate_inp",
    router_bias="ffn_gate_inp.bias",
    router_input_scale="ffn_gate_inp.scale",
    correction="exp_probs_b.bias",
    shared="",
    shared_matrices=Matrices("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    shared_gate="ffn_gate_inp_shexp",
    norm="ffn_norm",
    latent=("ffn_latent_down", "ffn_latent_up"),
)

# fmt: off
ROWS = (
    # ---- Qwen ----
    Family(("qwen2_moe", "qwen3_moe"), shared="shared_expert",
           routing=_router(_PLAIN, "renormalise")),
    Family(("qwen3_next", "qwen3_omni_moe"), shared="shared_expert",
           routing=_router(_SOFTMAX, "renormalise")),
    Family(("qwen3_5_moe", "qwen3_vl_moe"), shared="shared_expert",
           routing=_router(_SOFTMAX)),
    Family(("qwen4_exp",), shared="shared_expert",
           routing=_router(_SOFTMAX, "renormalise")),

    # ---- as Mixtral ----
    Family(("mixtral", "minimax"), **_MIXTRAL,
           routing=_router(_SOFTMAX)),
    Family(("minimax_m2",), **_MIXTRAL, correction="e_score_correction_bias",
           routing=_router(_CORRECTED, "correction")),
    Family(("minimax_m3_vl",), **_MIXTRAL, correction="e_score_correction_bias",
           activation=_OAI,
           routing=_router(replace(_CORRECTED, routed_scaling_factor=2.0), "scale")),
    Family(("phimoe",), **_MIXTRAL,
           routing=_router(replace(_PLAIN, jitter=0.01), "router jitter")),
    Family(("kimi_linear",), **_MIXTRAL,
           routing=_noaux(routed_scaling_factor=2.446),
           keys={"top_k": ("num_experts_per_token",), "n_group": ("num_expert_group",),
                 "scoring": ("moe_router_activation_func",), "renormalise": ("moe_renormalize",)}),
    Family(("kimi_k3",), **_MIXTRAL,
           latent=("routed_expert_down_proj", "routed_expert_up_proj"),
           activation=ExpertActivation(gate_cap=4.0, up_cap=25.0),
           routing=_noaux()),

    # ---- DeepSeek, Kimi ----
    Family(("deepseek_v2",),
           routing=_GREEDY),
    Family(("deepseek_ocr2",),
           routing=_GREEDY),
    Family(("deepseek_v3", "deepseek_v32", "kimi_k2"),
           routing=_noaux(n_group=8, topk_group=4, routed_scaling_factor=2.5)),
    Family(("kimi_k25",),
           routing=_noaux(n_group=8, topk_group=4, routed_scaling_factor=2.5)),
    # No family has another bias under the name gate.bias.
    Family(("deepseek_v4",), block="ffn", matrices=NUMBERED_W, shared_matrices=NUMBERED_W,
           correction="gate.bias", norm="ffn_norm",
           activation=_CLAMPED,
           router_table="gate.tid2eid",
           routing=_router(
               RouterSpec("sqrtsoftplus", correction=True, routed_scaling_factor=1.5),
               "scoring", "scale", "hash layers")),

    # ---- GLM ----
    Family(("glm4_moe", "glm4v_moe", "solar_open"),
           routing=_noaux()),
    Family(("glm4_moe_lite",),
           routing=_noaux(routed_scaling_factor=1.8)),
    Family(("glm_moe_dsa",),
           routing=_noaux(routed_scaling_factor=2.5)),
    Family(("glm5_next",),
           activation=_CLAMPED,
           routing=_noaux(routed_scaling_factor=2.5)),

    # ---- gpt-oss ----
    Family(("gpt_oss",), **_GPT_OSS, interleaved=True,
           routing=_router(replace(_LOGITS, bias=True))),
    Family(("openai_privacy_filter",), **_GPT_OSS,
           # which its router divides by their number, and its block multiplies by it
           routing=_router(replace(_LOGITS, bias=True))),

    # ---- Baidu, Tencent, Ant, StepFun, Xiaomi, Meituan ----
    Family(("ernie4_5_moe",), correction="moe_statics.e_score_correction_bias", mtp="mtp_block",
           routing=_ERNIE,
           keys={"experts": ("moe_num_experts",), "top_k": ("moe_k",)}),
    Family(("ernie4_5_vl_moe",), correction="moe_statics.e_score_correction_bias",
           router_is_transposed=True, correction_rows=2,
           routing=_ERNIE),
    Family(("hunyuan_v1_moe",), router="gate.wg", shared="shared_mlp",
           routing=_router(_SOFTMAX)),
    Family(("hy_v3",), router="router.gate", correction="expert_bias", shared="shared_mlp",
           routing=_router(replace(_CORRECTED, routed_scaling_factor=2.826), "scale"),
           keys={"scale": ("router_scaling_factor",)}),
    Family(("hy_v4",), mtp="mtp_layers",
           # as transformers saves them, which renames what in attention is a linear_gate
           shared_matrices=Matrices("linear_gate", "up_proj", "down_proj"),
           activation=_CLAMPED, shared_limit=False,
           routing=_noaux(routed_scaling_factor=2.827)),
    Family(("bailing_moe_v2", "bailing_hybrid"), correction="gate.expert_bias",
           routing=_noaux(n_group=8, topk_group=4, routed_scaling_factor=2.5)),
    Family(("step3p5", "step3p7"), block="moe", experts="", correction="router_bias",
           shared="share_expert",
           routing=_router(_CORRECTED, "scale"),
           keys={"top_k": ("moe_top_k",), "scale": ("moe_router_scaling_factor",)}),
    Family(("mimo_v2_flash",),
           routing=_noaux()),
    Family(("longcat_flash",), router="router.classifier",
           correction="router.e_score_correction_bias",
           routing=_router(
               replace(_PLAIN, correction=True, identity_experts=256, routed_scaling_factor=6.0),
               "scale", "zero experts"),
           keys={"intermediate size": ("expert_ffn_hidden_size",),
                 "zero experts": ("zero_expert_num",)}),

    # ---- others, by name ----
    Family(("afmoe",), router="router.gate", correction="expert_bias",
           routing=_router(_CORRECTED, "scale"),
           keys={"renormalise": ("route_norm",), "scale": ("route_scale",)}),
    Family(("aria",), matrices=Matrices("", "", "fc2", "fc1"), router="router",
           routing=_router(_LOGITS),
           keys={"experts": ("moe_num_experts",)}),
    Family(("axk1",),
           routing=_noaux(n_group=8, topk_group=4, routed_scaling_factor=2.5)),
    Family(("axk2",),
           routing=_noaux(masked=0.0, routed_scaling_factor=2.5)),
    Family(("beam",),
           routing=_noaux(n_group=8, topk_group=4, routed_scaling_factor=2.5)),
    Family(("cohere2_moe",),
           routing=_router(replace(_SOFTMAX, by_logits=True), "scoring", "renormalise"),
           keys={"scoring": ("expert_selection_fn",)}),
    Family(("dbrx",), layers="blocks", block="ffn", router="router.layer",
           matrices=Matrices("mlp.w1", "mlp.v1", "mlp.w2", rows_of_all=True),
           norm="norm_attn_norm.norm_2",
           routing=_router(_SOFTMAX, "p-norm"),
           keys={"layers": ("n_layers",), "hidden size": ("d_model",),
                 "experts": ("moe_num_experts",), "top_k": ("moe_top_k",),
                 "activation": ("ffn_config.ffn_act_fn.name",)}),
    Family(("dots1",),
           routing=_noaux(renormalise=False)),
    Family(("dots3_note",),
           routing=_noaux()),
    Family(("dots3_note_vision_encoder",), layers="blocks", norm="norm_2",
           matrices=Matrices("fc1", "fc3", "fc2"), correction="router_bias",
           routing="has its weights in gate_weight, which is not read"),
    Family(("exaone_moe",), correction="e_score_correction_bias",
           routing=_noaux(routed_scaling_factor=2.5)),
    Family(("flint",), shared="shared_expert",
           routing=_router(RouterSpec("sigmoid"), "renormalise")),
    Family(("gemma4", "diffusion_gemma"), block="", router="router.proj",
           norm="pre_feedforward_layernorm_2",
           activation=ExpertActivation("gelu_tanh"),
           router_input_scale="router.scale", router_expert_scale="router.per_expert_scale",
           routing=_router(
               replace(_SOFTMAX, input_norm=1e-6, expert_scale=True), "norm epsilon"),
           keys={"top_k": ("top_k_experts",)}),
    Family(("granitemoe",), block="block_sparse_moe", **_LINEAR,
           routing=_router(_LOGITS)),
    Family(("granitemoeshared", "granitemoehybrid"), block="block_sparse_moe", **_LINEAR,
           shared="shared_mlp",
           routing=_router(_LOGITS)),
    Family(("granitemoe_swa",), block="block_sparse_moe", router="router", shared="shared_mlp",
           routing=_router(_LOGITS)),
    # inkling_text is the text section's of inkling_mm_model
    Family(("inkling_mm_model", "inkling"), **_INKLING, router_scale="gate.global_scale",
           routing=_router(
               replace(
                   _CORRECTED, sinks=2, epsilon=0.0, stored_scale=True, routed_scaling_factor=8.0),
               "shared experts", "scale"),
           keys={"scale": ("route_scale",)}),
    Family(("inkling2",), **_INKLING,
           activation=ExpertActivation(gate_cap=4.0, up_cap=25.0),
           routing=_router(replace(_CORRECTED, routed_scaling_factor=8.0), "scoring", "scale"),
           keys={"scale": ("route_scale",)}),
    Family(("jamba",), block="feed_forward", router="router",
           routing=_router(_PLAIN)),
    Family(("jetmoe",), **_LINEAR, other_experts="self_attention",
           routing=_router(_LOGITS),
           keys={"activation": ("activation_function",)}),
    Family(("kolibri1",), layer_correction="moe.router.expert_bias",
           routing=_router(replace(_CORRECTED, by_logits=True, renormalise=False), "renormalise")),
    Family(("laguna",), shared="shared_expert", correction="experts.e_score_correction_bias",
           beside=("e_score_correction_bias",),
           routing=Router(
               _CORRECTED, frozenset(("scale", "logit softcap")), never=("weight on input",)),
           keys={"scale": ("moe_routed_scaling_factor",)}),
    Family(("lfm2_moe",), block="feed_forward", matrices=NUMBERED_W, norm="ffn_norm",
           correction="expert_bias",
           routing=_router(
               replace(_CORRECTED, epsilon=1e-6), "renormalise", "scale", "correction")),
    Family(("llama4",), block="feed_forward", router="router", shared="shared_expert",
           routing=_router(
               RouterSpec("sigmoid", by_logits=True, renormalise=False, weight_on_input=True))),
    Family(("mellum",),
           routing=_router(_SOFTMAX, "renormalise")),
    Family(("mistral4",),
           routing=_router(replace(_SOFTMAX, masked=0.0), "renormalise", "groups", "scale")),
    Family(("mistral_large4",), block="", matrices=NUMBERED_W, shared_matrices=NUMBERED_W,
           mtp="mtp_dspark", norm="ffn_norm",
           routing=_router(replace(_SOFTMAX, masked=0.0), "groups", "scale")),
    Family(("muse_spark",), beside=("post_expert_norm.weight",),
           latent=("pre_expert_proj", "post_expert_proj"),
           post_norm="post_expert_norm",
           routing=_router(
               replace(_CORRECTED, logit_scale=0.1767766952966369, epsilon=1e-15),
               "logit scale", "scale")),
    Family(("nemotron_h",), block="mixer", norm="norm",
           latent=("fc1_latent_proj", "fc2_latent_proj"),
           activation=ExpertActivation("relu2"),
           routing=_noaux(),
           keys={"activation": ("mlp_hidden_act",)}),
    Family(("olmoe", "flex_olmo"),
           routing=_router(_PLAIN, "renormalise")),
    Family(("zaya",),
           routing="adds up states of the routers of all layers before it"),

    # ---- as mlx-lm saves experts that it did not quantize, whatever the model is ----
    Family((), experts="switch_mlp"),

    # ---- GGUF ----
    _GGUF,
    replace(_GGUF, norm="post_attention_norm"),  # where `ffn_norm` is not there
)
# fmt: on
