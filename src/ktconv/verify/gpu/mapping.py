"""Whether a serving engine can load the experts and share them out among GPUs.

Engines hold a layer's experts in two tensors: w13, the rows of gate (w1) and below them those of up
(w3), and w2, which is down. Every tensor of the checkpoint must have exactly one place there.
Tensor parallelism gives each GPU a part of the intermediate size: rows of w13, columns of w2, which
must begin and end with a group of scales and an int32 word. Expert parallelism gives each GPU whole
experts: neighbours (linear) or every n-th (round robin).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ktconv.checkpoint import PROJECTIONS, Projection
from ktconv.checkpoint.config import CONFIG_NAME
from ktconv.errors import UsageError
from ktconv.system.units import format_ranges
from ktconv.verify.findings import Findings
from ktconv.verify.gpu.opened import PARTS, GpuOutput, Module
from ktconv.verify.gpu.quantization import Group
from ktconv.verify.kinds import Facts

LEVEL = "mapping"
SIZES = (1, 2, 4, 8)  # that are reported where none are asked for
SLOTS: Mapping[Projection, str] = {
    "gate": "w13, first half (w1)",
    "up": "w13, second half (w3)",
    "down": "w2",
}
_USUAL: Mapping[Projection, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
PLACEMENTS = ("linear", "round_robin")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What sharing out a layer depends on."""

    layer: int
    experts: Sequence[int]
    intermediate: int
    group: Group


def check_sizes(option: str, sizes: Sequence[int] | None) -> None:
    """UsageError for numbers of GPUs that cannot be."""
    for size in sizes or ():
        if size < 1:
            raise UsageError(f"--{option} {size} is no number of GPUs", "give numbers from 1 up")


def check_mapping(output: GpuOutput, request: Any, findings: Findings) -> Facts:
    """Slots, then sizes; those that were asked for must be possible."""
    slots = _Slots(output, findings)
    slots.fill()
    slots.look_for_gaps()
    shapes = list(_shapes(output))
    return {
        "experts": sum(len(shape.experts) for shape in shapes),
        "slots": len(slots.filled),
        "tensor_parallel": [
            _judged(size, tensor_parallel(shapes, size), request.tp, "tensor", findings)
            for size in request.tp or SIZES
        ],
        "expert_parallel": [
            _judged(size, expert_parallel(shapes, size), request.ep, "expert", findings)
            for size in request.ep or SIZES
        ],
    }


def _judged(
    size: int, facts: Facts, demanded: Sequence[int] | None, kind: str, findings: Findings
) -> Facts:
    if demanded and not facts["possible"]:
        findings.fail(
            LEVEL,
            f"{kind} parallel",
            f"{kind}-parallel size {size} is not possible: {facts['reason']}.",
            value=float(size),
        )
    return {"size": size, "demanded": bool(demanded), **facts}


# ---- slots -----------------------------------------------------------------------------


class _Slots:
    """Which tensor fills which place of w13 and w2."""

    def __init__(self, output: GpuOutput, findings: Findings) -> None:
        self._output, self._findings = output, findings
        self.filled: dict[tuple[int, int, Projection, str], str] = {}

    def fill(self) -> None:
        for module in self._output.modules.values():
            if module.where is None:
                continue  # level structure says so
            if module.layer is None:
                self._fail("slot", f"{module.name} is in no numbered layer.", module)
                continue
            self._known_as_packed(module)
            for part in sorted(module.parts.keys() & set(PARTS)):
                key = (module.layer, module.where.expert, module.where.proj, part)
                first = self.filled.setdefault(key, module.name)
                if first != module.name:
                    slot = SLOTS[module.where.proj]
                    message = f"{module.name}.{part} and {first}.{part} both go to {slot}"
                    self._fail("slot", f"{message} of one expert.", module)

    def _known_as_packed(self, module: Module) -> None:
        """Engines ask by the usual names, whatever the model calls its own, and want one group
        for a whole layer."""
        assert module.where is not None
        told = self._output.quantization
        usual = f"{module.where.source}.{module.where.expert}.{_USUAL[module.where.proj]}"
        first = f"{module.where.source}.0.{_USUAL['gate']}"
        if told.group_of(usual) is None:
            if told.group_of(module.name) is not None:  # else level structure tells
                message = f"{CONFIG_NAME} does not say that {usual} is packed"
                self._fail("scheme", f"{message}: engines ask for that name.", module)
        elif told.group_of(first) not in (None, told.group_of(usual)):
            self._fail("scheme", f"{usual} is quantized otherwise than {first}.", module)

    def look_for_gaps(self) -> None:
        for layer, experts in self._output.layers().items():
            for expert in experts:
                for proj in PROJECTIONS:
                    lacking = [p for p in PARTS if (layer, expert, proj, p) not in self.filled]
                    if lacking:
                        self._findings.fail(
                            LEVEL,
                            "slot",
                            f"layer {layer}, expert {expert}: nothing fills {SLOTS[proj]} "
                            f"({', '.join(lacking)}).",
                            layer=layer,
                            expert=expert,
                            projection=proj,
                        )

    def _fail(self, check: str, message: str, module: Module) -> None:
        self._findings.fail(LEVEL, check, message, tensor=module.name, **module.at)


# ---- sizes -----------------------------------------------------------------------------


def _shapes(output: GpuOutput) -> Iterator[LayerShape]:
    """By the columns of down; layers whose tensors are damaged are left out."""
    layers, seen = output.layers(), set()
    for module in output.modules.values():
        packed = module.parts.get(PARTS[0])
        if module.where is None or module.layer in seen or module.where.proj != "down":
            continue
        group = output.quantization.group_of(module.name)
        if module.layer is None or packed is None or len(packed.shape) != 2 or group is None:
            continue
        seen.add(module.layer)
        cols = packed.shape[1] * 32 // group.bits
        yield LayerShape(module.layer, layers[module.layer], cols, group)


def tensor_parallel(shapes: Sequence[LayerShape], size: int) -> Facts:
    """Whether `size` GPUs can each take a part of the intermediate size; why not."""
    reasons = dict.fromkeys(filter(None, (_why_not_cut(shape, size) for shape in shapes)))
    return {"possible": not reasons, "reason": "; ".join(reasons) or None}


def _why_not_cut(shape: LayerShape, size: int) -> str | None:
    inner, group = shape.intermediate, shape.group
    if inner % size:
        return f"intermediate size {inner} is not divisible by {size}"
    part = inner // size
    if group.group_size is not None and part % group.group_size:
        return (
            f"each GPU would have {part} of the {inner} columns of down (w2), which is not "
            f"divisible by the group size {group.group_size}"
        )
    if part * group.bits % 32:
        return f"{part} columns of down (w2) of {group.bits} bits do not fill int32 words"
    return None


def expert_parallel(shapes: Sequence[LayerShape], size: int) -> Facts:
    """Whether every layer's experts are shared out evenly in both placements; why not."""
    reasons: dict[str, None] = {}
    shares: dict[str, list[int]] = {}
    for shape in shapes:
        for placement in PLACEMENTS:
            ranks = placed(shape.experts, size, placement)
            shares.setdefault(placement, [len(rank) for rank in ranks])
            if len(set(map(len, ranks))) > 1:
                counts = format_ranges(sorted(set(map(len, ranks))))
                reasons[f"{len(shape.experts)} experts give GPUs {counts} each"] = None
    return {"possible": not reasons, "reason": "; ".join(reasons) or None, "first_layer": shares}


def placed(experts: Sequence[int], size: int, placement: str) -> list[list[int]]:
    """Expert ids by GPU. Experts count by their position among those that are there; where they
    cannot be shared out evenly, the first GPUs have one more."""
    if placement == "round_robin":
        return [list(experts[rank::size]) for rank in range(size)]
    share, more = divmod(len(experts), size)
    ends = [rank * share + min(rank, more) for rank in range(size + 1)]
    return [list(experts[start:end]) for start, end in pairwise(ends)]
