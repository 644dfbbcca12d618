"""Models' own names of expert modules: those of the unfused model."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple, TypeVar

from ktconv.families import table
from ktconv.families.family import USUAL
from ktconv.source import PROJECTIONS, MoELayer, Projection

USUAL_CONTAINER = "experts"
STACKED_GATE_UP = "gate_up_proj"  # gate and up of all experts
LINEAR = "Linear"  # the class of modules that targets and ignore lists can name


def module_name(layer: MoELayer, expert: int, proj: Projection) -> str:
    """model.layers.3.mlp.experts.5.gate_proj: the source's own name where it has one per
    expert (Mixtral: w1, w3, w2), else the usual one; for GGUF that of the safetensors model."""
    if layer.hub_names is not None:
        return f"{layer.hub_names.prefix}.{expert}.{layer.hub_names.matrices.of(proj)}"
    return f"{_container(layer.source)}.{expert}.{_spelling(layer, proj)}"


def container_of(layer: MoELayer) -> str:
    """model.layers.3.mlp.experts: what precedes the number of an expert."""
    return _container(layer.source) if layer.hub_names is None else layer.hub_names.prefix


def _container(source: str) -> str:
    """The family's own name for it; the usual one where a tool chose another, or there is none."""
    block, _, last = source.rpartition(".")
    if last in table.FAMILIES.own_containers:
        return source
    where = block if last in table.FAMILIES.containers else source
    return f"{where}.{USUAL_CONTAINER}"


def _spelling(layer: MoELayer, proj: Projection) -> str:
    name = layer.experts[0][proj].tensor.name
    match = re.fullmatch(re.escape(layer.source) + r"\.[0-9]+\.(\w+)\.\w+", name)
    if match:
        return match[1]
    down = layer.experts[0]["down"].tensor.name.removesuffix(".weight").rpartition(".")[2]
    return table.FAMILIES.unfused.get(down, USUAL).of(proj)


def target_pattern(modules: Iterable[str], stacked: bool = False) -> str:
    """The pattern by which engines find the encoded modules, of which these are some; it never
    fits a shared expert. `stacked`: it finds the tensors of all experts, too.

    The usual names are always in it: vLLM asks for them whatever the model calls its own.
    """
    parts = {tuple(module.split(".")[-3::2]) for module in modules}  # (experts, gate_proj)
    containers = "|".join(sorted({where for where, _ in parts})) or "experts"
    both = {STACKED_GATE_UP} if stacked else set()
    spelled = "|".join(sorted({word for _, word in parts} | USUAL.projections.keys() | both))
    where = f"({containers})" if "|" in containers else containers
    number = r"([0-9]+\.)?" if stacked else r"[0-9]+\."
    return rf"re:.*\.{where}\.{number}({spelled})$"


def fits(pattern: str, module: str) -> bool:
    """Whether compressed-tensors would find `module` by `pattern`."""
    return re.match(pattern.removeprefix("re:"), module) is not None


# ---- several methods -----------------------------------------------------------------------

T = TypeVar("T", bound=Hashable)


def patterns_of(
    modules: Iterable[tuple[str, Projection, T]],
) -> dict[T, list[str]]:
    """Patterns that find the modules of each method, and none of another: layers by number, experts
    by number where not all of a layer have the method, projections by the model's own words and the
    usual ones, for which vLLM asks. What precedes `layers` and `experts` is left open, since
    engines rename it, unless two layers differ by it alone (a model's and its draft's)."""
    found: dict[_Place, dict[T, dict[Projection, set[int]]]] = {}
    words: dict[Projection, set[str]] = {}
    for module, proj, method in modules:
        place, expert, word = _place_of(module)
        found.setdefault(place, {}).setdefault(method, {}).setdefault(proj, set()).add(expert)
        words.setdefault(proj, set()).add(word)
    stems, tails = {place.stem for place in found}, {place.tail for place in found}
    shared: dict[tuple[T, str, str, str, tuple[Projection, ...]], list[int]] = {}
    for place, methods in found.items():
        every = set().union(*(ids for one in methods.values() for ids in one.values()))
        for method, projections in methods.items():
            for ids, some in _by_experts(projections):
                which = "[0-9]+" if ids == every else _any(sorted(ids))
                key = (method, place.stem, place.tail, which, some)
                shared.setdefault(key, []).append(place.layer)
    patterns: dict[T, list[str]] = {}
    for (method, stem, tail, which, some), layers in shared.items():
        spelled = {word for proj in some for word in (*words[proj], USUAL.of(proj))}
        where = f"{_end(stem, stems)}{_any(sorted(layers))}\\.{_end(tail, tails)}"
        pattern = rf"re:{where}{which}\.{_any(sorted(spelled))}$"
        patterns.setdefault(method, []).append(pattern)
    return {method: sorted(some) for method, some in patterns.items()}


class _Place(NamedTuple):
    """model.layers, 3, mlp.experts"""

    stem: str
    layer: int
    tail: str


def _place_of(module: str) -> tuple[_Place, int, str]:
    """Place of a module, with the expert's number and the projection's word."""
    *path, expert, word = module.split(".")
    at = max(i for i, part in enumerate(path) if part.isdecimal())
    place = _Place(".".join(path[:at]), int(path[at]), ".".join(path[at + 1 :]))
    return place, int(expert), word


def _by_experts(
    projections: Mapping[Projection, set[int]],
) -> Iterator[tuple[set[int], tuple[Projection, ...]]]:
    """Projections that the same experts have."""
    left = dict(projections)
    while left:
        ids = next(iter(left.values()))
        some = tuple(proj for proj in PROJECTIONS if left.get(proj) == ids)
        yield ids, some
        for proj in some:
            del left[proj]


def _any(parts: Sequence[object]) -> str:
    words = [str(part) for part in parts]
    return words[0] if len(words) == 1 else f"({'|'.join(words)})"


def _end(path: str, others: Set[str]) -> str:
    r"""Pattern of what precedes a number: `(.*\.)?layers\.`; all of it where others end like
    that."""
    last = path.rpartition(".")[2]
    alone = sum(other.rpartition(".")[2] == last for other in others) == 1
    return rf"(.*\.)?{re.escape(last)}\." if alone else rf"{re.escape(path)}\."
