"""A map for a checkpoint with unknown names, guessed from patterns of names, and shapes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from msgspec import Struct, field

from ktconv.errors import CheckpointError, PackedExpertsError, UnknownNamesError
from ktconv.families import table
from ktconv.families.names import looked_for
from ktconv.source.config import ModelConfig
from ktconv.source.encodings import ENCODINGS
from ktconv.source.encodings.base import WEIGHT
from ktconv.source.name_patterns import NamePattern, name_patterns
from ktconv.source.naming_map import parse_map
from ktconv.source.stacks import MAP_HINT
from ktconv.source.types import TensorRef

_PRIMARY = frozenset(encoding.primary for encoding in ENCODINGS)
_PLAIN = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2")  # whose shapes are those of the weights
_LEAST = 4  # rows and columns of a weight; less is a convolution or a table of something
_TYPICAL_KEY = "model.layers.0.mlp.experts.0.gate_proj.weight"
_NEAREST = 3  # patterns that an error shows
_SHOWN = 40  # patterns of tensors that are no experts
_WORDS = {
    "gate_up": ("gate_up", "gateup", "w13", "w1w3", "gate_and_up", "wi"),
    "down": ("down", "w2", "fc2", "wo", "out", "output", "c_proj"),
    "up": ("up", "w3", "fc3", "v1", "wu", "wi_1"),
    "gate": ("gate", "w1", "fc1", "wg", "wi_0"),
}
_MTP = re.compile("mtp|nextn|next_token|extra|predict|draft|speculat")
_LIKE_EXPERTS = re.compile("expert|moe")


class _Weight(Struct, frozen=True):
    """Tensors that can be one projection of all experts."""

    base: NamePattern  # without the encoding's ending
    stored: NamePattern  # of the primary tensors
    numbered: bool
    single: bool  # of one layer: no number varies from layer to layer

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one expert's matrix, as it is stored."""
        return self.stored.shapes[0][-2:]

    @property
    def plain(self) -> bool:
        return all(dtype in _PLAIN for dtype in self.stored.dtypes)


class Guess(Struct, frozen=True):
    """Guess at the names of a checkpoint."""

    patterns: Sequence[NamePattern]
    likely: Sequence[NamePattern]  # that seem to be experts
    nearest: str | None  # the model_type of a family with similar names
    map: str | None  # TOML; None: nothing looks like experts


class _Table(Struct):
    """A table of the map in the making."""

    lines: dict[str, str] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    places: Mapping[int, str] = field(default_factory=dict)
    weights: Sequence[_Weight] = ()
    shape: tuple[int, int] | None = None  # of an expert: hidden, intermediate


def guess_map(tensors: Iterable[TensorRef], config: ModelConfig, name: str) -> Guess:
    """The patterns of a checkpoint that is called `name` for people, and a map for it."""
    patterns = name_patterns(tensors)
    groups = _groups(_weights(patterns, config))
    tables = [table for group in groups if (table := _table(group, config))]
    tables.sort(key=lambda one: -sum(weight.stored.nbytes for weight in one.weights))
    tables.sort(key=lambda one: one.weights[0].single)
    main = next((one for one in tables if not _is_mtp(one)), None)
    mtp = next((one for one in tables if _is_mtp(one)), None) if main else None
    chosen = [one for one in (main, mtp) if one is not None]
    likely = [weight.stored for one in chosen for weight in one.weights]
    likely += [
        one for one in patterns if _LIKE_EXPERTS.search(one.text) and one not in likely
    ][: 3 if likely else 6]  # fmt: skip
    nearest = _nearest(likely, config)
    if main is None:
        return Guess(patterns, likely, nearest, None)
    others = _others(patterns, main)
    text = "\n".join(_lines(name, main, mtp, others, nearest, config, patterns)) + "\n"
    parse_map(text, "the guessed map")  # a fault of this module, not of the user's
    return Guess(patterns, likely, nearest, text)


_PACKED = re.compile(r"blk\.[0-9]+\.ffn_[a-z_]+_exps\.[0-9]+\.")  # as KTransformers names them


def no_experts(others: Sequence[TensorRef], config: ModelConfig) -> CheckpointError:
    """The error for a checkpoint in whose names no experts were found."""
    packed = (one.name for one in others if _PACKED.match(one.name))
    if (name := next(packed, None)) is not None:
        return PackedExpertsError(
            f"{name}: these experts were packed for KTransformers, by quantize-cpu or its own "
            "converter, and are no source of a conversion",
            "Convert the original model; of outputs, those of the methods in docs/methods.md but "
            "awq can be read.",
        )
    guess = guess_map(others, config, "this model")
    near = [f"{one.text} ({one.described})" for one in guess.likely[:_NEAREST]]
    near = near or nearest_keys(tensor.name for tensor in others)
    tail = f"; the nearest keys are {', '.join(near)}" if near else ""
    if guess.likely and guess.nearest:
        tail += f"; the most similar names are those of {guess.nearest}"
    mapped = f"If these are experts, {MAP_HINT}; " if guess.likely else ""
    return UnknownNamesError(
        f"no MoE layer was found: looked for {looked_for()}{tail}",
        f"{mapped}{'d' if mapped else 'D'}ense models have no experts to convert.",
    )


# ---- which tensors are experts -----------------------------------------------------------


def _weights(patterns: Sequence[NamePattern], config: ModelConfig) -> list[_Weight]:
    found: dict[str, _Weight] = {}
    for pattern in patterns:
        base, part = pattern.base, pattern.part
        if part not in _PRIMARY or len(pattern.shapes) != 1 or not _is_plain(pattern):
            continue
        shape = pattern.shapes[0]
        count = len(pattern.values)
        if single := count == 3 - len(shape):
            pattern = _with_layer(pattern)
            base, count = pattern.base, len(pattern.values)
        numbered = count == 2 and len(shape) == 2
        stacked = count == 1 and len(shape) in (3, 4) and shape[0] > 1
        if part == "blocks" and len(shape) == 4:  # the last axis are bytes
            shape = (*shape[:2], shape[2] * shape[3])
        if not (numbered or stacked) or min(shape[-2:]) < _LEAST:
            continue
        known = config.num_experts
        if stacked and known is not None and shape[0] != known.value:
            continue
        bare = NamePattern(base, pattern.numbers, pattern.tensors)
        found.setdefault(base, _Weight(bare, pattern, numbered, single))
    return list(found.values())


def _with_layer(pattern: NamePattern) -> NamePattern:
    """Pattern with a mark for the only number that does not vary: that of a single layer."""
    constant = list(re.finditer(r"(?<![0-9A-Za-z])[0-9]+(?![0-9A-Za-z])", pattern.text))
    if len(constant) != 1:
        return pattern
    [match] = constant
    place = pattern.text[: match.start()].count("{}")
    number = int(match[0])
    return NamePattern(
        f"{pattern.text[: match.start()]}{{}}{pattern.text[match.end() :]}",
        [(*numbers[:place], number, *numbers[place:]) for numbers in pattern.numbers],
        pattern.tensors,
    )


def _is_plain(pattern: NamePattern) -> bool:
    """Whether a pattern of a map can have this text."""
    literals = pattern.text.split("{}")
    whole = re.fullmatch(r"[!-z|~]*", "".join(literals)) is not None
    return whole and len(literals) == len(pattern.values) + 1


def _groups(weights: Sequence[_Weight]) -> list[list[_Weight]]:
    """Weights of the same layers and experts whose names begin in the same way."""
    groups: dict[tuple[object, ...], list[_Weight]] = {}
    for one in weights:
        start = one.base.text.partition("{}")[0]
        key = (one.numbered, start, frozenset(one.stored.numbers), one.stored.dtypes[0])
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _roles(text: str, shared: set[str]) -> list[str]:
    """Projections that the words of a name can mean, best first."""
    words = [word for word in re.split(r"[./{}-]+", text) if word and word not in shared]
    found = []
    for role, spelt in _WORDS.items():
        for word in words:
            parts = {word, *re.split("_+", word)}
            if any(
                one in parts or (len(one) > 2 and re.search(rf"(?:^|_){one}(?:_|$)", word))
                for one in spelt
            ):
                found.append(role)
                break
    if "gate" in found and "up" in found and "gate_up" not in found:
        found.insert(0, "gate_up")
    return found


def _table(group: Sequence[_Weight], config: ModelConfig) -> _Table | None:
    """Table of a group of weights; None where it is no set of experts."""
    words = [set(re.split(r"[./{}-]+", one.base.text)) for one in group]
    shared = set.intersection(*words) if len(words) > 1 else set()
    roles = [_roles(one.base.text, shared) for one in group]
    table = _Table(places=_places(group[0], config))
    if len(group) > 3:  # the words must say which of them are experts
        chosen = {
            role: next((i for i, found in enumerate(roles) if found[:1] == [role]), None)
            for role in ("gate_up", "gate", "up", "down")
        }
        wanted = ("gate_up", "down") if chosen["gate_up"] is not None else ("gate", "up", "down")
        if any(chosen[role] is None for role in wanted):
            return None
        kept = [index for role in wanted if (index := chosen[role]) is not None]
        group, roles = [group[index] for index in kept], [roles[index] for index in kept]
    if len(group) == 3:
        named = _three(group, roles, table)
    elif len(group) == 2:
        named = _two(group, roles, table)
    else:
        return None
    if named is None:
        return None
    table.weights = list(named.values())
    table.lines |= {key: one.base.marked(table.places) for key, one in named.items()}
    _set_stored(named, table, config)
    return table


def _places(weight: _Weight, config: ModelConfig) -> Mapping[int, str]:
    """Marks that are {layer} and {expert}: the layer comes first, unless the counts of config.json
    say otherwise."""
    if not weight.numbered:
        return {0: "layer"}
    first, second = (len(values) for values in weight.stored.values)
    experts, layers = config.num_experts, config.num_layers
    swapped = experts is not None and first == experts.value != second
    swapped = swapped and (layers is None or first != layers.value)
    return {0: "expert", 1: "layer"} if swapped else {0: "layer", 1: "expert"}


def _three(
    group: Sequence[_Weight], roles: Sequence[Sequence[str]], table: _Table
) -> dict[str, _Weight] | None:
    """Gate, up and down: down has the others' shape turned, unless all are packed or square."""
    by_shape = [
        index
        for index, one in enumerate(group)
        if one.plain
        and all(other.shape == one.shape[::-1] for other in group if other is not one)
        and one.shape[0] != one.shape[1]
    ]
    by_word = [index for index, found in enumerate(roles) if found[:1] == ["down"]]
    down = next(iter(by_shape or by_word), None)
    if down is None:
        down = 2
        table.doubts.append("nothing shows which of the three is down")
    pair = [index for index in range(3) if index != down]
    if group[pair[0]].shape != group[pair[1]].shape:
        return None
    meant = [next((role for role in roles[index] if role in ("gate", "up")), None)
             for index in pair]  # fmt: skip
    if meant[0] == "up" or (meant[1] == "gate" and meant[0] != "gate"):
        pair.reverse()
        meant.reverse()
    if set(meant) == {None} or meant[0] == meant[1]:
        table.doubts.append(
            "gate and up have the same shape, and their names do not tell them apart: exchange "
            "them if the model's code has them the other way round"
        )
    return {"gate": group[pair[0]], "up": group[pair[1]], "down": group[down]}


def _two(
    group: Sequence[_Weight], roles: Sequence[Sequence[str]], table: _Table
) -> dict[str, _Weight] | None:
    """Gate and up in one tensor, with down; or experts without a gate."""
    first, second = group
    if first.plain and second.plain:
        for wide, down in ((first, second), (second, first)):
            (a, b), (c, d) = wide.shape, down.shape
            if (b == c and a == 2 * d) or (a == d and b == 2 * c):
                return _with_order(wide, down, table)
        if first.shape != second.shape[::-1]:
            return None
    downs = [index for index, found in enumerate(roles) if found[:1] == ["down"]]
    if len(downs) != 1:
        return None
    down, other = group[downs[0]], group[1 - downs[0]]
    if first.plain and second.plain:
        return {"up": other, "down": down}
    if "gate_up" in roles[1 - downs[0]]:
        return _with_order(other, down, table)
    return {"up": other, "down": down}


def _with_order(gate_up: _Weight, down: _Weight, table: _Table) -> dict[str, _Weight]:
    table.doubts.append(
        'the order of gate and up is not known: "gate first", "up first" or "interleaved"'
    )
    table.lines["order"] = "gate first"
    return {"gate_up": gate_up, "down": down}


def _set_stored(named: Mapping[str, _Weight], table: _Table, config: ModelConfig) -> None:
    """The sizes of plain weights; and whether numbered or separate ones are stored [in, out]."""
    down = named["down"]
    if not all(one.plain for one in named.values()):
        return
    rows, cols = down.shape
    hidden = {setting.value for setting in config.widths}
    if "gate_up" in named:
        wide = named["gate_up"].shape
        straight = wide[1] == rows and wide[0] == 2 * cols
        table.shape = (rows, cols) if straight else (cols, rows)
        if not straight and named["gate_up"].numbered:
            table.lines["stored"] = "in-out"
        return
    turned = cols in hidden and rows not in hidden
    table.shape = (cols, rows) if turned else (rows, cols)
    if turned:
        table.lines["stored"] = "in-out"
    elif rows == cols or rows not in hidden:
        table.doubts.append('if the weights are stored [in, out], add stored = "in-out"')


def _is_mtp(table: _Table) -> bool:
    return bool(_MTP.search(table.weights[0].base.text.partition("{}")[0].lower()))


# ---- what is beside the experts ----------------------------------------------------------


def _others(patterns: Sequence[NamePattern], main: _Table) -> dict[str, str]:
    """Router, correction bias and shared expert, where one pattern alone fits."""
    layer = next(place for place, what in main.places.items() if what == "layer")
    down = main.weights[-1].stored
    layers = set(down.values[layer])
    numbered = len(main.places) > 1
    experts = len(down.values[1 - layer]) if numbered else down.shapes[0][0]
    own = {weight.stored.text for weight in main.weights}
    beside = [
        one
        for one in patterns
        if _is_plain(one)
        and len(one.values) == 1
        and one.text not in own
        and {number for (number,) in one.numbers} <= layers
        and len(one.shapes) == 1
        and "shared" not in one.text
    ]
    hidden = main.shape[0] if main.shape else None
    routers = [
        one
        for one in beside
        if len(one.shapes[0]) == 2
        and one.shapes[0][0] == experts
        and (hidden is None or one.shapes[0][1] == hidden)
        and one.part == WEIGHT
    ]
    found = {}
    if len(routers) == 1:
        found["router"] = routers[0].base.replace("{}", "{layer}")
    vectors = [one for one in beside if one.shapes[0] in ((experts,), (1, experts))]
    router = routers[0].base if len(routers) == 1 else ""
    biases = [one for one in vectors if one.text != f"{router}.bias"]
    if len(biases) == 1:
        found["correction"] = biases[0].text.removesuffix(f".{WEIGHT}").replace("{}", "{layer}")
    return found | _shared(patterns, layers)


def _shared(patterns: Sequence[NamePattern], layers: set[int]) -> dict[str, str]:
    """A shared expert, by its words."""
    found: dict[str, list[str]] = {}
    for one in filter(_is_plain, patterns):
        if "shared" not in one.text or len(one.values) != 1 or one.part != WEIGHT:
            continue
        if {number for (number,) in one.numbers} <= layers and len(one.shapes[0]) == 2:
            role = next(iter(_roles(one.base.rpartition(".")[2], set())), None)
            if role in ("gate", "up", "down"):
                found.setdefault(f"shared_{role}", []).append(one.base.replace("{}", "{layer}"))
    if set(found) != {"shared_gate", "shared_up", "shared_down"}:
        return {}
    return {key: texts[0] for key, texts in sorted(found.items()) if len(texts) == 1}


def _nearest(likely: Sequence[NamePattern], config: ModelConfig) -> str | None:
    """The family whose model_type, or else the words of whose names, are most similar."""
    types = [kind for row in table.FAMILIES.rows for kind in row.types]
    for kind in sorted(config.model_types):
        if near := difflib.get_close_matches(kind, types, n=1, cutoff=0.75):
            return near[0]
    words = {word for one in likely for word in _words(one.base)}
    best, most = None, 0.0
    for row in table.FAMILIES.rows:
        spelt = row.matrices
        names = [row.block, row.experts, spelt.gate, spelt.up, spelt.down]
        own = {word for name in names for word in _words(name)}
        share = len(words & own) / len(words | own) if words else 0.0

        if row.types and share > most:
            best, most = row.types[0], share
    return best


def _words(name: str) -> set[str]:
    return set(re.split(r"[./{}_-]+", name)) - {"", "weight"}


# ---- the text of the map -----------------------------------------------------------------


def _lines(
    name: str,
    main: _Table,
    mtp: _Table | None,
    others: Mapping[str, str],
    nearest: str | None,
    config: ModelConfig,
    patterns: Sequence[NamePattern],
) -> Iterable[str]:
    yield f"# A map for {_comment(name)}, guessed by ktconv from names and shapes of its tensors."
    yield "# Check it, then use it with --map; docs/maps.md has all keys."
    yield ""
    tables = {"experts": main} if mtp is None else {"experts": main, "mtp": mtp}
    doubts = [f"[{key}]: {one}" for key, found in tables.items() for one in found.doubts]
    if doubts:
        yield "# Only the model's code shows these. Correct the lines below, and remove this:"
        yield "undecided = ["
        yield from (f"    {_quoted(one)}," for one in doubts)
        yield "]"
        yield ""
    known = [kind for kind in config.model_types if table.FAMILIES.of(kind) is not None]
    if not known:
        yield "# Router and activation are those of a known family only if you name it:"
        if {"gate", "gate_up"} & main.lines.keys():
            yield '# like = "qwen3_moe"'
        else:
            yield '# like = "nomic_bert"  # without a gate; squared ReLU: "nemotron_h"'
        if nearest is not None:
            yield f"# (The most similar names are those of {nearest}.)"
        yield ""
    for key, found in tables.items():
        yield from _table_lines(key, found)
        yield ""
    yield "# What stands next to the experts; only `verify --level layers` uses it."
    yield "[others]" if others else "# [others]"
    for key, text in others.items():
        yield f"{key} = {_quoted(text)}"
    for key in ("router", "correction", "norm"):
        if key not in others:
            yield f'# {key} = "..."'
    missing = [
        key
        for key, found in (
            ("num_experts", config.num_experts),
            ("num_experts_per_tok", config.top_k),
        )
        if not found
    ]
    if missing:
        yield ""
        yield "# Settings that config.json does not have under a known name."
        yield "# [config]"
        yield from (f"# {key} = ..." for key in missing)
    used = {weight.stored.text for one in (main, mtp) if one for weight in one.weights}
    rest = [one for one in patterns if one.text not in used]
    if rest:
        yield ""
        yield "# All other tensors:"
        for one in rest[:_SHOWN]:
            yield f"#   {_comment(one.text)}: {one.described}"
        if len(rest) > _SHOWN:
            yield f"#   and {len(rest) - _SHOWN} more patterns"


def _table_lines(name: str, table: _Table) -> Iterable[str]:
    yield f"[{name}]"
    order = ("gate_up", "gate", "up", "down", "order", "stored")
    by_text = {weight.base.marked(table.places): weight for weight in table.weights}
    for key in order:
        if key in table.lines:
            weight = by_text.get(table.lines[key])
            beside = f"  # {weight.stored.described}" if weight else ""
            yield f"{key} = {_quoted(table.lines[key])}{beside}"


def _quoted(text: str) -> str:
    """A TOML string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    escaped = re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\u{ord(match[0]):04X}", escaped)
    return f'"{escaped}"'


def _comment(text: str) -> str:
    """Text for a comment, which is one line."""
    return re.sub(r"[\x00-\x1f\x7f]", "?", text)


def nearest_keys(names: Iterable[str]) -> list[str]:
    """Up to three names that most look as if they belonged to experts, for an error."""
    everything = list(names)
    for word in ("expert", "moe"):
        found = list(islice((name for name in everything if word in name), 3))
        if found:
            return found
    # difflib is quadratic; the first thousand names show how the model spells things.
    return difflib.get_close_matches(_TYPICAL_KEY, everything[:1000], n=3, cutoff=0.3)
