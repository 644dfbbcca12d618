"""Reads bytes of an output and compares them with the checksums of its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ktconv.checkpoint import TensorRef
from ktconv.errors import CheckpointError
from ktconv.reading.reader import SourceReader
from ktconv.system.arrays import U8
from ktconv.system.files import FileTooShortError, io_error, read_exactly
from ktconv.system.regular_files import opened_regular
from ktconv.verify.findings import Findings
from ktconv.verify.second_reader import SecondReader
from ktconv.writer.journal import Record


@dataclass(frozen=True, slots=True)
class Context:
    """Shared by all checks of an output."""

    findings: Findings
    records: Mapping[str, Record]  # of the manifest, by tensor
    reader: SourceReader | None
    compare: bool  # weights with the source's
    second: SecondReader | None = None  # of the source, where weights are compared

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
        self._expected = context.records.get(tensor.name, {}).get("sha256")
        self._digest = None if self._expected is None else hashlib.sha256()
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
        equal = self._digest.hexdigest() == self._expected
        if not equal:
            words = "differs from the checksum in the manifest"
            self._context.findings.fail_tensor(
                "structure", "checksum", self._tensor.name, self._tensor.file, words
            )
        return equal


def read_into(tensor: TensorRef, target: U8, start: int) -> U8:
    """Fills `target` with the tensor's bytes from `start` on and returns it."""
    try:
        with opened_regular(tensor.file) as fd:
            read_exactly(fd, target.data, tensor.offset + start)
    except FileTooShortError:
        raise CheckpointError(f"{tensor.file} became shorter while it was read") from None
    except OSError as error:
        raise io_error("read", tensor.file, error) from error
    return target
