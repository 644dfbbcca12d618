"""Names of LoRA matrices in files of adapters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ktconv.families import table
from ktconv.families.family import USUAL, Family, Projection
from ktconv.families.names import (
    expert_module,
    layer_number,
    parse_source,
    split_name,
)
from ktconv.source.adapter.parameters import ExpertParameter

Side = Literal["a", "b"]
SIDES: tuple[Side, ...] = ("a", "b")

PREFIX = "base_model.model."  # of PEFT's names, before those of the model's modules
ENDS: Mapping[Side, str] = {"a": "lora_A.weight", "b": "lora_B.weight"}
# Of embeddings, whose matrix is [vocabulary, width]: A [r, vocabulary], B [width, r].
EMBEDDING_ENDS: Mapping[Side, str] = {"a": "lora_embedding_A", "b": "lora_embedding_B"}
WRAPPED = "base_layer"  # what an adapter of PEFT is around
_FUSED = re.compile(r"layers\.([0-9]{1,6})\.experts\.(gate|up|down)_lora_(a|b)")
# Modules in those of experts that have a parameter of their own: Aria's, and Granite's.
_WITHIN = ("fc1", "fc2", "input_linear", "output_linear")


class Place(NamedTuple):
    """A matrix of an adapter; `expert` None: those of all experts of the layer."""

    layer: int
    projection: Projection
    side: Side
    expert: int | None


class ParameterPlace(NamedTuple):
    """A matrix of an adapter of a parameter with all experts of a layer. PEFT nests adapters of
    several parameters of a module: `depth` is how many of them are around this one."""

    layer: int
    module: str  # what has the parameter, in the experts' module
    depth: int
    side: Side


class LayerNames:
    """PEFT's names for a layer: those of a model that has a linear layer for each matrix of an
    expert, and those of the parameters that have the matrices of all of them.

    `source` is before an expert's number, `path` the module with all experts, `words` what its
    matrices are called.
    """

    def __init__(
        self,
        layer: int,
        source: str,
        path: str,
        words: Mapping[Projection, str],
        parameters: Sequence[ExpertParameter],
    ) -> None:
        self.layer, self.source, self.path = layer, source, path
        self.words, self.parameters = words, parameters

    def module(self, projection: Projection, expert: int) -> str:
        """model.layers.3.mlp.experts.5.gate_proj"""
        return f"{self.source}.{expert}.{self.words[projection]}"

    def key(self, projection: Projection, side: Side, expert: int) -> str:
        """base_model.model.model.layers.3.mlp.experts.5.gate_proj.lora_A.weight"""
        return f"{PREFIX}{self.module(projection, expert)}.{ENDS[side]}"

    def parameter(self, of: ExpertParameter) -> str:
        """model.layers.3.mlp.experts.gate_up_proj"""
        return ".".join(filter(None, (self.path, of.module, of.name)))

    def parameter_key(self, of: ExpertParameter, depth: int, side: Side) -> str:
        """base_model.model.model.layers.3.mlp.experts.base_layer.lora_A.weight"""
        words = self.path, of.module, *[WRAPPED] * depth, ENDS[side]
        return PREFIX + ".".join(filter(None, words))

    @property
    def parameter_modules(self) -> dict[str, tuple[int, str]]:
        """PEFT's names of what has the parameters; with the layer, and the part of it that is
        within the experts' module."""
        return {
            PREFIX + ".".join(filter(None, (self.path, one.module))): (self.layer, one.module)
            for one in self.parameters
        }

    def place(self, key: str) -> Place | None:
        """Place with this name; None for others."""
        start = f"{PREFIX}{self.source}."
        if not key.startswith(start):
            return None
        expert, _, rest = key.removeprefix(start).partition(".")
        for side, end in ENDS.items():
            for projection, word in self.words.items():
                if expert.isdecimal() and rest == f"{word}.{end}":
                    return Place(self.layer, projection, side, int(expert))
        return None


def module_of(key: str, ends: Mapping[Side, str] = ENDS) -> tuple[str, Side] | None:
    """The module that a matrix belongs to, by the model's name, and its side; None for a name that
    does not end like that of a matrix."""
    for side, end in ends.items():
        if key.endswith(f".{end}"):
            return key.removeprefix(PREFIX).removesuffix(f".{end}"), side
    return None


def experts_path(key: str) -> str | None:
    """The module of all experts of a layer, of whose parameters this may be a matrix."""
    found = module_of(key)
    if found is None:
        return None
    words = found[0].split(".")
    while words and words[-1] == WRAPPED:
        words.pop()
    within = bool(words) and words[-1] in _WITHIN
    path = ".".join(words[:-1] if within else words)
    inside = within or path.rpartition(".")[2] in table.FAMILIES.containers
    return path if inside and parse_source(path) is not None else None


def layer_of_experts(key: str) -> int | None:
    """The decoder layer of `experts_path`; None where there is none."""
    path = experts_path(key)
    found = None if path is None else parse_source(path)
    return None if found is None or found.in_mtp else found.number


def source_of(path: str, layer: int, family: Family) -> str:
    """The experts of a layer as the family's checkpoints call them."""
    before = f".{path}".partition(f".{layer}.")[0].removeprefix(".")
    return ".".join(filter(None, (before, str(layer), family.block, family.experts or "experts")))


def words_of(family: Family | None) -> dict[Projection, str]:
    """Names of one expert's matrices: gate -> gate_proj."""
    spelt = USUAL if family is None else family.matrices
    if family is not None and (spelt.rows_of_all or not (spelt.up and family.experts)):
        spelt = family.unfused
    return {projection: name for name, projection in spelt.projections.items()}


def parameter_place(key: str, modules: Mapping[str, tuple[int, str]]) -> ParameterPlace | None:
    """Place with this name, of these `parameter_modules`; None for others."""
    found = module_of(key)
    if found is None:
        return None
    words = found[0].split(".")
    depth = 0
    while words and words[-1] == WRAPPED:
        depth += 1
        words.pop()
    place = modules.get(PREFIX + ".".join(words)) if key.startswith(PREFIX) else None
    return None if place is None else ParameterPlace(*place, depth, found[1])


def place_of(key: str) -> Place | None:
    """Place under a key by the spellings of any family, in PEFT's layout or in that of
    KTransformers (layers.3.experts.gate_lora_a); None for a matrix that is no expert's."""
    if fused := _FUSED.fullmatch(key):
        projection: Any = fused[2]
        of: Any = fused[3]
        return Place(int(fused[1]), projection, of, None)
    if (named := module_of(key)) is not None and (found := expert_module(named[0])) is not None:
        layer = layer_number(f"{found.source}.")
        if layer is not None:
            return Place(layer, found.proj, named[1], found.expert)
    return None


def is_of_unknown_layout(key: str) -> bool:
    """Whether a key that is no `Place` is below the experts of a layer, and not a router's."""
    parts = split_name(key.removeprefix(PREFIX))
    if parts is None or parse_source(parts[0]) is None:
        return False
    return not any(
        parts[1].startswith(f"{name.rpartition('.')[0]}.") for name in table.FAMILIES.beside
    )


# ---- modules beside the experts ------------------------------------------------------------


def usual_module(module: str) -> str | None:
    """The part that a module's names in a checkpoint and in transformers have in common: from the
    number of its layer on, with one word for the block of the experts. None outside of layers.

    >>> usual_module("model.language_model.layers.3.block_sparse_moe.gate")
    '3.mlp.gate'
    """
    found = table.FAMILIES.numbered_layer.search(f".{module}.")
    if found is None:
        return None
    blocks = table.FAMILIES.names("block")
    words = f".{module}."[found.end(2) :].strip(".").split(".")
    return ".".join([found[2], *("mlp" if word in blocks else word for word in words)])


def renamed_modules(module: str, rows: Iterable[Family]) -> dict[str, bool]:
    """Transformers' names of a checkpoint's module, by the rows of its family; whether such a
    module is one of several that it consists of."""
    found = {module: False}
    for pattern, names in dict.fromkeys(change for row in rows for change in row.modules):
        several = "|" in names
        for one, part in list(found.items()):
            for to in names.split("|"):
                renamed = re.sub(pattern, to, one)
                found.setdefault(renamed, part or several)
    return found
