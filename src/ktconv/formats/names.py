"""Names of packed tensors and `.kt` files: builders and parsers (SPEC 2).

Numbers are decimal without padding, so that every name has one spelling; a name
that is spelled otherwise does not parse.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, cast

from msgspec import Struct

from .table import output_named

Matrix = Literal["gate", "up", "down", "gate_bwd", "up_bwd", "down_bwd"]
Kind = Literal["weight", "scale", "bias"]

BACKWARD: tuple[Matrix, ...] = ("gate_bwd", "up_bwd", "down_bwd")
KINDS: tuple[Kind, ...] = ("weight", "scale")  # of every matrix

_KT_WORD: dict[Kind, str] = {"weight": "quant", "scale": "scale"}  # biases have no files
_KT_KIND: dict[str, Kind] = {word: kind for kind, word in _KT_WORD.items()}

_NUMBER = "(0|[1-9][0-9]{0,4})"  # layers, experts and parts
_SIZE = "(0|[1-9][0-9]{0,15})"
_MATRIX = "((?:gate|up|down)(?:_bwd)?)"
_TENSOR = re.compile(
    rf"blk\.{_NUMBER}\.ffn_{_MATRIX}_exps\.{_NUMBER}\.numa\.{_NUMBER}\.(weight|scale|bias)"
)
_KT_PATH = re.compile(
    rf"_layer_{_NUMBER}/_numa_{_NUMBER}/"
    rf"([A-Z0-9_]+)_{_MATRIX}_{_NUMBER}_{_SIZE}Byte_(quant|scale)_\.kt"
)


class TensorId(Struct, frozen=True):
    """The identity of a packed tensor, in shards and layer folders alike."""

    layer: int
    proj: Matrix
    expert: int
    part: int
    kind: Kind


class KtFile(Struct, frozen=True):
    """Facts in the path of a `.kt` file."""

    method: str  # an output format's name, or MOE_ and that name for another layout of it
    tensor: TensorId
    nbytes: int  # exact size of the file


def backward_of(projections: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """The matrices of the backward pass of experts with these forward ones."""
    return tuple(one for one in BACKWARD if one.removesuffix("_bwd") in projections)


def kinds_of(proj: Matrix, part: int, biased: bool) -> tuple[Kind, ...]:
    """The tensors of one part's matrix in a layer with or without biases. That of down is added
    once, so part 0 has it; backward matrices have none."""
    return (
        (*KINDS, "bias")
        if biased and (proj in ("gate", "up") or (proj, part) == ("down", 0))
        else KINDS
    )


def tensor_name(layer: int, proj: Matrix, expert: int, part: int, kind: Kind) -> str:
    """The key of the merged form (SPEC 2.2).

    >>> tensor_name(3, "gate", 0, 1, "weight")
    'blk.3.ffn_gate_exps.0.numa.1.weight'
    """
    return f"blk.{layer}.ffn_{proj}_exps.{expert}.numa.{part}.{kind}"


def parse_tensor_name(name: str) -> TensorId | None:
    """The inverse of `tensor_name`; None for every other name."""
    match = _TENSOR.fullmatch(name)
    if match is None:
        return None
    layer, proj, expert, part, kind = match.groups()
    return TensorId(int(layer), cast(Matrix, proj), int(expert), int(part), cast(Kind, kind))


def kt_path(
    method: str, layer: int, proj: Matrix, expert: int, part: int, kind: Kind, nbytes: int
) -> str:
    """The path of a `.kt` file below the root, with `/` (SPEC 2.1).

    >>> kt_path("INT4", 3, "gate", 0, 1, "weight", 16384)
    '_layer_3/_numa_1/INT4_gate_0_16384Byte_quant_.kt'
    """
    file = f"{method}_{proj}_{expert}_{nbytes}Byte_{_KT_WORD[kind]}_.kt"
    return f"_layer_{layer}/_numa_{part}/{file}"


def parse_kt_path(path: str) -> KtFile | None:
    """The inverse of `kt_path`; None for every other path."""
    match = _KT_PATH.fullmatch(path)
    if match is None:
        return None
    layer, part, method, proj, expert, nbytes, word = match.groups()
    if output_named(method.removeprefix("MOE_")) is None:
        return None
    tensor = TensorId(int(layer), cast(Matrix, proj), int(expert), int(part), _KT_KIND[word])
    return KtFile(method, tensor, int(nbytes))
