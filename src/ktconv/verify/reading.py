"""Bytes of an output: read, and held against the checksums of its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv.checkpoint import TensorRef
from ktconv.errors import CheckpointError
from ktconv.reading.reader import SourceReader
from ktconv.system.files import FileTooShortError, io_error, read_exactly
from ktconv.system.regular_files import opened_regular
from ktconv.verify.findings import Findings
from ktconv.writer.journal import Record

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Context:
    """What all checks share."""

    findings: Findings
    records: Mapping[str, Record]  # of the manifest, by tensor
    reader: SourceReader | None
    compare: bool  # with the source

    def fail_copy(self, tensor: TensorRef, words: str) -> None:
        self.findings.fail_tensor("structure", "copied tensor", tensor.name, tensor.file, words)


@dataclass(frozen=True, slots=True)
class SumCheck:
    """A checksum compared with the manifest's, if that has one."""

    compared: int = 0  # or 1
    equal: bool = False  # False where nothing was compared


def read_tensor(tensor: TensorRef) -> U8:
    """The bytes of a packed tensor."""
    data = np.empty(tensor.nbytes, np.uint8)
    with opened_regular(tensor.file) as fd:
        read_into(fd, tensor.file, data, tensor.offset)
    return data


class TensorStream:
    """The bytes of a packed tensor from the first to the last, some at a time, and whether they
    have the checksum of the manifest."""

    def __init__(self, context: Context, tensor: TensorRef) -> None:
        self._context, self._tensor = context, tensor
        self._expected = context.records.get(tensor.name, {}).get("sha256")
        self._digest = None if self._expected is None else hashlib.sha256()
        self._done = 0

    def read(self, target: U8) -> U8:
        """`target`, filled with the next bytes."""
        with opened_regular(self._tensor.file) as fd:
            read_into(fd, self._tensor.file, target, self._tensor.offset + self._done)
        self._done += target.nbytes
        if self._digest is not None:
            self._digest.update(target.data)
        return target

    def read_rest(self, buffer: U8) -> None:
        """What is left, through `buffer`."""
        while left := self._tensor.nbytes - self._done:
            self.read(buffer[: min(left, buffer.nbytes)])

    def check(self) -> SumCheck:
        """Compares the checksum, after everything was read."""
        if self._digest is None:
            return SumCheck()
        equal = self._digest.hexdigest() == self._expected
        if not equal:
            words = "differs from the checksum in the manifest"
            self._context.findings.fail_tensor(
                "structure", "checksum", self._tensor.name, self._tensor.file, words
            )
        return SumCheck(1, equal)


def read_into(fd: int, path: Any, target: U8, offset: int) -> None:
    try:
        read_exactly(fd, target.data, offset)
    except FileTooShortError:
        raise CheckpointError(f"{path} became shorter while it was read") from None
    except OSError as error:
        raise io_error("read", path, error) from error
