"""Work in a forked process, which has what takes seconds to import."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

SECONDS = 300  # after which a process ends that waits for another one


def forked(work: Callable[[], object]) -> int:
    """Run `work` in a forked process. Returns its exit code: 1 after an exception, minus the number
    of the signal that ended it."""
    return forked_together([work])[0]


def forked_together(works: Sequence[Callable[[], object]]) -> list[int]:
    """Run each in a process of its own, all at the same time."""
    children = [_fork(work) for work in works]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(SECONDS)
            work()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child
