"""Level weights of the matrices of backward passes: each element against its source, transposed."""

from __future__ import annotations

from collections.abc import Sequence

from ktconv.formats import (
    KINDS,
    Matrix,
    Slice,
    TensorId,
    backward_of,
    cut_by_rows,
    split,
)
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.transposed import Seen, transposed
from ktconv.system.arrays import F32
from ktconv.targets.packed.matrix_check import ErrorStats
from ktconv.targets.packed.proof import Proof
from ktconv.targets.packed.scale_rules import Allowed
from ktconv.targets.packed.target import Options
from ktconv.verify.packed.parts import ExpertCheck, PartCheck
from ktconv.verify.packed.resharded import PartsBefore
from ktconv.verify.runner import Advance
from ktconv.verify.totals import ItemResult


class BackwardCheck(ExpertCheck, frozen=True):
    """All parts of the transpose of one projection of one expert."""

    options: Options  # how it was quantized

    @property
    def packed_as(self) -> Matrix:
        (name,) = backward_of((self.proj,))
        return name

    def _tensors(self) -> Sequence[TensorId]:
        return [
            TensorId(self.layer, self.packed_as, self.expert, part, kind)
            for part in range(self.output.options.numa)
            for kind in KINDS
        ]

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        proof = Proof.plain(self.options.rule)
        parts = [
            PartCheck(self.context, self.output, tensor, proof)
            for tensor in self._tensors()
            if tensor.kind == "weight"
        ]
        comparable = self.source is not None and all(part.complete for part in parts)
        allowed = self._compare(parts, proof, buffers) if comparable else []
        checksums = sum(part.read_rest(buffers) for part in parts)
        sums = None
        if comparable:
            sums = ErrorStats()
            for part, scales in zip(parts, allowed, strict=True):
                sums.add(part.finish(scales, None))
        advance(self.nbytes)
        nbytes = sum(part.nbytes for part in parts)
        return ItemResult(nbytes, checksums, 0, self.layer, self.expert, self.packed_as, sums)

    def _compare(
        self, parts: Sequence[PartCheck], proof: Proof, buffers: Buffers
    ) -> Sequence[Allowed | None]:
        """Returns what the scales of each part can be; None: what its own source makes."""
        assert self.source is not None
        matrix = self.source.experts[self.expert][self.proj]
        source = MatrixReader(self.context.reader, matrix, self.options.compat)
        seen = self._reading()
        with source.open() as fd:
            scales = source.load_scales()
            for part in parts:
                owned = self._owned(part.index, len(parts))
                for first, view in transposed(source, fd, scales, owned, buffers, seen):
                    part.compare(view, first, buffers)
            if cut_by_rows(self.packed_as):
                return [None] * len(parts)
            before = PartsBefore(self.output, (matrix.cols, matrix.rows), proof)
            for index in range(before.count):
                owned = self._owned(index, before.count)
                for _, view in transposed(source, fd, scales, owned, buffers):
                    before.put(index, view)
        return before.scales()

    def _owned(self, part: int, parts: int) -> Slice:
        """Slice of the source that a part has."""
        geometry = self.output.packed.layers[self.layer]
        return split(self.proj, geometry.hidden, geometry.intermediate, part, parts)

    def _reading(self) -> Seen | None:
        """Compares some of what is read with the second reader's way."""
        assert self.source is not None
        reading = self.context.reading(self.source, self.expert, self.proj)
        if reading is None:
            return None

        def compare(rows: range, columns: range, values: F32) -> None:
            some, wide = reading.chunk(rows, columns.start, len(columns))
            first, left = some.start - rows.start, wide.start - columns.start
            found = values[first : first + len(some), left : left + len(wide)]
            reading.values(some, wide, found, self.options.compat)

        return compare
