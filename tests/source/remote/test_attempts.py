"""Requests that are tried again: how long the pauses are, and when it ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.stores import FolderStore, ResetError

from ktconv.errors import CheckpointError
from ktconv.source.remote import attempts
from ktconv.source.remote.network_errors import is_cut_off, is_of_network

pytestmark = [pytest.mark.slow, pytest.mark.network]


class BusyError(ResetError):
    """429, with what the server says about it."""

    def __init__(self, asked: str | None) -> None:
        super().__init__("busy")
        self.response = SimpleNamespace(headers={} if asked is None else {"Retry-After": asked})


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [
        ("7", 7, 7),
        ("0", 0, 0.6),
        (None, 0, 0.6),
        ("86400", attempts.LONGEST_ASKED, attempts.LONGEST_ASKED),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0, 0.6),
        ("nan", 0, 0.6),
        ("-5", 0, 0.6),
    ],
)
def test_a_server_is_left_alone_for_as_long_as_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, least: float, most: float
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(attempts, "sleep", pauses.append)
    failures = [BusyError(asked)]

    def call() -> int:
        if failures:
            raise failures.pop()
        return 3

    assert attempts.attempt(FolderStore(tmp_path), call) == 3
    assert least <= pauses[0] <= most and len(pauses) == 1


def test_pauses_grow_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(attempts, "sleep", pauses.append)

    def call() -> int:
        raise ResetError("reset")

    with pytest.raises(CheckpointError, match="reset"):
        attempts.attempt(FolderStore(tmp_path), call)
    assert len(pauses) == attempts.ATTEMPTS - 1
    assert pauses[-1] > 4 * pauses[0] and 20 < sum(pauses) < 90


@pytest.mark.parametrize("package", ["httpx", "httpx2", "aiohttp", "botocore", "mine"])
def test_errors_of_all_libraries_are_told_apart(package: str) -> None:
    """Those of huggingface_hub's versions 1 and 2 too, whichever is installed."""
    base = type("TransportError", (Exception,), {"__module__": f"{package}._errors"})
    of_network = package != "mine"
    for name, cut in (("ReadError", True), ("RemoteProtocolError", True), ("ConnectError", False)):
        error = type(name, (base,), {"__module__": "other"})("broken")
        assert is_of_network(error) == of_network
        assert is_cut_off(error) == (of_network and cut)
