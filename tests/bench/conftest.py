"""Limits measured in milliseconds: tests judge no figures."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from ktconv.bench import run, weights
from ktconv.bench.limits import Meter

QuickMeter = partial(Meter, 4 << 20, dot_seconds=(1e-4, 1e-4))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Meter", QuickMeter)


@pytest.fixture(scope="session", autouse=True)
def few_numbers() -> Iterator[None]:
    """Matrices repeat a block of numbers: drawing a million takes longer than most rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_BLOCK", 1 << 16)
        yield
