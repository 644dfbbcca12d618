"""Limits measured in milliseconds: tests judge no figures."""

from __future__ import annotations

from functools import partial

import pytest

from ktconv.bench import run
from ktconv.bench.limits import Meter

QuickMeter = partial(Meter, 4 << 20, dot_seconds=(1e-4, 1e-4))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Meter", QuickMeter)
