"""Work in a forked process, which has what takes seconds to import."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def forked(work: Callable[[], object]) -> int:
    """Run `work` in a forked process. Returns its exit code: 1 after an exception, minus the number
    of the signal that ended it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
