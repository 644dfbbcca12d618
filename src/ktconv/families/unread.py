"""Models with experts that are not read, and why not. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping

_ENCODERS = "encoder and decoder have experts, of two matrices with ReLU between them"

# By model_type, without the "_text" of a multimodal model's section.
UNREAD: Mapping[str, str] = {
    "doge": "they are rows of two embeddings (down_embed, up_embed), not matrices",
    "interns2_mobius": "several layers share each bank of experts (meta_mlp)",
    "moondream3": "they compute GELU of gate times up + 1, which no kernel here does",
    "nllb-moe": _ENCODERS,
    "switch_transformers": _ENCODERS,
}
