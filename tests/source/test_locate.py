"""The MODEL argument: directories, hub ids in the local cache, and everything else."""

from __future__ import annotations

import builtins
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from ktconv.errors import CheckpointError
from ktconv.source.locate import locate_model


def refusal(model: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        locate_model(model)
    assert caught.value.hint
    return caught.value


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_directory(tmp_path: Path) -> None:
    assert locate_model(tmp_path) == tmp_path
    assert locate_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.safetensors", "is a file, not a checkpoint directory"),
        ("model.safetensors.index.json", "is a file, not a checkpoint directory"),
        ("model.txt", "not a directory"),
    ],
)
def test_a_file(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / name).touch()
    error = refusal(str(tmp_path / name))
    assert reason in str(error)
    assert name in str(error)
    if "not a checkpoint directory" in str(error):
        assert str(tmp_path) in str(error.hint)


@pytest.mark.parametrize("model", ["no-such-thing", "/no/such/thing", "./org/name", "a/b/c", "\0"])
def test_neither_path_nor_hub_id(model: str) -> None:
    assert "does not exist" in str(refusal(model))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    constants: Any = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("no_network")
def test_cached_model(cache: Path) -> None:
    commit = "0" * 40
    repo = cache / "models--org--tiny-moe"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert locate_model("org/tiny-moe") == snapshot


@pytest.mark.usefixtures("no_network", "cache")
@pytest.mark.parametrize("model", ["org/absent", "org/bad..name"])
def test_not_cached(model: str) -> None:
    error = refusal(model)
    assert f"{model} is neither a directory nor a model in the local" in str(error)
    assert f"hf download {model}" in str(error.hint)


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    error = refusal("org/name")
    assert "without huggingface_hub" in str(error)
    assert "pip install huggingface_hub" in str(error.hint)
