"""Experts in memory of our own, whose matrices come one by one from wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ktconv import native
from ktconv.formats import PROJECTIONS, Format, Projection, split
from ktconv.native import Activation, Expert, PackedMatrix
from ktconv.runtime.layers.blocks import Block, part_shapes
from ktconv.runtime.layers.experts import Experts, OutputNorm, check_shape
from ktconv.runtime.layers.unpacked import packed_streams
from ktconv.system import machine
from ktconv.system.arrays import F32, Array
from ktconv.system.threads import run_tasks

Bind = Callable[[Array, int], None]  # gets the memory of a part (uint8) and its number


class Wanted(NamedTuple):
    """A matrix to be packed: `places` has one of each part."""

    expert: int
    proj: Projection
    places: Sequence[PackedMatrix]


# Packs a matrix, and returns its bias [rows] if it has one. Each thread has one of its own.
Packer = Callable[[Wanted], F32 | None]


class Shape(Struct, frozen=True):
    """Shape of a layer in kernel order."""

    format: Format
    hidden: int
    intermediate: int
    parts: int
    activation: Activation


def fill_experts(
    shape: Shape,
    origins: Sequence[int],
    packer: Callable[[], Packer],
    bind: Bind | None = None,
    threads: int | None = None,
    norm: OutputNorm | None = None,
) -> Experts:
    """The experts of a layer: slot p has expert `origins[p]`, those of one expert share its memory.

    `bind` gets the memory of each part and its number before anything is written to it, which
    `threads` threads do then (None: one per CPU), each by a `packer` of its own. UsageError for a
    shape that the format does not allow.
    """
    fmt, sizes = shape.format, (shape.hidden, shape.intermediate)
    check_shape(fmt, *sizes, shape.parts)
    places = _places(shape, sorted(set(origins)), bind)
    biases: dict[tuple[int, Projection], F32] = {}

    def worker() -> Callable[[Wanted], None]:
        pack = packer()

        def run(wanted: Wanted) -> None:
            if (bias := pack(wanted)) is not None:
                biases[wanted.expert, wanted.proj] = bias

        return run

    run_tasks(list(_wanted(places)), worker, threads or machine.usable_cpus())
    experts = {
        expert: [_with_biases(shape, expert, n, one, biases) for n, one in enumerate(parts)]
        for expert, parts in places.items()
    }
    rows = [[experts[expert][part] for expert in origins] for part in range(shape.parts)]
    layer = native.Layer(fmt.layout, shape.activation, *sizes, list(map(list, rows)))
    return Experts(
        fmt,
        layer,
        shape.activation,
        origins,
        lambda expert: packed_streams(fmt, *sizes, experts[expert]),
        norm=norm,
    )


def _places(shape: Shape, experts: Sequence[int], bind: Bind | None) -> dict[int, list[Expert]]:
    """Memory for the parts of each expert: a block for each part."""
    width = shape.intermediate // shape.parts
    shapes = part_shapes(shape.hidden, width, shape.activation.gated)
    blocks = [Block(shape.format, shapes, len(experts)) for _ in range(shape.parts)]
    for part, block in enumerate(blocks):
        if bind:
            bind(block.memory, part)
    return {expert: [block.expert(n) for block in blocks] for n, expert in enumerate(experts)}


def _wanted(places: dict[int, list[Expert]]) -> Sequence[Wanted]:
    found = []
    for expert, parts in places.items():
        for proj, matrices in zip(PROJECTIONS, zip(*parts, strict=True), strict=True):
            own = [matrix for matrix in matrices if matrix is not None]
            if own:
                found.append(Wanted(expert, proj, own))
    return found


def _with_biases(
    shape: Shape,
    expert: int,
    part: int,
    matrices: Expert,
    biases: dict[tuple[int, Projection], F32],
) -> Expert:
    """Biases of a part's rows; that of down is added once, so part 0 has it."""

    def biased(proj: Projection, matrix: PackedMatrix) -> PackedMatrix:
        bias = biases.get((expert, proj))
        if bias is None or (proj == "down" and part):
            return matrix
        rows, _ = split(proj, shape.hidden, shape.intermediate, part, shape.parts).index
        return replace(matrix, bias=bias[rows])

    gate, up, down = matrices
    return None if gate is None else biased("gate", gate), biased("up", up), biased("down", down)
