"""Experts of a layer in one tensor for gate and up and one for down, and the parts of these.

A stacked tensor [E, rows, ...] has the bytes of the tensors that numbered experts would have, one
behind the other: by expert, gate before up. So a part of it is written, read and recorded under the
name of that numbered tensor, and only the files and their index know the stacked one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ktconv.families import table
from ktconv.families.family import USUAL
from ktconv.families.table import one_of
from ktconv.source import Projection, TensorRef
from ktconv.targets.encoded.names import STACKED_GATE_UP as _GATE_UP
from ktconv.targets.packed.weights import PackedWeights, open_packed
from ktconv.writer.manifest import Manifest
from ktconv.writer.shards import Tensor

NUMBERED = "numbered"
_WEIGHT = "weight"
_FLAT_ENDINGS = ("packed", "scale", "global_scale", "shape")


class Stacking(Struct, frozen=True):
    """A way to spell stacked tensors."""

    name: str  # of --expert-layout
    nested: bool  # gate_up_proj.weight_scale, not gate_up_proj_scale

    def tensor(self, matrix: str, part: str) -> str:
        """Name of a stacked tensor; `part` as numbered experts have it: weight_packed."""
        if self.nested:
            return f"{matrix}.{part}"
        return matrix if part == _WEIGHT else f"{matrix}_{part.removeprefix(f'{_WEIGHT}_')}"


# llm-compressor writes the first one; vLLM reads the second.
STACKINGS = {one.name: one for one in (Stacking("stacked", True), Stacking("stacked-flat", False))}
LAYOUTS = (NUMBERED, *STACKINGS)


def together(projections: Sequence[Projection]) -> list[tuple[str, list[Projection]]]:
    """The stacked matrices of experts with these projections, and what is in each."""
    wide: list[Projection] = [proj for proj in projections if proj != "down"]
    return [(_GATE_UP if len(wide) > 1 else USUAL.of("up"), wide), (USUAL.of("down"), ["down"])]


def stacked_tensor(name: str, first: Tensor, count: int, matrices: int) -> Tensor:
    """The tensor of `count` experts with `matrices` each, whose parts are like `first`."""
    height, *rest = first.shape
    shape = count, matrices * height, *rest
    return Tensor(name, first.dtype, shape, count * matrices * first.nbytes)


def slots_of(tensor: TensorRef) -> list[TensorRef]:
    """The parts of a stacked tensor of a file, named and shaped as those of numbered experts; empty
    for any other tensor."""
    found = _pattern().fullmatch(tensor.name)
    if found is None or len(tensor.shape) < 2 or min(tensor.shape) == 0:
        return []
    container, word, nested, flat = found.groups()
    words = [USUAL.of("gate"), USUAL.of("up")] if word == _GATE_UP else [word]
    experts, height, *rest = tensor.shape
    if height % len(words):
        return []
    part = nested or (f"{_WEIGHT}_{flat}" if flat else _WEIGHT)
    names = [f"{container}.{expert}.{one}.{part}" for expert in range(experts) for one in words]
    size, shape = tensor.nbytes // len(names), (height // len(words), *rest)
    return [
        replace(tensor, name=name, shape=shape, offset=tensor.offset + i * size, nbytes=size)
        for i, name in enumerate(names)
    ]


@cache
def _pattern() -> re.Pattern[str]:
    """Container, matrix, and the nested or flat ending of a stacked tensor."""
    words = one_of((_GATE_UP, USUAL.of("up"), USUAL.of("down")))[3:-1]
    return re.compile(
        rf"(.+\.{one_of(table.FAMILIES.containers)})\.({words})"
        rf"(?:\.({_WEIGHT}\w*)|_({'|'.join(_FLAT_ENDINGS)}))?"
    )


def unstacked(tensors: Iterable[TensorRef]) -> Iterator[TensorRef]:
    """Tensors of files, with the parts of stacked ones in their place."""
    for tensor in tensors:
        yield from slots_of(tensor) or [tensor]


def open_unstacked(directory: Path) -> PackedWeights:
    """`open_packed` of experts that may be stacked: `others` has the parts of such tensors."""
    found = open_packed(directory)
    for name, tensor in list(found.others.items()):
        if parts := slots_of(tensor):
            found.stacked[name] = found.others.pop(name)
            for one in parts:
                if (other := found.others.get(one.name)) is not None:
                    found.doubles.append((one.name, other.file.name, one.file.name))
                found.others[one.name] = one
    names = (one.name for tensor in found.stacked.values() for one in slots_of(tensor))
    found.slots = frozenset(names)
    return found


def layout_of(stacked: Iterable[str]) -> str:
    """The layout of experts, one of LAYOUTS, by the names of stacked tensors in files."""
    found = [match for name in stacked if (match := _pattern().fullmatch(name)) is not None]
    if not found:
        return NUMBERED
    nested = any(match[3] is not None for match in found)
    return next(name for name, one in STACKINGS.items() if one.nested == nested)


def is_flat(layout: str) -> bool:
    """Whether a layout of experts, one of LAYOUTS, is that of vLLM's flat names."""
    return layout in STACKINGS and not STACKINGS[layout].nested


def is_stacked(manifest: Manifest | None) -> bool:
    """Whether the manifest of an output says that its experts are stacked."""
    return manifest is not None and str(manifest.options.get("expert_layout")) in STACKINGS


def places(stacks: Iterable[tuple[Tensor, Iterable[str]]]) -> Iterator[tuple[str, str, int]]:
    """Names of parts, each with its stacked tensor and where it begins there."""
    for tensor, names in stacks:
        listed = list(names)
        size = tensor.nbytes // len(listed)
        yield from ((name, tensor.name, i * size) for i, name in enumerate(listed))
