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

Gate is before up, or, in gpt-oss, the even outputs are gate and the odd ones up, also in scales and
biases. Shapes do not show it: MXFP4 blocks are gpt-oss's own, otherwise the model type decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ktconv.checkpoint.config import ModelConfig
from ktconv.checkpoint.encodings import candidates
from ktconv.checkpoint.encodings.base import BIAS, BLOCKS, Parts
from ktconv.checkpoint.stacks import Stack
from ktconv.checkpoint.types import TensorRef
from ktconv.checkpoint.views import StoredView
from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.family import Projection
from ktconv.families.table import one_of

# How names beside gate_up_proj begin that are weight_... beside a matrix of its own.
_COMPANIONS = ("scale", "packed", "zero_point", "g_idx", "shape", "global_scale")


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """Sizes and layout of a layer's two or three fused tensors."""

    gate: str  # the name of the tensor that it is in
    experts: int
    hidden: int
    intermediate: int
    transposed: bool  # stored [in, out]
    together: bool = True  # gate and up are one tensor
    interleaved: bool = False  # even outputs of that are gate, odd ones up
    up_first: bool = False  # of that the first half is up

    def views(self, expert: int) -> Mapping[Projection, StoredView]:
        """The positions of the three matrices of `expert`."""
        return {
            "gate": self._gate_up(expert, self.intermediate if self.up_first else 0),
            "up": self._gate_up(expert, 0 if self.up_first else self._up),
            "down": self._view(expert, self.hidden, self.intermediate, self.hidden),
        }

    @property
    def _up(self) -> int:
        """The first output that is up."""
        if self.interleaved:
            return 1
        return self.intermediate if self.together else 0

    def _gate_up(self, expert: int, output: int) -> StoredView:
        width, step = (2 if self.together else 1), (2 if self.interleaved else 1)
        return self._view(
            expert, self.intermediate, self.hidden, width * self.intermediate, output, step
        )

    def _view(
        self, expert: int, rows: int, cols: int, outputs: int, output: int = 0, step: int = 1
    ) -> StoredView:
        """`rows` outputs, every `step`-th from `output` on, of the `outputs` that the tensor
        has."""
        return StoredView(
            stored_rows=cols if self.transposed else outputs,
            stored_cols=outputs if self.transposed else cols,
            rows=rows,
            cols=cols,
            experts=self.experts,
            expert=expert,
            row=0 if self.transposed else output,
            col=output if self.transposed else 0,
            transposed=self.transposed,
            step=step,
        )


def fused_parts(
    stack: Stack, gated: bool | None = None
) -> Mapping[Projection, dict[str, TensorRef]]:
    """The tensors of a fused stack by the names of their parts; gate and up have the same ones
    where they are together. `gated`: whether there must be a gate; None: the tensors decide."""
    ways, pattern = table.FAMILIES.stacked, _pattern()
    found: dict[str, dict[str, TensorRef]] = {}
    for rest, tensor in stack.tensors.items():
        match = pattern.fullmatch(rest)
        if match is None:
            raise CheckpointError(
                f"{tensor.name} ({tensor.dtype} {list(tensor.shape)}) is not a known way to "
                "store experts",
                "Known are experts.<e>.<projection>.weight, and "
                + "; ".join(" with ".join(one) for one in ways)
                + ".",
            )
        part = _part_name(match[2], match[3])
        owner = found.setdefault(match[1], {})
        if part in owner:
            raise CheckpointError(
                f"{owner[part].name} and {tensor.name} are the same weight under two names",
                "Remove one of them from the checkpoint.",
            )
        owner[part] = tensor
    way = max(ways, key=lambda way: len(found.keys() & set(way)))  # the first of several
    gate, *_, up, down = (way[0], *way)
    if len(way) == 3 and not gated and gate not in found:
        way = way[1:]
    for name in way:
        if name not in found:
            raise CheckpointError(
                f"{stack.source}.{name} is missing, although {tensor.name} is there",
                "Download the checkpoint again.",
            )
    if stray := found.keys() - set(way):
        name = next(iter(found[min(stray)].values())).name
        raise CheckpointError(
            f"{name} and {stack.source}.{gate} are two ways to store the same experts",
            "Remove one of them from the checkpoint.",
        )
    rows = {name: _rows_of_bytes(found[name]) for name in way}
    others: dict[Projection, dict[str, TensorRef]] = {"up": rows[up], "down": rows[down]}
    return {"gate": rows[gate], **others} if gate in rows else others


def fused_name(source: str, tensor: TensorRef) -> str:
    """The name that a stacked weight of the experts `source` has where it is not encoded."""
    match = _pattern().fullmatch(tensor.name.removeprefix(f"{source}."))
    assert match is not None, "fused_parts() found it"
    return f"{source}.{match[1]}" + (".weight" if match[2] == "." else "")


def _pattern() -> re.Pattern[str]:
    """Name, separator and part of a tensor of stacked experts."""
    names = dict.fromkeys(name for way in table.FAMILIES.stacked for name in way)
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


def _is_interleaved(stack: Stack, parts: Parts, config: ModelConfig) -> bool:
    """Whether even outputs are gate and odd ones up. CheckpointError where biases suggest it, and
    nothing decides."""
    if stack.order is not None:
        return stack.order == "interleaved"
    if BLOCKS in parts:
        return True
    if table.FAMILIES.bare_layer.fullmatch(stack.source):  # GGUF files are written gate first
        return False
    rows = [row for kind in config.model_types if (row := table.FAMILIES.of(kind)) is not None]
    if BIAS in parts and not any(row.expert_biases for row in rows):
        raise CheckpointError(
            f"{parts[BIAS].name} is a bias of stacked experts, and nothing says whether gate and "
            "up are interleaved in them, as in gpt-oss, or one behind the other",
            "Known are gpt_oss and openai_privacy_filter as model_type in config.json; correct it "
            "there if the model is a copy of one of them.",
        )
    return any(row.interleaved for row in rows)


def fused_layout(
    stack: Stack, parts: Mapping[Projection, Parts], config: ModelConfig
) -> FusedLayout:
    """Decide the layout from the shapes of gate and up together and of down; raises CheckpointError
    if they fit none."""
    interleaved = _is_interleaved(stack, parts["gate"], config)
    gate_ups, downs = candidates(parts["gate"]), candidates(parts["down"])
    for gate_up, down in product(gate_ups, downs):
        shapes = [gate_up.weight.shape, down.weight.shape]
        if any(len(shape) != 3 or min(shape) == 0 for shape in shapes):
            continue
        for transposed in _ways_stored(stack):
            experts, *wide = gate_up.encoding.sizes(gate_up.weight, transposed)
            same, *narrow = down.encoding.sizes(down.weight, transposed)
            if transposed:
                wide, narrow = wide[::-1], narrow[::-1]
            hidden, inner = narrow
            if experts == same and wide == [2 * inner, hidden]:
                return FusedLayout(
                    gate_up.weight.name,
                    experts,
                    hidden,
                    inner,
                    transposed,
                    interleaved=interleaved,
                    up_first=stack.order == "up first",
                )
    found = (f"{one.weight.name} {list(one.weight.shape)}" for one in (gate_ups[0], downs[0]))
    raise CheckpointError(
        f"{' and '.join(found)} fit neither "
        f"{_expected(config, transposed=False)} nor {_expected(config, transposed=True)}",
        "Check that the tensors and config.json belong to one checkpoint.",
    )


def _ways_stored(stack: Stack) -> Sequence[bool]:
    """Whether tensors may be stored [in, out]: what is possible unless a map says it."""
    return (False, True) if stack.stored is None else (stack.stored == "in-out",)


def stacked_layout(
    stack: Stack, parts: Mapping[Projection, Parts], config: ModelConfig
) -> FusedLayout:
    """The layout of a tensor for each projection; raises CheckpointError if their shapes do not fit
    each other."""
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
                return FusedLayout(name, experts, inner, hidden, True, together=False)
            return FusedLayout(name, experts, hidden, inner, False, together=False)
    weights = [one[0].weight for one in possible]
    shapes = _listed(f"{one.name} {list(one.shape)}" for one in weights)
    wide, narrow = ("[E, I, H]", "[E, H, I]")[:: -1 if stack.stored == "in-out" else 1]
    expected = _listed([wide] * (len(weights) - 1) + [narrow])
    raise CheckpointError(
        f"{shapes} are not {expected}",
        "The checkpoint is damaged or incomplete; download it again.",
    )


def _is_transposed(inner: int, hidden: int, config: ModelConfig) -> bool:
    """Whether config.json has these two sizes the other way round."""
    sizes = (config.hidden_size, config.intermediate_size)
    return inner != hidden and [inner, hidden] == [one and one.value for one in sizes]


def _listed(texts: Iterable[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}"


def _expected(config: ModelConfig, transposed: bool) -> str:
    def text(setting: object, letter: str, factor: int = 1) -> str:
        value = getattr(setting, "value", None)
        return str(value * factor) if value else (f"{factor}{letter}" if factor > 1 else letter)

    experts = text(config.num_experts, "E")
    hidden = text(config.hidden_size, "H")
    inner = text(config.intermediate_size, "I")
    double = text(config.intermediate_size, "I", 2)
    gate_up: Sequence[str] = (hidden, double) if transposed else (double, hidden)
    down: Sequence[str] = (inner, hidden) if transposed else (hidden, inner)
    return f"[{experts}, {', '.join(gate_up)}] + [{experts}, {', '.join(down)}]"
