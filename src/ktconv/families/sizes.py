"""Published dimensions of models, one row each, from the config.json of their releases.

A model whose numbers are not known for sure is not here: `ktconv quantize-cpu MODEL OUTPUT
--dry-run` computes its sizes from its headers.
"""

from __future__ import annotations

from msgspec import Struct


class Size(Struct, frozen=True):
    """A model's routed experts."""

    type: str  # model_type
    model: str
    layers: int  # with routed experts, without those for multi-token prediction
    experts: int  # of a layer
    hidden: int  # inputs of an expert
    intermediate: int
    top_k: int
    hub: str = ""  # id of a release; "" where it is not known for sure


# fmt: off
SIZES = (
    # type, model, layers, experts, hidden, intermediate, top-k
    Size("qwen2_moe", "Qwen1.5-MoE-A2.7B", 24, 60, 2048, 1408, 4, "Qwen/Qwen1.5-MoE-A2.7B-Chat"),
    Size("qwen2_moe", "Qwen2-57B-A14B", 28, 64, 3584, 2560, 8, "Qwen/Qwen2-57B-A14B-Instruct"),
    Size("qwen3_moe", "Qwen3-30B-A3B", 48, 128, 2048, 768, 8, "Qwen/Qwen3-30B-A3B"),
    Size("qwen3_moe", "Qwen3-235B-A22B", 94, 128, 4096, 1536, 8, "Qwen/Qwen3-235B-A22B"),
    Size("qwen3_moe", "Qwen3-Coder-480B-A35B", 62, 160, 6144, 2560, 8,
         "Qwen/Qwen3-Coder-480B-A35B-Instruct"),
    Size("qwen3_next", "Qwen3-Next-80B-A3B", 48, 512, 2048, 512, 10,
         "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    Size("qwen3_5_moe", "Qwen3.5-35B-A3B", 40, 256, 2048, 512, 8, "Qwen/Qwen3.5-35B-A3B"),
    Size("qwen3_5_moe", "Qwen3.5-397B-A17B", 60, 512, 4096, 1024, 10, "Qwen/Qwen3.5-397B-A17B"),
    Size("mixtral", "Mixtral-8x7B", 32, 8, 4096, 14336, 2, "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    Size("mixtral", "Mixtral-8x22B", 56, 8, 6144, 16384, 2,
         "mistralai/Mixtral-8x22B-Instruct-v0.1"),
    Size("minimax_m2", "MiniMax-M2", 62, 256, 3072, 1536, 8, "MiniMaxAI/MiniMax-M2"),
    Size("phimoe", "Phi-3.5-MoE", 32, 16, 4096, 6400, 2, "microsoft/Phi-3.5-MoE-instruct"),
    Size("kimi_linear", "Kimi-Linear-48B-A3B", 26, 256, 2304, 1024, 8,
         "moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    Size("deepseek_v2", "DeepSeek-V2-Lite", 26, 64, 2048, 1408, 6,
         "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    Size("deepseek_v2", "DeepSeek-V2", 59, 160, 5120, 1536, 6, "deepseek-ai/DeepSeek-V2-Chat"),
    Size("deepseek_v3", "DeepSeek-V3", 58, 256, 7168, 2048, 8, "deepseek-ai/DeepSeek-V3"),
    Size("deepseek_v3", "DeepSeek-R1", 58, 256, 7168, 2048, 8, "deepseek-ai/DeepSeek-R1"),
    Size("deepseek_v3", "DeepSeek-V3.1", 58, 256, 7168, 2048, 8, "deepseek-ai/DeepSeek-V3.1"),
    Size("deepseek_v3", "Kimi-K2", 60, 384, 7168, 2048, 8, "moonshotai/Kimi-K2-Instruct"),
    Size("deepseek_v32", "DeepSeek-V3.2", 58, 256, 7168, 2048, 8, "deepseek-ai/DeepSeek-V3.2"),
    Size("kimi_k2", "Kimi-K2-Thinking", 60, 384, 7168, 2048, 8, "moonshotai/Kimi-K2-Thinking"),
    Size("kimi_k25", "Kimi-K2.5", 60, 384, 7168, 2048, 8, "moonshotai/Kimi-K2.5"),
    Size("deepseek_v4", "DeepSeek-V4-Flash", 43, 256, 4096, 2048, 6,
         "deepseek-ai/DeepSeek-V4-Flash"),
    Size("glm4_moe", "GLM-4.5-Air", 45, 128, 4096, 1408, 8, "zai-org/GLM-4.5-Air"),
    Size("glm4_moe", "GLM-4.5", 89, 160, 5120, 1536, 8, "zai-org/GLM-4.5"),
    Size("glm4_moe", "GLM-4.6", 89, 160, 5120, 1536, 8, "zai-org/GLM-4.6"),
    Size("glm4_moe", "GLM-4.7", 89, 160, 5120, 1536, 8, "zai-org/GLM-4.7"),
    Size("glm4v_moe", "GLM-4.5V", 45, 128, 4096, 1408, 8, "zai-org/GLM-4.5V"),
    Size("solar_open", "Solar-Open-100B", 48, 128, 4096, 1280, 8, "upstage/Solar-Open-100B"),
    Size("glm4_moe_lite", "GLM-4.7-Flash", 46, 64, 2048, 1536, 4, "zai-org/GLM-4.7-Flash"),
    Size("glm_moe_dsa", "GLM-5", 75, 256, 6144, 2048, 8, "zai-org/GLM-5"),
    Size("glm5_next", "GLM-5.3-Flash", 42, 288, 4096, 2048, 8, "zai-org/GLM-5.3-Flash"),
    Size("gpt_oss", "gpt-oss-20b", 24, 32, 2880, 2880, 4, "openai/gpt-oss-20b"),
    Size("gpt_oss", "gpt-oss-120b", 36, 128, 2880, 2880, 4, "openai/gpt-oss-120b"),
    Size("ernie4_5_moe", "ERNIE-4.5-21B-A3B", 27, 64, 2560, 1536, 6,
         "baidu/ERNIE-4.5-21B-A3B-PT"),
    Size("ernie4_5_moe", "ERNIE-4.5-300B-A47B", 51, 64, 8192, 3584, 8,
         "baidu/ERNIE-4.5-300B-A47B-PT"),
    Size("hunyuan_v1_moe", "Hunyuan-A13B", 32, 64, 4096, 3072, 8, "tencent/Hunyuan-A13B-Instruct"),
    Size("step3p5", "Step-3.5-Flash", 42, 288, 4096, 1280, 8, "stepfun-ai/Step-3.5-Flash"),
    Size("mimo_v2_flash", "MiMo-V2-Flash", 47, 256, 4096, 2048, 8, "XiaomiMiMo/MiMo-V2-Flash"),
    Size("longcat_flash", "LongCat-Flash", 28, 512, 6144, 2048, 12,
         "meituan-longcat/LongCat-Flash-Chat"),
    Size("dbrx", "DBRX", 40, 16, 6144, 10752, 4, "databricks/dbrx-instruct"),
    Size("dots1", "dots.llm1", 61, 128, 4096, 1408, 6, "rednote-hilab/dots.llm1.inst"),
    Size("jamba", "Jamba-1.5-Mini", 16, 16, 4096, 14336, 2),
    Size("jamba", "Jamba-1.5-Large", 36, 16, 8192, 24576, 2),
    Size("llama4", "Llama-4-Scout", 48, 16, 5120, 8192, 1,
         "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    Size("llama4", "Llama-4-Maverick", 24, 128, 5120, 8192, 1,
         "meta-llama/Llama-4-Maverick-17B-128E-Instruct"),
    Size("nemotron_h", "Nemotron-3-Nano", 23, 128, 2688, 1856, 6,
         "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    Size("nomic_bert", "nomic-embed-text-v2-moe", 6, 8, 768, 3072, 2,
         "nomic-ai/nomic-embed-text-v2-moe"),
    Size("olmoe", "OLMoE-1B-7B", 16, 64, 2048, 1024, 8, "allenai/OLMoE-1B-7B-0924-Instruct"),
)
# fmt: on


def sizes_of(model_type: str) -> tuple[Size, ...]:
    """The models of a type."""
    return tuple(size for size in SIZES if size.type == model_type)


def size_named(model: str) -> Size:
    """The row of a model."""
    return next(size for size in SIZES if size.model == model)
