"""The modules that config.json must name as not quantized.

For every linear layer that is neither a target nor on this list, SGLang and vLLM before 0.24 refuse
to load the checkpoint. Names, not patterns: SGLang looks for a listed name inside the names of its
modules, so that anything shorter could switch the experts off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

HEAD = "lm_head"
# Layers that engines compute as one, and the layers of the checkpoint that they are made of. Where
# an engine's model does not tell its parts, it is asked for by this name.
_JOINED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_WEIGHT = ".weight"


def ignored_modules(tensors: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
    """Names, sorted, of all modules that `tensors` (name, shape) are the plain weights of.

    `tensors` are those of no routed expert. Whatever has a weight of two or more dimensions counts:
    embeddings and convolutions do no harm. Joined layers are added, and the head of a model that
    shares its weight with the embeddings.
    """
    plain = {
        name.removesuffix(_WEIGHT)
        for name, shape in tensors
        if name.endswith(_WEIGHT) and len(shape) > 1
    }
    names = plain | set(_joined(plain))
    if not any(name.rpartition(".")[2] == HEAD for name in plain):
        names.add(HEAD)
    return sorted(names)


def _joined(plain: set[str]) -> Iterable[str]:
    for joined, parts in _JOINED.items():
        for name in plain:
            parent, _, last = name.rpartition(".")
            if last == parts[0] and all(f"{parent}.{part}" in plain for part in parts):
                yield f"{parent}.{joined}"
