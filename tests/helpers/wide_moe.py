"""Shapes of a Qwen3-MoE that is large enough to be measured, for files that tests fill."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(hidden: int, inner: int, experts: int, queries: int) -> Shapes:
    """Of a layer, by names behind model.layers.L.; heads of 64, two for keys and values, `queries`
    numbers for queries."""
    found: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (128, hidden),
        "self_attn.v_proj.weight": (128, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (64,),
        "self_attn.k_norm.weight": (64,),
        "mlp.gate.weight": (experts, hidden),
    }
    for expert in range(experts):
        found |= {
            f"mlp.experts.{expert}.gate_proj.weight": (inner, hidden),
            f"mlp.experts.{expert}.up_proj.weight": (inner, hidden),
            f"mlp.experts.{expert}.down_proj.weight": (hidden, inner),
        }
    return found
