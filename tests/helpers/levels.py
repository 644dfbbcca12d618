"""The library at another level of instruction sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from ktconv._native import ffi, lib

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


def isa_parts() -> list[str]:
    """Parts of levels that this machine can run, lowest first: what other CPUs have of them."""
    names = map(lib.kt_isa_part, itertools.count())
    return [ffi.string(name).decode() for name in itertools.takewhile(bool, names)]
