"""The library at another level of instruction sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ktconv import native


@contextmanager
def at_level(isa: str) -> Iterator[None]:
    """The library at this level, for tests that go through all of them: what is right is computed
    once. Tests with the fixture `isa` say which levels the machine lacks."""
    before = native.isa()
    native.use_isa(isa)
    try:
        yield
    finally:
        native.use_isa(before)
