"""One matrix of one expert, taken apart into codes and put together in other parts.

A matrix is cut by rows (gate, up, down_bwd) or by columns (down, gate_bwd, up_bwd). Rows keep their
scales in any part, and so do columns of a format with group scales. Otherwise a row of a part has
one scale, and columns can only join a part with the same scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.conversion.records import is_lost
from ktconv.conversion.tasks import Advance, four_digits, write_tensor
from ktconv.errors import CheckpointError, UsageError, VerificationError
from ktconv.formats import KINDS, Kind, Matrix, TensorId, cut_by_rows, scales
from ktconv.formats.folding import FoldError, decode, encode
from ktconv.repack.complete import CompleteWeights
from ktconv.repack.tasks import check_sum, refuse_odd_scales
from ktconv.repack.tree import TreeLayer
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.reader import SourceReader, Span
from ktconv.system.arrays import F32, I8, U8, Array, Bools
from ktconv.system.checksums import checksum_for
from ktconv.targets.packed.proof import CODES, ROW_ERROR_BOUND
from ktconv.targets.packed.weights import name_of
from ktconv.writer.journal import Record
from ktconv.writer.staging import Staging

MATRIX_COPIES = 4  # of all codes of a matrix that a task has in memory at most


class Share(Struct, frozen=True):
    """Range that a new part takes of an old one, along the axis that is cut."""

    part: int
    start: int
    stop: int


class UnequalScales(UsageError):
    """Two parts of a row that should become one have different scales."""


def shares(length: int, old: int, new: int, index: int) -> list[Share]:
    """The pieces of `old` parts that make part `index` of `new` parts of an axis of this length.

    >>> shares(12, 2, 3, 1)
    [Share(part=0, start=4, stop=6), Share(part=1, start=0, stop=2)]
    """
    old_width, width = length // old, length // new
    first, last = index * width, (index + 1) * width
    return [
        Share(part, max(first - part * old_width, 0), min(last - part * old_width, old_width))
        for part in range(first // old_width, (last - 1) // old_width + 1)
    ]


def joined_scales(scales: Sequence[F32], zero_rows: Sequence[Bools]) -> F32:
    """The scales that rows of several parts share; a row of zeros fits any.

    UnequalScales names the first row whose scales differ.
    """
    agreed: F32 = np.maximum.reduce(list(scales))
    for scale, zero in zip(scales, zero_rows, strict=True):
        wrong = np.flatnonzero((scale != agreed) & ~((scale == 0) & zero))
        if len(wrong):
            row = int(wrong[0])
            raise UnequalScales(
                f"row {row} has the scale {scale[row]:.9g} in one part and {agreed[row]:.9g} in "
                "another"
            )
    return agreed


def carried(records: Sequence[Record]) -> Record:
    """Record that is true of a part that was put together from parts with these records of
    codes."""
    found = {key: records[0][key] for key in (CODES, "calibration_tokens") if key in records[0]}
    bounds = [record[ROW_ERROR_BOUND] for record in records if ROW_ERROR_BOUND in record]
    return found | ({ROW_ERROR_BOUND: max(bounds)} if bounds else {})


def lost_share(records: Sequence[Record], codes: I8) -> Record:
    """The share of zeros of a part with these codes, if the parts with these records, which it was
    put together from, became nearly all zeros. Of others, codes alone do not tell whether the
    source's weights are zeros too."""
    lost = any(is_lost(record) for record in records)
    return {"zero_share": four_digits(float(np.mean(codes == 0)))} if lost else {}


class OldPart(Struct, frozen=True):
    """Codes [rows, cols] and scales [rows, 1], or [rows, groups], of a part that was read."""

    codes: I8
    scale: Array


class RecutTask(Struct, frozen=True):
    """Reads all parts of a matrix, writes all new ones."""

    packed: CompleteWeights
    reader: SourceReader
    layer: TreeLayer
    expert: int
    proj: Matrix
    parts: int  # new ones
    known: Mapping[str, Record]  # of a manifest, by tensor
    verify: bool

    @property
    def source_bytes(self) -> int:
        return sum(self.packed.weights.place(tensor).nbytes for tensor in self._old_tensors())

    def spans(self) -> Sequence[Span]:
        places = map(self.packed.weights.place, self._old_tensors())
        return [Span(place.file, place.offset, place.nbytes) for place in places]

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        old = []
        for part in range(self.layer.parts):
            old.append(self._read_part(part))
            advance(self.source_bytes // self.layer.parts)
        advance(self.source_bytes % self.layer.parts)
        records: dict[str, Any] = {}
        for index in range(self.parts):
            codes, scale = self._cut(old, index)
            records |= self._write(index, codes, scale, staging)
            if (fold := self._fold(index)) is not None:
                records[name_of(self._tensor(index, "weight"))]["fold"] = fold
        return records

    def _fold(self, index: int) -> str | None:
        """The record of up's factors for a new part, where up and down were folded."""
        names = [name_of(self._tensor(part, "weight")) for part in range(self.layer.parts)]
        records = [self.known.get(name, {}).get("fold") for name in names]
        if self.proj != "up" or records == [None] * len(records):
            return None
        width = self.layer.intermediate // self.layer.parts
        try:
            old = [decode(record, width) for record in records]
        except FoldError as error:
            raise CheckpointError(
                f"the manifest is damaged: {error}, in the record of {names[0]} or another part",
                "restore ktconv.json from a copy, or convert again",
            ) from error
        found = shares(self.layer.intermediate, self.layer.parts, self.parts, index)
        return encode(np.concatenate([old[one.part][one.start : one.stop] for one in found]))

    def _tensor(self, part: int, kind: Kind) -> TensorId:
        return TensorId(self.layer.index, self.proj, self.expert, part, kind)

    def _old_tensors(self) -> Iterator[TensorId]:
        for part in range(self.layer.parts):
            yield self._tensor(part, "weight")
            yield self._tensor(part, "scale")

    # ---- reading ----

    def _read_part(self, part: int) -> OldPart:
        scale = self._read(self._tensor(part, "scale"))
        layout, shape = self.layer.format.layout, self.layer.shape(self.proj)
        refuse_odd_scales(self.layer.format, scale, name_of(self._tensor(part, "scale")))
        packed = self._read(self._tensor(part, "weight"))
        codes = native.audit_codes(layout, packed, *shape)
        return OldPart(codes, scales.ordered(self.layer.format, scale, *shape))

    def _read(self, tensor: TensorId) -> U8:
        """A whole tensor, which has the checksum that its manifest records."""
        place = self.packed.weights.place(tensor)
        data = np.empty(place.nbytes, np.uint8)
        with self.reader.open(place.file) as fd:
            self.reader.read(fd, place, data.data, 0)
        known = self.known.get(place.name)
        checksum = checksum_for(known)
        checksum.update(data.data)
        check_sum(checksum.record(), known, f"{place.name} in {place.file}")
        return data

    # ---- cutting ----

    def _cut(self, old: Sequence[OldPart], index: int) -> tuple[I8, Array]:
        """Codes and scales of a new part."""
        found = shares(self.layer.intermediate, self.layer.parts, self.parts, index)
        if cut_by_rows(self.proj):
            codes = [old[share.part].codes[share.start : share.stop] for share in found]
            rows = [old[share.part].scale[share.start : share.stop] for share in found]
            return np.concatenate(codes), np.concatenate(rows)
        codes = [old[share.part].codes[:, share.start : share.stop] for share in found]
        if group := self.layer.format.group:
            pieces = [
                old[share.part].scale[:, share.start // group : share.stop // group]
                for share in found
            ]
            return np.concatenate(codes, axis=1), np.concatenate(pieces, axis=1)
        return np.concatenate(codes, axis=1), self._joined(old, found, codes)[:, None]

    def _joined(self, old: Sequence[OldPart], found: Sequence[Share], codes: Sequence[I8]) -> F32:
        of_rows: list[F32] = [old[share.part].scale[:, 0] for share in found]
        if len(of_rows) == 1:
            return of_rows[0]
        try:
            return joined_scales(of_rows, [np.all(piece == 0, axis=1) for piece in codes])
        except UnequalScales as error:
            name = name_of(self._tensor(found[0].part, "scale"))
            raise UnequalScales(f"{name}: {error}", "give --source MODEL") from error

    # ---- writing ----

    def _carried(self, index: int, codes: I8) -> Record:
        """Record of the codes of a new part, taken from those of the old parts."""
        found = shares(self.layer.intermediate, self.layer.parts, self.parts, index)
        names = (name_of(self._tensor(share.part, "weight")) for share in found)
        records = [self.known.get(name, {}) for name in names]
        return carried(records) | lost_share(records, codes)

    def _write(self, index: int, codes: I8, scale: Array, staging: Staging) -> dict[str, Any]:
        """To verify, packed codes are unpacked by code that the packer does not share."""
        layout = self.layer.format.layout
        weight, packed_scale = (name_of(self._tensor(index, kind)) for kind in KINDS)
        packed = native.pack(layout, layout.plain_codes(codes))
        if self.verify:
            unpacked = native.audit_codes(layout, packed, *codes.shape)
            if not np.array_equal(unpacked, codes):
                raise VerificationError(
                    f"{weight} does not match the packed weights it was made from",
                    "check this machine's memory, then run the same command again",
                )
        written = {weight: packed, packed_scale: scales.placed(self.layer.format, scale)}
        records = {
            name: write_tensor(name, [data], staging, self.verify) for name, data in written.items()
        }
        records[weight] |= self._carried(index, codes)
        return records
