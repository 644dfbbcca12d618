"""Where one projection lies inside a stored tensor, as it is or transposed."""

from __future__ import annotations

from dataclasses import dataclass

from ktconv.checkpoint.types import BlockScale, ExpertMatrix, TensorRef


@dataclass(frozen=True, slots=True)
class StoredView:
    """A [rows, cols] (PyTorch [out, in]) matrix within a tensor of [experts,] stored_rows x
    stored_cols elements, where it starts at (row, col) of its expert's part.

    `transposed`: the tensor is stored [in, out]; `row` and `col` still count stored
    rows and columns.
    """

    stored_rows: int
    stored_cols: int
    rows: int
    cols: int
    experts: int | None = None  # leading dimension of a fused tensor
    expert: int = 0
    row: int = 0
    col: int = 0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the stored tensor must have."""
        matrix = (self.stored_rows, self.stored_cols)
        return matrix if self.experts is None else (self.experts, *matrix)

    def matrix(self, tensor: TensorRef, scale: BlockScale | None) -> ExpertMatrix:
        """This view of `tensor`."""
        start = (self.expert * self.stored_rows + self.row) * self.stored_cols + self.col
        row_stride, col_stride = self.stored_cols, 1
        if self.transposed:
            row_stride, col_stride = col_stride, row_stride
        return ExpertMatrix(tensor, self.rows, self.cols, start, row_stride, col_stride, scale)
