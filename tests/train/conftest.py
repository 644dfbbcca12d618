"""Threads of the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ktconv.runtime import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(2) as made:
        yield made
