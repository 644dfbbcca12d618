"""The model families that ktconv knows, one row each.

To add a family, add a row; fields left out have the defaults of most families. A row's lines are
about, in this order: types and names of tensors, activation, router, keys of config.json.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ktconv.families.family import (
    INPUT_OUTPUT,
    NUMBERED_W,
    ExpertActivation,
    Family,
    Matrices,
    Released,
    Router,
    RouterSpec,
)

_SOFTMAX = RouterSpec("softmax")
_PLAIN = RouterSpec("softmax", renormalise=False)
_CORRECTED = RouterSpec("sigmoid", correction=True)
_SHARES = replace(_CORRECTED, epsilon=0.0)  # of the sum itself, however small it is
_LOGITS = replace(_PLAIN, by_logits=True)


def _router(spec: RouterSpec, *reads: str) -> Router:
    return Router(spec, frozenset(reads))


def _noaux(**changes: Any) -> Router:
    """Router of DeepSeek-V3 and those that took it over: sigmoid, correction bias, groups,
    factor."""
    return _router(replace(_CORRECTED, **changes), "renormalise", "groups", "scale")


_CLAMPED = ExpertActivation(limit=10.0)
_OAI = ExpertActivation(alpha=1.702, limit=7.0)

# As Mixtral stores its experts, and those that took that over.
_MIXTRAL: dict[str, Any] = {"block": "block_sparse_moe", "matrices": NUMBERED_W}

# As GraniteMoE does: two tensors for all experts, in the block itself.
_LINEAR: dict[str, Any] = {
    "experts": "",
    "matrices": INPUT_OUTPUT,
    "unfused": NUMBERED_W,
    "router": "router.layer",
}

_INKLING: dict[str, Any] = {
    "matrices": Matrices("w1", "w3", "w2", "w13"), "interleaved": True, "correction": "gate.bias",
    "norm": "mlp_norm", "mtp_inside": "transformer_block",
}  # fmt: skip

_GPT_OSS: dict[str, Any] = {
    "router": "router", "router_bias": "router.bias", "expert_biases": True,
    "activation": _OAI,
}  # fmt: skip

_HY4: dict[str, Any] = {
    "fused_only": True, "mtp": "mtp_layers",
    # as transformers saves them, which renames what in attention is a linear_gate
    "shared_matrices": Matrices("linear_gate", "up_proj", "down_proj"),
    "activation": _CLAMPED, "shared_limit": False,
    "routing": _noaux(routed_scaling_factor=2.827),
}  # fmt: skip

# As DeepSeek-V2 has it. Implementations do not agree on what it is to renormalise. DeepSeek-VL2 has
# layers of V2 and the router of V3.
_GREEDY = Router(
    replace(_PLAIN, group_score="max"),
    frozenset(("groups", "scale")),
    methods=("greedy", "group_limited_greedy"),
    never=("renormalise",),
    by_method={"noaux_tc": _noaux()},
)

_ERNIE = _router(replace(_SOFTMAX, correction=True, epsilon=0.0, least_sum=1e-12), "least sum")

# What comes before the list of layers in models that see.
_VISION, _LANGUAGE = "model.language_model.", "language_model.model."

# Modules of transformers' models: what wraps a language model, and the language model alone.
_WRAPPED = (
    (r"^language_model\.lm_head$", "lm_head"),
    (r"^language_model\.(?:model\.)?", "model.language_model."),
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
)
_TEXT_ALONE = ((r"^model\.language_model\.", "model."),)
_FORGET_GATE = (r"\.self_attn\.(f_[ab]_proj)$", r".self_attn.forget_gate.\1")
_OF_M3 = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"^vision_tower\.vision_model\.encoder\.", "vision_tower."),
    (r"^patch_merge_mlp\.", "multi_modal_projector.merge_"),
    *_WRAPPED,
    (r"\.self_attn\.index_", ".self_attn.indexer."),
    (r"\.(?:gate|up)_proj$", ".gate_up_proj"),
)
_OF_OCR2 = (
    (r"^model\.layers\.", "model.language_model.layers."),
    (r"^model\.projector\.layers$", "model.multi_modal_projector"),
    (r"^model\.sam_model\.blocks\.", "model.vision_tower.sam_encoder.layers."),
    (r"^model\.qwen2_model\.model\.model\.", "model.vision_tower.vision_encoder."),
)
_OF_KIMI_VL = (
    (r"^vision_tower\.encoder\.(.*)\.wo$", r"vision_tower.encoder.\1.attn.proj"),
    (r"\.wqkv$", ".attn.q_proj|.attn.k_proj|.attn.v_proj"),
    (r"^(vision_tower\..*\.mlp)\.fc1$", r"\1.fc2"),
    (r"^(vision_tower\..*\.mlp)\.fc0$", r"\1.fc1"),
    (r"^vision_tower\.encoder\.", "vision_tower."),
    (r"^mm_projector\.proj\.0$", "model.mm_projector.in_proj"),
    (r"^mm_projector\.proj\.2$", "model.mm_projector.out_proj"),
    *_WRAPPED,
    (r"\.blocks\.", ".layers."),
)
_OF_V4 = (
    (r"^layers\.", "model.layers."),
    (r"^head$", "lm_head"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.indexer\.weights_proj$", ".compressor.indexer.scorer.weights_proj"),
    (r"\.indexer\.wq_b$", ".compressor.indexer.q_b_proj"),
    (r"\.w(q_a|q_b|kv|o_a|o_b)$", r".\1_proj"),
    (r"\.wgate$", ".gate_proj"),
    (r"\.shared_experts\.w1$", ".shared_experts.gate_proj"),
    (r"\.shared_experts\.w2$", ".shared_experts.down_proj"),
    (r"\.shared_experts\.w3$", ".shared_experts.up_proj"),
)
_OF_ERNIE_VL = (
    (r"\bvision_model\.", "vision_tower."),
    (r"^model\.layers\.", "model.language_model.layers."),
    (r"\.((?:spatial|temporal)_linear)\.0$", r".\1.fc1"),
    (r"\.((?:spatial|temporal)_linear)\.2$", r".\1.fc2"),
)
_OF_STEP = (
    (r"^model\.layers\.", "model.language_model.layers."),
    (r"\.moe\.gate$", ".mlp.gate"),
    (r"\.share_expert\.", ".mlp.shared_experts."),
    (r"^vit_large_projector$", "model.multi_modal_projector"),
    (r"^vision_model\.transformer\.resblocks\.", "model.vision_model.layers."),
    # q, k and v are a parameter of one module with out_proj
    (r"\.attn\.out_proj$",
     ".self_attn.out_proj|.self_attn.q_proj|.self_attn.k_proj|.self_attn.v_proj"),
    (r"\.mlp\.c_fc$", ".mlp.fc1"),
    (r"\.mlp\.c_proj$", ".mlp.fc2"),
)  # fmt: skip
_OF_BAILING = (
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense$", ".self_attn.o_proj"),
    (r"\.self_attn\.f_proj$", ".self_attn.forget_gate.f_proj"),
)
_OF_SARVAM = (
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense$", ".self_attn.o_proj"),
    (r"\.query_key_value$", ".q_proj|.k_proj|.v_proj"),
)
_OF_UNLIMITED_OCR = (
    (r"^model\.layers\.", "model.language_model.layers."),
    (r"^model\.projector\.layers$", "model.multi_modal_projector"),
    (r"^model\.sam_model\.blocks\.", "model.vision_tower.sam_encoder.layers."),
    (r"^model\.vision_model\.transformer\.", "model.vision_tower.vision_encoder.encoder."),
    (r"\.qkv_proj$", ".q_proj|.k_proj|.v_proj"),
)
_OF_LARGE4 = (
    (r"^vision_encoder\.", "model.vision_tower."),
    (r"^layers\.", "model.language_model.layers."),
    (r"^patch_merger\.", "model.multi_modal_projector.patch_merger."),
    (r"^vision_language_adapter\.w_in$", "model.multi_modal_projector.linear_1"),
    (r"^vision_language_adapter\.w_out$", "model.multi_modal_projector.linear_2"),
    (r"(\.language_model\..*)\.attention\.", r"\1.self_attn."),
    (r"(\.(?:self_attn|attention))\.w([qkvo])$", r"\1.\2_proj"),
    (r"\.wkv_a_with_mqa$", ".kv_a_proj_with_mqa"),
    (r"\.wkv_b$", ".kv_b_proj"),
    (r"(\.feed_forward|\.shared_experts)\.w1$", r"\1.gate_proj"),
    (r"(\.feed_forward|\.shared_experts)\.w2$", r"\1.down_proj"),
    (r"(\.feed_forward|\.shared_experts)\.w3$", r"\1.up_proj"),
    (r"(\.language_model\..*)\.feed_forward\.", r"\1.mlp."),
    (r"\.(gate|shared_experts\..*)$", r".mlp.\1"),
)
_LINEAR_GATE = ((r"\.linear_gate$", ".gate_proj"),)
_OF_HY4_VL = (
    *_LINEAR_GATE,
    (r"^model\.layers\.", "model.language_model.layers."),
    (r"^vit\.perceive\.proj\.0$", "model.vision_tower.patch_merger.proj_conv"),
    (r"^vit\.perceive\.proj\.2$", "model.vision_tower.patch_merger.proj_out"),
    (r"^vit\.(.*)\.dense_h_to_4h$", r"vit.\1.fc1"),
    (r"^vit\.(.*)\.dense_4h_to_h$", r"vit.\1.fc2"),
    (r"^vit\.", "model.vision_tower."),
)
_OF_INKLING2 = (
    (r"^model\.llm\.", "model.language_model."),
    (r"\.attn\.w([qkv])_[a-z]+$", r".self_attn.\1_proj.linear"),
    (r"\.attn\.wo_ud$", ".self_attn.o_proj.linear"),
    (r"\.attn\.wr_du$", ".self_attn.relative_position_bias.linear"),
    (r"\.attn\.gate_attn$", ".self_attn.o_proj.gate_proj"),
    (r"\.attn\.attn_sink_proj$", ".self_attn.sink_proj"),
    (r"^model\.visual\.backbone\.", "model.vision_tower."),
    (r"^model\.visual\.proj_in$", "model.vision_tower.merger.linear_1"),
    (r"^model\.visual\.proj_out$", "model.vision_tower.merger.linear_2"),
    (r"\.mlp\.c_fc$", ".mlp.fc1"),
    (r"\.mlp\.c_proj$", ".mlp.fc2"),
    (r"\.controllers\.attn\.", ".q_message_gate."),
    (r"\.controllers\.([kv]|mlp)\.", r".\1_message_gate."),
    (r"\.down_weight$", ".down_proj"),
    (r"\.gain_weight$", ".message_gate_proj"),
    (r"\.forget_weight$", ".forget_gate_proj"),
)
_OF_LARA = (
    (r"\.linear_attn\.in_proj$",
     ".linear_attn.in_proj_qkv|.linear_attn.in_proj_z|.linear_attn.in_proj_b|.linear_attn.in_proj_a"),
)  # fmt: skip
_OF_AXK2 = (
    (r"\.W_down$", ".mlp.fc1"),
    (r"\.W_up$", ".mlp.fc2"),
    (r"\.self_attn\.q_b_proj$", ".self_attn.q_gate_proj"),
)

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
           routing=_router(_PLAIN, "renormalise"),
           released=(
               Released("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B", shared=True),
               Released("qwen3_moe", "Qwen3-MoE"))),
    # of the talker, too: its section is only read for that tower
    Family(("qwen3_next",), shared="shared_expert", norm_less_one=True,
           routing=_router(_SOFTMAX, "renormalise"),
           released=(Released("qwen3_next", "Qwen3-Next", shared=True),)),
    Family(("qwen3_omni_moe_talker",), fused_only=True, shared="shared_expert",
           routing=_router(_PLAIN, "renormalise"),
           released=(
               Released("qwen3_omni_moe_talker", "Qwen3-Omni-MoE (talker)",
                        prefix="talker.model.", shared=True),)),
    Family(("qwen3_omni_moe",), tower="thinker",
           routing=_router(_SOFTMAX, "renormalise"),
           released=(
               Released("qwen3_omni_moe", "Qwen3-Omni-MoE (thinker)", prefix="thinker.model."),)),
    Family(("qwen3_5_moe",), shared="shared_expert", norm_less_one=True, modules=_TEXT_ALONE,
           routing=_router(_SOFTMAX),
           released=(
               Released("qwen3_5_moe", "Qwen3.5, Qwen3.6, Qwen3.8-2.4T-A95B", "F1",
                        prefix=_VISION, shared=True),
               Released("qwen3_5_moe", "the same in FP8", "N", "fp8-block", prefix=_VISION,
                        shared=True))),
    Family(("qwen3_vl_moe",), fused_only=True,
           routing=_router(_SOFTMAX),
           released=(
               Released("qwen3_vl_moe", "Qwen3-VL-MoE", "F2", "bf16 fp8-block", prefix=_VISION),)),
    Family(("qwen4_exp",), shared="shared_expert", norm_less_one=True, modules=_TEXT_ALONE,
           routing=_router(_SOFTMAX, "renormalise"),
           released=(
               Released("qwen4_exp", "Qwen3.8-Flash-Next", "F1", prefix=_VISION, shared=True),
               Released("qwen4_exp", "the same in FP8", "N", "fp8-block", prefix=_VISION,
                        shared=True))),

    # ---- as Mixtral ----
    Family(("mixtral", "minimax"), **_MIXTRAL,
           routing=_router(_SOFTMAX),
           released=(
               Released("mixtral", "Mixtral", "W"),
               Released("minimax", "MiniMax-Text-01", "W"))),
    Family(("minimax_m2",), **_MIXTRAL, correction="e_score_correction_bias",
           routing=_router(_SHARES, "correction"),
           released=(Released("minimax_m2", "MiniMax-M2, M2.5, M2.7", "W", "fp8-block"),)),
    Family(("minimax_m3_vl",), **_MIXTRAL, correction="e_score_correction_bias",
           norm_less_one=True, modules=_OF_M3,
           activation=_OAI,
           routing=_router(replace(_SHARES, routed_scaling_factor=2.0), "scale"),
           released=(
               Released("minimax_m3_vl", "MiniMax-M3", "W", "bf16 fp8-block nvfp4",
                        prefix=_LANGUAGE, shared=True, mxfp8=True),)),
    Family(("phimoe",), **_MIXTRAL, modules=((r"\.block_sparse_moe\.gate$", ".mlp.router"),),
           routing=_router(replace(_PLAIN, jitter=0.01), "router jitter"),
           released=(Released("phimoe", "Phi-3.5-MoE", "W"),)),
    Family(("kimi_linear",), **_MIXTRAL,
           modules=(_FORGET_GATE, (r"\.block_sparse_moe\.", ".mlp.")),
           routing=_noaux(routed_scaling_factor=2.446),
           keys={"top_k": ("num_experts_per_token",), "n_group": ("num_expert_group",),
                 "scoring": ("moe_router_activation_func",), "renormalise": ("moe_renormalize",)},
           released=(Released("kimi_linear", "Kimi-Linear", "W", shared=True),)),
    Family(("kimi_k3",), fused_only=True, **_MIXTRAL,
           latent=("routed_expert_down_proj", "routed_expert_up_proj"),
           activation=ExpertActivation(gate_cap=4.0, up_cap=25.0),
           routing=_noaux(),
           released=(Released("kimi_k3", "Kimi-K3", "W", "mxfp4", prefix=_LANGUAGE, shared=True),)),

    # ---- DeepSeek, Kimi ----
    Family(("deepseek",), fused_only=True,
           routing=_router(_PLAIN, "renormalise"),
           released=(Released("deepseek", "DeepSeek-MoE-16B", shared=True),)),
    Family(("deepseek_v2",),
           routing=_GREEDY,
           released=(Released("deepseek_v2", "DeepSeek-V2, -Lite", shared=True),)),
    Family(("unlimited_ocr",), fused_only=True, modules=_OF_UNLIMITED_OCR,
           routing=_GREEDY,
           released=(Released("unlimited_ocr", "Unlimited-OCR", shared=True),)),
    # deepseek_vl_v2 is what releases say, of DeepSeek-OCR and DeepSeek-VL2 too; their text sections
    # need not have a model_type
    Family(("deepseek_ocr2", "deepseek_vl_v2"), modules=_OF_OCR2,
           routing=_GREEDY,
           released=(
               Released("deepseek_ocr2", "DeepSeek-OCR-2", shared=True),
               Released("deepseek_vl_v2", "DeepSeek-VL2", prefix="language.model.",
                        shared=True))),
    Family(("deepseek_v3", "deepseek_v32", "kimi_k2"),
           routing=_noaux(n_group=8, topk_group=4, routed_scaling_factor=2.5),
           released=(
               Released("deepseek_v3", "DeepSeek-V3, R1, V3.1, Kimi-K2-Instruct, GigaChat3",
                        "N", "fp8-block", shared=True),
               Released("deepseek_v32", "DeepSeek-V3.2", "N", "fp8-block", shared=True),
               Released("kimi_k2", "Kimi-K2-Thinking", "N", "int4-packed", shared=True))),
    Family(("kimi_k25",), modules=_OF_KIMI_VL,
           routing=_noaux(n_group=8, topk_group=4, routed_scaling_factor=2.5),
           released=(
               Released("kimi_k25", "Kimi-K2.5, K2.6", "N", "int4-packed", prefix=_LANGUAGE,
                        shared=True),)),
    # No family has a bias of another kind under the name gate.bias.
    Family(("deepseek_v4", "deepseek_v41"), block="ffn", matrices=NUMBERED_W,
           shared_matrices=NUMBERED_W, correction="gate.bias", norm="ffn_norm", modules=_OF_V4,
           activation=_CLAMPED,
           router_table="gate.tid2eid",
           routing=_router(
               RouterSpec("sqrtsoftplus", correction=True, routed_scaling_factor=1.5),
               "scoring", "scale", "hash layers"),
           released=(
               Released("deepseek_v4", "DeepSeek-V4, V4-Flash, V4-Pro, V4.1-Flash", "W",
                        "mxfp4 fp8-block", prefix="", shared=True),)),

    # ---- GLM ----
    Family(("glm4_moe", "glm4v_moe", "solar_open"),
           routing=_noaux(),
           released=(
               Released("glm4_moe", "GLM-4.5, 4.6, 4.7, -Air", "N",
                        "bf16 fp8-channel fp8-block", shared=True),
               Released("glm4v_moe", "GLM-4.5V, 4.6V", prefix=_VISION, shared=True),
               Released("solar_open", "Solar-Open-100B", shared=True))),
    Family(("glm4_moe_lite",),
           routing=_noaux(routed_scaling_factor=1.8),
           released=(Released("glm4_moe_lite", "GLM-4.7-Flash", shared=True),)),
    Family(("glm_moe_dsa",),
           routing=_noaux(routed_scaling_factor=2.5),
           released=(
               Released("glm_moe_dsa", "GLM-5, 5.1, 5.2", "N", "bf16 fp8-block", shared=True),)),
    Family(("glm5_next",), modules=(_FORGET_GATE,),
           activation=_CLAMPED,
           routing=_noaux(routed_scaling_factor=2.5),
           released=(
               Released("glm5_next", "GLM-5.3-Flash", "N", "fp8-block mxfp4", prefix=_VISION,
                        shared=True),)),

    # ---- gpt-oss ----
    # with a list of modules for each matrix as Unsloth saves it, which takes the stacks apart
    Family(("gpt_oss",), fused_only=True, **_GPT_OSS, interleaved=True,
           before_number=Matrices("", "", "down_projs", "gate_up_projs"),
           routing=_router(replace(_LOGITS, bias=True)),
           released=(
               Released("gpt_oss", "gpt-oss-20b, 120b", "F4", "mxfp4"),
               Released("gpt_oss", "the same in BF16", "F3"))),
    Family(("openai_privacy_filter",), fused_only=True, **_GPT_OSS,
           # which its router divides by their number, and its block multiplies by it
           routing=_router(replace(_LOGITS, bias=True)),
           released=(Released("openai_privacy_filter", "openai-privacy-filter", "F2"),)),

    # ---- Baidu, Tencent, Ant, StepFun, Xiaomi, Meituan ----
    Family(("ernie4_5_moe",), correction="moe_statics.e_score_correction_bias", mtp="mtp_block",
           routing=_ERNIE,
           keys={"experts": ("moe_num_experts",), "top_k": ("moe_k",)},
           released=(Released("ernie4_5_moe", "ERNIE-4.5-21B-A3B, 300B-A47B", shared=True),)),
    Family(("ernie4_5_vl_moe",), correction="moe_statics.e_score_correction_bias",
           router_is_transposed=True, correction_rows=2, modalities=True, modules=_OF_ERNIE_VL,
           routing=_ERNIE,
           released=(Released("ernie4_5_vl_moe", "ERNIE-4.5-VL (text experts)", shared=True),)),
    Family(("hunyuan_v1_moe",), router="gate.wg", shared="shared_mlp",
           routing=_router(_SOFTMAX),
           released=(Released("hunyuan_v1_moe", "Hunyuan-A13B", shared=True),)),
    Family(("hy_v3",), router="router.gate", correction="expert_bias", shared="shared_mlp",
           modules=((r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),),
           routing=_router(replace(_CORRECTED, routed_scaling_factor=2.826), "scale"),
           keys={"scale": ("router_scaling_factor",)},
           released=(Released("hy_v3", "Hy3", shared=True),)),
    Family(("hy_v4",), **_HY4, modules=_LINEAR_GATE,
           released=(
               Released("hy_v4", "Hy4-preview", "F1", shared=True),
               Released("hy_v4", "the same in MXFP8, MXFP4", "F12", "fp8-block mxfp4",
                        shared=True, mxfp8=True))),
    Family(("hy_v4_vl",), **_HY4, modules=_OF_HY4_VL,
           released=(Released("hy_v4_vl", "Hy4", "F1", shared=True),)),
    Family(("bailing_moe",), fused_only=True,
           routing=_router(_SOFTMAX, "renormalise"),
           released=(Released("bailing_moe", "Ling-lite, Ling-plus (1.x)", shared=True),)),
    Family(("bailing_moe_v2", "bailing_hybrid"), fused_only=True, correction="gate.expert_bias",
           modules=_OF_BAILING,
           routing=_noaux(n_group=8, topk_group=4, routed_scaling_factor=2.5),
           released=(
               Released("bailing_moe_v2", "Ling, Ring (2.x, 1T)", "N", "bf16 fp8-channel",
                        shared=True),
               Released("bailing_hybrid", "Ling-3.0-Flash", "N",
                        "bf16 fp8-block int4-packed mxfp4", shared=True))),
    # block diffusion; where config.json has an expert_capacity, tokens of a block choose together
    Family(("llada2_moe",), fused_only=True, correction="gate.expert_bias",
           routing=replace(_noaux(), never=("experts of a block",)),
           released=(Released("llada2_moe", "LLaDA2.0, 2.1", shared=True),)),
    Family(("step3", "step3_vl"), fused_only=True, block="moe", experts="", shared="share_expert",
           routing=_router(_PLAIN, "renormalise"),
           keys={"top_k": ("moe_top_k",), "renormalise": ("norm_expert_weight",)},
           released=(Released("step3_vl", "Step3", "F6", shared=True),)),
    Family(("step3p5", "step3p7", "step5"), fused_only=True, block="moe", experts="",
           correction="router_bias",
           shared="share_expert", norm_less_one=True, modules=_OF_STEP,
           routing=_router(_SHARES, "renormalise", "scale"),
           keys={"top_k": ("moe_top_k",), "renormalise": ("norm_expert_weight",),
                 "scale": ("moe_router_scaling_factor",)},
           released=(
               Released("step3p5", "Step-3.5-Flash, Step-3.7-Flash", "F6", "bf16 fp8-block",
                     activation=ExpertActivation(limit=7.0, limit_after=True),
                     where="in two layers; SiLU in the others", shared=True),)),
    Family(("mimo_v2_flash",),
           routing=_noaux(),
           released=(
               Released("mimo_v2_flash", "MiMo-V2-Flash, V2.5, V2.6", "N", "fp8-block mxfp4"),)),
    Family(("longcat_flash",), router="router.classifier",
           correction="router.e_score_correction_bias",
           routing=_router(
               replace(_PLAIN, correction=True, identity_experts=256, routed_scaling_factor=6.0),
               "scale", "zero experts"),
           keys={"layers": ("num_layers",), "intermediate size": ("expert_ffn_hidden_size",),
                 "zero experts": ("zero_expert_num",)},
           released=(Released("longcat_flash", "LongCat-Flash, 2.0"),)),

    # ---- others, by name ----
    Family(("afmoe",), router="router.gate", correction="expert_bias",
           routing=_router(_CORRECTED, "scale"),
           keys={"renormalise": ("route_norm",), "scale": ("route_scale",)},
           released=(Released("afmoe", "Trinity", shared=True),)),
    Family(("aria",), fused_only=True, no_gpu=True, matrices=Matrices("", "", "fc2", "fc1"),
           router="router", modules=_WRAPPED,
           routing=_router(_LOGITS),
           keys={"experts": ("moe_num_experts",)},
           released=(Released("aria", "Aria", "F8", prefix=_LANGUAGE, shared=True),)),
    Family(("axk1",),
           routing=_noaux(n_group=8, topk_group=4, routed_scaling_factor=2.5),
           released=(Released("axk1", "A.X-K1", shared=True),)),
    Family(("axk2",), modules=_OF_AXK2,
           routing=_noaux(masked=0.0, routed_scaling_factor=2.5),
           released=(Released("axk2", "A.X-K2", shared=True),)),
    Family(("beam",), fused_only=True,
           routing=_noaux(n_group=8, topk_group=4, routed_scaling_factor=2.5),
           released=(Released("beam", "Beam-1.0"),)),
    Family(("cohere2_moe",),
           routing=_router(replace(_SOFTMAX, by_logits=True), "scoring", "renormalise"),
           keys={"scoring": ("expert_selection_fn",)},
           released=(Released("cohere2_moe", "Command-A-plus", shared=True),)),
    Family(("dbrx",), fused_only=True, no_gpu=True, layers="blocks", block="ffn",
           router="router.layer",
           matrices=Matrices("mlp.w1", "mlp.v1", "mlp.w2", rows_of_all=True),
           norm="norm_attn_norm.norm_2",
           routing=_router(_SOFTMAX, "p-norm"),
           keys={"layers": ("n_layers",), "hidden size": ("d_model",),
                 "experts": ("moe_num_experts",), "top_k": ("moe_top_k",),
                 "activation": ("ffn_config.ffn_act_fn.name",)},
           released=(Released("dbrx", "DBRX", "F9", prefix="transformer."),)),
    Family(("dots1",),
           routing=_noaux(renormalise=False),
           released=(Released("dots1", "dots.llm1", shared=True),)),
    Family(("dots3_note",), fused_only=True,
           routing=_noaux(),
           released=(Released("dots3_note", "dots3-note (text)", shared=True),)),
    Family(("dots3_note_vision_encoder",), fused_only=True, layers="blocks", norm="norm_2",
           matrices=Matrices("fc1", "fc3", "fc2"), correction="router_bias",
           routing="has its weights in gate_weight, which is not read",
           released=(Released("dots3_note_vision_encoder", "dots3-note (vision)", "V",
                              prefix="vision_encoder."),)),
    Family(("exaone_moe",), correction="e_score_correction_bias",
           routing=_noaux(routed_scaling_factor=2.5),
           released=(Released("exaone_moe", "K-EXAONE", shared=True),)),
    Family(("flint",), fused_only=True, shared="shared_expert",
           routing=_router(RouterSpec("sigmoid"), "renormalise"),
           released=(Released("flint", "Flint", shared=True),)),
    Family(("gemma4", "diffusion_gemma"), fused_only=True, block="", router="router.proj",
           norm="pre_feedforward_layernorm_2",
           activation=ExpertActivation("gelu_tanh"),
           router_input_scale="router.scale", router_expert_scale="router.per_expert_scale",
           routing=_router(
               replace(_SOFTMAX, input_norm=1e-6, expert_scale=True), "norm epsilon"),
           keys={"top_k": ("top_k_experts",), "activation": ("hidden_activation",)},
           released=(
               Released("gemma4", "Gemma-4-26B-A4B", "F1", prefix=_VISION),
               Released("gemma4", "the same in NVFP4", "N", "nvfp4", prefix=_VISION),
               Released("diffusion_gemma", "DiffusionGemma", "F1", prefix="model.decoder."))),
    Family(("granitemoe",), fused_only=True, block="block_sparse_moe", **_LINEAR,
           routing=_router(_LOGITS),
           released=(Released("granitemoe", "Granite-3 MoE", "F7"),)),
    Family(("granitemoeshared", "granitemoehybrid"), fused_only=True, block="block_sparse_moe",
           **_LINEAR,
           shared="shared_mlp",
           routing=_router(_LOGITS),
           released=(
               Released("granitemoeshared", "Granite-3 MoE with a shared expert", "F7",
                        shared=True),
               Released("granitemoehybrid", "Granite-4 hybrid", "F7", shared=True))),
    Family(("granitemoe_swa",), fused_only=True, block="block_sparse_moe", router="router",
           shared="shared_mlp",
           routing=_router(_LOGITS),
           released=(Released("granitemoe_swa", "Granite SWA", "F1", shared=True),)),
    # inkling_text is the text section's of inkling_mm_model
    Family(("inkling_mm_model", "inkling"), fused_only=True, **_INKLING,
           router_scale="gate.global_scale",
           routing=_router(
               replace(
                   _CORRECTED, sinks=2, epsilon=0.0, stored_scale=True, routed_scaling_factor=8.0),
               "shared experts", "scale"),
           keys={"scale": ("route_scale",)},
           released=(Released("inkling_mm_model", "Inkling", "F5", prefix="model.llm."),)),
    Family(("inkling2", "inkling2_loop"), fused_only=True, **_INKLING, modules=_OF_INKLING2,
           activation=ExpertActivation(gate_cap=4.0, up_cap=25.0),
           routing=_router(replace(_CORRECTED, routed_scaling_factor=8.0), "scoring", "scale"),
           keys={"scale": ("route_scale",)},
           released=(
               Released("inkling2", "Inkling-2-Small", "F5", "fp8-block", prefix="model.llm.",
                        mxfp8=True),
               Released("inkling2_loop", "Inkling-2-Mini", "F5", "fp8-block",
                        prefix="model.llm.", mxfp8=True))),
    Family(("interns1_pro",), fused_only=True,
           routing="chooses as many experts in each group (router_n_groups)",
           released=(Released("interns1_pro", "Intern-S1-Pro", prefix=_VISION),)),
    Family(("iquest_q1",), fused_only=True, no_gpu=True, router="router",
           matrices=Matrices("", "", "proj", "fc"), norm="feed_forward_norm",
           routing=_router(_SOFTMAX),
           released=(Released("iquest_q1", "IQuest-Q1", "F14"),)),
    Family(("jamba",), block="feed_forward", router="router",
           routing=_router(_PLAIN),
           released=(Released("jamba", "Jamba-1.5, Jamba-2"),)),
    Family(("jetmoe",), fused_only=True, no_gpu=True, **_LINEAR, other_experts="self_attention",
           routing=_router(_LOGITS),
           keys={"activation": ("activation_function",)},
           released=(Released("jetmoe", "JetMoE", "F7"),)),
    Family(("k2_horizon", "xllm"), fused_only=True, correction="gate.bias",
           routing=_router(_SHARES, "scoring", "renormalise", "scale", "correction"),
           keys={"scoring": ("router_score_func",), "scale": ("router_scaling_factor",),
                 "correction": ("moe_gate_bias",)},
           released=(Released("k2_horizon", "K2-Horizon", shared=True),)),
    Family(("kolibri1",), fused_only=True, layer_correction="moe.router.expert_bias",
           routing=_router(replace(_CORRECTED, by_logits=True, renormalise=False), "renormalise"),
           released=(Released("kolibri1", "Kolibri-1", shared=True),)),
    Family(("laguna",), shared="shared_expert", correction="experts.e_score_correction_bias",
           modules=((r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),),
           beside=("e_score_correction_bias",),
           routing=Router(
               _SHARES, frozenset(("scale", "logit softcap")), never=("weight on input",)),
           keys={"scale": ("moe_routed_scaling_factor",)},
           released=(Released("laguna", "Laguna", shared=True),)),
    Family(("lara_mini",), fused_only=True, shared="shared_expert", modules=_OF_LARA,
           routing=_router(_SOFTMAX, "renormalise"),
           released=(Released("lara_mini", "Lara-4-Mini", "F1", shared=True),)),
    Family(("lfm2_moe",), block="feed_forward", matrices=NUMBERED_W, norm="ffn_norm",
           correction="expert_bias",
           routing=_router(
               replace(_CORRECTED, epsilon=1e-6), "renormalise", "scale", "correction"),
           released=(Released("lfm2_moe", "LFM2-MoE", "W"),)),
    Family(("llama4",), block="feed_forward", router="router", shared="shared_expert",
           modules=((r"^language_model\.", ""),),
           routing=_router(
               RouterSpec("sigmoid", by_logits=True, renormalise=False, weight_on_input=True)),
           released=(
               Released("llama4", "Llama-4 Scout, Maverick", "F2", prefix=_LANGUAGE,
                        shared=True),)),
    Family(("mellum",),
           routing=_router(_SOFTMAX, "renormalise"),
           released=(Released("mellum", "Mellum"),)),
    Family(("minicpm",), fused_only=True, matrices=NUMBERED_W,
           routing=_router(_SOFTMAX),
           released=(Released("minicpm", "MiniCPM-MoE-8x2B", "W"),)),
    Family(("mistral4",), fused_only=True,
           routing=_router(replace(_SOFTMAX, masked=0.0), "renormalise", "groups", "scale"),
           released=(
               Released("mistral4", "Mistral-Small-4", "F1", "fp8-tensor", prefix=_VISION,
                        shared=True),)),
    Family(("mistral_large4",), fused_only=True, block="", matrices=NUMBERED_W,
           shared_matrices=NUMBERED_W,
           mtp="mtp_dspark", norm="ffn_norm", modules=_OF_LARGE4,
           routing=_router(replace(_SOFTMAX, masked=0.0), "groups", "scale"),
           released=(
               Released("mistral_large4", "Mistral-Large-4", "W", "fp8-tensor", prefix="",
                        shared=True),)),
    Family(("muse_spark",), fused_only=True,
           latent=("pre_expert_proj", "post_expert_proj"),
           post_norm="post_expert_norm",
           routing=_router(
               replace(_CORRECTED, logit_scale=0.1767766952966369, epsilon=1e-15),
               "logit scale", "scale"),
           released=(Released("muse_spark", "Muse-Spark", "F1", prefix=_VISION),)),
    Family(("nemotron_h",), block="mixer", norm="norm",
           latent=("fc1_latent_proj", "fc2_latent_proj"),
           activation=ExpertActivation("relu2", gated=False),
           routing=_noaux(),
           keys={"activation": ("mlp_hidden_act",)},
           released=(
               Released("nemotron_h", "Nemotron-3 Nano, Super, Ultra", "U",
                        "bf16 fp8-tensor nvfp4", prefix="backbone.", shared=True),
               Released("nemotron_h", "the same, stacked", "F11", prefix="backbone.",
                        shared=True))),
    # `bias` is added to the sum of the experts; its class in transformers has dense layers alone
    Family(("nomic_bert",), fused_only=True, no_gpu=True, router="router.layer", norm="norm1",
           matrices=Matrices("", "mlp.w1", "mlp.w2", rows_of_all=True), beside=("bias",),
           activation=ExpertActivation("gelu", gated=False),
           routing=Router(_PLAIN, never=("p-norm", "experts choose")),
           keys={"layers": ("n_layer",), "hidden size": ("n_embd",),
                 "plain intermediate size": ("n_inner",), "top_k": ("moe_top_k",),
                 "activation": ("activation_function",)},
           released=(
               Released("nomic_bert", "nomic-embed-text-v2-moe", "F13", "fp32",
                        prefix="encoder."),)),
    Family(("olmoe", "flex_olmo"),
           routing=_router(_PLAIN, "renormalise"),
           released=(
               Released("olmoe", "OLMoE"),
               Released("flex_olmo", "FlexOlmo"))),
    Family(("pangu_ultra_moe",), fused_only=True, correction="e_score_correction_bias",
           norm="pre_mlp_layernorm",
           routing=_router(RouterSpec("sigmoid"), "renormalise", "scale", "correction"),
           keys={"correction": ("router_enable_expert_bias",)},
           released=(Released("pangu_ultra_moe", "openPangu-Ultra-MoE", shared=True),)),
    Family(("sarvam_moe", "sarvam_mla"), fused_only=True, correction="gate.expert_bias",
           modules=_OF_SARVAM,
           routing=_noaux(routed_scaling_factor=2.5),
           released=(
               Released("sarvam_moe", "Sarvam-30B", shared=True),
               Released("sarvam_mla", "Sarvam-105B", shared=True))),
    Family(("zaya",), fused_only=True,
           routing="adds up states of the routers of all layers before it",
           released=(Released("zaya", "Zaya1", "F1"),)),

    # ---- as mlx-lm saves experts that it did not quantize, whatever the model is ----
    Family((), experts="switch_mlp"),

    # ---- GGUF ----
    _GGUF,
    replace(_GGUF, norm="post_attention_norm"),  # where `ffn_norm` is not there
    replace(_GGUF, norm="attn_norm"),  # of layers that have no attention, as in Nemotron-H
    replace(_GGUF, norm="attn_output_norm"),  # of Nomic's, which is behind attention
)
# fmt: on
