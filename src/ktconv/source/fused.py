"""Fused experts: 3-D tensors with all experts of a layer, for gate and up together or apart.

Apart they are stored [E, out, in]: gate and up [E, I, H], down [E, H, I], and experts without a
gate have up and down alone. NeMo stores those [E, in, out], which looks the same with I and H
exchanged: the sizes in config.json decide. Together two layouts are in use:

    out-in   gate_up_proj [E, 2I, H]   down_proj [E, H, I]    Qwen3.5, transformers >= 5
    in-out   gate_up_proj [E, H, 2I]   down_proj [E, I, H]    Qwen3-VL, Llama 4, gpt-oss

There both tensors' shapes always determine the layout. Suppose that gate_up [E, a, b] and
down [E, c, d] fit both: out-in needs b = c and a = 2d, in-out needs a = d and b = 2c. Then
a = 2d = 2a, so a = 0, and empty tensors are refused. So 2I = H (square gate_up) is decided by
down, I = H (square down) by gate_up, and two squares fit neither. The model type
is not used: Qwen3-VL is in-out on the hub and out-in when transformers saved it.

Gate is before up, or, in gpt-oss and Inkling, the even outputs are gate and the odd ones up, also
in scales and biases. Shapes do not show it: MXFP4 blocks are gpt-oss's own, otherwise the model
type decides, for the name that its row gives the tensor: Inkling's w13_weight is interleaved, but
Hy4's is not, nor Inkling's gate_up_proj.

LongCat's gate_up_proj, as transformers stacks it, has also the experts that return their input,
behind the others; down_proj has not.

DBRX and, without a gate, Nomic have the rows of all experts in one axis, [E * I, H] in all tensors:
gate and up are stored [out, in], down [in, out]. config.json has E.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from ktconv.errors import CheckpointError, UnknownNamesError
from ktconv.families import table
from ktconv.families.family import Projection
from ktconv.families.names import known_spellings
from ktconv.families.table import one_of
from ktconv.source.config import ModelConfig, Setting
from ktconv.source.encodings import candidates
from ktconv.source.encodings.base import BIAS, BLOCKS, WEIGHT, Parts
from ktconv.source.naming_map import Order
from ktconv.source.stacks import MAP_HINT, Stack
from ktconv.source.types import TensorRef
from ktconv.source.views import StoredView
from ktconv.system.units import counted

_DAMAGED = "The checkpoint is damaged or incomplete; download it again."
# How names beside gate_up_proj begin that are weight_... beside a matrix of its own.
_COMPANIONS = ("scale", "packed", "zero_point", "g_idx", "shape", "global_scale")


class FusedLayout(Struct, frozen=True):
    """Sizes and layout of a layer's two or three fused tensors."""

    gate: str  # the name of the tensor that it is in
    experts: int
    hidden: int
    intermediate: int
    transposed: bool  # stored [in, out]
    order: Order | None  # of gate and up in one tensor; None: they are apart
    down_turned: bool = False  # down is stored the other way round
    spare: int = 0  # further experts of the tensor with gate and up, which have no down (LongCat)

    def views(self, expert: int) -> Mapping[Projection, StoredView]:
        """The positions of the three matrices of `expert`."""
        return {
            "gate": self._half(expert, "gate"),
            "up": self._half(expert, "up"),
            "down": self._down(expert),
        }

    def _down(self, expert: int) -> StoredView:
        one = replace(self, transposed=True) if self.down_turned else self
        return one._view(expert, self.hidden, self.intermediate, self.hidden)

    def _half(self, expert: int, half: Projection) -> StoredView:
        inner = self.intermediate
        if self.order is None:
            return self._view(expert, inner, self.hidden, inner)
        first, step = first_output(self.order, half, inner)
        return self._view(expert, inner, self.hidden, 2 * inner, first, step, self.spare)

    def _view(
        self,
        expert: int,
        rows: int,
        cols: int,
        outputs: int,
        output: int = 0,
        step: int = 1,
        spare: int = 0,
    ) -> StoredView:
        """`rows` outputs, every `step`-th from `output` on, of the `outputs` that the tensor
        has for each expert; behind those it has `spare` ones."""
        return StoredView(
            stored_rows=cols if self.transposed else outputs,
            stored_cols=outputs if self.transposed else cols,
            rows=rows,
            cols=cols,
            experts=self.experts + spare,
            expert=expert,
            row=0 if self.transposed else output,
            col=output if self.transposed else 0,
            transposed=self.transposed,
            step=step,
        )


_Parts = Mapping[Projection, Parts]  # gate and up have the same ones where they are together


def fused_experts(
    stack: Stack, config: ModelConfig, count: Setting | None
) -> tuple[FusedLayout, _Parts]:
    """Sizes and layout of a fused stack, and its tensors by the names of their parts. `count`: its
    number of experts, for tensors that do not show it.

    Raises CheckpointError naming the tensor that is missing, unknown, or of a shape that fits none.
    """
    way, parts = _found_parts(stack, config.gated)
    if not table.FAMILIES.rows_of_all.isdisjoint(way.values()):
        return _rows_of_all(parts, count)
    if "gate" in way and way["gate"] == way["up"]:
        order = order_of(stack, way["up"], parts["up"], config)
        return _together(stack, parts, order, config), parts
    return _apart(stack, parts, config), parts


def _found_parts(
    stack: Stack, gated: bool | None
) -> tuple[Mapping[Projection, str], Mapping[Projection, dict[str, TensorRef]]]:
    """The names of the tensors, and these. `gated`: whether there must be a gate; None: the
    tensors decide."""
    ways, pattern = table.FAMILIES.stacked, _pattern()
    if gated:
        ways = tuple(way for way in ways if "gate" in way)
    found: dict[str, dict[str, TensorRef]] = {}
    for rest, tensor in stack.tensors.items():
        match = pattern.fullmatch(rest)
        if match is None:
            raise UnknownNamesError(
                f"{tensor.name} ({tensor.dtype} {list(tensor.shape)}) is not a known way to "
                "store experts",
                f"Known are numbered experts with {known_spellings()}, or stacked ones, such as "
                f"{' with '.join(dict.fromkeys(ways[0].values()))}; {MAP_HINT}.",
            )
        part = _part_name(match[2], match[3])
        owner = found.setdefault(match[1], {})
        if part in owner:
            raise twice(owner[part], tensor)
        owner[part] = tensor

    def fits(way: Mapping[Projection, str]) -> tuple[int, bool]:
        """Number of its tensors that are there, and whether all: of DBRX's names, Nomic has two."""
        return len(found.keys() & way.values()), found.keys() >= {*way.values()}

    way = max(ways, key=fits)  # the first of several
    first = next(iter(way.values()))
    if not gated and way.get("gate") not in found and way["up"] in found:
        way = {what: name for what, name in way.items() if what != "gate"}
    for name in way.values():
        if name not in found:
            raise CheckpointError(
                f"{stack.source}.{name} is missing, although {tensor.name} is there",
                "Download the checkpoint again.",
            )
    if stray := found.keys() - way.values():
        name = next(iter(found[min(stray)].values())).name
        raise CheckpointError(
            f"{name} and {stack.source}.{first} are two ways to store the same experts",
            "Remove one of them from the checkpoint.",
        )
    rows = {name: _rows_of_bytes(found[name]) for name in way.values()}
    return way, {what: rows[name] for what, name in way.items()}


def twice(one: TensorRef, other: TensorRef) -> CheckpointError:
    """The error for two tensors of the same weight."""
    return CheckpointError(
        f"{one.name} and {other.name} are the same weight under two names",
        "Remove one of them from the checkpoint.",
    )


def is_stacked_name(rest: str) -> bool:
    """Whether what follows the experts' source is the name of a tensor of all experts."""
    return _pattern().fullmatch(rest) is not None


def fused_name(source: str, tensor: TensorRef) -> str:
    """The name that a stacked weight of the experts `source` has where it is not encoded."""
    match = _pattern().fullmatch(tensor.name.removeprefix(f"{source}."))
    assert match is not None, "fused_experts() found it"
    named = match[2] == "." or (match[3] or "").startswith(WEIGHT)  # w13_weight, w13_weight_packed
    return f"{source}.{match[1]}" + (f"{match[2]}{WEIGHT}" if named else "")


def _pattern() -> re.Pattern[str]:
    """Name, separator and part of a tensor of stacked experts."""
    names = dict.fromkeys(name for way in table.FAMILIES.stacked for name in way.values())
    return re.compile(rf"({one_of(names)})(?:([._])(.+))?")


def _part_name(separator: str | None, rest: str | None) -> str:
    """gate_up_proj -> weight, gate_up_proj_scale_inv -> weight_scale_inv, and so on."""
    if separator is None or rest is None:
        return "weight"
    if separator == "_" and rest.startswith(_COMPANIONS) and rest != "scales":
        return "weight_" + rest
    return "scale" if rest == "weight.scale" else rest  # both are names that GGUF files have


def _rows_of_bytes(parts: dict[str, TensorRef]) -> dict[str, TensorRef]:
    """MXFP4 blocks [E, N, K / 32, 16] as the [E, N, K / 2] that they are."""
    blocks = parts.get(BLOCKS)
    if blocks is None or len(blocks.shape) != 4:
        return parts
    *rows, groups, size = blocks.shape
    return parts | {BLOCKS: replace(blocks, shape=(*rows, groups * size))}


def order_of(stack: Stack, word: str, parts: Parts, config: ModelConfig) -> Order:
    """Order of gate and up in the tensor `word` of both. CheckpointError where its name or biases
    suggest that they are interleaved, and nothing decides."""
    if stack.order is not None:
        return stack.order
    return "interleaved" if _is_interleaved(word, parts, config) else "gate first"


def first_output(order: Order, half: Projection, inner: int) -> tuple[int, int]:
    """The first output of gate or up, `inner` each, in a tensor of both, and the distance of its
    outputs."""
    if order == "interleaved":
        return (1 if half == "up" else 0), 2
    return (inner if (half == "up") == (order == "gate first") else 0), 1


def _is_interleaved(word: str, parts: Parts, config: ModelConfig) -> bool:
    if BLOCKS in parts:
        return True
    if word in table.FAMILIES.bare_gate_up:  # GGUF files are written gate first
        return False
    tensor = next(iter(parts.values()))
    rows = [row for kind in config.model_types if (row := table.FAMILIES.of(kind)) is not None]
    spelt = [row for row in table.FAMILIES.rows if word in row.gate_up]
    if not rows and spelt and all(row.interleaved for row in spelt if row.types):
        raise CheckpointError(
            f"{tensor.name} has gate and up together, and nothing says whether they are "
            "interleaved in it, as in Inkling, or one behind the other, as in Hy4",
            "Correct model_type in config.json if the model is a copy of one of them.",
        )
    if BIAS in parts and not any(row.expert_biases for row in rows):
        raise CheckpointError(
            f"{parts[BIAS].name} is a bias of stacked experts, and nothing says whether gate and "
            "up are interleaved in them, as in gpt-oss, or one behind the other",
            "Known are gpt_oss and openai_privacy_filter as model_type in config.json; correct it "
            "there if the model is a copy of one of them.",
        )
    return any(row.interleaved for row in rows if word in row.gate_up)


def _together(stack: Stack, parts: _Parts, order: Order, config: ModelConfig) -> FusedLayout:
    """The layout by the shapes of gate and up together and of down."""
    gate_ups, downs = candidates(parts["gate"]), candidates(parts["down"])
    for gate_up, down in product(gate_ups, downs):
        shapes = [gate_up.weight.shape, down.weight.shape]
        if any(len(shape) != 3 or min(shape) == 0 for shape in shapes):
            continue
        for transposed in _ways_stored(stack):
            every, *wide = gate_up.encoding.sizes(gate_up.weight, transposed)
            experts, *narrow = down.encoding.sizes(down.weight, transposed)
            if transposed:
                wide, narrow = wide[::-1], narrow[::-1]
            hidden, inner = narrow
            spare = every - experts
            if spare in (0, config.zero_experts) and wide == [2 * inner, hidden]:
                name = gate_up.weight.name
                return FusedLayout(name, experts, hidden, inner, transposed, order, spare=spare)
    found = (f"{one.weight.name} {list(one.weight.shape)}" for one in (gate_ups[0], downs[0]))
    raise CheckpointError(
        f"{' and '.join(found)} fit neither "
        f"{_expected(config, transposed=False)} nor {_expected(config, transposed=True)}",
        "Check that the tensors and config.json belong to one checkpoint.",
    )


def _ways_stored(stack: Stack) -> Sequence[bool]:
    """Whether tensors may be stored [in, out]: what is possible unless a map says it."""
    return (False, True) if stack.stored is None else (stack.stored == "in-out",)


def _apart(stack: Stack, parts: _Parts, config: ModelConfig) -> FusedLayout:
    """The layout of a tensor for each projection."""
    possible = [candidates(one) for one in parts.values()]
    for found in product(*possible):
        if any(len(one.weight.shape) != 3 or min(one.weight.shape) == 0 for one in found):
            continue
        turned = stack.stored == "in-out"
        first, *others = (tuple(one.encoding.sizes(one.weight, turned)) for one in found)
        experts, inner, hidden = first
        if others == [first] * (len(others) - 1) + [(experts, hidden, inner)]:
            name = found[0].weight.name
            if turned or (stack.stored is None and _is_transposed(inner, hidden, config)):
                return FusedLayout(name, experts, inner, hidden, True, None)
            return FusedLayout(name, experts, hidden, inner, False, None)
    weights = [one[0].weight for one in possible]
    shapes = _listed(f"{one.name} {list(one.shape)}" for one in weights)
    wide, narrow = ("[E, I, H]", "[E, H, I]")[:: -1 if stack.stored == "in-out" else 1]
    expected = _listed([wide] * (len(weights) - 1) + [narrow])
    raise CheckpointError(
        f"{shapes} are not {expected}",
        _DAMAGED,
    )


def _rows_of_all(parts: _Parts, count: Setting | None) -> tuple[FusedLayout, _Parts]:
    """The layout of DBRX, and the tensors as [E, I, H], which they are."""
    weights = [one.get(WEIGHT, one[min(one)]) for one in parts.values()]
    first = weights[0]
    if count is None:
        raise CheckpointError(
            f"{first.name} {list(first.shape)} has the rows of all experts, but config.json does "
            "not say how many there are",
            "Add their number to config.json, as moe_num_experts in ffn_config.",
        )
    shape = first.shape
    if len(shape) != 2 or min(shape) == 0 or any(one.shape != shape for one in weights):
        shapes = _listed(f"{one.name} {list(one.shape)}" for one in weights)
        raise CheckpointError(f"{shapes} are not [E * I, H] each", _DAMAGED)
    if not count.value or shape[0] % count.value:
        raise CheckpointError(
            f"{first.name} has {shape[0]} rows, which are no equal parts of "
            f"{counted(count.value, 'expert')}, "
            f"as {count.key} has them",
            "Check that config.json and the weights belong to one checkpoint.",
        )
    experts, inner = count.value, shape[0] // count.value
    layout = FusedLayout(first.name, experts, shape[1], inner, False, None, down_turned=True)
    split = {
        what: {**named, WEIGHT: replace(weight, shape=(experts, inner, shape[1]))}
        for (what, named), weight in zip(parts.items(), weights, strict=True)
    }
    return layout, split


def _is_transposed(inner: int, hidden: int, config: ModelConfig) -> bool:
    """Whether config.json has these two sizes the other way round."""
    sizes = (config.width_of(inner), config.intermediate_size)
    return inner != hidden and [inner, hidden] == [one and one.value for one in sizes]


def _listed(texts: Iterable[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}"


def _expected(config: ModelConfig, transposed: bool) -> str:
    def text(setting: object, letter: str, factor: int = 1) -> str:
        value = getattr(setting, "value", None)
        return str(value * factor) if value else (f"{factor}{letter}" if factor > 1 else letter)

    experts = text(config.num_experts, "E")
    hidden = text(next(iter(config.widths), None), "H")
    inner = text(config.intermediate_size, "I")
    double = text(config.intermediate_size, "I", 2)
    gate_up: Sequence[str] = (hidden, double) if transposed else (double, hidden)
    down: Sequence[str] = (inner, hidden) if transposed else (hidden, inner)
    return f"[{experts}, {', '.join(gate_up)}] + [{experts}, {', '.join(down)}]"
