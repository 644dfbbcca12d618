"""A hub on this machine, and outputs to send there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cli import write_model
from helpers.convert import convert
from helpers.hub_uploads import TOKEN, Hub, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """Empty, and what the library talks to, logged in."""
    constants = pytest.importorskip("huggingface_hub.constants")
    server.reset()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return server


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output with three shards; nobody may change it."""
    room = tmp_path_factory.mktemp("push")
    convert(write_model(room / "model", layers=2), room / "out")
    return room / "out"
