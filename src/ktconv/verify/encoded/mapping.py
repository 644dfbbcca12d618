"""Whether a serving engine can load the experts and distribute them over GPUs.

Engines store a layer's experts in two tensors: w13, the rows of gate (w1) and below them those of
up (w3), or those of up alone where there is no gate, and w2, which is down. Every tensor of the
checkpoint must have exactly one place there.
Tensor parallelism gives each GPU a part of the intermediate size: rows of w13, columns of w2, which
must begin and end with a group of scales and an int32 word. Expert parallelism gives each GPU whole
experts: neighbours (linear) or every n-th (round robin).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from ktconv.errors import UsageError
from ktconv.families.family import USUAL
from ktconv.plan.placement.parallel import (
    Grain,
    LayerShape,
    Split,
    expert_parallel,
    tensor_parallel,
)
from ktconv.source import Projection, TensorRef
from ktconv.source.config import CONFIG_NAME
from ktconv.targets.encoded.layouts.packed import PACK_QUANTIZED
from ktconv.verify.encoded.output import EncodedOutput, Module
from ktconv.verify.encoded.quantization import Group
from ktconv.verify.findings import Facts, Findings
from ktconv.verify.request import VerifyRequest

LEVEL = "mapping"
SIZES = (1, 2, 4, 8)  # reported by default
SLOTS: Mapping[Projection, str] = {
    "gate": "w13, first half (w1)",
    "up": "w13, second half (w3)",
    "down": "w2",
}
UNGATED_UP = "w13 (w1)"  # the slot of up where there is no gate


def check_sizes(option: str, sizes: Sequence[int] | None) -> None:
    """Raises UsageError for numbers of GPUs below 1."""
    for size in sizes or ():
        if size < 1:
            raise UsageError(
                f"--{option} {size} is not a number of GPUs", "use numbers of at least 1"
            )


def check_mapping(output: EncodedOutput, request: VerifyRequest, findings: Findings) -> Facts:
    """Checks slots, then sizes; those that were requested must be possible."""
    slots = _Slots(output, findings)
    slots.fill()
    slots.look_for_gaps()
    shapes = list(_shapes(output))
    facts: Facts = {
        "experts": sum(len(shape.experts) for shape in shapes),
        "slots": len(slots.filled),
    }
    for kind, split, sizes in (
        ("tensor", tensor_parallel, request.tp),
        ("expert", expert_parallel, request.ep),
    ):
        facts[f"{kind}_parallel"] = [
            _size(size, split(shapes, size), bool(sizes), kind, findings) for size in sizes or SIZES
        ]
    return facts


def _size(size: int, split: Split, demanded: bool, kind: str, findings: Findings) -> Facts:
    if demanded and not split.possible:
        message = f"{kind}-parallel size {size} is not possible: {split.reason}."
        findings.fail(LEVEL, f"{kind} parallel", message, value=float(size))
    shares = {} if split.first_layer is None else {"first_layer": split.first_layer}
    about = {"size": size, "demanded": demanded, "possible": split.possible}
    return {**about, "reason": split.reason, **shares}


# ---- slots -----------------------------------------------------------------------------


class _Slots:
    """Assigns tensors to places in w13 and w2."""

    def __init__(self, output: EncodedOutput, findings: Findings) -> None:
        self._output, self._findings = output, findings
        self.filled: dict[tuple[int, int, Projection, str], str] = {}
        self._projections = cache(output.projections)  # by layer

    def fill(self) -> None:
        for module in self._output.modules.values():
            if module.where is None:
                continue  # reported by level structure
            if module.layer is None:
                self._fail("slot", f"{module.name} is not in a numbered layer.", module)
                continue
            self._known_as_packed(module)
            for part in sorted(module.parts.keys() & set(module.layout.parts)):
                key = (module.layer, module.where.expert, module.where.proj, part)
                first = self.filled.setdefault(key, module.name)
                if first != module.name:
                    slot = self._slot(module.layer, module.where.proj)
                    message = f"{module.name}.{part} and {first}.{part} both go to {slot}"
                    self._fail("slot", f"{message} of one expert.", module)

    def _known_as_packed(self, module: Module) -> None:
        """Checks what engines need: config.json covers the usual names, whatever those of the model
        are, and has one group for a whole layer."""
        assert module.where is not None
        quantization = self._output.quantization
        if module.layout is not PACK_QUANTIZED:
            return  # config.json was compared as a whole
        usual = f"{module.where.source}.{module.where.expert}.{USUAL.of(module.where.proj)}"
        assert module.layer is not None
        proj, *_ = self._projections(module.layer)
        first = f"{module.where.source}.0.{USUAL.of(proj)}"
        if quantization.group_of(usual) is None:
            if quantization.group_of(module.name) is not None:  # else reported by level structure
                message = f"{CONFIG_NAME} does not say that {usual} is packed"
                self._fail("scheme", f"{message}: engines ask for that name.", module)
        elif quantization.group_of(first) not in (None, quantization.group_of(usual)):
            self._fail("scheme", f"{usual} is quantized differently than {first}.", module)

    def look_for_gaps(self) -> None:
        for layer, experts in self._output.layers.items():
            parts = self._output.parts
            for expert in experts:
                for proj in self._projections(layer):
                    missing = [p for p in parts if (layer, expert, proj, p) not in self.filled]
                    if missing:
                        words = f"nothing fills {self._slot(layer, proj)} ({', '.join(missing)})."
                        message = f"layer {layer}, expert {expert}: {words}"
                        where = {"layer": layer, "expert": expert, "projection": proj}
                        self._findings.fail(LEVEL, "slot", message, **where)

    def _slot(self, layer: int, proj: Projection) -> str:
        gated = "gate" in self._projections(layer)
        return SLOTS[proj] if gated or proj != "up" else UNGATED_UP

    def _fail(self, check: str, message: str, module: Module) -> None:
        self._findings.fail(LEVEL, check, message, tensor=module.name, **module.at)


# ---- sizes -----------------------------------------------------------------------------


def _shapes(output: EncodedOutput) -> Iterator[LayerShape]:
    """Shapes of layers by the columns of down, without damaged layers."""
    layers, seen = output.layers, set()
    for module in output.modules.values():
        packed = module.parts.get(module.layout.parts[0])
        if module.where is None or module.layer in seen or module.where.proj != "down":
            continue
        group = output.quantization.group_of(module.name)
        if module.layer is None or packed is None or len(packed.shape) != 2 or group is None:
            continue
        seen.add(module.layer)
        grains = _grains(output, group)
        if group.group_size:
            grains.insert(0, Grain(group.group_size, f"the group size {group.group_size}"))
        yield LayerShape(layers[module.layer], _columns(output, packed, group), grains)


def _grains(output: EncodedOutput, group: Group) -> list[Grain]:
    """Numbers that the columns of a part must be multiples of, but for groups."""
    if output.scheme is None or output.scheme.row.is_int:
        word = 32 // group.bits
        return [Grain(word, f"the {word} weights of an int32 word")]
    return [Grain(2, "the 2 weights of a byte")] if group.bits == 4 else []


def _columns(output: EncodedOutput, packed: TensorRef, group: Group) -> int:
    """Number of columns of down, by its codes."""
    if not output.layout.streamed:
        return packed.shape[0] * (32 // group.bits)
    unit = {"I32": 32, "BF16": 16}.get(packed.dtype, 8)
    return packed.shape[1] * unit // group.bits
