"""The result of a call that runs in the background."""

from __future__ import annotations

import os
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from ktconv.errors import UsageError
from ktconv.runtime.compiled import uncompiled

_MOMENT = 5e-5  # seconds: a sleeping thread wakes in less; otherwise Python lets it wait for 5 ms


class Handle:
    """Result of `MoELayer.submit`. Any thread of the process may wait, any number of times."""

    def __init__(self, future: Future[Any]) -> None:
        self._future, self._process = future, os.getpid()

    @classmethod
    def failed(cls, error: BaseException) -> Handle:
        """A handle of a call that cannot be made: waiting raises `error`."""
        future: Future[Any] = Future()
        future.set_exception(error)
        return cls(future)

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once. A thread that asks again and again leaves the interpreter
        to the call's own thread meanwhile, by waiting for the call for a moment."""
        if self._process == os.getpid() and not self._future.done():
            futures.wait([self._future], _MOMENT)
        return self._process != os.getpid() or self._future.done()

    @uncompiled
    def wait(self) -> Any:
        """The result, once it is there; raises what the call raised. UsageError in a child process,
        where no thread would ever finish the call."""
        if self._process != os.getpid():
            raise UsageError(
                "the call was submitted by the parent process", "call the layer in this process"
            )
        return self._future.result()
