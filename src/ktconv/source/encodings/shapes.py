"""Grids of numbers next to a weight, recognised by a tensor's shape."""

from __future__ import annotations

from math import prod

from msgspec.structs import replace

from ktconv.errors import CheckpointError
from ktconv.source.config import ModelConfig
from ktconv.source.encodings.grids import NUMBERS
from ktconv.source.types import BlockGrid, DeclaredShape, GroupIndex, TensorRef
from ktconv.source.views import StoredView

FLOATS = {"F32": "F32", "BF16": "BF16", "F16": "F16"}
# U8 has the same bits as F8_E8M0: older files were written before safetensors had that name.
POWERS = {"F8_E8M0": "E8M0", "U8": "E8M0"}


def grid_with_blocks(
    tensor: TensorRef, view: StoredView, number: str, block: tuple[int, int]
) -> BlockGrid | None:
    """`tensor` as a grid of one number per block of (outputs, inputs), stored as the weight is;
    None if its shape is another. Blocks start again in each expert; the last may be ragged."""
    unit = NUMBERS[number]
    outputs, inputs = view.outputs_and_inputs
    rows, cols = unit.height(-(-outputs // block[0])), -(-inputs // block[1])
    if not _has_shape(tensor, view, (cols, rows) if view.transposed else (rows, cols)):
        return None
    row_stride, col_stride = (1, rows) if view.transposed else (cols, 1)
    row, col = (view.col, view.row) if view.transposed else (view.row, view.col)
    start = view.expert * rows * cols if view.experts is not None and prod(tensor.shape) > 1 else 0
    block_rows, block_cols = block
    if view.step > 1:
        if block_rows == 1 and unit.rows == 1:
            start, row, row_stride = start + row * row_stride, 0, row_stride * view.step
        elif block_rows % view.step == 0:
            row, block_rows = row // view.step, block_rows // view.step
        else:
            return None
    return BlockGrid(
        tensor, number, start, row_stride, col_stride, block_rows, block_cols, row, col
    )


def biases(tensor: TensorRef, view: StoredView) -> BlockGrid | None:
    """`tensor` as one number per output of a stored matrix; None if its dtype or shape is
    another."""
    outputs = view.outputs_and_inputs[0]
    shape = (outputs,) if view.experts is None else (view.experts, outputs)
    if tensor.dtype not in FLOATS or tensor.shape != shape:
        return None
    start = view.expert * outputs + view.first_output
    return BlockGrid(tensor, FLOATS[tensor.dtype], start, view.step, 1, 1, 1, 0, 0)


def group_index(tensor: TensorRef, view: StoredView) -> GroupIndex:
    """`tensor` as the group of each input; CheckpointError if it has another number of them."""
    inputs = view.outputs_and_inputs[1]
    if tensor.shape not in ((inputs,), (view.experts, inputs)):
        raise CheckpointError(
            f"{tensor.name} has shape {list(tensor.shape)}, expected [{inputs}]: a group for each "
            "input of its weight",
            "The checkpoint is damaged; download it again.",
        )
    return GroupIndex(tensor, view.expert * inputs if len(tensor.shape) == 2 else 0)


def declared_shape(tensor: TensorRef, view: StoredView) -> DeclaredShape:
    """`tensor` as outputs and inputs of a weight, or of gate and then of up, where they are in one
    weight; CheckpointError if it is not two or four numbers."""
    if tensor.shape == (view.experts, 4) and view.stored_rows == 2 * view.rows and view.step == 1:
        half = int(view.first_output > 0)
        return DeclaredShape(tensor, 4 * view.expert + 2 * half, (view.rows, view.cols))
    if tensor.shape not in ((2,), (view.experts, 2)):
        raise CheckpointError(
            f"{tensor.name} has shape {list(tensor.shape)}, expected [2]: outputs and inputs of "
            "its weight",
            "The checkpoint is damaged; download it again.",
        )
    index = 2 * view.expert if len(tensor.shape) == 2 else 0
    return DeclaredShape(tensor, index, view.outputs_and_inputs)


def group_size(inputs: int, groups: int, config: ModelConfig) -> int | None:
    """Number of `inputs` that share one of `groups` scales; the last group may have less.

    config.json decides where one of its sizes gives as many groups; else the inputs must divide.
    None where they do not, or several of its sizes fit.
    """
    if groups <= 1:
        return inputs if groups else None
    declared = [size for size in config.group_sizes if -(-inputs // size) == groups]
    if len(declared) == 1:
        return declared[0]
    return None if inputs % groups else inputs // groups


def integer_scales(tensor: TensorRef, view: StoredView, config: ModelConfig) -> BlockGrid | None:
    """`tensor` as scales of integers, as `grid_of_groups`. They may be negative: AutoRound gives
    the larger side of a group the code that only one sign has."""
    grid = grid_of_groups(tensor, view, FLOATS[tensor.dtype], config)
    return None if grid is None else replace(grid, any_sign=True)


def grid_of_groups(
    tensor: TensorRef, view: StoredView, number: str, config: ModelConfig
) -> BlockGrid | None:
    """`tensor` as a grid of one number per tensor, per half of gate and up together, or per output
    and a group of its inputs, see `group_size`."""
    outputs, inputs = view.outputs_and_inputs
    count = prod(tensor.shape)
    if count in (1, view.experts):
        whole = grid_with_blocks(tensor, view, number, (outputs, inputs))
        if whole is not None or not tensor.shape:
            return whole
    if count == 2 * (view.experts or 1) and view.step == 1 and outputs == 2 * view.rows:
        return grid_with_blocks(tensor, view, number, (view.rows, inputs))
    groups, rest = divmod(count, NUMBERS[number].height(outputs) * (view.experts or 1))
    size = None if rest else group_size(inputs, groups, config)
    return None if size is None else grid_with_blocks(tensor, view, number, (1, size))


def _has_shape(tensor: TensorRef, view: StoredView, grid: tuple[int, int]) -> bool:
    """Whatever axes of length 1 there are: [N], [N, 1] and ModelOpt's [a, 1, b, 1]."""
    shape = [size for size in tensor.shape if size != 1]
    own = [size for size in grid if size != 1]
    if view.experts is not None and own:
        return shape == [*([view.experts] if view.experts != 1 else []), *own]
    return shape == own or (view.experts is not None and shape == [view.experts])
