"""The result of a call that runs in the background."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


class Handle:
    """What `MoELayer.submit` returns. Any thread may wait, any number of times."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    @classmethod
    def failed(cls, error: BaseException) -> Handle:
        """Of a call that cannot be made: waiting raises `error`."""
        future: Future[Any] = Future()
        future.set_exception(error)
        return cls(future)

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._future.done()

    def wait(self) -> Any:
        """The result, once it is there; raises what the call raised."""
        return self._future.result()
