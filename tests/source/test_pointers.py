"""Pointers of Git LFS, in place of every file that something reads or copies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.cli import ktconv, refused, run, write_model
from helpers.convert import convert

from ktconv.errors import CheckpointError
from ktconv.system.opened import opened_source
from ktconv.system.pointers import POINTER_BYTES, PointerError, refuse_pointer_at
from ktconv.system.regular_files import read_small

SHA = "ac02591061f1344027a7e7b11dbb4143f75f166c47dc09b742f5de3ab1dde1d1"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{SHA}\nsize 2669283096\n"
WORDS = "is a Git LFS pointer in place of a file of 2.7 GB"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def pointer(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(POINTER)
    return path


@pytest.mark.parametrize(
    "name",
    [
        SHARD,
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "vocab.txt",
        "modeling_own.py",
        "LICENSE",
        "README.md",
        "quant_model_description.json",
    ],
)
@pytest.mark.parametrize("more", [("--dry-run",), ()])
def test_no_conversion_begins(
    model: Path, tmp_path: Path, name: str, more: tuple[str, ...]
) -> None:
    path = pointer(model / name)
    output = tmp_path / "out"
    result = run(model, output, *more)
    refused(result, 2, f"{path} {WORDS}")
    assert "git lfs pull" in result.stderr
    assert not output.exists()


@pytest.mark.parametrize("method", ["rawint4", "bf16"])
def test_no_checkpoint_is_written_either(model: Path, tmp_path: Path, method: str) -> None:
    path = pointer(model / "tokenizer.json")
    words = ("quantize-cpu", model, tmp_path / "out", "--method", method)
    refused(ktconv(*words), 2, f"{path} {WORDS}")
    refused(ktconv("quantize-gpu", model, tmp_path / "out"), 2, f"{path} {WORDS}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a-00001-of-00002.gguf", "a.gguf"])
def test_gguf(tmp_path: Path, name: str) -> None:
    path = pointer(tmp_path / "gguf" / name)
    pointer(path.with_name(name.replace("00001-", "00002-")))
    for place in (path, path.parent):
        refused(ktconv("inspect", place), 2, f"{path} {WORDS}")
    renamed = pointer(tmp_path / "blob")  # as in a cache, where names say nothing
    refused(ktconv("inspect", renamed), 2, f"{renamed} {WORDS}")


def test_files_that_options_name(model: Path, tmp_path: Path) -> None:
    given = pointer(tmp_path / "given.json")
    table = pointer(tmp_path / "given.toml")
    arrays = pointer(tmp_path / "given.safetensors")
    for options in (
        ("--map", table),
        ("--exclude-experts", given, "--allow-partial"),
        ("--importance", arrays),
    ):
        refused(run(model, tmp_path / "out", *options), 2, WORDS)
    refused(ktconv("quantize-cpu", model, tmp_path / "out", "--recipe", table), 2, WORDS)
    refused(ktconv("stats", given), 2, WORDS)
    refused(ktconv("stats", arrays), 2, WORDS)
    refused(ktconv("plan", model, "--ep", 2, "--load", given), 2, WORDS)
    folder = tmp_path / "config"
    shutil.copytree(model, folder)
    pointer(folder / "config.json")
    refused(run(model, tmp_path / "out", "--config", folder), 2, WORDS)


def test_a_text(tmp_path: Path) -> None:
    from ktconv.model.text import read_text

    with pytest.raises(PointerError, match="Git LFS"):
        read_text(pointer(tmp_path / "corpus.txt"))


def test_outputs(model: Path, tmp_path: Path) -> None:
    """Of verify, merge, reshard, compare, push; and sources beside them."""
    output, layers = tmp_path / "out", tmp_path / "layers"
    convert(model, output)
    convert(model, layers, layout="layers")

    damaged = Path(shutil.copytree(output, tmp_path / "tokenizer"))
    pointer(damaged / "tokenizer.json")
    found = ktconv("verify", damaged)
    assert found.exit_code == 1 and WORDS in found.stdout
    refused(ktconv("push", damaged, "org/name", "--dry-run"), 2, WORDS)
    assert ktconv("reshard", damaged, tmp_path / "new", "--numa", 1).exit_code != 0
    assert not (tmp_path / "new").exists()

    damaged = Path(shutil.copytree(output, tmp_path / "shard"))
    pointer(next(damaged.glob("model-00002-of-*.safetensors")))
    found = ktconv("verify", damaged)
    assert found.exit_code == 1 and WORDS in found.stdout
    refused(ktconv("push", damaged, "org/name", "--dry-run"), 2, WORDS)
    found = ktconv("reshard", damaged, tmp_path / "new", "--numa", 1)
    assert found.exit_code != 0 and WORDS in found.stderr

    folders = Path(shutil.copytree(layers, tmp_path / "kt"))
    pointer(next(folders.glob("_layer_1/_numa_0/*.kt")))
    refused(ktconv("merge", folders, tmp_path / "new"), 2, WORDS)
    found = ktconv("verify", folders)
    assert found.exit_code == 1 and WORDS in found.stdout

    pointer(model / SHARD)
    for words in (("verify", output), ("merge", layers, tmp_path / "new")):
        refused(ktconv(*words, "--source", model), 2, WORDS)
    refused(ktconv("stats", model), 2, WORDS)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (POINTER.replace("\n", "\r\n"), "a file of 2.7 GB"),
        (POINTER.replace("2669283096", "12"), "a file of 12 B"),
        ("version https://git-lfs.github.com/spec/v1\nsize 7 or so\n", "the file"),
        ("version https://git-lfs", "the file"),
        (POINTER.ljust(POINTER_BYTES - 1), "a file of 2.7 GB"),
    ],
)
def test_what_counts_as_one(tmp_path: Path, text: str, size: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode())
    for reader in (
        lambda: read_small(tmp_path, "x.json"),
        lambda: opened_source(path).__enter__(),
        lambda: refuse_pointer_at(path),
    ):
        with pytest.raises(PointerError) as caught:
            reader()
        assert f"{path} is a Git LFS pointer in place of {size}:" in str(caught.value)
        assert isinstance(caught.value, CheckpointError)


@pytest.mark.parametrize(
    "text",
    ["", "version", json.dumps({"of": POINTER}), POINTER.ljust(POINTER_BYTES), "\n" + POINTER],
)
def test_what_does_not(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert read_small(tmp_path, "x.json") == text.encode()
    refuse_pointer_at(path)
