"""Failures of a verification, collected from all threads; of many alike only some are listed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

Facts = dict[str, Any]  # a section of the report
Progression = Callable[[dict[str, int]], AbstractContextManager[Any]]  # sizes -> observer

LISTED_PER_CHECK = 50  # of one kind: a swapped layer has thousands


class Failure(Struct, frozen=True):
    """A failed check. `message` is a whole sentence; the other fields locate it."""

    level: str
    check: str
    message: str
    file: str | None = None
    tensor: str | None = None
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None
    part: int | None = None
    row: int | None = None
    column: int | None = None
    source_value: float | None = None
    value: float | None = None
    steps: float | None = None  # of quantization, between the two

    def as_dict(self) -> dict[str, Any]:
        """The fields that have a value, as `verify --json` lists them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Findings:
    """Failures by level and check. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listed: list[Failure] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self.notes: list[str] = []

    def fail(self, level: str, check: str, message: str, **where: Any) -> None:
        """Adds a Failure with these fields."""
        with self._lock:
            self._counts[level, check] += 1
            if self._counts[level, check] <= LISTED_PER_CHECK:
                self._listed.append(Failure(level, check, message, **where))

    def fail_tensor(
        self, level: str, check: str, name: str, file: Path, words: str, **where: Any
    ) -> None:
        """`fail` with a sentence about a tensor in a file."""
        message = f"{name} in {file.name} {words}."
        self.fail(level, check, message, file=file.name, tensor=name, **where)

    def take(self) -> list[tuple[str, str, int, list[Facts]]]:
        """Level, check, count and listed failures of each check that failed, which are no longer
        here afterwards."""
        with self._lock:
            found = [
                (level, check, count, [
                    asdict(one) for one in self._listed if (one.level, one.check) == (level, check)
                ])
                for (level, check), count in self._counts.items()
            ]  # fmt: skip
            self._listed, self._counts = [], Counter()
        return found

    def add(self, level: str, check: str, count: int, listed: Sequence[Facts]) -> None:
        """Adds what `take` returned of one check."""
        with self._lock:
            room = max(LISTED_PER_CHECK - self._counts[level, check], 0)
            self._counts[level, check] += count
            self._listed += [Failure(**one) for one in listed[:room]]

    def note(self, text: str) -> None:
        with self._lock:
            self.notes.append(text)

    def count(self, level: str | None = None) -> int:
        return sum(n for (of, _), n in self._counts.items() if level in (None, of))

    @property
    def listed(self) -> list[Failure]:
        """Worst first within a check, checks in the order in which they first failed."""
        order = list(self._counts)
        return sorted(
            self._listed, key=lambda f: (order.index((f.level, f.check)), -(f.steps or 0))
        )
