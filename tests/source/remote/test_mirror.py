"""Commands on a source that is read over a network: what they write, read, notice and say."""

from __future__ import annotations

import json
import os
import pickle
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import contents, done, ktconv, ktconv_done, refused, run, write_model
from helpers.convert import read_model, read_shards
from helpers.families import (
    bf16,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
    write_safetensors,
)
from helpers.stores import FolderStore, ResetError, close_stores
from source.remote.conftest import Served, weights

from ktconv.errors import CheckpointError
from ktconv.source import open_checkpoint
from ktconv.source.remote import attempts, mirror
from ktconv.source.remote.store import RemoteFile
from ktconv.system.stores import local_path, transfer

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.usefixtures("no_pauses")]

URL = "hf://org/model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", layers=2)


def texts(output: Path) -> str:
    files = (path for path in output.rglob("*") if path.suffix in (".json", ".md"))
    return "".join(path.read_text() for path in files)


def every(count: int, fault: str) -> Any:
    """A fault of every so-manyth read."""

    def apply(number: int, data: bytes) -> bytes:
        if number % count:
            return data
        if fault == "reset":
            raise ResetError("connection reset")
        return data[: len(data) // 2]

    return apply


@pytest.mark.parametrize("fault", [None, "reset", "short"])
def test_quantize_cpu_writes_what_it_writes_from_a_local_copy(
    model: Path, tmp_path: Path, served: Served, fault: str | None
) -> None:
    def prepare(store: FolderStore) -> None:
        if fault:
            store.fault = every(3, fault)

    served.prepare = prepare
    retries = transfer.retries
    done(model, tmp_path / "local")
    done(URL, tmp_path / "remote")
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")
    assert (transfer.retries > retries) == (fault is not None)
    assert "ktconv-" not in texts(tmp_path / "remote").replace("ktconv-version", "")
    manifest = json.loads((tmp_path / "remote" / "ktconv.json").read_text())
    for name, source in manifest["source"]["files"].items():
        assert "mtime_ns" not in source and ("etag" in source) == name.endswith(".safetensors")


def test_each_byte_is_read_once_and_none_is_kept(
    model: Path, tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    done(URL, tmp_path / "remote")
    store = served.stores["org/model"]
    size = sum(path.stat().st_size for path in model.iterdir())
    assert store.nbytes < 2.5 * size  # headers are read again with what follows them: small files
    [copies] = (tmp_path / "tmp").iterdir()
    assert (copies / "config.json").exists() and not list(copies.rglob("*.safetensors"))
    close_stores()
    assert not list((tmp_path / "tmp").iterdir())


def test_verify_stats_and_inspect_read_the_same_way(
    model: Path, tmp_path: Path, served: Served
) -> None:
    done(model, tmp_path / "local")
    local = json.loads(
        ktconv_done("verify", tmp_path / "local", "--source", model, "--level=weights", "--json")
    )
    found = json.loads(
        ktconv_done("verify", tmp_path / "local", "--source", URL, "--level=weights", "--json")
    )
    assert found["source"] == "hf://org/model@main" and found["level"] == "weights"
    assert found["network_bytes"] > 0 and "network_bytes" not in local
    assert found["weights"] == local["weights"]
    assert "hf://org/model" in ktconv_done("inspect", URL)
    about = json.loads(ktconv_done("inspect", URL, "--json"))
    assert about.pop("network_bytes") > 0 and about.pop("network_requests") > 0
    there = json.loads(ktconv_done("inspect", model, "--json"))
    assert about == there | {"path": "hf://org/model@main"}


def test_inspect_reads_headers_only(tmp_path: Path, served: Served) -> None:
    model = write_model(tmp_path / "model", layers=2, inner=1024, experts=16, shards=1)
    ktconv_done("inspect", URL)
    (size,) = (path.stat().st_size for path in model.glob("*.safetensors"))
    assert served.stores["org/model"].nbytes < size / 8


def test_quantize_gpu_reads_the_same_way(model: Path, tmp_path: Path, served: Served) -> None:
    ktconv_done("quantize-gpu", model, tmp_path / "local", "--scheme=W4A16")
    ktconv_done("quantize-gpu", URL, tmp_path / "remote", "--scheme=W4A16")
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")


def test_cards_say_how_to_make_them_again(model: Path, tmp_path: Path, served: Served) -> None:
    done(URL, tmp_path / "cpu")
    ktconv_done("quantize-gpu", URL, tmp_path / "gpu", "--scheme=W4A16")
    for output, command in (("cpu", "quantize-cpu"), ("gpu", "quantize-gpu")):
        card = (tmp_path / output / "README.md").read_text()
        assert "base_model: org/model\n" in card
        assert f"    ktconv {command} hf://org/model@main OUTPUT" in card


def test_a_run_continues_where_it_was(model: Path, tmp_path: Path, served: Served) -> None:
    done(model, tmp_path / "local")
    done(URL, tmp_path / "remote", "--layers=1")
    close_stores()
    first = served.stores["org/model"].nbytes
    done(URL, tmp_path / "remote")
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")
    assert served.stores["org/model"].nbytes < first + sum(
        path.stat().st_size for path in model.iterdir()
    )


def test_a_source_that_changes_is_noticed_before_a_layer_is_kept(
    model: Path, tmp_path: Path, served: Served
) -> None:
    target = sorted(model.glob("*.safetensors"))[-1]

    def prepare(store: FolderStore) -> None:
        def fault(_: int, data: bytes) -> bytes:
            if len(data) > 10_000 and store.states == 0:
                os.utime(target, ns=(1, 1))
            return data

        store.fault = fault

    served.prepare = prepare
    said = refused(run(URL, tmp_path / "remote"), 2, "changed while it was read")
    assert said.startswith(f"Error: {URL}@main/{target.name}")
    assert not contents(tmp_path / "remote").get("model.safetensors.index.json")


def test_a_server_that_stays_away_ends_in_one_sentence(
    model: Path, tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)

    def prepare(store: FolderStore) -> None:
        def fault(_: int, data: bytes) -> bytes:
            if len(data) > 10_000:
                raise ResetError("connection reset")
            return data

        store.fault = fault

    served.prepare = prepare
    refused(run(URL, tmp_path / "remote"), 2, f"{URL}@main: connection reset")
    served.prepare = lambda store: None
    close_stores()
    done(URL, tmp_path / "remote")  # and the same command goes on later


def test_answers_that_are_always_cut_are_no_lost_connection(
    model: Path, tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)

    def prepare(store: FolderStore) -> None:
        store.fault = lambda _, data: data[:-1] if len(data) > 10_000 else data

    served.prepare = prepare
    refused(run(URL, tmp_path / "remote"), 3, f"{URL}@main sent ", "2 times in a row")


def test_a_remote_path_names_its_file_and_is_none_of_this_machine(
    model: Path, served: Served
) -> None:
    """Whatever reads it by its name fails, rather than to read something else."""
    (model / "folder" / "inner").mkdir(parents=True)
    (model / "folder" / "inner" / "x.txt").write_text("text")
    root = mirror.open_remote(URL)
    names = {path.name for path in model.iterdir()}
    assert str(root) == f"{URL}@main" and root.name == "model" and root.parent == root
    assert {path.name for path in root.iterdir()} == names
    config, inner = root / "config.json", root / "folder" / "inner"
    assert str(config) == f"{URL}@main/config.json" and config.is_file() and not config.is_dir()
    assert inner.is_dir() and inner.parent.parent == root and not (root / "none").exists()
    assert [str(one) for one in inner.iterdir()] == [f"{URL}@main/folder/inner/x.txt"]
    assert config.with_name("x").relative_to(root).as_posix() == "x"
    with pytest.raises(FileNotFoundError):
        config.read_bytes()
    assert local_path(config).read_bytes() == (model / "config.json").read_bytes()
    again = pickle.loads(pickle.dumps(inner / "x.txt"))
    assert again == inner / "x.txt" and again.store is root.store


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/../../x", "a\0b"])
def test_a_listing_cannot_lead_out_of_the_mirror(model: Path, served: Served, name: str) -> None:
    def prepare(store: FolderStore) -> None:
        listed = store.files()
        changed = RemoteFile(name, 1, "x")
        store.files = lambda: [*listed, changed]  # type: ignore[method-assign]

    served.prepare = prepare
    refused(ktconv("inspect", URL), 2, "which leads out of it")


@pytest.mark.parametrize(
    ("url", "phrase"),
    [
        ("ftp://host/dir", "ftp://host/dir is not a URL that ktconv reads"),
        ("hf://name", "hf://name is not a repository of the hub"),
        ("hf://org/name@", "is not a repository of the hub"),
        ("s3://", "names no directory"),
        ("https://user:secret@host/../dir/?sig=secret", "https://host/../dir/ names no directory"),
    ],
)
def test_urls_that_are_none_are_refused(tmp_path: Path, url: str, phrase: str) -> None:
    for words in (("inspect", url), ("quantize-cpu", url, tmp_path / "output")):
        result = ktconv(*words)
        refused(result, 2, phrase)
        assert not re.search("secret", result.output)


def test_headers_take_little_more_than_their_bytes(tmp_path: Path, served: Served) -> None:
    """By one request for each, as the index foretells their sizes."""
    model = write_model(tmp_path / "model", layers=3, experts=16, shards=6)
    checkpoint = open_checkpoint(URL)
    store = served.stores["org/model"]
    heads = {name: (start, stop) for name, start, stop in store.reads if "-of-" in name}
    assert len(checkpoint.files) == 6 == len([one for one in store.reads if "-of-" in one[0]])
    for name, (start, stop) in heads.items():
        size = 8 + int.from_bytes((model / name).read_bytes()[:8], "little")
        assert start == 0 and size <= stop <= 1.5 * size


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2669283096\n"


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", "LICENSE", "model-00002-of-00003.safetensors"]
)
def test_pointers_of_git_lfs_are_refused_before_anything_is_written(
    model: Path, tmp_path: Path, served: Served, name: str
) -> None:
    (model / name).write_text(POINTER)
    for more in (["--dry-run"], []):
        words = f"{URL}@main/{name} is a Git LFS pointer in place of a file of 2.7 GB"
        refused(run(URL, tmp_path / "out", *more), 2, words)
        assert not (tmp_path / "out").exists()


def test_short_side_files_are_fetched_once(model: Path, tmp_path: Path, served: Served) -> None:
    (model / "tokenizer.json").write_text("x" * 2000)
    (model / "generation_config.json").write_text("{}")
    done(URL, tmp_path / "out", "--dry-run")
    [store] = served.stores.values()
    read = [name for name, _, _ in store.reads]
    assert "tokenizer.json" not in read and read.count("generation_config.json") == 1
    done(URL, tmp_path / "out")
    read = [name for name, _, _ in store.reads]
    assert read.count("tokenizer.json") == read.count("generation_config.json") == 1


def test_what_lies_there_is_looked_at(model: Path, tmp_path: Path, served: Served) -> None:
    """Of shards that the index calls otherwise, and of a second copy of a tensor."""
    done(model, tmp_path / "expected")
    index = json.loads((model / "model.safetensors.index.json").read_text())
    shard = model / "model-00002-of-00003.safetensors"
    shard.rename(model / "weights-2.safetensors")
    done(URL, tmp_path / "renamed")
    assert weights(tmp_path / "renamed").keys() == weights(tmp_path / "expected").keys()
    assert read_model(tmp_path / "renamed") == read_model(tmp_path / "expected")
    [note] = open_checkpoint(URL).notes
    assert f"names 1 shard that is not there: {shard.name}; " in note
    close_stores()
    copied = next(name for name, file in index["weight_map"].items() if file != shard.name)
    (model / "weights-2.safetensors").rename(shard)
    tensors = read_shards([shard]) | {copied: bf16(random_weights(seed=5).up[0])}
    write_safetensors(shard, tensors)
    [note] = open_checkpoint(URL).notes
    assert "ignored 1 tensor that" in note and "has in other shards" in note
    done(URL, tmp_path / "copied")
    assert read_model(tmp_path / "copied") == read_model(tmp_path / "expected")


def test_an_index_that_names_a_missing_tensor(served: Served, tmp_path: Path) -> None:
    weights = numbered("model.layers.0.mlp.experts", random_weights())
    model = write_checkpoint(tmp_path / "m", weights, simple_config(), shards=2)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.mlp.gate.weight"] = "model-00001-of-00002.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.gate\.weight"):
        open_checkpoint("hf://org/m")
