"""Processes of our own that end with the process that started them, however that ends.

A child holds the reading end of a pipe whose only writing end this process has, and a thread of the
child waits there: whatever ends this process, kill -9 included, closes the pipe. Linux has a signal
for it too, PR_SET_PDEATHSIG, but that follows the thread that started the child, which is one of a
pool, and is lost where the parent ends before the child asks for it. An end of file is neither.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import IO, Any


def start(
    program: str,
    *,
    stderr: int | IO[Any] | None,
    environment: Mapping[str, str] | None = None,
    errors: str | None = None,
) -> subprocess.Popen[str]:
    """Start Python with the text of a program, whose standard input and output are pipes."""
    life = _pipe()[0]
    return subprocess.Popen(
        [sys.executable, "-c", f"{_WATCH.format(life=life)}; {program}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
        text=True,
        errors=errors,
        pass_fds=[life],
    )


# Without this module, which the child may not find yet. Exit code 130, as after an interrupt.
_WATCH = (
    "import os, threading; "
    "threading.Thread(target=lambda: (os.read({life}, 1), os._exit(130)), daemon=True).start()"
)


@cache
def _pipe() -> tuple[int, int]:
    """The pipe of this process for all its children; no end is inherited unless passed on."""
    return os.pipe()
