"""Two versions of ktconv side by side: a process of each answers in turn, on the same core.

A turn takes some milliseconds, so that what else the machine does meets both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SLICE = 0.012  # seconds of one turn


class Version:
    """A process that has ktconv from `tree`: `script --answer`, which reads a case and the number
    of the turn from each line, and prints seconds, or -1 where this version has no such case."""

    def __init__(self, script: str, tree: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, script, "--answer"], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def seconds(self, case: list[Any], turn: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([*case, turn]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def start_versions(script: str, against: Path | None) -> list[Version]:
    """This tree's version, and that of `against`, on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    trees = [Path(__file__).resolve().parent.parent / "src"]
    trees += [against] if against else []
    return [Version(script, tree) for tree in trees]


def pair_row(versions: list[Version], name: str, work: float, case: list[Any], rounds: int) -> str:
    """A row of a table: `work` by the fastest time of the first version, and the median of how many
    times as fast it was as the second."""
    times: list[list[float]] = [[] for _ in versions]
    for number in range(rounds):
        order = range(len(versions)) if number % 2 else reversed(range(len(versions)))
        for index in order:
            times[index].append(versions[index].seconds(case, number))
    speed = work / min(times[0])
    if len(versions) == 1 or times[1][0] < 0:
        return f"| {name} | {speed:.1f} | |"
    ratios = [other / own for own, other in zip(*times, strict=True)]
    return f"| {name} | {speed:.1f} | {statistics.median(ratios):.2f} |"
