"""The modules that config.json must name as not quantized.

SGLang and vLLM before 0.24 refuse a checkpoint with a linear layer that is neither a target nor on
this list; others, and all of them where the class Linear is a target, would take it for quantized.

Names, not patterns: old versions of vLLM ask about attention and embeddings too and end where one
of these is ignored, and a pattern that fits a layer's `experts` could switch the experts off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from ktconv.families.family import Family
from ktconv.families.names import is_in_experts
from ktconv.source import TensorRef
from ktconv.targets.encoded.module_classes import class_of
from ktconv.writer.shards import Tensor

HEAD = "lm_head"
_WEIGHT = ".weight"
_NO_LINEAR = "embeddings"
_QKV = ("q_proj", "k_proj", "v_proj")
_QKV_A = ("q_a_proj", "kv_a_proj_with_mqa")
# Layers that engines compute as one, and their parts. Engines look up the parts where their model
# class lists them, else the whole. Both spellings of qkv: SGLang writes attn.qkv_proj for
# attn.qkv in the lists of vision models, even where _proj is there already.
_JOINED: Mapping[str, Sequence[str]] = {
    "qkv_proj": _QKV,
    "qkv": _QKV,
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": _QKV_A,
    "fused_qkv_a_proj_with_mqa": _QKV_A,
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
# Checkpoints' first words, and those of modules in transformers and vLLM (Nemotron-H).
_RENAMED = {"backbone.": "model."}
_IN_LAYER = re.compile(r"(?:.*?\.)(layers\.[0-9]+\..*)")
_DRAFT = ".eh_proj"  # only a layer for multi-token prediction has it

Stored = Tensor | TensorRef  # of a plan or of a file


def plain_modules(tensors: Iterable[Stored]) -> set[str]:
    """The modules that `tensors` are the weights of: those of two or more dimensions that are no
    embedding, which are linear layers or do no harm on the list."""
    return {
        tensor.name.removesuffix(_WEIGHT)
        for tensor in tensors
        if tensor.name.endswith((_WEIGHT, "_weight"))  # the latter are renamed, or are no modules
        and len(tensor.shape) > 1
        and class_of(tensor.name) != _NO_LINEAR
    }


def ignored_modules(tensors: Iterable[Stored], renamed: Iterable[str] = ()) -> list[str]:
    """The list `ignore`, sorted, for an output whose unpacked tensors are `tensors`: their modules
    by every name that an engine has for them, and the head, which may have no weight of its own.
    `renamed`: see `names_in_transformers`."""
    names = plain_modules(tensors)
    if not any(name.rpartition(".")[2] == HEAD for name in names):
        names.add(HEAD)
    names |= set(_joined(names))
    names |= set(_renamed(names))
    return sorted({*names, *_of_drafts(names), *_shorter(names), *renamed})


def names_in_transformers(tensors: Iterable[Stored], rows: Iterable[Family]) -> set[str]:
    """Transformers' names of the modules of `tensors`, where they differ: by the row of each model
    type in config.json, the whole model's first."""
    plain = {name for name in plain_modules(tensors) if not is_in_experts(name)}
    found = set(plain)
    for pattern, names in dict.fromkeys(change for row in rows for change in row.modules):
        found = {re.sub(pattern, to, one) for one in found for to in names.split("|")}
    return found - plain


def _joined(names: Set[str]) -> Iterator[str]:
    for joined, (first, *more) in _JOINED.items():
        for name in names:
            parent, _, last = name.rpartition(".")
            if last == first and all(f"{parent}.{part}" in names for part in more):
                yield f"{parent}.{joined}"


def _renamed(names: Set[str]) -> Iterator[str]:
    for stored, loaded in _RENAMED.items():
        for name in names:
            if name.startswith(stored):
                yield loaded + name.removeprefix(stored)


def _shorter(names: Set[str]) -> Iterator[str]:
    """Names from `layers` on: SGLang compares the ends of names, and what comes before differs
    between its models and the checkpoint (Mixtral, vision models, drafts)."""
    for name in names:
        if found := _IN_LAYER.fullmatch(name):
            yield found[1]


def _of_drafts(names: Set[str]) -> Iterator[str]:
    """SGLang calls the layer for multi-token prediction `decoder`, whatever its number."""
    for draft in [name.removesuffix(_DRAFT) for name in names if name.endswith(_DRAFT)]:
        for name in names:
            if name.startswith(f"{draft}."):
                yield f"decoder.{name.removeprefix(f'{draft}.')}"
