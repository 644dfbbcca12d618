"""Levels 1 and 2 in one pass over the bytes: checksums, copies, matrices against their source.

Unpacking is the audit's (native/src/audit), which shares no code with the packer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from ktconv.formats import TensorId, kinds_of
from ktconv.formats.folding import FoldError
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import Factors, MatrixReader, chunks
from ktconv.system.arrays import I8
from ktconv.targets.packed.matrix_check import ErrorStats
from ktconv.targets.packed.proof import Proof
from ktconv.targets.packed.scale_rules import Allowed
from ktconv.verify.packed.parts import LEVEL, ExpertCheck, PartCheck
from ktconv.verify.packed.proofs import Proofs
from ktconv.verify.packed.resharded import PartsBefore, parts_before
from ktconv.verify.runner import Advance
from ktconv.verify.totals import ItemResult
from ktconv.writer.manifest import MANIFEST


class ExpertMatrixCheck(ExpertCheck, frozen=True):
    """All parts of one projection of one expert."""

    proofs: Proofs

    def _tensors(self) -> Iterable[TensorId]:
        return (
            TensorId(self.layer, self.proj, self.expert, part, kind)
            for part in range(self.output.options.numa)
            for kind in kinds_of(self.proj, part, self.output.packed.layers[self.layer].biased)
        )

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        exponents, numa = self._exponents(), self.output.options.numa
        proof = self.proofs.of(self.layer, self.expert, self.proj, exponents)
        parts = [self._part(part, self._proof_of(part, proof)) for part in range(numa)]
        source = self._folded(exponents)
        comparable = source is not None and all(part.complete for part in parts)
        allowed = self._compare(source, parts, proof, buffers) if source and comparable else []
        self._compare_biases(source, parts)
        checksums = sum(part.read_rest(buffers) for part in parts)
        sums = self._finish(parts, allowed) if comparable else None
        advance(self.nbytes)
        nbytes = sum(part.nbytes for part in parts)
        return ItemResult(nbytes, checksums, 0, self.layer, self.expert, self.proj, sums)

    def _part(self, index: int, proof: Proof) -> PartCheck:
        weight = TensorId(self.layer, self.proj, self.expert, index, "weight")
        return PartCheck(self.context, self.output, weight, proof)

    def _exponents(self) -> I8 | None:
        """Exponents of folding; None: nothing is folded, or they are not recorded, which is a
        failure."""
        if self.source is None or self.proj == "gate":
            return None
        geometry = self.output.packed.layers[self.layer]
        widths = [geometry.shape("up")[0]] * self.output.options.numa
        try:
            return self.proofs.exponents(self.layer, self.expert, widths)
        except FoldError as error:
            words = f"{MANIFEST} cannot say how {self.proj} of expert {self.expert} in layer "
            where = {"layer": self.layer, "expert": self.expert, "projection": self.proj}
            message = f"{words}{self.layer} is folded: {error}."
            self.context.findings.fail(LEVEL, "manifest", message, file=MANIFEST, **where)
            return None

    def _folded(self, exponents: I8 | None) -> MatrixReader | None:
        """The source as it was quantized; None without one, or where that is not known."""
        if self.source is None:
            return None
        if self.proofs.fold and self.proj != "gate" and exponents is None:
            return None
        options, factors = self.output.options, None
        if exponents is not None:
            factors = Factors.of(self.proj, exponents)
        matrix = self.source.experts[self.expert][self.proj]
        return MatrixReader(
            self.context.reader, matrix, options.compat, options.keep_integers, factors
        )

    def _compare(
        self, source: MatrixReader, parts: Sequence[PartCheck], proof: Proof, buffers: Buffers
    ) -> Sequence[Allowed | None]:
        """Returns what the scales of each part can be; None: what its own source makes."""
        matrix, plain = source.matrix, replace(source, factors=None)
        rows = matrix.rows if self.proj == "down" else parts[0].rows
        wider = None
        if self.proj == "down":
            wider = PartsBefore(self.output, (matrix.rows, matrix.cols), proof)
        with source.open() as fd:
            grid = source.load_scales()
            assert self.source is not None
            reading = self.context.reading(self.source, self.expert, self.proj)
            if reading:
                reading.scales(grid)
            for number, chunk in enumerate(chunks(matrix, rows)):
                touched = parts if self.proj == "down" else [parts[chunk.start // rows]]
                with source.loaded(fd, chunk, buffers.source, buffers.bounce) as data:
                    if wider:
                        wider.compare(source, grid, chunk, data)
                    for part in touched:
                        first_col = part.index * part.cols if self.proj == "down" else 0
                        view = source.view(chunk, grid, data, first_col, part.cols)
                        part.compare(view, chunk.start % rows, buffers)
                        if reading and part is touched[number % len(touched)]:
                            reading.view(plain, grid, chunk, data, first_col, part.cols)
        return wider.scales() if wider else [None] * len(parts)

    def _compare_biases(self, source: MatrixReader | None, parts: Sequence[PartCheck]) -> None:
        """Compare biases with the source's, if it is read: the same numbers, or zeros where it has
        none."""
        expected = None
        if source is not None:
            expected = source.load_bias()
            if expected is None:
                expected = np.zeros(source.matrix.rows, np.float32)
        for part in parts:
            first = 0 if self.proj == "down" else part.index * part.rows
            part.compare_bias(None if expected is None else expected[first : first + part.rows])

    def _finish(self, parts: Sequence[PartCheck], allowed: Sequence[Allowed | None]) -> ErrorStats:
        total, together = ErrorStats(), None
        if self.proj == "down" and parts_before(self.output):
            # Rows have the errors of the parts that they were quantized in, not of these.
            together = np.sum([part.check.squares for part in parts], axis=0)
        for part, scales in zip(parts, allowed, strict=True):
            total.add(part.finish(scales, together))
        return total

    def _proof_of(self, part: int, proof: Proof) -> Proof:
        """Proof of one part, from that of the whole matrix."""
        cols = self.output.packed.layers[self.layer].shape(self.proj)[1]
        every = range(self.output.options.numa)
        cut_anew = self.proj == "down" and bool(parts_before(self.output))
        bound = self.proofs.row_error(
            self.layer, self.expert, self.proj, every if cut_anew else [part]
        )
        if self.proj == "down":
            proof = proof.columns(part * cols, (part + 1) * cols)
        return replace(proof, row_error=bound)
