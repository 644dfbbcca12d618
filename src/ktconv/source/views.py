"""The position of one projection inside a stored tensor, as is or transposed."""

from __future__ import annotations

from msgspec import Struct

from ktconv.source.elements import Element
from ktconv.source.types import ExpertMatrix, Quantization, TensorRef


class StoredView(Struct, frozen=True):
    """A [rows, cols] (PyTorch [out, in]) matrix within a tensor of [experts,] stored_rows x
    stored_cols elements, where it starts at (row, col) of its expert's part and has every `step`-th
    output from there on.

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
    step: int = 1

    @property
    def first_output(self) -> int:
        return self.col if self.transposed else self.row

    @property
    def outputs_and_inputs(self) -> tuple[int, int]:
        """Outputs and inputs of the stored matrix: of gate and up together where they are fused."""
        if self.transposed:
            return self.stored_cols, self.stored_rows
        return self.stored_rows, self.stored_cols

    def shape(self, element: Element) -> tuple[int, ...]:
        """The shape that the stored tensor must have."""
        rows, cols = self._unit(element)
        height, width = -(-self.stored_rows // rows), -(-self.stored_cols // cols)
        if self.transposed:
            height *= element.items
        else:
            width *= element.items
        return (height, width) if self.experts is None else (self.experts, height, width)

    def whole(self, element: Element) -> bool:
        """Whether the matrix consists of whole units."""
        if self.step > 1 and (element.unit_rows > 1 or (self.transposed and element.items > 1)):
            return False  # units with outputs of both matrices
        return self.rows % element.unit_rows == 0 and self.cols % element.unit_cols == 0

    def matrix(
        self, tensor: TensorRef, element: Element, quantization: Quantization | None
    ) -> ExpertMatrix:
        """Matrix of `tensor` in this view."""
        unit_rows, unit_cols = self._unit(element)
        stored_rows, stored_cols = self.stored_rows // unit_rows, self.stored_cols // unit_cols
        start = (self.expert * stored_rows + self.row // unit_rows) * stored_cols
        start += self.col // unit_cols
        row_stride, col_stride = stored_cols, 1
        if self.transposed:
            row_stride, col_stride = col_stride, row_stride
        return ExpertMatrix(
            tensor,
            self.rows,
            self.cols,
            start,
            row_stride * self.step,
            col_stride,
            element,
            quantization,
        )

    def _unit(self, element: Element) -> tuple[int, int]:
        """Stored rows and columns of a unit."""
        if self.transposed:
            return element.unit_cols, element.unit_rows
        return element.unit_rows, element.unit_cols
