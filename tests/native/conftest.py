"""The fixture that runs a test on every level of instruction sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ktconv import native


@pytest.fixture(params=list(native.ISA_NAMES.values()))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level in turn, in use during the test; one that the machine lacks is skipped."""
    level: str = request.param
    if level not in native.isa_available():
        pytest.skip(f"this machine lacks {level}")
    before = native.isa()
    native.use_isa(level)
    yield level
    native.use_isa(before)
