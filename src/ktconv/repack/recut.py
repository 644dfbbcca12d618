"""One matrix of one expert, taken apart into codes and put together in other parts.

A matrix is cut by rows (gate, up, down_bwd) or by columns (down, gate_bwd, up_bwd). A row of one
part has one scale, so that rows go anywhere with their scales, and columns only into a part with
the same scales.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconv import native
from ktconv.errors import UsageError, VerificationError
from ktconv.formats import Kind, Matrix, TensorId
from ktconv.packed.weights import name_of
from ktconv.reading.buffers import Buffers
from ktconv.reading.reader import SourceReader, Span
from ktconv.repack.complete import CompleteWeights
from ktconv.repack.tasks import check_sum, refuse_odd_scales
from ktconv.repack.tree import TreeLayer
from ktconv.system.files import io_error, read_exactly
from ktconv.writer.journal import Record
from ktconv.writer.staging import Staging

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

MATRIX_COPIES = 4  # of all codes of a matrix, that a task holds at most


@dataclass(frozen=True, slots=True)
class Share:
    """What a new part takes of an old one: from where to where along the axis that is cut."""

    part: int
    start: int
    stop: int


class UnequalScales(UsageError):
    """Two parts of a row that should become one have different scales."""


def shares(length: int, old: int, new: int, index: int) -> list[Share]:
    """Where part `index` of `new` parts lies in `old` parts of an axis of this length.

    >>> shares(12, 2, 3, 1)
    [Share(part=0, start=4, stop=6), Share(part=1, start=0, stop=2)]
    """
    old_width, width = length // old, length // new
    first, last = index * width, (index + 1) * width
    return [
        Share(part, max(first - part * old_width, 0), min(last - part * old_width, old_width))
        for part in range(first // old_width, (last - 1) // old_width + 1)
    ]


def cut_by_rows(proj: Matrix) -> bool:
    """Whether the parts of a packed matrix are rows of the whole."""
    return proj in ("gate", "up", "down_bwd")


def joined_scales(scales: Sequence[F32], zero_rows: Sequence[Bools]) -> F32:
    """The scales that rows of several parts share; a row of zeros fits to any.

    UnequalScales names the first row that has none.
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


def _zero_rows(codes: I8) -> Bools:
    zero: Bools = np.all(codes == 0, axis=1)
    return zero


@dataclass(frozen=True, slots=True)
class OldPart:
    """Codes [rows, cols] and scales [rows] of a part that was read."""

    codes: I8
    scale: F32


@dataclass(frozen=True, slots=True)
class RecutTask:
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

    def run(
        self, staging: Staging, buffers: Buffers, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        old = []
        for part in range(self.layer.parts):
            old.append(self._read_part(part))
            advance(self.source_bytes // self.layer.parts)
        advance(self.source_bytes % self.layer.parts)
        records: dict[str, Any] = {}
        for index in range(self.parts):
            codes, scale = self._cut(old, index)
            records |= self._write(index, codes, scale, staging)
        return records

    def _tensor(self, part: int, kind: Kind) -> TensorId:
        return TensorId(self.layer.index, self.proj, self.expert, part, kind)

    def _old_tensors(self) -> Iterator[TensorId]:
        for part in range(self.layer.parts):
            yield self._tensor(part, "weight")
            yield self._tensor(part, "scale")

    # ---- reading ----

    def _read_part(self, part: int) -> OldPart:
        scale = self._read(self._tensor(part, "scale"))
        refuse_odd_scales(scale, name_of(self._tensor(part, "scale")))
        packed = self._read(self._tensor(part, "weight"))
        values = scale.view(np.float32)
        cols = packed.nbytes * 8 // self.layer.format.bits // len(values)
        codes = native.audit_codes(self.layer.format.key, packed, len(values), cols)
        return OldPart(codes, values)

    def _read(self, tensor: TensorId) -> U8:
        """A whole tensor, which has the checksum that its manifest records."""
        place, name = self.packed.weights.place(tensor), name_of(tensor)
        data = np.empty(place.nbytes, np.uint8)
        with self.reader.open(place.file) as fd:
            try:
                read_exactly(fd, data.data, place.offset)
            except OSError as error:
                raise io_error(f"read tensor {name} from", place.file, error) from error
        checksum = hashlib.sha256(data.data).hexdigest()
        check_sum(checksum, self.known.get(name), f"{name} in {place.file}")
        return data

    # ---- cutting ----

    def _cut(self, old: Sequence[OldPart], index: int) -> tuple[I8, F32]:
        """Codes and scales of a new part."""
        found = shares(self.layer.intermediate, self.layer.parts, self.parts, index)
        if cut_by_rows(self.proj):
            codes = [old[share.part].codes[share.start : share.stop] for share in found]
            scales = [old[share.part].scale[share.start : share.stop] for share in found]
            return np.concatenate(codes), np.concatenate(scales)
        codes = [old[share.part].codes[:, share.start : share.stop] for share in found]
        return np.concatenate(codes, axis=1), self._joined(old, found, codes)

    def _joined(self, old: Sequence[OldPart], found: Sequence[Share], codes: Sequence[I8]) -> F32:
        scales = [old[share.part].scale for share in found]
        if len(scales) == 1:
            return scales[0]
        try:
            return joined_scales(scales, [_zero_rows(piece) for piece in codes])
        except UnequalScales as error:
            name = name_of(self._tensor(found[0].part, "scale"))
            raise UnequalScales(f"{name}: {error}", "give --source MODEL") from error

    # ---- writing ----

    def _write(self, index: int, codes: I8, scale: F32, staging: Staging) -> dict[str, Any]:
        format = self.layer.format.key
        packed = native.pack(format, codes)
        scales = np.ascontiguousarray(scale).view(np.uint8)
        written = {self._tensor(index, "weight"): packed, self._tensor(index, "scale"): scales}
        for tensor, data in written.items():
            staging.write(name_of(tensor), data.data, 0)
        if self.verify:
            self._check_written(index, codes, scales, staging)
        return {
            name_of(tensor): {"sha256": hashlib.sha256(data.data).hexdigest()}
            for tensor, data in written.items()
        }

    def _check_written(self, index: int, codes: I8, scales: U8, staging: Staging) -> None:
        """Read back and unpack, by code that the packer does not share."""
        format = self.layer.format
        packed = np.empty(format.weight_nbytes(*codes.shape), np.uint8)
        found = np.empty_like(scales)
        staging.read(name_of(self._tensor(index, "weight")), packed.data, 0)
        staging.read(name_of(self._tensor(index, "scale")), found.data, 0)
        unpacked = native.audit_codes(format.key, packed, *codes.shape)
        if not np.array_equal(unpacked, codes) or not np.array_equal(found, scales):
            raise VerificationError(
                f"{name_of(self._tensor(index, 'weight'))} does not match the packed "
                "weights it was made from",
                "check this machine's memory and disk, then run the same command again",
            )
