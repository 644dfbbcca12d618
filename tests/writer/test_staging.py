"""Staged files: there with their whole size at once, final only after commit, gone if abandoned."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ktconv.errors import ResourceError
from ktconv.writer.shards import Tensor, plan_shard
from ktconv.writer.staging import (
    FolderStaging,
    ShardStaging,
    publish_folder,
    publish_shards,
    staged_name,
)

SHARDS = [
    plan_shard(name, [Tensor(f"{name}.{n}", "I8", (size,), size) for n, size in enumerate(sizes)],
               {"format": "pt"})
    for name, sizes in (("a", [100_000, 7]), ("b", [64]))
]  # fmt: skip
FILES = {"x": ("_layer_0/_numa_0/x.kt", 5), "y": ("_layer_0/_numa_1/y.kt", 3)}
Maker = Callable[..., ShardStaging]


@pytest.fixture
def shards(tmp_path: Path) -> Maker:
    (tmp_path / "staging").mkdir()
    return lambda attempt="": ShardStaging(SHARDS, tmp_path / "staging", tmp_path, attempt)


def names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


def test_shards_have_their_place_at_once(shards: Maker, tmp_path: Path) -> None:
    staging = shards()
    assert names(tmp_path / "staging") == ["a.part", "b.part"]
    assert staging.files() == [Path("a.part"), Path("b.part")]
    for shard in SHARDS:
        stat = (tmp_path / "staging" / f"{shard.name}.part").stat()
        assert stat.st_size == shard.size
        assert stat.st_blocks * 512 >= shard.size  # no hole: a full disk would show
    staging.abandon()
    assert names(tmp_path / "staging") == []


def test_shards_become_final_together(shards: Maker, tmp_path: Path) -> None:
    staging = shards()
    data = {"a.0": bytes(range(100)) * 1000, "a.1": b"1234567", "b.0": b"b" * 64}
    for name, content in data.items():
        staging.write(name, memoryview(content)[:3], 0)
        staging.write(name, memoryview(content)[3:], 3)
        found = bytearray(len(content) - 2)
        staging.read(name, memoryview(found), 2)
        assert bytes(found) == content[2:]
    assert names(tmp_path) == ["staging", "staging/a.part", "staging/b.part"]
    records = staging.commit()
    assert names(tmp_path) == ["a", "b", "staging"]
    for shard, record in zip(SHARDS, records, strict=True):
        content = (tmp_path / shard.name).read_bytes()
        assert content[: len(shard.header)] == shard.header
        for name, offset in shard.offsets.items():
            assert content[offset : offset + len(data[name])] == data[name]
        assert (record["name"], record["bytes"]) == (shard.name, len(content))


def test_attempts_have_names_of_their_own(shards: Maker, tmp_path: Path) -> None:
    one, two = shards("1"), shards("2")
    assert names(tmp_path / "staging") == ["a.1.part", "a.2.part", "b.1.part", "b.2.part"]
    assert staged_name("a", "1") == "a.1.part" and staged_name("a") == "a.part"
    one.abandon()
    two.seal()
    publish_shards(SHARDS, tmp_path / "staging", tmp_path, "2")
    assert names(tmp_path) == ["a", "b", "staging"]


def test_a_shard_that_cannot_be_made_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "staging/b.part").mkdir(parents=True)
    with pytest.raises(ResourceError, match=r"b\.part"):
        ShardStaging(SHARDS, tmp_path / "staging", tmp_path)
    assert names(tmp_path / "staging") == []


def test_a_folder_becomes_final_as_a_whole(tmp_path: Path) -> None:
    for content in (b"12345", b"abcde"):
        staging = FolderStaging("_layer_0", FILES, tmp_path / "staging", tmp_path)
        staging.write("x", memoryview(content)[2:], 2)
        staging.write("x", memoryview(content)[:2], 0)
        staging.write("y", memoryview(b"xyz"), 0)
        found = bytearray(3)
        staging.read("x", memoryview(found), 1)
        assert bytes(found) == content[1:4]
        assert [str(path) for path in staging.files()] == [
            "_layer_0.part/_numa_0/x.kt", "_layer_0.part/_numa_1/y.kt",
        ]  # fmt: skip
        records = staging.commit()
        assert records == [{"name": path, "bytes": size} for path, size in FILES.values()]
        assert (tmp_path / "_layer_0/_numa_0/x.kt").read_bytes() == content
        assert names(tmp_path / "staging") == []


def test_a_folder_that_is_abandoned(tmp_path: Path) -> None:
    (tmp_path / "staging/_layer_0.old.part").mkdir(parents=True)
    staging = FolderStaging("_layer_0", FILES, tmp_path / "staging", tmp_path, "7")
    assert names(tmp_path / "staging") == [
        "_layer_0.7.part", "_layer_0.7.part/_numa_0", "_layer_0.7.part/_numa_1",
    ]  # fmt: skip
    staging.abandon()
    assert names(tmp_path) == ["staging"]


def test_what_went_wrong_is_said_of_which_file(tmp_path: Path) -> None:
    staging = FolderStaging("_layer_0", FILES, tmp_path / "staging", tmp_path)
    shutil.rmtree(tmp_path / "staging/_layer_0.part/_numa_0")
    with pytest.raises(ResourceError, match=r"^cannot write .*/_numa_0/x\.kt: "):
        staging.write("x", memoryview(b"12345"), 0)
    with pytest.raises(ResourceError, match=r"^cannot read back .*/_numa_0/x\.kt: "):
        staging.read("x", memoryview(bytearray(5)), 0)
    with pytest.raises(ResourceError, match=r"^cannot write .*/_layer_0\.part: "):
        staging.commit()
    staging.abandon()
    with pytest.raises(ResourceError, match=r"^cannot rename .*/_layer_0\.part: "):
        publish_folder("_layer_0", tmp_path / "staging", tmp_path)
    with pytest.raises(ResourceError, match=r"^cannot rename .*/a\.part: "):
        publish_shards(SHARDS, tmp_path / "staging", tmp_path)
