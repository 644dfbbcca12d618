"""Reads bytes of an output, and compares them with what its manifest says and with the source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from ktconv.errors import CheckpointError
from ktconv.source import MoELayer, Projection, TensorRef
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.reader import SourceReader, Span
from ktconv.system.arrays import U8
from ktconv.system.checksums import algorithm_of, checksum_for
from ktconv.system.files import FileTooShortError, io_error
from ktconv.system.opened import opened_source
from ktconv.system.stores import MadePath
from ktconv.targets.packed.matrix_check import RECORDED, ErrorStats
from ktconv.verify.findings import Findings
from ktconv.verify.reading_check import ReadingCheck, expert_check, sums_check
from ktconv.verify.runner import Advance
from ktconv.verify.second_reader import SecondReader
from ktconv.verify.totals import ItemResult
from ktconv.writer.journal import Record
from ktconv.writer.manifest import MANIFEST

TOLERANCE = 2e-3  # the manifest has four digits, and sums are made in another order
COPY_BYTES = 4 << 20


class Context(Struct, frozen=True):
    """Shared by all checks of an output."""

    findings: Findings
    records: Mapping[str, Record]  # of the manifest, by tensor
    reader: SourceReader  # of no files without a source
    second: SecondReader | None = None  # of the source, where weights are compared

    def reading(self, layer: MoELayer, expert: int, proj: Projection) -> ReadingCheck | None:
        """The check of how a matrix is read that is compared; None as of `expert_check`."""
        assert self.second is not None
        return expert_check(self.second, self.findings, layer, expert, proj)

    def fail_copy(self, tensor: TensorRef, words: str) -> None:
        self.findings.fail_tensor("structure", "copied tensor", tensor.name, tensor.file, words)


def read_tensor(tensor: TensorRef, start: int = 0, nbytes: int | None = None) -> U8:
    """The bytes of a tensor, or `nbytes` of them from `start` on."""
    data = np.empty(tensor.nbytes if nbytes is None else nbytes, np.uint8)
    return read_into(tensor, data, start)


class TensorStream:
    """Reads a tensor from its first to its last byte, some at a time, and checks its checksum."""

    def __init__(self, context: Context, tensor: TensorRef) -> None:
        self._context, self._tensor = context, tensor
        self._expected = context.records.get(tensor.name, {})
        self._digest = checksum_for(self._expected) if algorithm_of(self._expected) else None
        self._done = 0

    def read(self, target: U8) -> U8:
        """Fills `target` with the next bytes and returns it."""
        read_into(self._tensor, target, self._done)
        self._done += target.nbytes
        if self._digest is not None:
            self._digest.update(target.data)
        return target

    def read_rest(self, buffer: U8) -> None:
        """Reads what is left, through `buffer`."""
        while left := self._tensor.nbytes - self._done:
            self.read(buffer[: min(left, buffer.nbytes)])

    def check(self) -> bool | None:
        """Whether everything that was read has the checksum of the manifest; None: it has none."""
        if self._digest is None:
            return None
        equal = self._digest.agrees(self._expected)
        if not equal:
            words = "differs from the checksum in the manifest"
            self._context.findings.fail_tensor(
                "structure", "checksum", self._tensor.name, self._tensor.file, words
            )
        return equal


def read_into(tensor: TensorRef, target: U8, start: int) -> U8:
    """Fills `target` with the tensor's bytes from `start` on and returns it."""
    try:
        with opened_source(tensor.file) as opened:
            opened.read(target.data, tensor.offset + start)
    except FileTooShortError:
        raise CheckpointError(f"{tensor.file} became shorter while it was read") from None
    except OSError as error:
        raise io_error("read", tensor.file, error) from error
    return target


class CopyCheck(Struct, frozen=True):
    """The checksum of one tensor and its equality with the source."""

    context: Context
    unit: str
    tensor: TensorRef  # in the output
    origin: TensorRef | None  # in the source

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def spans(self) -> Sequence[Span]:
        found = self.origin
        return [] if found is None else [Span(found.file, found.offset, found.nbytes)]

    def run(self, buffers: Buffers, advance: Advance) -> ItemResult:
        stream, equal = TensorStream(self.context, self.tensor), True
        for offset in range(0, self.nbytes, COPY_BYTES):
            piece = stream.read(buffers.source[: min(COPY_BYTES, self.nbytes - offset)])
            equal = equal and self._equal(piece, offset, buffers)
            advance(len(piece))
        if not equal:
            self.context.fail_copy(self.tensor, "differs from the source")
        elif self.origin is not None and isinstance(self.origin.file, MadePath):
            self._check_sums(self.origin)
        return ItemResult(
            self.nbytes, int(stream.check() is not None), int(self.origin is not None)
        )

    def _equal(self, piece: U8, offset: int, buffers: Buffers) -> bool:
        if self.origin is None:
            return True
        if self.origin.nbytes != self.tensor.nbytes:
            return False
        other = buffers.source[COPY_BYTES : COPY_BYTES + len(piece)]
        with self.context.reader.open(self.origin.file) as fd:
            self.context.reader.read(fd, self.origin, other.data, offset)
        return bool(np.array_equal(piece, other))

    def _check_sums(self, origin: TensorRef) -> None:
        """Compare a matrix that adapters are added to with the sums of the second reader."""
        second = self.context.second
        if second is None or second.scale_of(origin.name) == origin.name:
            return  # scales are compared with the weight that they belong to
        rows, cols = origin.shape
        row_bytes = self.tensor.nbytes // rows
        if (check := sums_check(second, self.context.findings, origin)) is not None:
            check.run(
                lambda at: read_tensor(self.tensor, at.start * row_bytes, len(at) * row_bytes),
                max(1, COPY_BYTES // (8 * cols)),
            )


def check_claims(context: Context, name: str, sums: ErrorStats) -> None:
    """A failure for each error of tensor `name` that is not the one measured, `sums`."""
    about, measured = context.records.get(name, {}), sums.as_dict()
    for key in RECORDED:
        if key in about and not _agree(about[key], measured[key]):
            claim = f"{MANIFEST} says {key} {about[key]} of {name}"
            message = f"{claim}, but {measured[key]:.4g} was measured."
            context.findings.fail("weights", "manifest", message, file=MANIFEST, tensor=name)


def _agree(claim: object, measured: float) -> bool:
    if not isinstance(claim, (int, float)) or isinstance(claim, bool):
        return False
    return math.isclose(claim, measured, rel_tol=TOLERANCE, abs_tol=1e-9)
