"""Faults that servers of tests answer requests with, how often ktconv tries again, full disks."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Fault:
    """Something that goes wrong with a request for bytes: a status, or a word."""

    kind: int | str  # 429, 503; reset, short, less, whole, other, flip, slow; bare, silent
    headers: dict[str, str] = field(default_factory=dict)


def every_third(
    faults: Sequence[Fault | None],
) -> tuple[Callable[[int], Fault | None], list[Fault | None]]:
    """Faults in turn, of every third request: what says so of a request's number, and the list to
    which those come that were met."""
    met: list[Fault | None] = []

    def fault(number: int) -> Fault | None:
        if number % 3 != 1:
            return None
        met.append(faults[number // 3 % len(faults)])
        return met[-1]

    return fault, met


def expect_retries(name: str, met: Sequence[Fault | None], retries: int) -> None:
    """As many new attempts of ours as faults of this name were met, where they need some."""
    if name in ("reset", "short"):  # libraries try some of these again themselves
        assert 0 < retries <= len(met)
    else:
        assert retries == (len(met) if name == "busy and down" else 0)


def no_space(*_: Any) -> None:
    """Fail as a system call that writes to a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def read_zeros(self: object, name: str, target: memoryview, offset: int) -> None:
    """Read zeros, as ShardStaging.read from a disk that has forgotten what was written."""
    target[:] = bytes(len(target))
