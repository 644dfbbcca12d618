"""Fused experts: one 3-D gate_up_proj and one 3-D down_proj with all experts of a layer.

Two layouts are in use:

    out-in   gate_up_proj [E, 2I, H]   down_proj [E, H, I]    Qwen3.5, transformers >= 5
    in-out   gate_up_proj [E, H, 2I]   down_proj [E, I, H]    Qwen3-VL, Llama 4, gpt-oss

Both tensors' shapes together always determine the layout. Suppose that gate_up [E, a, b] and down
[E, c, d] fit both: out-in needs b = c and a = 2d, in-out needs a = d and b = 2c. Then
a = 2d = 2a, so a = 0, and empty tensors are refused. So 2I = H (square gate_up) is decided by
down, I = H (square down) by gate_up, and two squares fit neither. The model type
is not used: Qwen3-VL is in-out on the hub and out-in when transformers saved it.

Gate is before up, or, in gpt-oss, the even outputs are gate and the odd ones up, also in scales and
biases. Shapes do not show it: MXFP4 blocks are gpt-oss's own, otherwise the model type decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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

# First words of names beside gate_up_proj: gate_up_proj_scale_inv.
_COMPANIONS = ("scale",)


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """Sizes and layout of a layer's two fused tensors."""

    gate_up: str  # the name of that tensor
    experts: int
    hidden: int
    intermediate: int
    transposed: bool  # stored [in, out]
    interleaved: bool = False  # even outputs of gate_up are gate, odd ones up

    def views(self, expert: int) -> Mapping[Projection, StoredView]:
        """The positions of the three matrices of `expert`."""
        return {
            "gate": self._gate_up(expert, 0),
            "up": self._gate_up(expert, 1 if self.interleaved else self.intermediate),
            "down": self._view(expert, self.hidden, self.intermediate, self.hidden),
        }

    def _gate_up(self, expert: int, output: int) -> StoredView:
        step = 2 if self.interleaved else 1
        return self._view(
            expert, self.intermediate, self.hidden, 2 * self.intermediate, output, step
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


def fused_parts(stack: Stack) -> tuple[dict[str, TensorRef], dict[str, TensorRef]]:
    """The tensors of a fused stack that are gate and up, and those that are down, by the names of
    their parts."""
    fused = table.FAMILIES.fused
    pattern = re.compile(rf"({one_of((*fused, *fused.values()))})(?:([._])(.+))?")
    found: dict[str, dict[str, TensorRef]] = {}
    for rest, tensor in stack.tensors.items():
        match = pattern.fullmatch(rest)
        if match is None:
            raise CheckpointError(
                f"{tensor.name} ({tensor.dtype} {list(tensor.shape)}) is not a known way to "
                "store experts",
                "Known are experts.<e>.<projection>.weight, and "
                + " and ".join(f"{one} with {other}" for one, other in fused.items())
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
    gate_up, down = next(pair for pair in fused.items() if not found.keys().isdisjoint(pair))
    for name in (gate_up, down):
        if name not in found:
            raise CheckpointError(
                f"{stack.source}.{name} is missing, although {tensor.name} is there",
                "Download the checkpoint again.",
            )
    if stray := found.keys() - {gate_up, down}:
        name = next(iter(found[min(stray)].values())).name
        raise CheckpointError(
            f"{name} and {stack.source}.{gate_up} are two ways to store the same experts",
            "Remove one of them from the checkpoint.",
        )
    return _rows_of_bytes(found[gate_up]), _rows_of_bytes(found[down])


def _part_name(separator: str | None, rest: str | None) -> str:
    """gate_up_proj -> weight, gate_up_proj_scale_inv -> weight_scale_inv, and so on."""
    if separator is None or rest is None:
        return "weight"
    if separator == "_" and rest.startswith(_COMPANIONS):
        return "weight_" + rest
    return rest


def _rows_of_bytes(parts: dict[str, TensorRef]) -> dict[str, TensorRef]:
    """MXFP4 blocks [E, N, K / 32, 16] as the [E, N, K / 2] that they are."""
    blocks = parts.get(BLOCKS)
    if blocks is None or len(blocks.shape) != 4:
        return parts
    *rows, groups, size = blocks.shape
    return parts | {BLOCKS: replace(blocks, shape=(*rows, groups * size))}


def _is_interleaved(parts: Parts, config: ModelConfig) -> bool:
    """Whether even outputs are gate and odd ones up. CheckpointError where biases suggest it, and
    nothing decides."""
    if BLOCKS in parts:
        return True
    rows = [row for kind in config.model_types if (row := table.FAMILIES.of(kind)) is not None]
    if BIAS in parts and not any(row.expert_biases for row in rows):
        raise CheckpointError(
            f"{parts[BIAS].name} is a bias of stacked experts, and nothing says whether gate and "
            "up are interleaved in them, as in gpt-oss, or one behind the other",
            "Known are gpt_oss and openai_privacy_filter as model_type in config.json; correct it "
            "there if the model is a copy of one of them.",
        )
    return any(row.interleaved for row in rows)


def fused_layout(gate_up_parts: Parts, down_parts: Parts, config: ModelConfig) -> FusedLayout:
    """Decide the layout from both shapes; raises CheckpointError if they fit none."""
    interleaved = _is_interleaved(gate_up_parts, config)
    gate_ups, downs = candidates(gate_up_parts), candidates(down_parts)
    for gate_up, down in product(gate_ups, downs):
        shapes = [gate_up.weight.shape, down.weight.shape]
        if any(len(shape) != 3 or min(shape) == 0 for shape in shapes):
            continue
        for transposed in (False, True):
            experts, *wide = gate_up.encoding.sizes(gate_up.weight, transposed)
            same, *narrow = down.encoding.sizes(down.weight, transposed)
            if transposed:
                wide, narrow = wide[::-1], narrow[::-1]
            hidden, inner = narrow
            if experts == same and wide == [2 * inner, hidden]:
                return FusedLayout(
                    gate_up.weight.name, experts, hidden, inner, transposed, interleaved
                )
    found = (f"{one.weight.name} {list(one.weight.shape)}" for one in (gate_ups[0], downs[0]))
    raise CheckpointError(
        f"{' and '.join(found)} fit neither "
        f"{_expected(config, transposed=False)} nor {_expected(config, transposed=True)}",
        "Check that the tensors and config.json belong to one checkpoint.",
    )


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
