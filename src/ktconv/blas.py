"""NumPy's BLAS without threads of its own, while threads of ours share the work.

OpenBLAS's threads wait for each other by spinning, in every product. Where other processes use the
CPUs too, a small product then takes many times as long, and all the CPU time there is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

MAPS = Path("/proc/self/maps")
_SPELLINGS = [
    (f"{prefix}openblas_get_num_threads{suffix}", f"{prefix}openblas_set_num_threads{suffix}")
    for prefix in ("scipy_", "")
    for suffix in ("64_", "")
]


@contextmanager
def one_thread() -> Iterator[None]:
    """Products run in the thread that asks for them; no change where NumPy has another BLAS."""
    found = _openblas()
    if found is None:
        yield
        return
    get, set_to = found
    before = get()
    set_to(1)
    try:
        yield
    finally:
        set_to(before)


@cache
def _openblas() -> tuple[Callable[[], int], Callable[[int], object]] | None:
    """The functions of the OpenBLAS in this process that get and set its number of threads."""
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(None, 5)[5] for line in lines if "openblas" in line.rpartition("/")[2]}
    for path in sorted(paths):
        library = ctypes.CDLL(path)  # which is loaded already
        for getter, setter in _SPELLINGS:
            if hasattr(library, setter):
                return getattr(library, getter), getattr(library, setter)
    return None
