"""Names of a GGUF model's tensors in the unquantized safetensors checkpoint of the same family.

Only of families whose rows llama.cpp's converter leaves in their order: what it permutes, splits or
adds to elsewhere (q and k of Llama, norms of Gemma) is not undone here. transformers reads the same
families from GGUF files, by the same names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from ktconv.families.family import NUMBERED_W, USUAL, Matrices

_IN_LAYER = re.compile(r"blk\.([0-9]+)\.(.+)")
_ENDS = ("weight", "bias")

_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_NORMS_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_QWEN = _LAYER | {"ffn_gate_inp": "mlp.gate"}


class ExpertNames(Struct, frozen=True):
    """`prefix`.EXPERT.`matrices` are the names of the experts' modules."""

    prefix: str
    matrices: Matrices


class HubNames(Struct, frozen=True):
    """Names of one architecture; those within a layer are behind blk.L. and model.layers.L."""

    layer: Mapping[str, str]  # modules, or whole names of tensors that are none of a module
    block: str  # of the experts
    matrices: Matrices = USUAL
    float32: frozenset[str] = frozenset()  # tensors that the family's checkpoints have in float32
    rows: frozenset[str] = frozenset()  # tensors [1, n] that are vectors in GGUF files

    def find(self, name: str) -> str | None:
        """model.layers.3.self_attn.q_proj.weight for blk.3.attn_q.weight; None: not known."""
        found = _IN_LAYER.fullmatch(name)
        modules, rest = (self.layer, found[2]) if found else (_MODEL, name)
        start = f"model.layers.{int(found[1])}." if found else ""
        if rest in modules and "." in rest:
            return start + modules[rest]
        module, _, end = rest.rpartition(".")
        return f"{start}{modules[module]}.{end}" if module in modules and end in _ENDS else None

    def is_float32(self, name: str) -> bool:
        return _in_layer(name) in self.float32

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a tensor in the output that has `shape` in the GGUF file."""
        is_row = len(shape) == 1 and _in_layer(name) in self.rows
        return (1, *shape) if is_row else shape

    def experts(self, layer: int) -> ExpertNames:
        return ExpertNames(f"model.layers.{layer}.{self.block}.experts", self.matrices)


def _in_layer(name: str) -> str:
    found = _IN_LAYER.fullmatch(name)
    return found[2] if found else name


# By general.architecture.
HUB_NAMES: Mapping[str, HubNames] = {
    "qwen2moe": HubNames(
        _QWEN
        | {
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        "mlp",
        rows=frozenset(("ffn_gate_inp_shexp.weight",)),
    ),
    "qwen3moe": HubNames(_QWEN | _NORMS_OF_HEADS, "mlp"),
    "minimax-m2": HubNames(
        _LAYER
        | _NORMS_OF_HEADS
        | {
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        "block_sparse_moe",
        NUMBERED_W,
        float32=frozenset(("ffn_gate_inp.weight", "exp_probs_b.bias")),
    ),
}
