"""Counts the modules of a checkpoint by class, and which of them are quantized."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from msgspec import Struct

from ktconv.conversion.plan import Copy, LayerUnit
from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.names import is_in_experts
from ktconv.families.table import Families, one_of
from ktconv.system.units import format_size
from ktconv.targets.encoded.names import fits
from ktconv.targets.encoded.naming import BLK

if TYPE_CHECKING:
    from ktconv.targets.encoded.target import EncodedTarget

ROUTED = "routed experts"
_MODULES = ("modules", "module ")  # a column
_OTHER = "other"


@cache
def _classes(families: Families) -> Sequence[tuple[str, re.Pattern[str]]]:
    """The first pattern found in a tensor's name decides."""
    block = one_of((*families.names("block"), "moe"))
    router = one_of(families.routers)
    bare = (
        "" if families.has_blocks else rf"|\.{one_of(families.names('layers'))}\.[0-9]+\.{router}\b"
    )
    correction = one_of(families.corrections)
    shared, dense = (one_of(families.names(field)) for field in ("shared", "block"))
    patterns = {
        "vision parts": r"(?:^|\.)(?:\w*vis(?:ual|ion)\w*|\w*image\w*|audio\w*|\w*mm_projector|"
        r"multi_modal_projector|aligner)\.",
        "shared-expert gates": rf"\.{shared}_gate\.",
        "shared experts": rf"\.{shared}\.",
        "router gates": rf"\.{block}\.{router}\b|{correction}{bare}",
        "norms": r"(?:^|\.)\w*(?:norm|layernorm|ln_f|ln_\d)\w*(?:\.weight|\.bias)?$",
        "linear attention": r"\.(?:linear_attn|linear_attention|mamba|mixer|gated_delta\w*)\.",
        "attention": r"\.(?:self_attn|attention|attn|self_attention)\.",
        "embeddings": r"(?:^|\.)(?:embed\w*|\w*word_embeddings|wte|wpe)\.",
        "lm_head": r"(?:^|\.)(?:lm_head|head|output)\.",
        "leading dense layers": rf"\.{dense}\.{one_of(families.matrix_words)}\.",
    }
    return [(name, re.compile(pattern)) for name, pattern in patterns.items()]


class ClassCount(Struct):
    """Modules of one class; a weight with its scales and bias is one module."""

    name: str
    modules: int = 0
    source_bytes: int = 0
    quantized: bool = False
    example: str = ""  # of its modules


def class_of(tensor: str) -> str:
    """The class of a tensor that is no routed expert's.

    >>> class_of("model.layers.3.mlp.shared_experts.up_proj.weight")
    'shared experts'
    """
    return next(
        (name for name, pattern in _classes(table.FAMILIES) if pattern.search(tensor)), _OTHER
    )


def class_lines(classes: Sequence[ClassCount]) -> list[str]:
    """The table that people read."""
    lines = []
    for count in classes:
        fate = "quantized" if count.quantized else "kept as they are"
        word = _MODULES[count.modules == 1]
        lines.append(
            f"{count.name:<21} {count.modules:>8} {word}  {format_size(count.source_bytes):>9}"
            f"  {fate:<16}  {count.example}"
        )
    return lines


def count_classes(
    target: EncodedTarget, units: Sequence[LayerUnit], others: Iterable[Copy]
) -> list[ClassCount]:
    """All classes that there are, routed experts first.

    Raises CheckpointError for an expert that would stay unquantized, and where the pattern in
    config.json would not find exactly the experts.
    """
    patterns = target.patterns((unit.layer, unit.experts) for unit in units)
    every = [pattern for some in patterns.values() for pattern in some]
    experts = ClassCount(ROUTED, quantized=True)
    for unit in units:
        for expert in unit.experts:
            for proj in unit.layer.projections:
                name = target.module(unit.layer, expert, proj)
                scheme = target.scheme_of(unit.layer, expert, proj)
                found = [one for one, some in patterns.items() if _any_fits(some, name)]
                if found != [scheme] and target.row.naming is not BLK:
                    raise CheckpointError(
                        f"{name} would stay unquantized: {', '.join(every)} misses it"
                        if not found
                        else f"{name} would be taken for {found[0].name}, not {scheme.name}",
                        "use one method for all layers",
                    )
                experts.modules += 1
                experts.example = experts.example or name
        experts.source_bytes += unit.source_bytes
    if not experts.modules:
        raise CheckpointError(f"{', '.join(every)} finds no module: there is nothing to quantize")
    return [experts, *_count_others(others, every)]


def _any_fits(patterns: Sequence[str], module: str) -> bool:
    return any(fits(pattern, module) for pattern in patterns)


def _count_others(copies: Iterable[Copy], patterns: Sequence[str]) -> list[ClassCount]:
    counts = {name: ClassCount(name) for name, _ in (*_classes(table.FAMILIES), (_OTHER, ""))}
    seen = set()
    for tensor, name in copies:
        module = name.rpartition(".")[0] or name
        if _any_fits(patterns, module) or is_in_experts(name):
            raise CheckpointError(
                f"{tensor.name} belongs to an expert that would stay unquantized",
                "this way of storing experts is not supported",
            )
        count = counts[class_of(name)]
        count.source_bytes += tensor.nbytes
        if module not in seen:
            seen.add(module)
            count.modules += 1
            count.example = count.example or module
    return [count for count in counts.values() if count.modules]
