"""Memory for packed experts: all matrices of a part in one block."""

from __future__ import annotations

from ktconv.formats import Format
from ktconv.native import Expert, PackedMatrix
from ktconv.source.reading.buffers import whole_lines
from ktconv.system.blocks import new_block

Shape = tuple[int, int]
Shapes = tuple[Shape | None, Shape, Shape]  # of gate (None: experts without one), up and down


def part_shapes(hidden: int, width: int, gated: bool) -> Shapes:
    """Shapes of the matrices of a part with `width` of the intermediate size."""
    wide = (width, hidden)
    return wide if gated else None, wide, (hidden, width)


class Block:
    """The memory of `count` experts of a part, each in its place, so that it can have huge pages.

    Each matrix and each set of scales begins a cache line. Nothing has been written to `memory`
    (uint8): it can still be bound to a NUMA node.
    """

    def __init__(self, fmt: Format, shapes: Shapes, count: int) -> None:
        self._layout, self._shapes = fmt.layout, shapes
        self._expert_size = sum(
            whole_lines(size) for shape in shapes if shape for size in self._sizes(shape)
        )
        self.memory = new_block(self._expert_size * count)

    def expert(self, index: int) -> Expert:
        """The place of expert `index` of the block, which nothing need be in yet."""
        start = index * self._expert_size

        def following(shape: Shape) -> PackedMatrix:
            nonlocal start
            weight, scale = self._sizes(shape)
            first, middle = start, start + whole_lines(weight)
            start = middle + whole_lines(scale)
            scales = self.memory[middle : middle + scale] if scale else None
            return PackedMatrix(self.memory[first : first + weight], scales)

        gate, up, down = self._shapes
        return None if gate is None else following(gate), following(up), following(down)

    def _sizes(self, shape: Shape) -> tuple[int, int]:
        """Bytes of codes and of scales."""
        return self._layout.weight_size(*shape), self._layout.scale_size(*shape)
