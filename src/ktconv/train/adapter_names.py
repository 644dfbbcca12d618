"""Names of the LoRA matrices of experts in files of adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ktconv.families import table
from ktconv.families.family import USUAL, Family, Projection
from ktconv.families.names import expert_module, layer_number, parse_source, split_name
from ktconv.model.own import ExpertParameter
from ktconv.model.sites import Site
from ktconv.source.settings import ModelSettings

Side = Literal["a", "b"]
SIDES: tuple[Side, ...] = ("a", "b")

PREFIX = "base_model.model."  # of PEFT's names, before those of the model's modules
_ENDS: Mapping[Side, str] = {"a": "lora_A.weight", "b": "lora_B.weight"}
_WRAPPED = "base_layer"  # what an adapter of PEFT is around
_FUSED = re.compile(r"layers\.([0-9]{1,6})\.experts\.(gate|up|down)_lora_(a|b)")


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
    """PEFT's names for a layer: those of a model that has a linear layer for each matrix.

    Of lists these are the model's own. Where it has all experts in one module they are those that
    checkpoints of its family have (Mixtral: block_sparse_moe.experts.3.w1), by which engines and
    PEFT know them.
    """

    def __init__(self, site: Site, config: ModelSettings) -> None:
        path, family = site.bare_path.removeprefix(PREFIX), config.family
        self.layer, self.words = site.layer, site.names
        self.parameters = site.parameters_of_all
        self.source = self._path = path
        if not self.words:
            self.words = _words(family)
            self.source = _source(path, site.layer, family) if family else path

    def module(self, projection: Projection, expert: int) -> str:
        """model.layers.3.mlp.experts.5.gate_proj"""
        return f"{self.source}.{expert}.{self.words[projection]}"

    def key(self, projection: Projection, side: Side, expert: int) -> str:
        """base_model.model.model.layers.3.mlp.experts.5.gate_proj.lora_A.weight"""
        return f"{PREFIX}{self.module(projection, expert)}.{_ENDS[side]}"

    def parameter(self, of: ExpertParameter) -> str:
        """model.layers.3.mlp.experts.gate_up_proj"""
        return ".".join(filter(None, (self._path, of.module, of.name)))

    def parameter_key(self, of: ExpertParameter, depth: int, side: Side) -> str:
        """base_model.model.model.layers.3.mlp.experts.base_layer.lora_A.weight"""
        words = self._path, of.module, *[_WRAPPED] * depth, _ENDS[side]
        return PREFIX + ".".join(filter(None, words))

    @property
    def parameter_modules(self) -> dict[str, tuple[int, str]]:
        """PEFT's names of what has the parameters; with the layer, and the part of it that is
        within the experts' module."""
        return {
            PREFIX + ".".join(filter(None, (self._path, one.module))): (self.layer, one.module)
            for one in self.parameters
        }

    def place(self, key: str) -> Place | None:
        """Place with this name; None for others."""
        start = f"{PREFIX}{self.source}."
        if not key.startswith(start):
            return None
        expert, _, rest = key.removeprefix(start).partition(".")
        for side, end in _ENDS.items():
            for projection, word in self.words.items():
                if expert.isdecimal() and rest == f"{word}.{end}":
                    return Place(self.layer, projection, side, int(expert))
        return None


def _source(path: str, layer: int, family: Family) -> str:
    """The experts of a layer as the family's checkpoints call them."""
    before = f".{path}".partition(f".{layer}.")[0].removeprefix(".")
    return ".".join(filter(None, (before, str(layer), family.block, family.experts or "experts")))


def _words(family: Family | None) -> dict[Projection, str]:
    """Names of one expert's matrices: gate -> gate_proj."""
    spelt = USUAL if family is None else family.matrices
    if family is not None and (spelt.rows_of_all or not (spelt.up and family.experts)):
        spelt = family.unfused
    return {projection: name for name, projection in spelt.projections.items()}


def parameter_place(key: str, modules: Mapping[str, tuple[int, str]]) -> ParameterPlace | None:
    """Place with this name, of these `parameter_modules`; None for others."""
    for side, end in _ENDS.items():
        if not key.endswith(f".{end}"):
            continue
        words = key.removesuffix(f".{end}").split(".")
        depth = 0
        while words and words[-1] == _WRAPPED:
            depth += 1
            words.pop()
        found = modules.get(".".join(words))
        return None if found is None else ParameterPlace(*found, depth, side)
    return None


def place_of(key: str) -> Place | None:
    """Place under a key by the spellings of any family, in PEFT's layout or in that of
    KTransformers (layers.3.experts.gate_lora_a); None for a matrix that is no expert's."""
    if fused := _FUSED.fullmatch(key):
        projection: Any = fused[2]
        of: Any = fused[3]
        return Place(int(fused[1]), projection, of, None)
    for side, end in _ENDS.items():
        found = expert_module(key.removeprefix(PREFIX).removesuffix(f".{end}"))
        if key.endswith(f".{end}") and found is not None:
            layer = layer_number(f"{found.source}.")
            if layer is not None:
                return Place(layer, found.proj, side, found.expert)
    return None


def is_of_unknown_layout(key: str) -> bool:
    """Whether a key that is no `Place` is below the experts of a layer, and not a router's."""
    parts = split_name(key.removeprefix(PREFIX))
    if parts is None or parse_source(parts[0]) is None:
        return False
    return not any(
        parts[1].startswith(f"{name.rpartition('.')[0]}.") for name in table.FAMILIES.beside
    )
