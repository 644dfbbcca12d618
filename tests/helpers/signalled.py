"""Signals to a conversion at known points of its work, in a process that imports this.

SIGNALLED in the environment holds the signal that the process sends itself at its second write, a
second one (or 0) that follows as it cleans up, and for how many seconds a repeated one counts as
the same."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from ktconv.cli import exits
from ktconv.conversion.pipeline import Pipeline
from ktconv.writer.staging import ShardStaging

_write, _abandon, _stop = ShardStaging.write, ShardStaging.abandon, Pipeline._stop
_stopped = threading.Event()
_count = 0


def _asked() -> tuple[int, int, float]:
    number, again, patience = os.environ["SIGNALLED"].split()
    return int(number), int(again), float(patience)


def _first(staging: ShardStaging, *words: Any) -> None:
    global _count
    number, _, exits.REPEATED_SECONDS = _asked()
    _write(staging, *words)
    _count += 1
    if _count == 2:
        os.kill(os.getpid(), number)
        if signal.getsignal(number) is not signal.SIG_IGN:
            _stopped.wait()  # else this thread could finish before the main one wakes


def _noticed(pipeline: Pipeline, error: BaseException) -> None:
    _stop(pipeline, error)
    _stopped.set()


def _second(staging: ShardStaging) -> None:
    _, again, patience = _asked()
    if again and _count >= 2:
        os.kill(os.getpid(), again)
        if patience < 0:
            threading.Event().wait()  # for the main thread, which ends the process
    _abandon(staging)


_staging: Any = ShardStaging
_staging.write, _staging.abandon = _first, _second
_pipeline: Any = Pipeline
_pipeline._stop = _noticed
