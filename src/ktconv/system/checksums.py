"""Checksums of tensors, in records under the name of their algorithm.

BLAKE3: as hard to forge as SHA-256, which manifests of earlier versions have, in a third of the
time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from blake3 import blake3

BLAKE3 = "blake3"
ALGORITHMS: Mapping[str, Callable[[], Any]] = {BLAKE3: blake3, "sha256": hashlib.sha256}
_DIGITS = re.compile("[0-9a-f]{64}")


class Checksum:
    """Checksum of bytes that come one after the other."""

    __slots__ = ("_algorithm", "_hash", "update")

    def __init__(self, algorithm: str = BLAKE3) -> None:
        self._algorithm, self._hash = algorithm, ALGORITHMS[algorithm]()
        self.update: Callable[[Any], Any] = self._hash.update

    def record(self) -> dict[str, str]:
        return {self._algorithm: self._hash.hexdigest()}

    def agrees(self, record: Mapping[str, Any]) -> bool:
        """Whether it agrees with a record of the same algorithm."""
        return bool(record.get(self._algorithm) == self._hash.hexdigest())


def algorithm_of(record: Mapping[str, Any] | None) -> str | None:
    """The algorithm of a record's checksum; None: it has none that is known."""
    return next((name for name in ALGORITHMS if name in (record or ())), None)


def of_record(record: Mapping[str, Any] | None) -> dict[str, str]:
    """The checksum alone; empty without one."""
    name = algorithm_of(record)
    return {} if name is None or record is None else {name: record[name]}


def is_sound(record: Mapping[str, Any]) -> bool:
    """Whether a record has one checksum, of 64 digits."""
    found = [record[name] for name in ALGORITHMS if name in record]
    return len(found) == 1 and isinstance(found[0], str) and bool(_DIGITS.fullmatch(found[0]))


def checksum_for(record: Mapping[str, Any] | None) -> Checksum:
    """One that can be compared with a record; BLAKE3 without."""
    return Checksum(algorithm_of(record) or BLAKE3)
