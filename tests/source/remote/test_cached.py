"""--cache-dir: nothing is read twice, and nothing damaged is used."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.cli import done, ktconv, ktconv_done, refused, write_model
from helpers.stores import FolderStore, close_stores
from source.remote.conftest import Served

from ktconv.source.remote import attempts
from ktconv.source.remote.cached import ByteCache

pytestmark = [pytest.mark.slow, pytest.mark.network]

CONTENT = random.Random(0).randbytes(50_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").write_bytes(CONTENT)
    return tmp_path / "model"


class Cached(NamedTuple):
    cache: ByteCache
    store: FolderStore


def opened(folder: Path, cache: Path) -> tuple[Cached, FolderStore]:
    inner = FolderStore(folder)
    return Cached(ByteCache(inner.url, cache), inner), inner


def read(cached: Cached, start: int, stop: int) -> bytes:
    [file] = cached.store.files()
    fetch = partial(attempts.fetch, cached.store)
    return bytes(cached.cache.read(file, start, stop, fetch))


def test_only_what_is_not_there_is_read(folder: Path, tmp_path: Path) -> None:
    store, inner = opened(folder, tmp_path / "cache")
    for start, stop in [(100, 200), (150, 300), (0, 50), (0, 400), (120, 290), (0, 0)]:
        assert read(store, start, stop) == CONTENT[start:stop]
    wanted = [(100, 200), (200, 300), (0, 50), (50, 100), (300, 400)]
    assert [(start, stop) for _, start, stop in inner.reads] == wanted
    store, inner = opened(folder, tmp_path / "cache")  # as another process does
    assert read(store, 0, 400) == CONTENT[:400] and not inner.reads


@pytest.mark.parametrize("seed", range(5))
def test_any_ranges_of_any_runs(folder: Path, tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    total = 0
    for _ in range(4):
        store, inner = opened(folder, tmp_path / "cache")
        for _ in range(40):
            start = choose.randrange(50_000)
            stop = min(start + choose.randrange(1, 9000), 50_000)
            assert read(store, start, stop) == CONTENT[start:stop]
        total += inner.nbytes
    assert total <= 50_000


def test_damage_is_read_anew(folder: Path, tmp_path: Path) -> None:
    """As after a power cut: a log whose data did not reach the disk, and half a line."""
    store, _ = opened(folder, tmp_path / "cache")
    read(store, 0, 1000), read(store, 2000, 3000)
    [data], [log] = (list((tmp_path / "cache").rglob(f"*.{kind}")) for kind in ("data", "log"))
    data.write_bytes(bytes(1000) + data.read_bytes()[1000:])
    log.write_bytes(log.read_bytes() + b"5000 6000 abc")
    store, inner = opened(folder, tmp_path / "cache")
    assert read(store, 0, 6000) == CONTENT[:6000]
    assert [one[1:] for one in inner.reads] == [(0, 2000), (3000, 6000)]
    data.write_bytes(b"")
    log.write_bytes(b"x\n1 2\n-5 3 0\n7 7 0\n0 999999 0\n" + log.read_bytes())
    store, inner = opened(folder, tmp_path / "cache")
    assert read(store, 0, 3000) == CONTENT[:3000]


def test_another_state_of_the_file_is_another_file(folder: Path, tmp_path: Path) -> None:
    store, _ = opened(folder, tmp_path / "cache")
    read(store, 0, 1000)
    (folder / "a").write_bytes(CONTENT[::-1])
    store, inner = opened(folder, tmp_path / "cache")
    assert read(store, 0, 1000) == CONTENT[::-1][:1000] and len(inner.reads) == 1


def test_a_second_command_transfers_nothing(tmp_path: Path, served: Served) -> None:
    write_model(tmp_path / "model", layers=2)
    cache, url = ("--cache-dir", tmp_path / "cache"), "hf://org/model"
    done(url, tmp_path / "out", *cache)
    close_stores()
    ktconv_done("verify", tmp_path / "out", "--source", url, "--level=weights", *cache)
    assert served.stores["org/model"].nbytes == 0
    close_stores()
    done(url, tmp_path / "again", *cache)
    assert served.stores["org/model"].nbytes == 0


def test_directories_that_cannot_be_used(tmp_path: Path, served: Served) -> None:
    write_model(tmp_path / "model", layers=1)
    (tmp_path / "file").write_text("x")
    words = ("quantize-cpu", "hf://org/model", tmp_path / "out")
    refused(ktconv(*words, "--cache-dir", tmp_path / "file"), 2, "is no directory")
    local = ("quantize-cpu", tmp_path / "model", tmp_path / "out")
    refused(ktconv(*local, "--cache-dir", tmp_path / "c"), 2, "is on this machine")
    assert not (tmp_path / "out").exists()
