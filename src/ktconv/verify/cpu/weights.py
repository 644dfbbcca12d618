"""Levels 1 and 2 in one pass over the bytes: checksums, copies, matrices against their source.

Unpacking is the audit's (native/src/audit), which shares no code with the packer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ktconv import native
from ktconv.checkpoint import MoELayer
from ktconv.formats import FORMATS, KINDS, Projection, TensorId, kinds_of, packed_shape
from ktconv.formats.folding import FoldError
from ktconv.packed.matrix_check import ErrorStats, MatrixCheck, Packed, Violation, relative_errors
from ktconv.packed.proof import ROW_ERROR_BOUND, Proof
from ktconv.packed.scale_rules import Allowed
from ktconv.packed.weights import name_of
from ktconv.reading.buffers import Buffers
from ktconv.reading.matrices import Factors, MatrixReader, Scales, chunks, source_bytes
from ktconv.system.arrays import F32, F64, I8
from ktconv.verify.cpu.output import CpuOutput
from ktconv.verify.cpu.proofs import Proofs
from ktconv.verify.cpu.resharded import PartsBefore, parts_before
from ktconv.verify.reading import TOLERANCE, Context, TensorStream, check_claims
from ktconv.verify.reading_check import ReadingCheck, expert_check
from ktconv.verify.runner import Advance, unit_of
from ktconv.verify.structure import where_of
from ktconv.verify.totals import ItemResult
from ktconv.writer.manifest import MANIFEST

LEVEL = "weights"


@dataclass(frozen=True, slots=True)
class ExpertMatrixCheck:
    """All parts of one projection of one expert."""

    context: Context
    output: CpuOutput
    layer: int
    expert: int
    proj: Projection
    source: MoELayer | None  # None: checksums only
    proofs: Proofs

    @property
    def unit(self) -> str:
        return unit_of(self.layer)

    @property
    def nbytes(self) -> int:
        """Bytes of progress: of the source if it is read, else packed ones."""
        if self.source is not None:
            return source_bytes(self.source.experts[self.expert][self.proj])
        tensors = (
            TensorId(self.layer, self.proj, self.expert, part, kind)
            for part in range(self.output.options.numa)
            for kind in kinds_of(self.proj, part, self.output.packed.layers[self.layer].biased)
        )
        places = self.output.packed.tensors
        return sum(places[tensor].nbytes for tensor in tensors if tensor in places)

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        exponents, numa = self._exponents(), self.output.options.numa
        proof = self.proofs.of(self.layer, self.expert, self.proj, exponents)
        parts = [_Part(self, part, self._proof_of(part, proof)) for part in range(numa)]
        source = self._folded(exponents)
        comparable = source is not None and all(part.complete for part in parts)
        allowed = self._compare(source, parts, proof, buffers) if source and comparable else []
        self._compare_biases(source, parts)
        checksums = sum(part.read_rest(buffers) for part in parts)
        sums = self._finish(parts, allowed) if comparable else None
        advance(self.nbytes)
        nbytes = sum(part.nbytes for part in parts)
        return ItemResult(nbytes, checksums, 0, self.layer, self.expert, self.proj, sums)

    def _exponents(self) -> I8 | None:
        """Of folding; None: nothing is folded, or they are not recorded, which is a failure."""
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
        if self.source is None or self.context.reader is None:
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
        self, source: MatrixReader, parts: Sequence[_Part], proof: Proof, buffers: Buffers
    ) -> Sequence[Allowed | None]:
        """Returns what the scales of each part can be; None: what its own source makes."""
        matrix, plain = source.matrix, replace(source, factors=None)
        rows = matrix.rows if self.proj == "down" else parts[0].rows
        wider = PartsBefore(self.output, matrix, proof) if self.proj == "down" else None
        with source.open() as fd:
            grid = source.load_scales()
            reading = self._reading(grid)
            for number, chunk in enumerate(chunks(matrix, rows)):
                source.read(fd, chunk, buffers.source, buffers.bounce)
                touched = parts if self.proj == "down" else [parts[chunk.start // rows]]
                if wider:
                    wider.compare(source, grid, chunk, buffers)
                for part in touched:
                    first_col = part.index * part.cols if self.proj == "down" else 0
                    view = source.view(chunk, grid, buffers.source, first_col, part.cols)
                    part.compare(view, chunk.start % rows, buffers)
                    if reading and part is touched[number % len(touched)]:
                        reading.view(plain, grid, chunk, buffers.source, first_col, part.cols)
        return wider.scales() if wider else [None] * len(parts)

    def _compare_biases(self, source: MatrixReader | None, parts: Sequence[_Part]) -> None:
        """With the source's, if it is read: the same numbers, or zeros where it has none."""
        expected = None
        if source is not None:
            expected = source.load_bias()
            if expected is None:
                expected = np.zeros(source.matrix.rows, np.float32)
        for part in parts:
            first = 0 if self.proj == "down" else part.index * part.rows
            part.compare_bias(None if expected is None else expected[first : first + part.rows])

    def _reading(self, scales: Scales | None) -> ReadingCheck | None:
        """The check of how the source is read, which begins with its scales."""
        assert self.source is not None and self.context.second is not None
        reading = expert_check(
            self.context.second, self.context.findings, self.source, self.expert, self.proj
        )
        if reading:
            reading.scales(scales)
        return reading

    def _finish(self, parts: Sequence[_Part], allowed: Sequence[Allowed | None]) -> ErrorStats:
        total, together = ErrorStats(), None
        if self.proj == "down" and parts_before(self.output):
            # Rows have the errors of the parts that they were quantized in, not of these.
            together = np.sum([part.check.squares for part in parts], axis=0)
        for part, scales in zip(parts, allowed, strict=True):
            total.add(part.finish(scales, together))
        return total

    def _proof_of(self, part: int, proof: Proof) -> Proof:
        """Of one part, from that of the whole matrix."""
        cols = self.output.packed.layers[self.layer].shape(self.proj)[1]
        every = range(self.output.options.numa)
        cut_anew = self.proj == "down" and bool(parts_before(self.output))
        bound = self.proofs.row_error(
            self.layer, self.expert, self.proj, every if cut_anew else [part]
        )
        if self.proj == "down":
            proof = proof.columns(part * cols, (part + 1) * cols)
        return replace(proof, row_error=bound)


class _Part:
    """One part's packed matrix, compared with its source a few rows at a time. A tensor of a wrong
    size is not read: level structure reports it."""

    def __init__(self, item: ExpertMatrixCheck, index: int, proof: Proof) -> None:
        self._context, self._packed, self.index = item.context, item.output.packed, index
        geometry, options = self._packed.layers[item.layer], item.output.options
        self.rows, self.cols = packed_shape(
            item.proj, geometry.hidden, geometry.intermediate, options.numa
        )
        self._fmt = FORMATS[options.method]
        self.nbytes = 0
        weight, scale = (TensorId(item.layer, item.proj, item.expert, index, k) for k in KINDS)
        self._id = weight
        self._layout = self._fmt.layout
        self._weight = self._stream(weight, self._layout.weight_size(self.rows, self.cols))
        self._scale = np.empty(self._layout.scale_size(self.rows, self.cols), np.uint8)
        self._scales = self._stream(scale, self._scale.nbytes)
        bias = replace(weight, kind="bias")
        self._bias = None
        if "bias" in kinds_of(item.proj, index, geometry.biased):
            self._bias = self._stream(bias, 4 * self.rows)
        self._checked: Sequence[bool | None] = ()
        if self._scales is not None:
            self._scales.read(self._scale)
        self._bound = None if parts_before(item.output) else proof.row_error
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
