"""Bytes of an output: read, and held against the checksums of its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv.errors import CheckpointError
from ktconv.packed.weights import Place
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


@dataclass(frozen=True, slots=True)
class SumCheck:
    """A checksum compared with the manifest's, if that has one."""

    compared: int = 0  # or 1
    equal: bool = False  # False where nothing was compared


def read_place(place: Place) -> U8:
    """The bytes of a packed tensor."""
    data = np.empty(place.nbytes, np.uint8)
    with opened_regular(place.file) as fd:
        read_into(fd, place.file, data, place.offset)
    return data


class PlaceStream:
    """The bytes of a packed tensor from the first to the last, some at a time, and whether they
    have the checksum of the manifest."""

    def __init__(self, context: Context, name: str, place: Place) -> None:
        self._context, self._name, self._place = context, name, place
        self._digest = hashlib.sha256() if "sha256" in context.records.get(name, {}) else None
        self._done = 0

    def read(self, target: U8) -> U8:
        """`target`, filled with the next bytes."""
        with opened_regular(self._place.file) as fd:
            read_into(fd, self._place.file, target, self._place.offset + self._done)
        self._done += target.nbytes
        if self._digest is not None:
            self._digest.update(target.data)
        return target

    def read_rest(self, buffer: U8) -> None:
        """What is left, through `buffer`."""
        while left := self._place.nbytes - self._done:
            self.read(buffer[: min(left, buffer.nbytes)])

    def check(self) -> SumCheck:
        """Compares the checksum, after everything was read."""
        if self._digest is None:
            return SumCheck()
        return compare_sum(self._context, self._name, self._place, self._digest.hexdigest())


def compare_sum(context: Context, name: str, place: Place, digest: str) -> SumCheck:
    expected = context.records.get(name, {}).get("sha256")
    if expected is None:
        return SumCheck()
    if digest != expected:
        context.findings.fail(
            "structure",
            "checksum",
            f"{name} in {place.file.name} does not have the checksum of the manifest.",
            file=place.file.name,
            tensor=name,
        )
    return SumCheck(1, digest == expected)


def read_into(fd: int, path: Any, target: U8, offset: int) -> None:
    try:
        read_exactly(fd, target.data, offset)
    except FileTooShortError:
        raise CheckpointError(f"{path} became shorter while it was read") from None
    except OSError as error:
        raise io_error("read", path, error) from error
