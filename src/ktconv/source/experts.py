"""Builds a layer of experts from one stack of tensors, with every tensor accounted for."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from typing import Any

from msgspec.structs import replace

from ktconv.errors import CheckpointError, UnknownNamesError
from ktconv.families import table
from ktconv.families.family import PROJECTIONS, UNGATED, Projection
from ktconv.families.names import known_spellings, matrix_name
from ktconv.source.config import ModelConfig, Setting
from ktconv.source.counts import CONTRADICTION, Counts
from ktconv.source.encodings import Candidate, candidates, stored_matrix
from ktconv.source.encodings.base import BIAS, Encoding, Parts
from ktconv.source.encodings.refusals import check_described, check_rotation
from ktconv.source.encodings.shapes import biases
from ktconv.source.fused import first_output, fused_experts, is_stacked_name, order_of, twice
from ktconv.source.naming_map import Order
from ktconv.source.stacks import MAP_HINT, Stack
from ktconv.source.types import BlockGrid, ExpertMatrix, MoELayer, TensorRef
from ktconv.source.views import StoredView

_NUMBER = re.compile("0|[1-9][0-9]{0,5}")
_LEADING_ZEROS = re.compile("0[0-9]+")
_SHOWN = 8  # experts that an error lists
_INCOMPLETE = "Download the checkpoint again; incomplete layers are not converted."
_NO_GATE = 'If they have none by design, give a map with like = "nomic_bert" (docs/maps.md).'

# Expert id -> projection -> part name -> tensor.
_Found = dict[int, dict[Projection, dict[str, TensorRef]]]
_Views = tuple[StoredView, StoredView]  # of a weight stored [out, in], and stored [in, out]
# Number of experts, and by expert id the parts and the views of its projections.
_Contents = tuple[
    int,
    Callable[[int], Mapping[Projection, Parts]],
    Callable[[int], Mapping[Projection, _Views]],
]


def build_layer(stack: Stack, index: int, is_mtp: bool, counts: Counts) -> MoELayer:
    """The MoE layer in `stack`, with as many experts as `counts` confirms.

    Raises CheckpointError naming the tensor for anything missing, left over, of an
    unsupported encoding, or of a shape that the config or the other experts contradict.
    """
    config, numbered = counts.config, any(_is_numbered(rest) for rest in stack.tensors)
    count, parts, views = (_numbered if numbered else _fused)(stack, index, counts)
    encodings = _EncodingsOfLayer(config)
    experts = []
    for expert in range(count):
        of, where = parts(expert), views(expert)
        experts.append({p: encodings.matrix(of[p], where[p]) for p in PROJECTIONS if p in of})
    up = experts[0]["up"]
    return MoELayer(
        index,
        stack.source,
        is_mtp,
        up.cols,
        up.rows,
        encodings.name,
        tuple(experts),
        encodings.biased,
    )


def _kind_of(parts: Parts, views: _Views) -> Hashable:
    """Key that weights which are stored alike have in common; called for each of a million."""
    if len(parts) == 1:
        ((part, one),) = parts.items()
        return id(views), part, one.dtype, one.shape
    return id(views), *[(part, one.dtype, one.shape) for part, one in parts.items()]


def _but_tensor(matrix: ExpertMatrix) -> tuple[Any, ...]:
    """The other fields of a matrix without scales."""
    one = matrix
    return one.rows, one.cols, one.start, one.row_stride, one.col_stride, one.element


def _is_numbered(rest: str) -> bool:
    """Whether this is 5.gate_proj.weight, or gate_proj.5.weight."""
    return rest[:1].isdecimal() or rest.partition(".")[2][:1].isdecimal()


def _numbered(stack: Stack, index: int, counts: Counts) -> _Contents:
    found, config = _group_by_expert(stack), counts.config
    _check_complete(stack, found, index, counts)
    inner, hidden = _sizes(stack, found[0], config)
    shapes: Mapping[Projection, tuple[int, int]] = {
        "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)
    }  # fmt: skip
    apart = {projection: _whole_views(*shape) for projection, shape in shapes.items()}
    turned = stack.stored == "in-out"
    if turned:
        apart = {projection: (view, view) for projection, (_, view) in apart.items()}
    joined = {expert: found[expert] for expert in found if _together(found[expert])}
    if not joined:
        return len(found), found.__getitem__, lambda expert: apart
    words = set()
    keys = {tensor.name: f".{rest}" for rest, tensor in stack.tensors.items()}
    for expert in joined.values():
        tensors = list(expert["up"].values())
        words.add(word := _gate_up_word(keys[tensors[0].name]))
        for stray in (one for one in tensors if f".{word}." not in keys[one.name]):
            raise twice(tensors[0], stray)
    first = next(iter(joined.values()))["up"]
    order = order_of(stack, words.pop(), first, config)
    together = {what: _half_views(inner, hidden, order, what) for what in PROJECTIONS[:2]}
    if turned:
        together = {what: (view, view) for what, (_, view) in together.items()}
    together = {**apart, **together}
    return len(found), found.__getitem__, lambda one: together if one in joined else apart


def _together(expert: Mapping[Projection, Parts]) -> bool:
    """Whether gate and up are one tensor."""
    return expert.get("gate") is expert["up"]


def _gate_up_word(key: str) -> str:
    words = key.split(".")
    return next((word for word in reversed(words) if word in table.FAMILIES.fused), "")


def _half_views(inner: int, hidden: int, order: Order, half: Projection) -> _Views:
    """Gate or up of one expert's tensor of both."""
    first, step = first_output(order, half, inner)
    return (
        StoredView(2 * inner, hidden, inner, hidden, row=first, step=step),
        StoredView(hidden, 2 * inner, inner, hidden, col=first, step=step, transposed=True),
    )


def _group_by_expert(stack: Stack) -> _Found:
    """The tensors of each expert; gate and up have the same ones where they are together."""
    found: _Found = {}
    projections, fused = table.FAMILIES.projections, table.FAMILIES.fused
    # What nearly all names are made of, once it was looked at: "gate_proj.weight", "17".
    tails: dict[str, tuple[Projection, str]] = {}
    numbers: dict[str, dict[Projection, dict[str, TensorRef]]] = {}
    for rest, tensor in stack.tensors.items():
        number, _, tail = rest.partition(".")
        if tail in tails and number in numbers:
            which, part = tails[tail]
            expert = numbers[number]
            parts = expert.get(which)
            if parts is None:
                expert[which] = {part: tensor}
                continue
            if part in parts:
                raise twice(parts[part], tensor)
            parts[part] = tensor
            continue
        name, _, part = tail.partition(".")
        if not number.isdecimal():
            number, name = name, number
        if not _is_numbered(rest) and is_stacked_name(rest):
            other = next(one for key, one in stack.tensors.items() if _is_numbered(key))
            raise CheckpointError(
                f"{other.name} is of one expert, and {tensor.name} of all: the experts of "
                f"{stack.source} are stored in two ways",
                "Remove one of them from the checkpoint.",
            )
        projection = projections.get(name)
        if projection is None and name in fused:
            projection = "up"
        if projection is not None and _LEADING_ZEROS.fullmatch(number):
            raise UnknownNamesError(
                f"{tensor.name} has leading zeros in the number of its expert",
                f"Number experts 0, 1, 2 and so on, as all engines do; {MAP_HINT}.",
            )
        if projection is None or not part or not _NUMBER.fullmatch(number):
            raise UnknownNamesError(
                f"{tensor.name} ({tensor.dtype} {list(tensor.shape)}) is not a known tensor of "
                "numbered experts",
                f"Known are {known_spellings()} with .weight; {MAP_HINT}.",
            )
        expert = found.setdefault(int(number), {})
        if name in projections and rest.startswith(f"{number}."):
            tails[tail], numbers[number] = (projection, part), expert
        parts = expert.setdefault(projection, {})
        if (
            name in fused
            and name not in projections
            and expert.setdefault("gate", parts) is not parts
        ):
            raise twice(next(iter(expert["gate"].values())), tensor)
        if part in parts:
            raise twice(parts[part], tensor)
        parts[part] = tensor
    return found


def _check_complete(stack: Stack, found: _Found, index: int, counts: Counts) -> None:
    """Experts 0 .. count-1 are there, each with its two or three projections, and no other."""
    highest, config = max(found), counts.config
    count = counts.expected(stack.source, index, highest + 1)
    if count is not None and highest >= count.value:
        surplus = next(iter(next(iter(found[highest].values())).values()))
        raise CheckpointError(
            f"{surplus.name} is expert {highest}, but config.json has {count.key} {count.value}",
            CONTRADICTION,
        )
    expected = count.value if count is not None else highest + 1
    gated = config.gated or any("gate" in projections for projections in found.values())
    wanted = PROJECTIONS if gated else UNGATED
    for expert in range(expected):
        projections = found.get(expert, {})
        if len(projections) != len(wanted):
            absent = next(one for one in wanted if one not in projections)
            more = _missing_experts(found, expected)
            hint = _INCOMPLETE
            if not more and not any(absent in own for own in found.values()):
                more = f": no expert of the layer has a matrix {absent}"
                hint = f"{_INCOMPLETE} {_NO_GATE}" if absent == "gate" else hint
            raise CheckpointError(f"{_name_of(stack, expert, absent)} is missing{more}", hint)


def _missing_experts(found: _Found, expected: int) -> str:
    missing = list(islice((e for e in range(expected) if e not in found), _SHOWN + 1))
    if not missing:
        return ""
    listed = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
    return f": the layer has no expert {listed} of 0-{expected - 1}"


def _name_of(stack: Stack, expert: int, projection: Projection) -> str:
    """Name of a weight as this stack has it, so that an error names the key to look for."""
    words = [rest.split(".")[:2] for rest in stack.tensors]
    names = {word for pair in words for word in pair}
    spelt = next(one for one in table.FAMILIES.matrices if names & one.projections.keys())
    word = spelt.of(projection) or spelt.gate_up or ""
    usual = matrix_name(stack.source, expert, word)
    if words[0][0].isdecimal() or not usual.startswith(f"{stack.source}.{expert}."):
        return usual
    return f"{stack.source}.{word}.{expert}.weight"


def _sizes(
    stack: Stack, expert: Mapping[Projection, Parts], config: ModelConfig
) -> tuple[int, int]:
    """Intermediate and hidden size: from the config, else the outputs of up and of down, which
    no packing along the inputs hides."""

    def outputs(projection: Projection) -> list[int]:
        # A weight that is not 2-D will be refused by name for its shape.
        possible = candidates(expert[projection])
        if stack.stored == "in-out":
            sizes = (one.encoding.sizes(one.weight, True) for one in possible)
            return [size[-1] for size in sizes if len(size) == 2] or [0]
        return [found for one in possible if (found := one.encoding.outputs(one.roles))] or [0]

    halves = 2 if _together(expert) else 1
    inner = (
        config.intermediate_size.value if config.intermediate_size else outputs("up")[0] // halves
    )
    widths = [setting.value for setting in config.widths]
    if len(widths) == 1 and not stack.latent:
        return inner, widths[0]
    found = outputs("down")
    known = [size for size in found if size in widths or size in stack.latent]
    return inner, next(iter((*known, *widths, *found)))


def _whole_views(rows: int, cols: int) -> _Views:
    return StoredView(rows, cols, rows, cols), StoredView(cols, rows, rows, cols, transposed=True)


def _fused(stack: Stack, index: int, counts: Counts) -> _Contents:
    config = counts.config
    layout, parts = fused_experts(stack, config, counts.rows_of(stack.source, index))
    name, expected = layout.gate, counts.expected(stack.source, index, layout.experts)
    _check_size(name, "expert count", layout.experts, expected)
    if layout.hidden not in stack.latent:
        _check_size(name, "hidden size", layout.hidden, config.width_of(layout.hidden))
    _check_size(name, "intermediate size", layout.intermediate, config.intermediate_size)

    def views(expert: int) -> Mapping[Projection, _Views]:
        return {proj: (view, view) for proj, view in layout.views(expert).items()}

    return layout.experts, lambda expert: parts, views


def _check_size(name: str, what: str, found: int, setting: Setting | None) -> None:
    if setting is not None and setting.value != found:
        raise CheckpointError(
            f"{name} has {what} {found}, but config.json has {setting.key} {setting.value}",
            CONTRADICTION,
        )


def _bias(tensor: TensorRef, view: StoredView) -> BlockGrid:
    found = biases(tensor, view)
    if found is None:
        raise CheckpointError(
            f"{tensor.name} ({tensor.dtype} {list(tensor.shape)}) is no bias of its weight: "
            f"expected is one number for each output ({view.rows} of this expert) in F32, BF16 "
            "or F16",
            CONTRADICTION,
        )
    return found


class _EncodingsOfLayer:
    """Makes the matrices of one layer; every weight may have an encoding of its own."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._seen: dict[str, None] = {}
        # A hundred thousand weights are of few kinds: of each, the first is looked at closely.
        self._kinds: dict[Hashable, Candidate] = {}
        # The same for weights without scales: what they are but for their tensor.
        self._plain: dict[Hashable, tuple[Encoding, tuple[Any, ...]]] = {}
        self.biased = False

    @property
    def name(self) -> str:
        return "+".join(self._seen)

    def matrix(self, parts: Parts, views: _Views) -> ExpertMatrix:
        if len(parts) == 1 and not self._config.described:
            ((part, one),) = parts.items()  # a kind as `_kind_of` has it, without its call
            if plain := self._plain.get((id(views), part, one.dtype, one.shape)):
                return ExpertMatrix(one, *plain[1])
        if self._config.described:
            check_described(parts, self._config.described)
        encoding, matrix = self._stored(parts, views)
        if encoding.name not in self._seen:
            check_rotation(matrix.tensor, self._config)
            self._check_declared(encoding, matrix.tensor)
            self._seen[encoding.name] = None
        if BIAS in parts:
            matrix = replace(matrix, bias=_bias(parts[BIAS], views[encoding.transposed]))
            self.biased = True
        return matrix

    def _stored(self, parts: Parts, views: _Views) -> tuple[Encoding, ExpertMatrix]:
        kind = views[0].experts is None and _kind_of(parts, views)
        if kind in self._plain:
            encoding, rest = self._plain[kind]
            return encoding, ExpertMatrix(parts[encoding.primary], *rest)
        if kind in self._kinds:
            same = self._kinds[kind].of(parts)
            known = same.matrix(views[same.encoding.transposed], self._config)
            assert known is not None, "it was not for the first of this kind"
            return same.encoding, known
        found, matrix = stored_matrix(
            parts, lambda one: views[one.transposed], self._config, self._wrong_shape
        )
        if kind and matrix.quantization is None:
            self._plain[kind] = found.encoding, _but_tensor(matrix)
        elif kind:
            self._kinds[kind] = found
        return found.encoding, matrix

    def _check_declared(self, encoding: Encoding, weight: TensorRef) -> None:
        """CheckpointError if quantization_config says that `weight` is something else."""
        declared = {
            "quant_method": (self._config.quant_method, encoding.methods),
            "fmt": (self._config.fp8_format, encoding.formats),
        }
        for key, (value, expected) in declared.items():
            if value and expected and not any(word in value.lower() for word in expected):
                raise CheckpointError(
                    f"{weight.name} is {weight.dtype} ({encoding.name}), but "
                    f"quantization_config.{key} in config.json is {value!r:.80}",
                    CONTRADICTION,
                )

    def _wrong_shape(self, weight: TensorRef, expected: str) -> CheckpointError:
        known = [
            f"{setting.key} {setting.value}"
            for setting in (*self._config.widths, self._config.intermediate_size)
            if setting is not None
        ]
        reason = f"config.json has {' and '.join(known)}" if known else "as in the other experts"
        turned = str(list(weight.shape[::-1])) in expected
        return CheckpointError(
            f"{weight.name} has shape {list(weight.shape)}, expected {expected}: {reason}",
            'If the weights of experts are stored [in, out], say stored = "in-out" in a map '
            "(docs/maps.md); else check that config.json and the weights belong to one checkpoint."
            if turned
            else CONTRADICTION,
        )
