"""Paths of a remote store: they list, join and match as local ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ktconv.system.stores import RemotePath, RemoteStore

FILES = (
    "config.json", "model-1.safetensors", "model-2.safetensors", "[odd]*.json", "a/config.json",
    "a/b/model.safetensors", "_layer_0/_numa_0/x.kt", "_layer_1/_numa_1/y.kt",
)  # fmt: skip


class TreeStore(RemoteStore):
    """Serves the names below a local folder."""

    memory, name, shown = 0, "tree", "https://example.org/tree"

    def __init__(self, root: Path) -> None:
        self.root = root

    def kind(self, path: RemotePath) -> str:
        here = self.root / path.inner
        return "file" if here.is_file() else "folder" if here.is_dir() else ""

    def names(self, path: RemotePath) -> Any:
        return [one.name for one in (self.root / path.inner).iterdir()]

    def _unused(self, *_: Any) -> Any:
        raise AssertionError("names alone are asked for")

    open = advise = kept = confirm = nbytes = local = _unused  # type: ignore[assignment]


@pytest.mark.parametrize(
    "pattern",
    [
        "*", "*.safetensors", "config.json", "nothing*", "*/config.json", "**/*.json", "**",
        "_layer_*/_numa_*/*.kt", "_layer_0/**/*.kt", "config.json/*", "[[]odd]*", "a/**/b/*",
    ],
)  # fmt: skip
def test_glob_finds_what_a_local_folder_has(pattern: str, tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    root = RemotePath(TreeStore(tmp_path))
    local = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob(pattern)}
    folders = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*/")}
    found = [path.inner or "." for path in root.glob(pattern)]
    assert len(found) == len(set(found))
    if pattern == "**":  # of folders alone before Python 3.13
        assert set(found) & (folders | {"."}) == local & (folders | {"."})
        return
    assert set(found) == local and bool(local) != (pattern in ("nothing*", "config.json/*"))
    assert {path.inner for path in root.rglob("*.json")} == {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")
    }


def test_a_folder_that_is_not_there_matches_nothing(tmp_path: Path) -> None:
    root = RemotePath(TreeStore(tmp_path))
    assert list((root / "nothing").glob("*")) == []
    with pytest.raises(ValueError, match="pattern"):
        list(root.glob(""))
