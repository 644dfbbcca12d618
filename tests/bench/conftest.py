"""Limits measured in milliseconds: tests judge no figures."""

from __future__ import annotations

from functools import partial

import pytest

from ktconv.bench import limits, run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Meter", partial(limits.Meter, 4 << 20))
    monkeypatch.setattr(limits, "_DOT_SECONDS", 1e-4)
    monkeypatch.setattr(limits, "_DOT_AGAIN_SECONDS", 1e-4)
