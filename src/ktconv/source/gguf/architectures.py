"""Names of model families in llama.cpp, and in Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field


class Architecture(Struct, frozen=True):
    """`config`: settings that the files do not have, or need not. `refused`: why experts cannot be
    read."""

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None


# What llama.cpp computes for architectures whose routers no row of the table of families has: the
# score function where the file has no expert_gating_func, and whether weights are shares.
_SOFTMAX = {"scoring_func": "softmax", "norm_topk_prob": False}
_SOFTMAX_SHARES = {"scoring_func": "softmax", "norm_topk_prob": True}
_SIGMOID_SHARES = {"scoring_func": "sigmoid", "norm_topk_prob": True}

# By general.architecture. Others keep their own name as model_type.
ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": Architecture("afmoe"),
    "arctic": Architecture("arctic", config=_SOFTMAX_SHARES),
    "bailingmoe": Architecture("bailing_moe", config=_SOFTMAX),
    "bailingmoe2": Architecture("bailing_moe_v2"),
    "dbrx": Architecture("dbrx"),
    "deepseek": Architecture("deepseek", config=_SOFTMAX),
    # With sigmoid scores; V2 has softmax, and the same architecture: see gguf.config.
    "deepseek2": Architecture("deepseek_v3"),
    "deepseek2-ocr": Architecture("deepseek_vl_v2", config={"scoring_func": "softmax"}),
    "dots1": Architecture("dots1"),
    "ernie4_5-moe": Architecture("ernie4_5_moe"),
    "exaone-moe": Architecture("exaone_moe"),
    "gemma4": Architecture("gemma4", config={"hidden_activation": "gelu_pytorch_tanh"}),
    "glm-dsa": Architecture("glm_moe_dsa"),
    "glm4moe": Architecture("glm4_moe"),
    "gpt-oss": Architecture("gpt_oss"),
    "granitehybrid": Architecture("granitemoehybrid"),
    "granitemoe": Architecture("granitemoe"),
    "grok": Architecture("grok", config={"hidden_act": "gelu", **_SOFTMAX_SHARES}),
    "grovemoe": Architecture("grove_moe", refused="it has chunk experts besides the others"),
    "hunyuan-moe": Architecture("hunyuan_v1_moe"),
    "jamba": Architecture("jamba"),
    "kimi-linear": Architecture("kimi_linear"),
    "lfm2moe": Architecture("lfm2_moe"),
    "llada-moe": Architecture("llada_moe", config=_SOFTMAX),
    "llama": Architecture("mixtral"),
    "llama4": Architecture("llama4"),
    "mimo2": Architecture("mimo_v2", config=_SIGMOID_SHARES),
    "minimax-m2": Architecture("minimax_m2"),
    "mistral4": Architecture("mistral4"),
    "nemotron_h_moe": Architecture("nemotron_h"),
    "nomic-bert-moe": Architecture("nomic_bert"),
    "olmoe": Architecture("olmoe"),
    "phimoe": Architecture("phimoe"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen35moe": Architecture("qwen3_5_moe"),
    "qwen3moe": Architecture("qwen3_moe"),
    "qwen3next": Architecture("qwen3_next"),
    "qwen3vlmoe": Architecture("qwen3_vl_moe"),
    "smallthinker": Architecture("smallthinker", config={"hidden_act": "relu"}),
    "step35": Architecture("step3p5"),
}

# Settings that have the same meaning under two names, by the keys after the architecture's name.
SETTINGS: Mapping[str, str] = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "embedding_length": "hidden_size",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "moe_latent_size": "moe_latent_size",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
# expert_gating_func; 0 is none, and 3 a softmax over the chosen experts, which families say by
# themselves.
SCORING: Mapping[int, str] = {1: "softmax", 2: "sigmoid", 4: "sqrtsoftplus"}
SAID_BY_FAMILY = (0, 3)
# GLM-4.7-Flash is of architecture deepseek2, whose routers score by softmax where the file does not
# say; llama.cpp knows it by its number of layers and its vocabulary.
GLM_4_7_FLASH_LAYERS, GLM_4_7_FLASH_TOKENS = (47, 48), 154_880
