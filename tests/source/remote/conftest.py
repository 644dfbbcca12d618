"""What tests of remote sources share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.stores import FolderStore

from ktconv.source.remote import mirror
from ktconv.source.remote.urls import Url


class Served:
    """Folders that are read as hf://org/NAME, and the stores that serve them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stores: dict[str, FolderStore] = {}
        self.prepare = lambda store: None  # for each store that is opened

    def open(self, url: Url) -> FolderStore:
        store = FolderStore(self.root / url.place.rpartition("/")[2])
        self.prepare(store)
        self.stores[url.place] = store
        return store


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """tmp_path / NAME is hf://org/NAME."""
    found = Served(tmp_path)
    monkeypatch.setattr(mirror, "open_store", found.open)
    yield found
    mirror.close_all()
