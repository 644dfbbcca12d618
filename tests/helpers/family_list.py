"""The checkpoints of family_models by name: every row of the table of families, in the layouts and
encodings that its models are released in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from helpers.encoded import (
    KINDS,
    Rng,
    Stored,
    e2m1,
    of_fp8,
    of_fp8_powers,
    of_packed,
    pairs,
    powers,
)
from helpers.families import bf16
from helpers.family_models import EXPERTS, HIDDEN, INNER, TOP_K, VOCAB, Model
from helpers.layouts import Encode

BOTH, SECOND = (0, 1), (1,)
MIXTRAL = "model.layers.{}.block_sparse_moe.experts"
QWEN = "model.layers.{}.mlp.experts"
LANGUAGE = "model.language_model.layers.{}.mlp.experts"


def _by(saved_by: str, type_: str, at: str = QWEN, layers: tuple[int, ...] = SECOND,
        layout: str = "N", *, router: str = "G", config: Mapping[str, Any] | None = None,
        **more: Any) -> Model:  # fmt: skip
    """A model that transformers writes."""
    return Model(
        type_, at, layers, layout, router=router, saved_by=saved_by, config=config or {}, **more
    )


# fmt: off
SAVED: dict[str, Model] = {
    "mixtral": _by("MixtralForCausalLM", "mixtral", MIXTRAL, BOTH, "W", router="S1r"),
    "minimax": _by("MiniMaxForCausalLM", "minimax", MIXTRAL, BOTH, "W", router="S1r"),
    "minimax_m2": _by("MiniMaxM2ForCausalLM", "minimax_m2", MIXTRAL, BOTH, "W", router="G0"),
    "minimax_m3_vl": _by(
        "MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl_text",
        "language_model.model.layers.{}.block_sparse_moe.experts", BOTH, "W", router="G0",
        activation="oai", config={
            "projector_hidden_size": 32, "text_config": {"dense_intermediate_size": INNER}}),
    "phimoe": _by("PhimoeForCausalLM", "phimoe", MIXTRAL, BOTH, "W", router="P"),
    "kimi_linear": _by("KimiLinearForCausalLM", "kimi_linear", MIXTRAL, SECOND, "W"),
    "qwen2_moe": _by("Qwen2MoeForCausalLM", "qwen2_moe", router="S1",
                     config={"mlp_only_layers": [0]}),
    "qwen3_moe": _by("Qwen3MoeForCausalLM", "qwen3_moe", QWEN, BOTH, router="S1"),
    "qwen3_next": _by("Qwen3NextForCausalLM", "qwen3_next", QWEN, BOTH, router="S1",
                      mtp="mtp.layers.0."),
    "qwen3_vl_moe, resaved": _by("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text",
                                 LANGUAGE, BOTH, "F1", router="S1r"),
    "qwen3_5_moe": _by("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", LANGUAGE, BOTH,
                       router="S1r", mtp="mtp.layers.0."),
    "qwen3_5_moe_text": _by("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", QWEN, BOTH, router="S1r"),
    "qwen4_exp": _by("Qwen4ExpForConditionalGeneration", "qwen4_exp_text", LANGUAGE, BOTH,
                     router="S1"),
    "deepseek_v2": _by("DeepseekV2ForCausalLM", "deepseek_v2", router="V2"),
    "deepseek_ocr2": _by("DeepseekOcr2ForConditionalGeneration", "deepseek_ocr2_text",
                         QWEN, router="V2", config={
                             "text_config": {"mlp_layer_types": ["dense", "sparse"]},
                             "vision_config": {"sam_config": {
                                 "output_channels": 32, "mlp_dim": 32, "global_attn_indexes": [0],
                                 "downsample_channels": [32, 32]}}}),
    "unlimited_ocr": _by("UnlimitedOcrForConditionalGeneration", "unlimited_ocr_text",
                         router="V2", config={
                             "text_config": {"mlp_layer_types": ["dense", "sparse"]},
                             "vision_config": {"sam_config": {
                                 "output_channels": 32, "mlp_dim": 32, "global_attn_indexes": [0],
                                 "downsample_channels": [32, 32]}}}),
    "deepseek_v3": _by("DeepseekV3ForCausalLM", "deepseek_v3", mtp="model.layers.2.",
                       config={"head_dim": 16}),
    "deepseek_v32": _by("DeepseekV32ForCausalLM", "deepseek_v32", mtp="model.layers.2."),
    "deepseek_v4, resaved": _by("DeepseekV4ForCausalLM", "deepseek_v4",
                                "model.layers.{}.ffn.experts", BOTH, "W", router="D4",
                                activation="clamp",
                                config={"mlp_layer_types": ["hash_moe", "moe"]}),
    "kimi_k25, resaved": _by("Kimi_K25ForConditionalGeneration", "deepseek_v3",
                             "language_model.model.blocks.{}.mlp.experts",
                             config={"text_config": {"head_dim": 16}}),
    "glm4_moe": _by("Glm4MoeForCausalLM", "glm4_moe", mtp="model.layers.2."),
    "glm4_moe_lite": _by("Glm4MoeLiteForCausalLM", "glm4_moe_lite", mtp="model.layers.2."),
    "glm4v_moe": _by("Glm4vMoeForConditionalGeneration", "glm4v_moe_text", LANGUAGE,
                     config={"text_config": {"rope_parameters": {
                         "rope_type": "default", "rope_theta": 10000.0,
                         "mrope_section": [8, 4, 4], "partial_rotary_factor": 0.5}}}),
    "glm_moe_dsa": _by("GlmMoeDsaForCausalLM", "glm_moe_dsa", mtp="model.layers.2."),
    "glm5_next": _by("Glm5NextForConditionalGeneration", "glm5_next_text", LANGUAGE,
                     activation="clamp", config={"text_config": {
                         "qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"]}},
                     mtp="model.language_model.layers.2."),
    "gpt_oss": _by("GptOssForCausalLM", "gpt_oss", QWEN, BOTH, "F3", router="T",
                   activation="oai", biases=True),
    "openai_privacy_filter": _by(
        "OpenAIPrivacyFilterForTokenClassification", "openai_privacy_filter", QWEN, BOTH, "F2",
        router="T", activation="oai", biases=True),
    "llama4": _by("Llama4ForConditionalGeneration", "llama4_text",
                  "language_model.model.layers.{}.feed_forward.experts", BOTH, "F2", router="L4",
                  config={"text_config": {
                      "intermediate_size_mlp": INNER, "num_experts_per_tok": 1}}),
    "ernie4_5_moe": _by("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", router="E45",
                        mtp="mtp.layers.0."),
    "ernie4_5_vl_moe": _by("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe_text",
                           router="E45",
                           config={"text_config": {
                               "moe_intermediate_size": [256, 128], "head_dim": 128,
                               "num_attention_heads": 1, "num_key_value_heads": 1}}),
    "hunyuan_v1_moe": _by("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", QWEN, BOTH, router="S1r"),
    "hy_v3": _by("HYV3ForCausalLM", "hy_v3", router="G0", mtp="model.layers.2."),
    "hy_v4": _by("HYV4ForCausalLM", "hy_v4", layout="F1", activation="clamp",
                 mtp="model.mtp_layers.0."),
    "hy_v4_vl": _by("HYV4VLForConditionalGeneration", "hy_v4_vl_text", layout="F1",
                    activation="clamp", config={"text_config": {"rope_parameters": {
                        "rope_type": "default", "rope_theta": 10000.0,
                        "mrope_section": [2, 2, 4]}}}),
    "step3p7": _by("Step3p7ForConditionalGeneration", "step3p5",
                   "model.layers.{}.moe", SECOND, "F6", router="G0",
                   activation="stepclamp", config={"text_config": {
                       "mlp_layer_types": ["dense", "sparse"], "share_expert_dim": INNER,
                       "sliding_window": 64,
                       "swiglu_limits": [0.0, 7.0], "swiglu_limits_shared": [0.0, 16.0]}}),
    "mimo_v2_flash": _by("MiMoV2FlashForCausalLM", "mimo_v2_flash", 
                         config={"num_key_value_heads": 1}, mtp="model.mtp.layers.0."),
    "longcat_flash": _by("LongcatFlashForCausalLM", "longcat_flash", QWEN, BOTH, router="LC",
                         config={"expert_ffn_hidden_size": INNER, "ffn_hidden_size": INNER,
                                 "zero_expert_num": 2, "head_dim": 16, "num_layers": 2},
                         mtp="model.mtp.layers.0."),
    "nemotron_h": _by("NemotronHForCausalLM", "nemotron_h", "backbone.layers.{}.mixer.experts",
                      SECOND, "U", activation="relu2", mtp="mtp.layers.0.",
                      config={"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16,
                              "n_groups": 2, "moe_shared_expert_intermediate_size": INNER,
                              "layers_block_type": ["linear_attention", "moe"]}),
    "nemotron_h, latent": _by(
        "NemotronHForCausalLM", "nemotron_h", "backbone.layers.{}.mixer.experts", SECOND,
        "U", activation="relu2", router_apart=True,
        config={"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
                "moe_shared_expert_intermediate_size": INNER, "hidden_size": 256,
                "moe_latent_size": HIDDEN, "layers_block_type": ["full_attention", "moe"]}),
    "afmoe": _by("AfmoeForCausalLM", "afmoe", router="G0"),
    "solar_open": _by("SolarOpenForCausalLM", "solar_open", QWEN, BOTH),
    "dots1": _by("Dots1ForCausalLM", "dots1"),
    "granitemoe": _by("GraniteMoeForCausalLM", "granitemoe", "model.layers.{}.block_sparse_moe",
                      BOTH, "F7", router="T"),
    "granitemoeshared": _by("GraniteMoeSharedForCausalLM", "granitemoeshared",
                            "model.layers.{}.block_sparse_moe", BOTH, "F7", router="T"),
    "granitemoehybrid": _by("GraniteMoeHybridForCausalLM", "granitemoehybrid",
                            "model.layers.{}.block_sparse_moe", BOTH, "F7", router="T",
                            config={"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 16}),
    "granitemoe_swa": _by("GraniteMoeSWAForCausalLM", "granitemoe_swa", MIXTRAL, BOTH, "F1",
                          router="T"),
    "jetmoe": _by("JetMoeForCausalLM", "jetmoe", "model.layers.{}.mlp", BOTH, "F7", router="T"),
    "jamba": _by("JambaForCausalLM", "jamba", "model.layers.{}.feed_forward.experts", SECOND,
                 router="S1"),
    "lfm2_moe": _by("Lfm2MoeForCausalLM", "lfm2_moe", "model.layers.{}.feed_forward.experts",
                    SECOND, "W", router="G0", config={"layer_types": ["conv", "full_attention"]}),
    "olmoe": _by("OlmoeForCausalLM", "olmoe", QWEN, BOTH, router="S1"),
    "flex_olmo": _by("FlexOlmoForCausalLM", "flex_olmo", QWEN, BOTH, router="S1"),
    "dbrx": _by("DbrxForCausalLM", "dbrx", "transformer.blocks.{}.ffn.experts", BOTH, "F9",
                config={"d_model": HIDDEN, "n_heads": 2, "n_layers": 2, "attn_config": {
                    "kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}, "ffn_config": {
                    "hidden_size": HIDDEN, "ffn_hidden_size": INNER, "moe_num_experts": EXPERTS,
                    "moe_top_k": TOP_K}}, router="S1"),
    "aria": _by("AriaForConditionalGeneration", "aria_text",
                "language_model.model.layers.{}.mlp.experts", BOTH, "F8", router="T"),
    "gemma4": _by("Gemma4ForConditionalGeneration", "gemma4_text",
                  "model.language_model.layers.{}.experts", BOTH, "F1", router="GM",
                  router_apart=True, activation="gelu_tanh", config={
                  "vision_config": None, "audio_config": None, "text_config": {
                      "enable_moe_block": True, "vocab_size_per_layer_input": VOCAB,
                                  "hidden_size_per_layer_input": 0,
                                  "global_head_dim": 32}}),
    "mistral4": _by("Mistral4ForCausalLM", "mistral4", layout="F1", router="M4",
                     config={"head_dim": 48}),
    "cohere2_moe": _by("Cohere2MoeForCausalLM", "cohere2_moe", QWEN, BOTH, router="CO"),
    "exaone_moe": _by("ExaoneMoeForCausalLM", "exaone_moe", mtp="mtp.layers.0."),
    "axk1": _by("AXK1ForCausalLM", "axk1", config={"head_dim": 16}),
    "axk2": _by("AXK2ForCausalLM", "axk2"),
    "mellum": _by("MellumForCausalLM", "mellum", QWEN, BOTH, router="S1"),
    "laguna": _by("LagunaForCausalLM", "laguna", router="G0"),
    # not in every release of transformers that is supported
    "bailing_hybrid": _by("BailingHybridForCausalLM", "bailing_hybrid", mtp="model.layers.2."),
    "beam": _by("BeamForCausalLM", "beam", config={"mlp_layer_types": ["dense", "sparse"]}),
    "dots3_note": _by("Dots3NoteForCausalLM", "dots3_note_text"),
    "flint": _by("FlintForCausalLM", "flint", router="sigmoid", config={"mlp_only_layers": [0]}),
    "inkling2": _by("Inkling2ForConditionalGeneration", "inkling2_text",
                    "model.llm.layers.{}.mlp.experts", BOTH, "F5", activation="softcap",
                    router="sigmoid + bias", config={
                        "text_config": {"unpadded_vocab_size": VOCAB}, "vision_config": {
                            "text_hidden_size": HIDDEN, "projection_hidden_dim": 32}}),
    "inkling2_loop": _by("Inkling2LoopForConditionalGeneration", "inkling2_loop_text",
                         "model.llm.layers.{}.mlp.experts", BOTH, "F5", activation="softcap",
                         router="sigmoid + bias", config={
                             "text_config": {
                                 "unpadded_vocab_size": VOCAB, "n_layers_per_attn_res_block": 1,
                                 "loop_layer_index_start": 1, "loop_layer_index_end": 2,
                                 "loop_num_passes": 2, "loop_gate_rank": 8},
                             "vision_config": {
                                 "text_hidden_size": HIDDEN, "projection_hidden_dim": 32}}),
    "kolibri1": _by("Kolibri1ForCausalLM", "kolibri1", QWEN, BOTH, router="KO"),
    "lara_mini": _by("LaraMiniForCausalLM", "lara_mini", QWEN, BOTH, "F1", router="S1",
                     config={"layer_types": ["linear_attention", "full_attention"]}),
    "sarvam_mla": _by("SarvamMLAConfig", "sarvam_mla", config={"head_dim": 16}),
    "sarvam_moe": _by("SarvamMoEConfig", "sarvam_moe"),
    "mistral_large4": _by("MistralLarge4ForConditionalGeneration", "mistral_large4_text",
                          "layers.{}.experts", SECOND, "W", router="M4",
                          mtp="mtp_dspark.0."),
    "muse_spark": _by("MuseSparkForConditionalGeneration", "muse_spark_text", LANGUAGE, BOTH,
                      "F1", router="G0", router_apart=True, post_norm=True, config={
                          "projector_hidden_size": 32,
                          "out_hidden_size": 256,
                          "text_config": {"hidden_size": 256, "moe_hidden_size": HIDDEN},
                          "audio_config": {
                              "patch_sizes": [2], "hidden_sizes": [32], "depths": [1],
                              "out_hidden_size": 256}}),
    "zaya": _by("ZayaForCausalLM", "zaya", QWEN, BOTH, "F1",
                config={"num_experts_per_tok": 1, "moe_router_topk": 1}, router="own",
                router_apart=True),
}
# fmt: on


# ---- made from the names of released files ---------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]
GATED, WIDE = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def _made(type_: str, at: str, layers: tuple[int, ...] = SECOND, layout: str = "N", *,
          router: str, beside: Shapes, config: Mapping[str, Any], of: Encode | None = None,
          **more: Any) -> Model:  # fmt: skip
    return Model(
        type_, at, layers, layout, router=router, beside=beside, config=config, of=of, **more
    )


def _of(kind: str) -> dict[str, Any]:
    """An encoding of encoded.KINDS."""
    return {"of": KINDS[kind].of, "encoding": KINDS[kind].name}


def _config(type_: str, **more: Any) -> dict[str, Any]:
    """config.json of two layers."""
    return {
        "model_type": type_, "hidden_size": HIDDEN, "num_hidden_layers": 2, "vocab_size": VOCAB,
        "hidden_act": "silu", "num_experts_per_tok": TOP_K, "moe_intermediate_size": INNER,
        "intermediate_size": INNER, **more,
    }  # fmt: skip


def _deepseek(type_: str, **more: Any) -> dict[str, Any]:
    """The keys of DeepSeek-V3, which many took over."""
    keys = {
        "n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
    }  # fmt: skip
    return _config(type_, **{**keys, **more})


def _beside(block: str = "mlp.", correction: str = "gate.e_score_correction_bias",
            shared: str = "shared_experts", names: tuple[str, str, str] = GATED,
            gate: str = "gate.weight", norm: str = "post_attention_layernorm",
            hidden: int = HIDDEN) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Router, norm and shared expert of a layer."""
    found: dict[str, tuple[int, ...]] = {
        f"{block}{gate}": (EXPERTS, hidden), f"{norm}.weight": (hidden,)
    }  # fmt: skip
    if correction:
        found[f"{block}{correction}"] = (EXPERTS,)
    if shared:
        for name, shape in zip(names, ((INNER, hidden),) * 2 + ((hidden, INNER),), strict=True):
            found[f"{block}{shared}.{name}.weight"] = shape
    return found


def _dense(prefix: str, names: tuple[str, str, str] = GATED, hidden: int = HIDDEN) -> Shapes:
    """The MLP of the first layer, embeddings, and whatever a name may be mistaken for."""
    shapes = ((INNER, hidden),) * 2 + ((hidden, INNER),)
    return {f"{prefix}{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}


def _grid(rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // 128), -(-cols // 128)


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
_INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
            "symmetric": True}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
}  # fmt: skip
_KIMI_INT4: dict[str, Any] = {
    "of": partial(of_packed, bits=4, group=32, store=bf16), "encoding": "int4-packed"
}  # fmt: skip
_BLOCKS: dict[str, Any] = {
    "of": partial(of_fp8, grid=_grid, name="weight_scale_inv"), "encoding": "fp8-block"
}  # fmt: skip
_VISION_TOWER: Shapes = {
    "vision_tower.encoder.blocks.0.mlp.fc0.weight": (64, 32),
    "vision_tower.encoder.blocks.0.mlp.fc1.weight": (32, 64),
}


_SHARE_EXPERT: Shapes = {  # of Step's, beside the block of the others
    f"share_expert.{name}": shape for name, shape in _dense("").items()
}


def _of_fp32(rng: Rng, rows: int, cols: int) -> Stored:
    values = rng.standard_normal((rows, cols), np.float32) / np.float32(8)
    return {"weight": values}, values


def _gpt_oss_blocks(rng: Rng, rows: int, cols: int) -> Stored:
    codes = rng.integers(0, 16, (rows, cols), np.uint8)
    scale = rng.integers(110, 130, (rows, cols // 32), np.uint8)
    blocks = pairs(codes).reshape(rows, cols // 32, 16)
    values = e2m1(codes) * powers(scale).repeat(32, axis=1)
    return {"weight_blocks": blocks, "weight_scales": scale}, values


# fmt: off
MADE: dict[str, Model] = {
    "Kimi-K2-Thinking": _made(
        "kimi_k2", QWEN, router="G", beside=_beside(), more=_dense("model.layers.0.mlp."),
        config=_deepseek("kimi_k2", quantization_config=_INT4), **_KIMI_INT4),
    "Kimi-K2.5": _made(
        "kimi_k2", "language_model.model.layers.{}.mlp.experts", router="G", beside=_beside(),
        more={**_dense("language_model.model.layers.0.mlp."), **_VISION_TOWER},
        config={"model_type": "kimi_k25", "text_config": _deepseek(
            "kimi_k2", quantization_config=_INT4)}, **_KIMI_INT4),
    "Kimi-K3": _made(
        "kimi_linear", "language_model.model.layers.{}.block_sparse_moe.experts", layout="W",
        router="G", activation="situ", beside={
            **_beside("block_sparse_moe.", hidden=256),
            "block_sparse_moe.routed_expert_down_proj.weight": (HIDDEN, 256),
            "block_sparse_moe.routed_expert_up_proj.weight": (256, HIDDEN),
            "block_sparse_moe.routed_expert_norm.weight": (HIDDEN,)},
        more={**_dense("language_model.model.layers.0.mlp.", hidden=256), **_VISION_TOWER},
        config={"model_type": "kimi_k3", "text_config": {
            "model_type": "kimi_linear", "hidden_size": 256, "routed_expert_hidden_size": HIDDEN,
            "num_hidden_layers": 2, "num_experts": EXPERTS, "num_experts_per_token": TOP_K,
            "moe_intermediate_size": INNER, "intermediate_size": INNER, "hidden_act": "silu",
            "first_k_dense_replace": 1, "moe_renormalize": True, "num_expert_group": 1,
            "topk_group": 1, "routed_scaling_factor": 2.446, "num_shared_experts": 1,
            "moe_router_activation_func": "sigmoid", "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0, "vocab_size": VOCAB},
            "quantization_config": {"quant_method": "compressed-tensors",
                                    "format": "mxfp4-pack-quantized"}},
        **_of("mxfp4, compressed-tensors")),
    "MiniMax-M2 FP8": _made(
        "minimax_m2", MIXTRAL, BOTH, "W", router="G0",
        beside=_beside("block_sparse_moe.", "e_score_correction_bias", ""),
        config=_config("minimax_m2", num_local_experts=EXPERTS, scoring_func="sigmoid",
                       use_routing_bias=True, quantization_config=_FP8),
        **_BLOCKS),
    "MiniMax-M3 MXFP8": _made(
        "minimax_m3_vl_text", "language_model.model.layers.{}.block_sparse_moe.experts", SECOND,
        "W", router="G0", activation="oai",
        beside=_beside("block_sparse_moe.", "e_score_correction_bias"),
        more=_dense("language_model.model.layers.0.mlp."),
        config={"model_type": "minimax_m3_vl", "text_config": _config(
            "minimax_m3_vl_text", num_local_experts=EXPERTS, routed_scaling_factor=2.0,
            moe_layer_freq=[0, 1], swiglu_alpha=1.702, swiglu_limit=7.0),
            "quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]}},
        **_of("mxfp8")),
    "Qwen3-Omni": _made(
        "qwen3_omni_moe_text", "thinker.model.layers.{}.mlp.experts", BOTH, router="S1",
        beside=_beside(correction="", shared=""), more={
            f"talker.model.layers.{layer}.mlp.{name}": shape for layer in BOTH
            for name, shape in {
                "gate.weight": (2, 64), "shared_expert_gate.weight": (1, 64),
                **{f"experts.{e}.{one}.weight": (64, 64) for e in (0, 1) for one in GATED},
            }.items()},
        config={"model_type": "qwen3_omni_moe", "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker", "text_config": _config(
                "qwen3_omni_moe_text", num_experts=EXPERTS, norm_topk_prob=True)},
            "talker_config": {"model_type": "qwen3_omni_moe_talker", "text_config": {
                "model_type": "qwen3_omni_moe_talker_text", "hidden_size": 64, "num_experts": 2,
                "num_experts_per_tok": 1, "moe_intermediate_size": 64, "num_hidden_layers": 2}}}),
    "Qwen3-VL": _made(
        "qwen3_vl_moe_text", LANGUAGE, BOTH, "F2", router="S1r",
        beside=_beside(correction="", shared=""),
        more={"model.visual.blocks.0.mlp.linear_fc1.weight": (64, 32)},
        config={"model_type": "qwen3_vl_moe", "text_config": _config(
            "qwen3_vl_moe_text", num_experts=EXPERTS, norm_topk_prob=True)}),
    "Qwen3-VL FP8": _made(
        "qwen3_vl_moe_text", LANGUAGE, BOTH, "F2", router="S1r",
        beside=_beside(correction="", shared=""),
        config={"model_type": "qwen3_vl_moe", "quantization_config": _FP8, "text_config": _config(
            "qwen3_vl_moe_text", num_experts=EXPERTS, norm_topk_prob=True)}, **_BLOCKS),
    "Qwen3.5": _made(
        "qwen3_5_moe_text", LANGUAGE, BOTH, "F1", router="S1r", mtp="mtp.layers.0.",
        beside={**_beside(correction="", shared="shared_expert"),
                "mlp.shared_expert_gate.weight": (1, HIDDEN)},
        config={"model_type": "qwen3_5_moe", "text_config": _config(
            "qwen3_5_moe_text", num_experts=EXPERTS, mtp_num_hidden_layers=1)}),
    "Qwen3.5 FP8": _made(
        "qwen3_5_moe_text", LANGUAGE, BOTH, router="S1r", mtp="mtp.layers.0.",
        beside={**_beside(correction="", shared="shared_expert"),
                "mlp.shared_expert_gate.weight": (1, HIDDEN)},
        config={"model_type": "qwen3_5_moe", "quantization_config": _FP8, "text_config": _config(
            "qwen3_5_moe_text", num_experts=EXPERTS, mtp_num_hidden_layers=1)},
        **_BLOCKS),
    "Qwen3.8-Flash-Next": _made(
        "qwen4_exp_text", LANGUAGE, BOTH, "F1", router="S1",
        beside={**_beside(correction="", shared="shared_expert"),
                "mlp.shared_expert_gate.weight": (1, HIDDEN)},
        more={"model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight":
              (512, 32)},
        config={"model_type": "qwen4_exp", "text_config": _config(
            "qwen4_exp_text", num_experts=EXPERTS, norm_topk_prob=True)}),
    "Qwen3.8-Flash-Next FP8": _made(
        "qwen4_exp_text", LANGUAGE, BOTH, router="S1",
        beside={**_beside(correction="", shared="shared_expert"),
                "mlp.shared_expert_gate.weight": (1, HIDDEN)},
        config={"model_type": "qwen4_exp", "quantization_config": _FP8, "text_config": _config(
            "qwen4_exp_text", num_experts=EXPERTS, norm_topk_prob=True)},
        **_of("fp8 block, Qwen")),
    "DeepSeek-V3 FP8": _made(
        "deepseek_v3", QWEN, router="G", mtp="model.layers.2.", beside=_beside(),
        more=_dense("model.layers.0.mlp."), config=_deepseek(
            "deepseek_v3", n_group=2, num_nextn_predict_layers=1, quantization_config=_FP8),
        **_BLOCKS),
    "DeepSeek-MoE-16B": _made(
        "deepseek", QWEN, router="S1", beside=_beside(correction=""),
        more=_dense("model.layers.0.mlp."),
        config=_config("deepseek", n_routed_experts=EXPERTS, n_shared_experts=1,
                       first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=False,
                       scoring_func="softmax")),
    "DeepSeek-V4-Flash": _made(
        "deepseek_v4", "layers.{}.ffn.experts", BOTH, "W", router="D4", activation="clamp",
        mtp="mtp.0.", beside=_beside("ffn.", "gate.bias", names=WIDE, norm="ffn_norm"),
        more={"layers.0.ffn.gate.tid2eid": (VOCAB, TOP_K), "layers.0.ffn.gate.bias": None,
              "embed.weight": (VOCAB, HIDDEN)},
        config=_config("deepseek_v4", n_routed_experts=EXPERTS, n_shared_experts=1,
                       num_hash_layers=1, num_nextn_predict_layers=1, norm_topk_prob=True,
                       scoring_func="sqrtsoftplus", topk_method="noaux_tc",
                       routed_scaling_factor=1.5, swiglu_limit=10.0, expert_dtype="fp4",
                       quantization_config={**_FP8, "scale_fmt": "ue8m0"}),
        **_of("mxfp4, DeepSeek-V4")),
    "DeepSeek-V4-Flash-Base": _made(
        "deepseek_v4", "layers.{}.ffn.experts", BOTH, "W", router="D4", activation="clamp",
        beside=_beside("ffn.", "gate.bias", names=WIDE, norm="ffn_norm"),
        more={"layers.0.ffn.gate.tid2eid": (VOCAB, TOP_K), "layers.0.ffn.gate.bias": None},
        config=_config("deepseek_v4", n_routed_experts=EXPERTS, n_shared_experts=1,
                       num_hash_layers=1, norm_topk_prob=True, scoring_func="sqrtsoftplus",
                       topk_method="noaux_tc", routed_scaling_factor=1.5, swiglu_limit=10.0,
                       expert_dtype="fp8", quantization_config={**_FP8, "scale_fmt": "ue8m0"}),
        **_of("fp8 block, DeepSeek-V4")),
    "DeepSeek-V4.1-Flash": _made(
        "deepseek_v4", "layers.{}.ffn.experts", BOTH, "W", router="D4", activation="clamp",
        mtp="mtp.0.", beside=_beside("ffn.", "gate.bias", names=WIDE, norm="ffn_norm"),
        more={"layers.0.ffn.gate.tid2eid": (VOCAB, TOP_K),
              "layers.0.ffn.gate.bias": None, "layers.1.engram.embed.weight": (512, 32),
              "vision.blocks.0.mlp.fc1.weight": (64, 32)},
        config={"model_type": "deepseek_v4_1", "text_config": _config(
                    "deepseek_v4", n_routed_experts=EXPERTS, n_shared_experts=1,
                    num_hash_layers=1, num_nextn_predict_layers=1, norm_topk_prob=True,
                    scoring_func="sqrtsoftplus", topk_method="noaux_tc",
                    routed_scaling_factor=1.5, swiglu_limit=10.0),
                "quantization_config": {**_FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp4"}},
        **_of("mxfp4, DeepSeek-V4")),
    "GLM-4.6 FP8": _made(
        "glm4_moe", QWEN, router="G", mtp="model.layers.2.", beside=_beside(),
        more=_dense("model.layers.0.mlp."), config=_deepseek(
            "glm4_moe", num_nextn_predict_layers=1, quantization_config={
                "quant_method": "compressed-tensors", "format": "float-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                    "num_bits": 8, "type": "float", "strategy": "channel",
                    "symmetric": True}}}}),
        **_of("fp8 channel")),
    "GLM-5.3-Flash FP8": _made(
        "glm5_next_text", LANGUAGE, router="G", activation="clamp",
        mtp="model.language_model.layers.2.", beside=_beside(),
        more=_dense("model.language_model.layers.0.mlp."),
        config={"model_type": "glm5_next", "quantization_config": _FP8, "text_config": _deepseek(
            "glm5_next_text", num_nextn_predict_layers=1, swiglu_limit=10.0)},
        **_BLOCKS),
    "GLM-5.3-Flash MXFP4": _made(
        "glm5_next_text", LANGUAGE, router="G", activation="clamp", beside=_beside(),
        more=_dense("model.language_model.layers.0.mlp."),
        config={"model_type": "glm5_next", "quantization_config": {"quant_method": "quark"},
                "text_config": _deepseek("glm5_next_text", swiglu_limit=10.0)},
        **_of("mxfp4, Quark")),
    "gpt-oss MXFP4": _made(
        "gpt_oss", QWEN, BOTH, "F4", router="T", activation="oai", biases=True,
        beside={**_beside(correction="router.bias", shared="", gate="router.weight"),
                "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * INNER),
                "mlp.experts.down_proj_bias": (EXPERTS, HIDDEN)},
        config=_config("gpt_oss", num_local_experts=EXPERTS, swiglu_limit=7.0,
                       quantization_config={"quant_method": "mxfp4"}),
        of=_gpt_oss_blocks, encoding="mxfp4"),
    "Hy4 MXFP8": _made(
        "hy_v4", QWEN, layout="F12", router="G", activation="clamp", beside=_beside(),
        mtp="model.mtp_layers.0.", more=_dense("model.layers.0.mlp."),
        config=_deepseek("hy_v4", swiglu_limit=10.0, num_nextn_predict_layers=1,
                         routed_scaling_factor=2.827, quantization_config={
                             "quant_method": "mxfp8", "weight_block_size": [1, 32]}),
        of=partial(of_fp8_powers, block=(1, 32), name="weight_scale", store=lambda codes: codes),
        encoding="fp8-block"),
    "IQuest-Q1": _made(
        "iquest_q1", QWEN, layout="F14", router="S1r",
        beside=_beside(correction="", shared="", gate="router.weight", norm="feed_forward_norm"),
        more=_dense("model.layers.0.mlp."),
        config=_config("iquest_q1", moe_intermediate_size=None, num_experts=EXPERTS,
                       dense_intermediate_size=INNER, mlp_only_layers=[0])),
    "K2-Horizon": _made(
        "k2_horizon", QWEN, router="G0", beside=_beside(correction="gate.bias"),
        more={**_dense("model.layers.0.mlp."), **{
            f"model.layers.1.self_attn.v_experts.{one}.weight": (64, HIDDEN)
            for one in range(EXPERTS)}, "model.layers.1.self_attn.v_router.weight": (4, HIDDEN)},
        config=_config("k2_horizon", num_experts=EXPERTS, num_shared_experts=1,
                       mlp_only_layers=[0], norm_topk_prob=True, router_score_func="sigmoid",
                       router_scaling_factor=2.5, moe_gate_bias=True)),
    "LLaDA2.0": _made(
        "llada2_moe", QWEN, router="G", beside=_beside(correction="gate.expert_bias"),
        more=_dense("model.layers.0.mlp."),
        config=_config("llada2_moe", num_experts=EXPERTS, num_shared_experts=1,
                       first_k_dense_replace=1, n_group=2, topk_group=1, norm_topk_prob=True,
                       routed_scaling_factor=2.5, score_function="sigmoid",
                       moe_router_enable_expert_bias=True)),
    "MiniCPM-MoE": _made(
        "minicpm", QWEN, BOTH, "W", router="S1r", beside=_beside(correction="", shared=""),
        config=_config("minicpm", moe_intermediate_size=None, num_experts=EXPERTS)),
    "openPangu-Ultra-MoE": _made(
        "pangu_ultra_moe", QWEN, router="G0", mtp="model.layers.2.",
        beside={**_beside(correction="e_score_correction_bias", norm="pre_mlp_layernorm"),
                "post_attention_layernorm.weight": (HIDDEN,),
                "post_mlp_layernorm.weight": (HIDDEN,)},
        more=_dense("model.layers.0.mlp."),
        config=_config("pangu_ultra_moe", n_routed_experts=EXPERTS, n_shared_experts=1,
                       first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
                       router_enable_expert_bias=True, sandwich_norm=True,
                       num_nextn_predict_layers=1)),
    "Ling-lite": _made(
        "bailing_moe", QWEN, router="S1", beside=_beside(correction=""),
        more=_dense("model.layers.0.mlp."),
        config=_config("bailing_moe", num_experts=EXPERTS, num_shared_experts=1,
                       first_k_dense_replace=1, norm_topk_prob=True)),
    "Ling-2.0": _made(
        "bailing_moe_v2", QWEN, router="G", beside=_beside(correction="gate.expert_bias"),
        more=_dense("model.layers.0.mlp."),
        config=_config("bailing_moe_v2", num_experts=EXPERTS, num_shared_experts=1,
                       first_k_dense_replace=1, n_group=2, topk_group=1, norm_topk_prob=True,
                       routed_scaling_factor=2.5, score_function="sigmoid",
                       moe_router_enable_expert_bias=True)),
    "Ling-2.6 FP8": _made(
        "bailing_moe_v2", QWEN, router="G", beside=_beside(correction="gate.expert_bias"),
        more=_dense("model.layers.0.mlp."),
        config=_config("bailing_moe_v2", num_experts=EXPERTS, num_shared_experts=1,
                       first_k_dense_replace=1, n_group=2, topk_group=1, norm_topk_prob=True,
                       routed_scaling_factor=2.5, score_function="sigmoid",
                       quantization_config={"quant_method": "compressed-tensors",
                                            "format": "float-quantized"}),
        **_of("fp8 channel")),
    **{
        f"Ling-3.0-Flash {name}": _made(
            "bailing_hybrid", QWEN, router="G", mtp="model.layers.2.",
            beside=_beside(correction="gate.expert_bias"), more=_dense("model.layers.0.mlp."),
            config={key: value for key, value in _config(
                "bailing_hybrid", num_experts=EXPERTS, num_experts_per_tok=None,
                num_experts_per_token=TOP_K, num_expert_group=2, topk_group=1,
                moe_renormalize=True, num_shared_experts=1, first_k_dense_replace=1,
                routed_scaling_factor=2.5, num_nextn_predict_layers=1,
                quantization_config=quantization).items() if value is not None}, **encoding)
        for name, quantization, encoding in (
            ("BF16", None, {}),
            ("INT4", _INT4, _KIMI_INT4),
            ("FP4", {"quant_method": "fp8", "weight_block_size": [128, 128],
                     "routed_experts_quant_method": "mxfp4", "routed_experts_group_size": 32},
             _of("mxfp4, Ling")),
        )
    },
    "Step3": _made(
        "step3_text", "model.layers.{}.moe", layout="F6", router="S1",
        beside={**_beside("moe.", "", ""), **_SHARE_EXPERT},
        more={**_dense("model.layers.0.mlp."), **_VISION_TOWER},
        config={"model_type": "step3_vl", "text_config": _config(
            "step3_text", moe_layers_enum="1", moe_num_experts=EXPERTS, moe_top_k=TOP_K,
            norm_expert_weight=False, share_expert_dim=INNER)}),
    **{
        f"Step-3.5 {name}": _made(
            "step3p5", "model.layers.{}.moe", (1, 2), "F6", router="G0", activation="stepclamp",
            beside={**_beside("moe.", "router_bias", ""), **_SHARE_EXPERT},
            mtp="model.layers.3.", more=_dense("model.layers.0.mlp."),
            config={**_config(
                "step3p5", num_hidden_layers=3, num_nextn_predict_layers=1, moe_layers_enum="1,2",
                moe_num_experts=EXPERTS, moe_top_k=TOP_K, moe_router_scaling_factor=3.0,
                moe_router_activation="sigmoid", norm_expert_weight=True,
                share_expert_dim=INNER, swiglu_limits=[0.0, 0.0, 7.0, 0.0],
                swiglu_limits_shared=[0.0, 0.0, 16.0, 0.0]), **more}, **encoding)
        for name, more, encoding in (
            ("BF16", {}, {}),
            ("FP8", {"quantization_config": _FP8},
             _BLOCKS),
        )
    },
    "MiMo-V2.5-Pro FP4": _made(
        "mimo_v2_flash", QWEN, router="G", beside=_beside(shared=""), mtp="model.mtp.layers.0.",
        more=_dense("model.layers.0.mlp."),
        config=_deepseek("mimo_v2_flash", n_shared_experts=None, first_k_dense_replace=None,
                         moe_layer_freq=[0, 1], quantization_config={
                             "quant_method": "fp8", "store_dtype": "mxfp4",
                             "mxfp4_block_size": 32}),
        **_of("mxfp4, Quark")),
    "Nemotron-3 NVFP4": _made(
        "nemotron_h", "backbone.layers.{}.mixer.experts", layout="U", router="G",
        activation="relu2", beside={
            "norm.weight": (256,), "mixer.gate.weight": (EXPERTS, 256),
            "mixer.gate.e_score_correction_bias": (EXPERTS,),
            "mixer.fc1_latent_proj.weight": (HIDDEN, 256),
            "mixer.fc2_latent_proj.weight": (256, HIDDEN),
            "mixer.shared_experts.up_proj.weight": (INNER, 256),
            "mixer.shared_experts.down_proj.weight": (256, INNER)},
        more={"backbone.layers.0.mixer.in_proj.weight": (512, 256)},
        config=_deepseek("nemotron_h", hidden_size=256, moe_latent_size=HIDDEN,
                         hybrid_override_pattern="ME", mlp_hidden_act="relu2",
                         first_k_dense_replace=None, hidden_act=None, quantization_config={
                             "quant_method": "modelopt", "quant_algo": "NVFP4"}),
        **_of("nvfp4, ModelOpt")),
    "Nemotron-3, stacked": _made(
        "nemotron_h", "backbone.layers.{}.mixer.experts", layout="F11", router="G",
        activation="relu2", beside={
            "norm.weight": (HIDDEN,), "mixer.gate.weight": (EXPERTS, HIDDEN),
            "mixer.gate.e_score_correction_bias": (EXPERTS,)},
        more={"backbone.layers.0.mixer.in_proj.weight": (512, HIDDEN)},
        config=_deepseek("nemotron_h", hybrid_override_pattern="ME", mlp_hidden_act="relu2",
                         first_k_dense_replace=None, hidden_act=None)),
    "nomic-embed-text-v2-moe": _made(
        "nomic_bert", "encoder.layers.{}.mlp.experts", layout="F13", router="S1",
        activation="ungated gelu", beside={
            "norm1.weight": (HIDDEN,), "norm1.bias": (HIDDEN,), "norm2.weight": (HIDDEN,),
            "mlp.router.layer.weight": (EXPERTS, HIDDEN), "mlp.experts.bias": (HIDDEN,)},
        more={"encoder.layers.0.mlp.fc1.weight": (INNER, HIDDEN),
              "encoder.layers.0.mlp.fc1.bias": (INNER,),
              "encoder.layers.0.mlp.fc2.weight": (HIDDEN, INNER),
              "encoder.layers.0.mlp.fc2.bias": (HIDDEN,)},
        config={
            "model_type": "nomic_bert", "activation_function": "gelu", "n_embd": HIDDEN,
            "n_inner": INNER, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB, "ffn_div": 1,
            "num_experts": EXPERTS, "moe_top_k": TOP_K, "moe_every_n_layers": 2,
            "moe_normalize_expert_weights": False, "expert_choice_router": False,
            "num_shared_experts": 0, "layer_norm_epsilon": 1e-05},
        of=_of_fp32, encoding="fp32"),
    "dots3-note": _made(
        "dots3_note_text", QWEN, router="G", beside=_beside(), more={
            **_dense("model.layers.0.mlp."), "vision_encoder.blocks.0.mlp.gate_weight": (2, 64),
            "vision_encoder.blocks.0.mlp.router_bias": (2,),
            **{f"vision_encoder.blocks.0.mlp.experts.{e}.{one}.weight": (64, 64)
               for e in (0, 1) for one in ("fc1", "fc2", "fc3")}},
        config={"model_type": "dots3_note", "text_config": _deepseek("dots3_note_text"),
                "vision_config": {"model_type": "dots3_note_vision", "num_local_experts": 2,
                                  "moe_intermediate_size": 64, "hidden_size": 64}}),
    "Gemma-4 NVFP4": _made(
        "gemma4_text", "model.language_model.layers.{}.experts", BOTH, router="GM",
        activation="gelu_tanh", beside={
            "router.proj.weight": (EXPERTS, HIDDEN), "router.scale": (HIDDEN,),
            "router.per_expert_scale": (EXPERTS,), "pre_feedforward_layernorm.weight": (HIDDEN,),
            **{f"mlp.{one}.weight": shape for one, shape in zip(
                GATED, ((INNER, HIDDEN),) * 2 + ((HIDDEN, INNER),), strict=True)}},
        config={"model_type": "gemma4", "text_config": _config(
            "gemma4_text", hidden_act=None, hidden_activation="gelu_pytorch_tanh",
            num_experts=EXPERTS, num_experts_per_tok=None, top_k_experts=TOP_K,
            enable_moe_block=True), "quantization_config": {
                "quant_method": "modelopt", "quant_algo": "NVFP4"}},
        **_of("nvfp4, ModelOpt")),
    "Mistral-Small-4 FP8": _made(
        "mistral4", "model.language_model.layers.{}.mlp.experts", BOTH, "F1", router="M4",
        beside={**_beside(correction=""), "mlp.experts.gate_up_proj_activation_scale": (1,),
                "mlp.experts.down_proj_activation_scale": (1,)},
        config={"model_type": "mistral3", "text_config": _deepseek(
            "mistral4", first_k_dense_replace=0, scoring_func=None, topk_method=None),
            "quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        of=partial(of_fp8, grid=lambda n, k: (1, 1), name="weight_scale_inv", store=bf16),
        encoding="fp8-tensor"),
    "Mistral-Large-4": _made(
        "mistral_large4_text", "layers.{}.experts", layout="W", router="M4",
        mtp="mtp_dspark.0.", beside=_beside("", "", names=WIDE, norm="ffn_norm"),
        more=_dense("layers.0.feed_forward.", WIDE),
        config={"model_type": "mistral_large4", "text_config": _deepseek(
            "mistral_large4_text", scoring_func=None, topk_method=None,
            num_nextn_predict_layers=1)},
        **_of("fp8 tensor, scalar")),
    "Kolibri-1": _made(
        "kolibri1", QWEN, BOTH, router="KO",
        beside={**_beside(correction=""), "moe.router.expert_bias": (EXPERTS,)},
        config=_config("kolibri1", num_local_experts=EXPERTS, norm_topk_prob=False,
                       shared_expert_intermediate_size=INNER, intermediate_size=None)),
    "Flint": _made(
        "flint", QWEN, router="sigmoid", beside=_beside(correction="", shared="shared_expert"),
        more=_dense("model.layers.0.mlp."),
        config=_config("flint", num_experts=EXPERTS, mlp_only_layers=[0], norm_topk_prob=True,
                       shared_expert_intermediate_size=INNER)),
    "Beam-1.0": _made(
        "beam", QWEN, router="G", beside=_beside(shared=""), more=_dense("model.layers.0.mlp."),
        config=_config("beam", num_experts=EXPERTS, mlp_layer_types=["dense", "sparse"],
                       n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5)),
    "Muse-Spark": _made(
        "muse_spark_text", LANGUAGE, BOTH, "F1", router="G0", post_norm=True, beside={
            **_beside(shared="", hidden=256), "mlp.experts.post_expert_norm.weight": (HIDDEN,),
            "mlp.pre_expert_proj.weight": (HIDDEN, 256), "mlp.pre_expert_norm.weight": (HIDDEN,),
            "mlp.post_expert_proj.weight": (256, HIDDEN)},
        config={"model_type": "muse_spark", "text_config": _config(
            "muse_spark_text", hidden_size=256, moe_hidden_size=HIDDEN,
            num_local_experts=EXPERTS, mlp_layer_types=["sparse", "sparse"],
            routed_scaling_factor=1.0)}),
    "Inkling": _made(
        "inkling_mm_text", "model.llm.layers.{}.mlp.experts", BOTH, "F5", router="IK",
        mtp="model.mtp.layers.0.", beside={
            **_beside(correction="gate.bias", shared="", norm="mlp_norm"),
            "mlp.gate.weight": (EXPERTS + 2, HIDDEN), "mlp.gate.global_scale": (1,),
            "mlp.shared_w13_weight": (2, 2 * INNER, HIDDEN),
            "mlp.shared_w2_weight": (2, HIDDEN, INNER)},
        config={"model_type": "inkling_mm_model", "text_config": _config(
            "inkling_text", n_routed_experts=EXPERTS, n_shared_experts=2, route_scale=8.0,
            shared_expert_sink=True, num_nextn_predict_layers=1)}),
    "Inkling-2 MXFP8": _made(
        "inkling2_text", "model.llm.layers.{}.mlp.experts", BOTH, "F5", router="sigmoid + bias",
        activation="softcap",
        beside=_beside(correction="gate.bias", shared="", norm="mlp_norm"),
        config={"model_type": "inkling2", "text_config": _config(
            "inkling2_text", n_routed_experts=EXPERTS, route_scale=8.0, scoring_func="sigmoid",
            mlp_gate_softcap=4.0, mlp_up_softcap=25.0), "quantization_config": {
                "quant_method": "mxfp8", "weight_block_size": [1, 32]}},
        of=partial(of_fp8_powers, block=(1, 32), name="weight_scale", store=lambda codes: codes),
        encoding="fp8-block"),
    "DiffusionGemma": _made(
        "diffusion_gemma_text", "model.decoder.layers.{}.experts", BOTH, "F1", router="GM",
        activation="gelu_tanh", beside={
            "router.proj.weight": (EXPERTS, HIDDEN), "router.scale": (HIDDEN,),
            "router.per_expert_scale": (EXPERTS,), "pre_feedforward_layernorm.weight": (HIDDEN,)},
        config={"model_type": "diffusion_gemma", "text_config": _config(
            "diffusion_gemma_text", hidden_act=None, hidden_activation="gelu_pytorch_tanh",
            num_experts=EXPERTS, num_experts_per_tok=None, top_k_experts=TOP_K)}),
    "mlx": _made(
        "qwen3_moe", "model.layers.{}.mlp.switch_mlp", BOTH, "F6", router="S1",
        beside=_beside(correction="", shared=""),
        config=_config("qwen3_moe", num_experts=EXPERTS, norm_topk_prob=True)),
}
# fmt: on
MODELS = {**SAVED, **MADE}
