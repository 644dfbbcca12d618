"""One part's packed matrix while it is read: codes, scales, biases, checksums, recorded errors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec.structs import asdict, replace

from ktconv import native
from ktconv.formats import FORMATS, Projection, TensorId, kinds_of, packed_shape
from ktconv.source import MoELayer
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import source_bytes, spans_of
from ktconv.source.reading.reader import Span
from ktconv.system.abstract_record import AbstractRecord
from ktconv.system.arrays import F32, F64
from ktconv.targets.packed.matrix_check import (
    ErrorStats,
    MatrixCheck,
    Packed,
    Violation,
    relative_errors,
)
from ktconv.targets.packed.proof import ROW_ERROR_BOUND, Proof
from ktconv.targets.packed.scale_rules import Allowed
from ktconv.targets.packed.weights import name_of
from ktconv.verify.packed.output import PackedOutput
from ktconv.verify.packed.resharded import parts_before
from ktconv.verify.reading import TOLERANCE, Context, TensorStream, check_claims
from ktconv.verify.runner import unit_of
from ktconv.verify.structure import where_of
from ktconv.writer.manifest import MANIFEST

LEVEL = "weights"


class ExpertCheck(AbstractRecord, frozen=True):
    """All parts of a matrix of one expert, packed from one projection of the source."""

    context: Context
    output: PackedOutput
    layer: int
    expert: int
    proj: Projection
    source: MoELayer | None  # None: checksums only

    @property
    def unit(self) -> str:
        return unit_of(self.layer)

    @property
    def nbytes(self) -> int:
        """Bytes of progress: of the source if it is read, else packed ones."""
        if self.source is not None:
            return source_bytes(self.source.experts[self.expert][self.proj])
        places = self.output.packed.tensors
        return sum(places[one].nbytes for one in self._tensors() if one in places)

    @abstractmethod
    def _tensors(self) -> Iterable[TensorId]:
        """Packed tensors of all parts."""

    def spans(self) -> Sequence[Span]:
        if self.source is None:
            return []
        return spans_of(self.source.experts[self.expert][self.proj])


class PartCheck:
    """One part's packed matrix, compared with its source a few rows at a time. A tensor of a wrong
    size is not read: level structure reports it."""

    def __init__(
        self, context: Context, output: PackedOutput, weight: TensorId, proof: Proof
    ) -> None:
        """`weight` names the codes."""
        self._context, self._packed, self.index = context, output.packed, weight.part
        geometry, options = self._packed.layers[weight.layer], output.options
        self.rows, self.cols = packed_shape(
            weight.proj, geometry.hidden, geometry.intermediate, options.numa
        )
        self._fmt = FORMATS[options.method]
        self.nbytes = 0
        self._id = weight
        self._layout = self._fmt.layout
        self._weight = self._stream(weight, self._layout.weight_size(self.rows, self.cols))
        self._scale = np.empty(self._layout.scale_size(self.rows, self.cols), np.uint8)
        self._scales = self._stream(replace(weight, kind="scale"), self._scale.nbytes)
        self._bias = None
        if "bias" in kinds_of(weight.proj, weight.part, geometry.biased):
            self._bias = self._stream(replace(weight, kind="bias"), 4 * self.rows)
        self._checked: Sequence[bool | None] = ()
        if self._scales is not None:
            self._scales.read(self._scale)
        self._bound = None if parts_before(output) else proof.row_error
        self.check = MatrixCheck(self._fmt, weight, self.rows, self.cols, self._report, proof)

    def _stream(self, tensor: TensorId, nbytes: int) -> TensorStream | None:
        place = self._packed.tensors.get(tensor)
        if place is None or place.nbytes != nbytes:
            return None
        self.nbytes += nbytes
        return TensorStream(self._context, place)

    @property
    def complete(self) -> bool:
        return self._weight is not None and self._scales is not None

    def compare(self, view: native.Matrix, first: int, buffers: Buffers) -> None:
        """Compares the next rows, which begin at `first`, with their source `view`."""
        assert self._weight is not None
        size = self._layout.weight_size(view.rows, self.cols)
        packed = self._weight.read(buffers.packed[:size])
        start, stop = (
            self._layout.scale_size(row, self.cols) for row in (first, first + view.rows)
        )
        self.check.compare(view, first, Packed(packed, self._scale[start:stop], view.rows))

    def compare_bias(self, expected: F32 | None) -> None:
        """Reports the first number that differs from the source's."""
        if self._bias is None or expected is None:
            return
        found = self._bias.read(np.empty(expected.nbytes, np.uint8)).view(np.float32)
        rows = np.flatnonzero(found.view(np.uint32) != expected.view(np.uint32))
        if len(rows):
            row, name = int(rows[0]), name_of(replace(self._id, kind="bias"))
            self._report(
                Violation(
                    "bias",
                    f"{name}: number {row} is {found[row]:.9g}, that of the source "
                    f"{expected[row]:.9g}.",
                    name,
                    row=row,
                )
            )

    def read_rest(self, buffers: Buffers) -> int:
        """Reads what was not compared. Returns how many checksums were checked."""
        every = (self._weight, self._scales, self._bias)
        streams = [one for one in every if one is not None]
        for one in streams:
            one.read_rest(buffers.source)
        self._checked = [one.check() for one in streams]
        return sum(equal is not None for equal in self._checked)

    def finish(self, allowed: Allowed | None, squares: F64 | None) -> ErrorStats:
        """Errors, after all rows and checksums were compared; see MatrixCheck.finish."""
        found = self.check.finish(allowed, squares)
        if all(self._checked):  # of other bytes the manifest says nothing
            check_claims(self._context, name_of(self._id), found)
            if self._bound is not None:
                self._check_bound(self._bound)
        return found

    def _check_bound(self, bound: float) -> None:
        """The recorded bound is the largest error that a row has."""
        largest = float(relative_errors(self.check.squares).max())
        if not largest >= (1 - TOLERANCE) * bound:
            words = f"{MANIFEST} says {ROW_ERROR_BOUND} {bound:.6g} of {name_of(self._id)}"
            self._context.findings.fail(
                LEVEL, "manifest", f"{words}, but {largest:.6g} was measured.", file=MANIFEST,
                tensor=name_of(self._id), **where_of(self._id),
            )  # fmt: skip

    def _report(self, violation: Violation) -> None:
        file, where = self._packed.tensors[self._id].file.name, where_of(self._id)
        self._context.findings.fail(LEVEL, **asdict(violation), file=file, **where)
