"""A recipe: which method each matrix of the routed experts gets, as a file that people edit.

    method = "int4-g128"              # of all matrices that no rule names
    engine = "vllm"                   # what must load the output; see `engines`

    [[rule]]
    layers = "0-2,61"                 # or "mtp"; default: all
    projections = ["down"]            # of gate, up, down; default: all
    experts = "hot.json"              # a file of --experts, or { 3 = "0,5,17-20" }; default: all
    method = "int8-g128"
    group_size = 64                   # of a method that has several

Of several rules for a matrix the last one counts. `Recipe.toml` is the same file in one form, with
sets of experts in it and numbers for "mtp": what an output records.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NoReturn, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from ktconv.errors import UsageError
from ktconv.formats.dialects import translated
from ktconv.source import PROJECTIONS, MoELayer, Projection
from ktconv.source.toml_file import parse_toml, read_toml, unknown_key
from ktconv.system.units import counted, format_ranges, parse_ranges
from ktconv.targets.encoded.scheme import MIXABLE, SCHEMES, Scheme
from ktconv.targets.expert_sets import ExpertSet, check_expert_set, expert_set, read_expert_set

MTP = "mtp"
FIRST_ENGINE = "vllm"
_MAX_BYTES = 16 << 20
_TOP_KEYS = ("method", "group_size", "engine", "rule")
_RULE_KEYS = ("layers", "projections", "experts", "method", "group_size")
_HINT = "see docs/recipes.md"


class Method(Struct, frozen=True):
    """A format by name, with the group size where it has several."""

    name: str
    group_size: int

    def scheme(self, search: bool) -> Scheme:
        scheme = Scheme(self.name, self.group_size)
        return replace(scheme, search=search and scheme.row.is_int)

    @property
    def words(self) -> str:
        """Name for messages and tables."""
        row = SCHEMES[self.name]
        return f"{self.name} (group {self.group_size})" if len(row.groups) > 1 else self.name

    def lines(self) -> Iterator[str]:
        yield f"method = {json.dumps(self.name)}"
        if self.group_size != SCHEMES[self.name].groups[0]:
            yield f"group_size = {self.group_size}"


class Rule(Struct, frozen=True):
    """Matrices, and their method."""

    method: Method
    layers: tuple[int, ...] | str = ()  # () for all; MTP before `Recipe.resolved`
    projections: tuple[Projection, ...] = ()
    experts: ExpertSet = field(default_factory=ExpertSet)

    def experts_of(self, layer: MoELayer) -> Sequence[int]:
        """Ids of the experts in a layer that the rule is for."""
        if self.layers and layer.index not in self.layers:
            return ()
        return self.experts.of(layer.index) if self.experts else range(len(layer.experts))

    def lines(self) -> Iterator[str]:
        yield "[[rule]]"
        if self.layers:
            layers = self.layers if isinstance(self.layers, str) else format_ranges([*self.layers])
            yield f"layers = {json.dumps(layers)}"
        if self.projections:
            yield f"projections = {json.dumps(list(self.projections))}"
        if self.experts:
            ids = self.experts.layers.items()
            sets = (f'{layer} = "{format_ranges(list(some))}"' for layer, some in ids)
            yield f"experts = {{ {', '.join(sets)} }}"
        yield from self.method.lines()


class Recipe(Struct, frozen=True, dict=True):
    """The method of every matrix. Hashable; `scheme` is fast."""

    method: Method
    engine: str = FIRST_ENGINE
    rules: tuple[Rule, ...] = ()

    @property
    def toml(self) -> str:
        """The recipe as a file; `parse_recipe` gives the same recipe again."""
        blocks = [[*self.method.lines(), f"engine = {json.dumps(self.engine)}"]]
        blocks += [list(rule.lines()) for rule in self.rules]
        return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"

    def of(self, layer: int, expert: int, proj: Projection) -> Method:
        for rule in self._of_layer(layer):
            if proj in (rule.projections or (proj,)) and (
                not rule.experts or expert in rule.experts.of(layer)
            ):
                return rule.method
        return self.method

    def _of_layer(self, layer: int) -> tuple[Rule, ...]:
        """Rules for some of its experts, the strongest first."""
        found = self._by_layer.get(layer)
        if found is None:
            found = self._by_layer[layer] = tuple(
                rule
                for rule in reversed(self.rules)
                if (not rule.layers or layer in rule.layers)
                and (not rule.experts or rule.experts.of(layer))
            )
        return found

    @cached_property
    def _by_layer(self) -> dict[int, tuple[Rule, ...]]:
        return {}

    def assigned(
        self, layer: MoELayer, experts: Sequence[int]
    ) -> dict[tuple[Projection, Method], Sequence[int]]:
        """The ids of a layer's experts by projection and method."""
        found: dict[tuple[Projection, Method], Sequence[int]] = {}
        chosen = any(rule.experts for rule in self._of_layer(layer.index))
        for proj in layer.projections:
            if not chosen and experts:
                found[proj, self.of(layer.index, experts[0], proj)] = experts
                continue
            ids: dict[Method, list[int]] = {}
            for expert in experts:
                ids.setdefault(self.of(layer.index, expert, proj), []).append(expert)
            found |= {(proj, method): some for method, some in ids.items()}
        return found

    def alike(self, layer: int) -> object:
        """Equal for layers whose matrices have the same methods."""
        return [
            (rule.projections, rule.method, rule.experts.of(layer))
            for rule in self._of_layer(layer)
        ]

    def resolved(self, layers: Sequence[MoELayer], name: str = "the recipe") -> Recipe:
        """The recipe for a model with these layers: numbers for "mtp". UsageError for what the
        model does not have, and for a rule that decides nothing."""
        drafts = tuple(layer.index for layer in layers if layer.is_mtp)
        counts = {layer.index: len(layer.experts) for layer in layers}
        rules = []
        for number, rule in enumerate(self.rules, 1):
            where = f"rule {number} of {name}"
            if rule.layers == MTP:
                if not drafts:
                    raise UsageError(
                        f"{where} is for layers of multi-token prediction, of which none is "
                        "converted",
                        "remove the rule, or omit --no-mtp",
                    )
                rule = replace(rule, layers=drafts)
            if beyond := [one for one in rule.layers if one not in counts]:
                raise UsageError(
                    f"{where} names layer {beyond[0]}, which is not an MoE layer that is converted",
                    f"MoE layers are {format_ranges(list(counts))}",
                )
            check_expert_set(rule.experts, counts, where)
            rules.append(rule)
        found = replace(self, rules=tuple(rules))
        found.check_rules(layers, name)
        return found

    def check_rules(self, layers: Sequence[MoELayer], name: str) -> None:
        """UsageError for a rule that decides nothing."""
        decides = [0] * len(self.rules)
        for layer in layers:
            taken: set[tuple[int, Projection]] = set()
            for number in reversed(range(len(self.rules))):
                rule = self.rules[number]
                projections = set(rule.projections or PROJECTIONS) & {*layer.projections}
                here = {(expert, proj) for expert in rule.experts_of(layer) for proj in projections}
                decides[number] += len(here - taken)
                taken |= here
        for number, count in enumerate(decides, 1):
            if not count:
                raise UsageError(
                    f"rule {number} of {name} decides nothing: it names no matrix, or later rules "
                    "name all of its matrices",
                    "remove it, or move it to the end",
                )


# ---- files -------------------------------------------------------------------------------


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file; files of experts are sought next to it. UsageError names what is
    wrong."""
    content = read_toml(path, "--recipe", "recipe", _MAX_BYTES, _HINT)
    return _Parser(f"--recipe {path}", path.parent).recipe(content)


@lru_cache(64)
def parse_recipe(toml: str) -> Recipe:
    """The inverse of `Recipe.toml`."""
    return _Parser("the recipe", None).recipe(toml)


class _Parser:
    def __init__(self, name: str, beside: Path | None) -> None:
        self._name, self._beside = name, beside

    def recipe(self, content: str) -> Recipe:
        found = parse_toml(content, self._name, _HINT)
        self._check_keys("", found, _TOP_KEYS)
        rules = found.get("rule", [])
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            self._fail("rule", "must be tables, [[rule]]")
        return Recipe(
            self._method("", found),
            self._engine(found.get("engine", FIRST_ENGINE)),
            tuple(self._rule(f"rule {number}: ", rule) for number, rule in enumerate(rules, 1)),
        )

    def _fail(self, where: str, what: str, hint: str = _HINT) -> NoReturn:
        raise UsageError(" ".join(f"{self._name}: {where} {what}".split()), hint)

    def _check_keys(self, where: str, found: Mapping[str, Any], known: Sequence[str]) -> None:
        if (unknown := unknown_key(found, known)) is not None:
            key, guess = unknown
            what = f"is not a key of a {'rule' if where else 'recipe'}{guess}"
            self._fail(f"{where}{key}", what, f"known are {', '.join(known)}")

    def _engine(self, name: object) -> str:
        if not isinstance(name, str):
            self._fail("engine", f"{name!r} must be a name")
        return name

    def _rule(self, where: str, found: Mapping[str, Any]) -> Rule:
        self._check_keys(where, found, _RULE_KEYS)
        return Rule(
            self._method(where, found),
            self._layers(f"{where}layers", found.get("layers")),
            self._projections(f"{where}projections", found.get("projections")),
            self._experts(f"{where}experts", found.get("experts")),
        )

    def _method(self, where: str, found: Mapping[str, Any]) -> Method:
        name, size = found.get("method"), found.get("group_size")
        if not isinstance(name, str):
            self._fail(f"{where}method", "is missing" if name is None else "must be a name")
        available = f"methods of recipes: {', '.join(MIXABLE)}"
        if name not in MIXABLE:
            name = translated(name, "method")
        if name not in MIXABLE:
            self._fail(f"{where}method", f"{name!r} {_why_not(name)}", available)
        row = SCHEMES[name]
        if size is None:
            return Method(name, row.groups[0])
        if type(size) is not int or size not in row.groups:
            sizes = ", ".join(map(str, row.groups)) if any(row.groups) else "no groups"
            self._fail(f"{where}group_size", f"{size!r} is not one of {name}: {sizes}")
        return Method(name, size)

    def _layers(self, where: str, found: object) -> tuple[int, ...] | str:
        if found is None:
            return ()
        if found == MTP:
            return MTP
        if isinstance(found, str):
            return self._ranges(where, found)
        if isinstance(found, list) and found and all(type(n) is int and n >= 0 for n in found):
            return tuple(sorted(set(found)))
        return self._fail(where, f'{found!r} must be like "0-2,61", or "mtp"')

    def _ranges(self, where: str, text: str) -> tuple[int, ...]:
        try:
            return tuple(parse_ranges(text, where))
        except UsageError as error:
            self._fail("", str(error), error.hint or _HINT)

    def _projections(self, where: str, found: object) -> tuple[Projection, ...]:
        if found is None:
            return ()
        known = get_args(Projection)
        names = [found] if isinstance(found, str) else found
        if not isinstance(names, list) or not names or any(name not in known for name in names):
            self._fail(where, f"{found!r} must be some of {', '.join(known)}")
        return tuple(proj for proj in PROJECTIONS if proj in names)

    def _experts(self, where: str, found: object) -> ExpertSet:
        if found is None:
            return ExpertSet()
        if isinstance(found, str) and self._beside is not None:
            return read_expert_set(self._beside / found, f"{self._name}: {where}")
        if isinstance(found, dict) and found:
            sets = {}
            for layer, ids in found.items():
                if not layer.isdecimal() or not isinstance(ids, str):
                    self._fail(where, f'{layer!r} must be like 3 = "0,5,17-20"')
                sets[int(layer)] = self._ranges(f"{where}.{layer}", ids)
            return expert_set(sets)
        return self._fail(where, f'{found!r} must be a file, or like {{ 3 = "0,5,17-20" }}')


def _why_not(name: str) -> str:
    """Reason why a method cannot be in a recipe."""
    from ktconv.formats import output_formats

    if name in output_formats():
        return (
            "cannot be mixed: KTransformers loads such packed experts with one --kt-method for "
            "all layers"
        )
    if name in SCHEMES:
        return (
            "cannot be mixed: config.json names this format for all experts together, and "
            "loaders of KTransformers take one method for all layers"
        )
    near = difflib.get_close_matches(name, MIXABLE, n=1)
    return "is not known" + (f"; the nearest is {near[0]}" if near else "")


# ---- what a recipe makes of a model ------------------------------------------------------


class Share(Struct, frozen=True):
    """The matrices with one method."""

    method: Method
    layers: tuple[int, ...]
    projections: tuple[Projection, ...]
    experts: int  # with at least one of them, over all layers
    whole: bool  # all experts of these layers
    matrices: int

    @property
    def words(self) -> str:
        where = f"layers {format_ranges([*self.layers])}"
        if len(self.projections) < len(PROJECTIONS):
            where += f", {' and '.join(self.projections)}"
        return where if self.whole else f"{where}, {counted(self.experts, 'expert')}"


def shares(recipe: Recipe, chosen: Iterable[tuple[MoELayer, Sequence[int]]]) -> list[Share]:
    """Matrices of each method; the methods in order of their first use."""
    layers: dict[Method, dict[int, set[int]]] = {}
    projections: dict[Method, set[Projection]] = {}
    matrices: dict[Method, int] = {}
    counts = {}
    for layer, experts in chosen:
        counts[layer.index] = len(experts)
        for (proj, method), ids in recipe.assigned(layer, experts).items():
            layers.setdefault(method, {}).setdefault(layer.index, set()).update(ids)
            projections.setdefault(method, set()).add(proj)
            matrices[method] = matrices.get(method, 0) + len(ids)
    return [
        Share(
            method,
            tuple(sorted(used)),
            tuple(proj for proj in PROJECTIONS if proj in projections[method]),
            sum(map(len, used.values())),
            all(len(ids) == counts[index] for index, ids in used.items()),
            matrices[method],
        )
        for method, used in layers.items()
    ]
