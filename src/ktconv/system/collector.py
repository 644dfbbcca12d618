"""The cyclic garbage collector while very many objects are made that stay alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection inside, or while a function runs that this decorates.

    Nearly all objects of an opened checkpoint and of a plan stay alive, and none form cycles:
    with 100 000 tensors the collector would walk them again and again for a quarter of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
