"""What tests of the kernels share."""

from __future__ import annotations

import pytest

from ktconv import native
from ktconv.formats import FORMATS


@pytest.fixture
def kernel_level(isa: str) -> str:
    """The levels at which layers run code of their own."""
    if isa not in native.kernel_levels(*(method.layout for method in FORMATS.values())):
        pytest.skip(f"there are no kernels for {isa}")
    return isa
