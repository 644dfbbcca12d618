"""Functions of CUDA that PyTorch lacks: host functions, and memory that lives as long as a graph.

Calls go to the driver, libcuda, of which a process has one, whatever CUDA runtime its PyTorch was
built with; its functions have kept their names and arguments since CUDA 11.3. Streams of the
runtime are the driver's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from ktconv.errors import ResourceError, UsageError

_CAPTURES = 1  # a cuStreamCaptureStatus
_RELAXED = 2  # a CUstreamCaptureMode: this thread may allocate while any thread captures
_PORTABLE = 1  # of cuMemHostAlloc: pinned for all devices
_NO_SYNC = 1  # of cuUserObjectCreate: nobody waits for its destructor
_MOVE = 1  # of cuGraphRetainUserObject: our reference becomes the graph's


class Capture(NamedTuple):
    """A stream's capture: its number in this process, and the driver's address of its graph."""

    number: int
    graph: int


class Memory:
    """Pinned memory, returned to the driver with this object."""

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self._cuda, address = cuda, ctypes.c_void_p()
        with cuda.relaxed():
            cuda.call("cuMemHostAlloc", ctypes.byref(address), max(1, nbytes), _PORTABLE)
        self.address, self.nbytes = address.value or 0, nbytes

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._cuda.free(self.address)


class Cuda:
    """The driver. ResourceError names what it refuses."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        """A function of the driver by its name; addresses are given as c_void_p."""
        status = getattr(self._library, name)(*arguments)
        if status:
            raise ResourceError(f"{name} of the CUDA driver failed: {self._words(status)}")

    def _words(self, status: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorString(status, ctypes.byref(text)) or text.value is None:
            return f"error {status}"
        return f"{text.value.decode()} ({status})"

    def launch(self, stream: int, function: int, data: int) -> None:
        """Puts a host function, by its address, on a stream: it runs once all before it is done,
        and what follows waits for it."""
        self.call(
            "cuLaunchHostFunc",
            ctypes.c_void_p(stream), ctypes.c_void_p(function), ctypes.c_void_p(data),
        )  # fmt: skip

    def capture(self, stream: int) -> Capture | None:
        """The capture that the stream takes part in."""
        if not stream:  # the legacy stream, which cannot be captured, and refuses to say so
            return None
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        self.call(
            "cuStreamGetCaptureInfo_v2",
            ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number),
            ctypes.byref(graph), None, None,
        )  # fmt: skip
        return Capture(number.value, graph.value or 0) if status.value == _CAPTURES else None

    def tell_end(self, graph: int, function: int, data: int) -> None:
        """Lets the driver call a host function, by its address, once the graph and all that was
        made of it are gone."""
        made = ctypes.c_void_p()
        self.call(
            "cuUserObjectCreate",
            ctypes.byref(made), ctypes.c_void_p(data), ctypes.c_void_p(function), 1, _NO_SYNC,
        )  # fmt: skip
        self.call("cuGraphRetainUserObject", ctypes.c_void_p(graph), made, 1, _MOVE)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Memory may be pinned and returned by this thread, though a graph is being captured."""
        mode = ctypes.c_int(_RELAXED)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def free(self, address: int) -> None:
        """Returns memory; at the end of a process the driver may be gone, and its memory too."""
        mode = ctypes.c_int(_RELAXED)
        for name, argument in (
            ("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)),
            ("cuMemFreeHost", ctypes.c_void_p(address)),
            ("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)),
        ):
            getattr(self._library, name)(argument)


@cache
def driver() -> Cuda:
    """The driver of this process. UsageError where there is none."""
    try:
        return Cuda(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise UsageError(f"the CUDA driver cannot be opened: {error}") from None
