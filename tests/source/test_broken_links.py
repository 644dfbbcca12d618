"""Links that lead to nothing: what `cp -a` makes of a snapshot in the hub's cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.cli import ktconv, refused, run, write_model

FIRST, INDEX = "model-00001-of-00003.safetensors", "model.safetensors.index.json"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """As the hub's library makes one."""
    repository = tmp_path / "models--org--name"
    blobs = write_model(repository / "blobs")
    found = repository / "snapshots" / "0123abc"
    found.mkdir(parents=True)
    for file in blobs.iterdir():
        (found / file.name).symlink_to(Path("../../blobs", file.name))
    return found


@pytest.fixture
def copied(snapshot: Path, tmp_path: Path) -> Path:
    """`cp -a`: the links, without what they lead to."""
    return Path(shutil.copytree(snapshot, tmp_path / "copied", symlinks=True))


def repair(snapshot: Path, copied: Path, *names: str) -> None:
    for name in names:
        (copied / name).unlink()
        shutil.copyfile(snapshot / name, copied / name)


def test_a_whole_copy(copied: Path, tmp_path: Path) -> None:
    result = run(copied, tmp_path / "out")
    refused(result, 2, f"{copied / INDEX} is a broken link to ../../blobs/{INDEX}")
    assert "copied from a snapshot in the Hugging Face cache" in result.stderr
    assert "`cp -rL`" in result.stderr


def test_shards(snapshot: Path, copied: Path, tmp_path: Path) -> None:
    repair(snapshot, copied, INDEX, "config.json")
    result = run(copied, tmp_path / "out")
    refused(
        result,
        2,
        f"3 of the 3 shards that {copied / INDEX} names are broken links: {FIRST}",
        f"; {FIRST} leads to ../../blobs/{FIRST}",
    )
    assert "`cp -rL`" in result.stderr
    (copied / FIRST).unlink()
    refused(run(copied, tmp_path / "out"), 2, "are missing, or broken links")
    (copied / INDEX).unlink()
    shutil.copyfile(snapshot / FIRST, copied / FIRST)
    second = FIRST.replace("00001-", "00002-")
    refused(run(copied, tmp_path / "out"), 2, f"{copied / second} is a broken link to ../../blobs")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "LICENSE", "chat.jinja"])
def test_side_files(snapshot: Path, copied: Path, tmp_path: Path, name: str) -> None:
    repair(snapshot, copied, INDEX, "config.json", "tokenizer.json")
    repair(snapshot, copied, *(path.name for path in copied.glob("*.safetensors")))
    (copied / name).unlink(missing_ok=True)
    (copied / name).symlink_to("../../blobs/abc")
    for more in (["--dry-run"], []):
        result = run(copied, tmp_path / "out", *more)
        refused(result, 2, f"{copied / name} is a broken link to ../../blobs/abc")
        assert "`cp -rL`" in result.stderr
    assert not (tmp_path / "out").exists()


def test_in_the_cache_itself(snapshot: Path, tmp_path: Path) -> None:
    """Nothing was copied: what is missing is downloaded."""
    (snapshot.parent.parent / "blobs" / FIRST).unlink()
    result = run(snapshot, tmp_path / "out")
    refused(result, 2, f"1 of the 3 shards that {snapshot / INDEX} names are broken links: {FIRST}")
    assert f"hf download org/name {FIRST} --revision 0123abc" in result.stderr
    (snapshot / FIRST).unlink()
    (snapshot / FIRST).touch()
    (snapshot.parent.parent / "blobs" / "config.json").unlink()
    result = ktconv("inspect", snapshot)
    refused(result, 2, f"{snapshot / 'config.json'} is a broken link")
    assert "Download it again" in result.stderr and "cp -rL" not in result.stderr


def test_gguf_and_the_model_itself(tmp_path: Path) -> None:
    parts = [f"m-{n:05d}-of-00002.gguf" for n in (1, 2)]
    folder = tmp_path / "gguf"
    folder.mkdir()
    for part in parts:
        (folder / part).symlink_to(Path("../../blobs", part))
    words = f"2 of the 2 parts of {folder / 'm'} are broken links: {parts[0]}, {parts[1]}"
    refused(ktconv("inspect", folder), 2, words)
    words = f"{folder / parts[0]} is a broken link to ../../blobs/{parts[0]}"
    refused(ktconv("inspect", folder / parts[0]), 2, words)
    lost = tmp_path / "model"
    lost.symlink_to("nowhere")
    refused(ktconv("inspect", lost), 2, f"{lost} is a broken link to nowhere")
