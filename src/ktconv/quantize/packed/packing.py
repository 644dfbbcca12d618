"""Steps that all tasks of quantize-cpu share: packing some rows, writing, reading back,
comparing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ktconv import native
from ktconv.conversion.tasks import ExpertTask, Stretch, write_stretches
from ktconv.errors import VerificationError
from ktconv.formats import FORMATS, Kind, Matrix, Slice, TensorId, split, tensor_name
from ktconv.native import Layout
from ktconv.source.reading.buffers import Buffers
from ktconv.system.arrays import U8
from ktconv.system.checksums import Checksum
from ktconv.targets.packed.matrix_check import MatrixCheck, Packed, Violation
from ktconv.targets.packed.proof import Proof
from ktconv.targets.packed.target import Options
from ktconv.writer.journal import Record
from ktconv.writer.staging import Staging


class Part:
    """One part of a matrix while its rows arrive: checksums, scales, comparison. `shape` is that of
    what is packed, `owned` what it has of the source. `memory`: place for packed codes and scales
    of all rows, one behind the other; None: codes are packed piece by piece."""

    def __init__(
        self,
        index: int,
        owned: Slice,
        shape: tuple[int, int],
        layout: Layout,
        choice: native.Choice,
        check: MatrixCheck,
        memory: U8 | None = None,
    ) -> None:
        self.index, self.owned, self.layout, self.check = index, owned, layout, check
        self.rows, self.cols = shape
        self.choice = choice
        self.names = check.weight_name, check.scale_name
        self.digest, self.scale_digest = Checksum(), Checksum()
        self.scale_sum = 0  # of what was compared
        size = layout.scale_size(*shape)
        self._codes = None if memory is None else memory[:-size]
        self.scale = native.aligned_bytes(size) if memory is None else memory[-size:]
        self.rows_done = 0
        self._bytes_done = 0

    def next_piece(self, view: native.Matrix, memory: U8) -> Piece:
        """Place of the next rows, whose source is `view`; `memory` for codes without any."""
        done, until = self.rows_done, self.rows_done + view.rows
        size = native.packed_size(self.layout, view.rows, self.cols)
        start, stop = (self.layout.scale_size(rows, self.cols) for rows in (done, until))
        offset, last = self._bytes_done, until == self.rows
        codes = memory[:size] if self._codes is None else self._codes[offset : offset + size]
        self.rows_done, self._bytes_done = until, offset + size
        return Piece(self, view, done, offset, codes, self.scale[start:stop], last)


class Piece(NamedTuple):
    """Some rows of a part: their source, and where packed codes and scales come to lie."""

    part: Part
    view: native.Matrix
    first_row: int
    offset: int  # of its codes in the tensor
    packed: U8
    scale: U8
    last: bool  # of its part


class PackingTask(ExpertTask, frozen=True):
    """Packs a matrix of one expert, a few rows at a time."""

    options: Options

    @property
    def packed_as(self) -> Matrix:
        """Name of the packed matrix."""
        return self.proj

    def _owned(self, index: int) -> Slice:
        """Slice of the source that a part has."""
        layer = self.layer
        return split(
            self.proj, layer.hidden_size, layer.intermediate_size, index, self.options.numa
        )

    def _new_part(
        self,
        index: int,
        shape: tuple[int, int],
        choice: native.Choice,
        proof: Proof,
        memory: U8 | None = None,
    ) -> Part:
        fmt = FORMATS[self.options.method]
        weight = TensorId(self.layer.index, self.packed_as, self.expert, index, "weight")
        check = MatrixCheck(fmt, weight, *shape, _refuse, proof)
        return Part(index, self._owned(index), shape, fmt.layout, choice, check, memory)

    def _name(self, part: Part, kind: Kind) -> str:
        return tensor_name(self.layer.index, self.packed_as, self.expert, part.index, kind)

    def write_pieces(self, pieces: Sequence[Piece], staging: Staging, buffers: Buffers) -> None:
        """Quantize, pack, compare and write pieces of this task, or of several that pack alike.
        NonFiniteError for a NaN or Inf."""
        stretches: list[Stretch] = []
        for piece, (audit, sums) in zip(pieces, self._pack(pieces, buffers), strict=True):
            part, packed, scale = piece.part, piece.packed, piece.scale
            # Before it is written: caches have it. The sums tell whether this is what was written.
            part.check.judge(
                audit, piece.view, piece.first_row, Packed(packed, scale, piece.view.rows)
            )
            part.scale_sum = (part.scale_sum + sums.scale) % 2**64  # as sums of bytes are
            codes = Stretch(part.names[0], part.digest, packed, piece.offset, sums.packed)
            stretches.append(codes)
            if piece.last:
                stretches.append(
                    Stretch(part.names[1], part.scale_digest, part.scale, 0, part.scale_sum)
                )
        write_stretches(stretches, staging, buffers.readback, self.verify)

    def _pack(
        self, pieces: Sequence[Piece], buffers: Buffers
    ) -> Iterable[tuple[native.Audit, native.ByteSums]]:
        """Codes and scales into their places; of each piece the audit by the choice of the part's
        check, and the sums of what it compared. NonFiniteError for a NaN or Inf."""
        matrices = [
            native.Unpacked(one.view, one.packed, one.scale, one.part.choice) for one in pieces
        ]
        return native.quantize_audit(pieces[0].part.layout, matrices, buffers.scratch)

    def _facts(self, part: Part) -> dict[str, Any]:
        """Facts of a part's weights in the manifest besides checksum and errors."""
        return {}

    def _records(self, parts: Sequence[Part]) -> dict[str, Record]:
        """The manifest's record of each tensor, all of whose rows were written."""
        records: dict[str, Record] = {}
        for part in parts:
            weight, name = part.names
            records[weight] = {
                **part.digest.record(),
                **part.check.finish().record(),
                **self._facts(part),
            }
            records[name] = part.scale_digest.record()
        return records


def _refuse(violation: Violation) -> None:
    """Refuse what was just packed: it does not match its source."""
    raise VerificationError(
        violation.message,
        "check this machine's memory and disk, then run the same command again",
    )
