"""Cuts of an expert's matrices in a checkpoint for tensor parallelism.

The intermediate size is that of the rows of gate and up, and of the columns of down. Other
tensors of a weight are cut with it, unless they say nothing about the dimension that is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from ktconv.plan.placement.parallel import Grain
from ktconv.plan.placement.slices import Kind, Shard, tp_slice
from ktconv.source import BlockGrid, ExpertMatrix, Projection
from ktconv.source.encodings.grids import NUMBERS, grid_nbytes
from ktconv.source.reading.matrices import source_bytes

Expert = Mapping[Projection, ExpertMatrix]


def shard_of(proj: Projection, gated: bool) -> Shard:
    """The name that engines have for a projection."""
    if proj == "down":
        return "w2"
    return "w3" if proj == "up" and gated else "w1"


def grid_kind(grid: BlockGrid, matrix: ExpertMatrix) -> Kind:
    """Purpose of a number in a matrix's grid."""
    if grid.block_cols >= matrix.cols:
        if grid.block_rows == 1:
            return "channel"
        if grid.block_rows >= matrix.rows:
            return "tensor"
    return "group" if grid.block_rows == 1 else "block"


def grids_of(matrix: ExpertMatrix) -> Iterator[tuple[str, BlockGrid]]:
    """The scales of a matrix, and its zero points if they are tensors."""
    found = matrix.quantization
    if found is not None:
        yield "scale", found.scale
        if isinstance(found.zero_point, BlockGrid):
            yield "zero_point", found.zero_point


# ---- where it can be cut ---------------------------------------------------------------


def grains(expert: Expert) -> list[Grain]:
    """Units that a cut through the intermediate size must not divide, each once."""
    found: dict[Grain, None] = {}
    for proj, matrix in expert.items():
        found.update(dict.fromkeys(_grains(proj == "down", matrix)))
    return list(found)


def _grains(down: bool, matrix: ExpertMatrix) -> Iterator[Grain]:
    unit = matrix.element.unit_cols if down else matrix.element.unit_rows
    if unit > 1:
        yield Grain(unit, f"the {unit} weights that {matrix.element.name} stores together")
    for _, grid in grids_of(matrix):
        if _is_whole(grid, matrix, down):
            continue
        kind = grid_kind(grid, matrix)
        block = grid.block_cols if down else grid.block_rows
        if block > 1:
            what = "group size" if kind == "group" else "block size"
            yield Grain(block, f"the {what} {block}")
        rows = NUMBERS[grid.number].rows * block
        if not down and rows > block:
            yield Grain(rows, f"the {rows} rows whose zero points are stored together")


def _is_whole(grid: BlockGrid, matrix: ExpertMatrix, down: bool) -> bool:
    """Whether every GPU needs all of the grid."""
    kind = grid_kind(grid, matrix)
    return kind == "tensor" or (down and (kind == "channel" or _act_order(matrix)))


def _act_order(matrix: ExpertMatrix) -> bool:
    return matrix.quantization is not None and matrix.quantization.groups is not None


# ---- bytes -----------------------------------------------------------------------------


def cut_bytes(expert: Expert, tp: int) -> int:
    """Bytes of an expert, with scales and biases, on each of `tp` GPUs. The bias of down, which one
    of them adds, counts for all."""
    return sum(_cut_bytes(proj == "down", matrix, tp) for proj, matrix in expert.items())


def _cut_bytes(down: bool, matrix: ExpertMatrix, tp: int) -> int:
    rows, cols = (matrix.rows, matrix.cols // tp) if down else (matrix.rows // tp, matrix.cols)
    total = source_bytes(replace(matrix, rows=rows, cols=cols))
    if down and _act_order(matrix):
        for _, grid in grids_of(matrix):  # whole, whatever columns a GPU has
            total += grid_nbytes(grid, rows, matrix.cols) - grid_nbytes(grid, rows, cols)
    return total


# ---- slices ----------------------------------------------------------------------------


def slices(expert: Expert, tp: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Slices for each of `tp` GPUs, by shard and tensor (weight, scale, zero_point, g_idx, bias),
    as `TensorSlice.as_dict`. Positions count weights, and numbers of grids, as [out, in]."""
    gated = "gate" in expert
    return {
        shard_of(proj, gated): dict(_slices(matrix, shard_of(proj, gated), tp, gated))
        for proj, matrix in expert.items()
    }


def _slices(
    matrix: ExpertMatrix, shard: Shard, tp: int, gated: bool
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    down = shard == "w2"
    size, act_order = matrix.cols if down else matrix.rows, _act_order(matrix)

    def of(shape: tuple[int, ...], kind: Kind, per: int = 1) -> list[dict[str, Any]]:
        more = {"per": per, "intermediate": size, "gated": gated, "act_order": act_order}
        return [
            tp_slice(shape, shard, tp, rank, kind, **more).as_dict()  # type: ignore[arg-type]
            for rank in range(tp)
        ]

    yield "weight", of((matrix.rows, matrix.cols), "weight")
    for name, grid in grids_of(matrix):
        kind, block = grid_kind(grid, matrix), (grid.block_rows, grid.block_cols)
        rows, cols = -(-matrix.rows // block[0]), -(-matrix.cols // block[1])
        shape = () if kind == "tensor" else (rows, cols)
        yield name, of(shape, kind, block[1] if down else block[0])
    if act_order:
        yield "g_idx", of((matrix.cols,), "g_idx")
    if matrix.bias is not None:
        yield "bias", of((matrix.rows,), "channel")
