"""Which bytes of the lock file other processes find locked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ktconv.errors import InUseError
from ktconv.writer.journal import SETUP_BYTE, Journal, OutputLock

pytestmark = pytest.mark.process

UNITS = [*range(10), SETUP_BYTE]
# Prints the units that it can lock, and keeps them until its input ends.
OTHER = """
import fcntl, json, sys
file, mine = open(sys.argv[1], "r+b"), []
for unit in json.loads(sys.argv[2]):
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, unit)
        mine.append(unit)
    except OSError:
        pass
print(json.dumps(mine), flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(journal: Journal, units: list[int]) -> Iterator[list[int]]:
    """What another process could lock of these units; it has them inside the block."""
    words = [sys.executable, "-c", OTHER, str(journal.directory / "lock"), json.dumps(units)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()


def free(journal: Journal) -> list[int]:
    with another_process(journal, UNITS) as found:
        return found


def without(*units: int) -> list[int]:
    return [unit for unit in UNITS if unit not in units]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    found = Journal(tmp_path / "output")
    found.create()
    return found


def test_locks_of_a_run_that_ends_are_waited_for(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one that was killed, until the system has ended its threads."""
    first, second, waited = OutputLock(journal), OutputLock(journal), list[float]()
    first.acquire([1, 3], "layers")

    def ending(seconds: float) -> None:
        waited.append(seconds)
        first.release()

    monkeypatch.setattr("ktconv.writer.journal.time.sleep", ending)
    second.acquire([3], "layers")
    assert len(waited) == 1
    second.release()


def test_others_find_what_is_locked(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktconv.writer.journal.ENDING_SECONDS", 0.0)  # who has them keeps them
    first, second = OutputLock(journal), OutputLock(journal)
    with first.setup_lock():
        first.acquire([1, 3, 5], "layers")
        assert free(journal) == without(1, 3, 5, SETUP_BYTE)
    assert free(journal) == without(1, 3, 5)
    assert first.try_acquire([3, 4])  # its own do not count
    second.acquire([8], "layer 8")
    assert not second.try_acquire([7, 3])
    with pytest.raises(InUseError, match="another ktconv is converting layer 4"):
        second.acquire([4], "layer 4")
    assert free(journal) == without(1, 3, 4, 5, 8)
    first.release()
    assert free(journal) == without(8)
    second.release()
    assert free(journal) == UNITS


def test_all_or_none_beside_another_process(journal: Journal) -> None:
    """What is given back when one of several cannot be had is only what was just taken."""
    lock, more = OutputLock(journal), OutputLock(journal)
    lock.acquire([2, 9], "layers")
    with another_process(journal, [5]) as theirs:
        assert theirs == [5]
        assert not more.try_acquire([0, 1, 5, 6])
        assert free(journal) == without(2, 5, 9)
        assert more.try_acquire([0, 6])
        assert free(journal) == without(0, 2, 5, 6, 9)
    more.release()
    assert free(journal) == without(2, 9)
    lock.release()
