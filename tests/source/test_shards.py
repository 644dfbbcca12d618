"""Which files make up a checkpoint: indexes, shards, links, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import Tensor, simple_config, write_checkpoint, write_safetensors

from ktconv.errors import CheckpointError
from ktconv.source import open_checkpoint, source_identity

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert caught.value.hint
    return str(caught.value)


def change_index(directory: Path, **changes: Any) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"].update(changes)
    (directory / INDEX).write_text(json.dumps(index))


def test_sharded_with_index(checkpoint_dir: Path, tensors: dict[str, Tensor]) -> None:
    (checkpoint_dir / "original").mkdir()
    write_safetensors(checkpoint_dir / "original" / FIRST, {})  # another copy: never read
    checkpoint = open_checkpoint(checkpoint_dir)
    assert [file.name for file in checkpoint.files] == [FIRST, SECOND]
    assert checkpoint.config.content == simple_config()
    assert checkpoint.notes == []
    assert {m.tensor.name for e in checkpoint.layers[0].experts for m in e.values()} == set(tensors)


def test_single_file_wins_over_strays(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_checkpoint(tmp_path, tensors, simple_config())
    write_safetensors(tmp_path / "adapter.safetensors", {})
    checkpoint = open_checkpoint(str(tmp_path))
    assert [file.name for file in checkpoint.files] == ["model.safetensors"]
    assert "adapter.safetensors" in checkpoint.notes[0]


def test_shards_without_index(checkpoint_dir: Path) -> None:
    (checkpoint_dir / INDEX).unlink()
    assert len(open_checkpoint(checkpoint_dir).files) == 2
    (checkpoint_dir / FIRST).unlink()
    assert f"1 of the 2 shards in {checkpoint_dir} are missing: {FIRST}" in refusal(checkpoint_dir)


def test_other_index_name(checkpoint_dir: Path) -> None:
    (checkpoint_dir / INDEX).rename(checkpoint_dir / "weights.safetensors.index.json")
    assert len(open_checkpoint(checkpoint_dir).files) == 2
    (checkpoint_dir / "more.safetensors.index.json").write_text("{}")
    assert "several indexes" in refusal(checkpoint_dir)


def test_shards_that_are_links(tmp_path: Path, checkpoint_dir: Path) -> None:
    """The Hugging Face cache: names in a snapshot link to blobs elsewhere."""
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    checkpoint_dir.rename(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    checkpoint = open_checkpoint(snapshot)
    assert checkpoint.files[0] == snapshot / FIRST
    identity = source_identity(checkpoint)[1]
    assert identity["name"] == FIRST
    assert identity["mtime_ns"] == (blobs / FIRST).stat().st_mtime_ns
    (blobs / FIRST).unlink()
    assert "1 of the 2 shards" in refusal(snapshot)


def test_source_identity_changes_with_the_files(checkpoint_dir: Path) -> None:
    before = source_identity(open_checkpoint(checkpoint_dir))
    assert json.loads(json.dumps(before)) == before
    assert [item["name"] for item in before] == ["config.json", FIRST, SECOND]
    assert before[1].keys() == {"name", "bytes", "mtime_ns", "header_sha256"}
    assert source_identity(open_checkpoint(checkpoint_dir)) == before
    config = checkpoint_dir / "config.json"
    config.write_text(config.read_text() + "\n")
    after = source_identity(open_checkpoint(checkpoint_dir))
    assert after[0] != before[0]
    assert after[1:] == before[1:]


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "a\\b", "\0"]
)
def test_index_must_not_lead_out(checkpoint_dir: Path, name: str) -> None:
    change_index(checkpoint_dir, evil=name)
    message = refusal(checkpoint_dir)
    assert repr(name) in message
    assert INDEX in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {}}', "empty weight_map"),
        ('{"weight_map": {"a": 1}}', "maps 'a' to 1"),
        ('{"weight_map": {"a": "x.bin"}}', "not a safetensors file"),
        ('{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "the key 'a' twice"),
        ('{"weight_map": ' + "[" * 100_000, "nested too deeply"),
        (r'{"weight_map": {"a": "\udc80.safetensors"}}', "not valid Unicode"),
    ],
)
def test_checkpoint_with_a_damaged_index(checkpoint_dir: Path, content: str, reason: str) -> None:
    (checkpoint_dir / INDEX).write_text(content)
    message = refusal(checkpoint_dir)
    assert reason in message
    assert INDEX in message


def test_missing_shards_are_named(checkpoint_dir: Path) -> None:
    (checkpoint_dir / SECOND).unlink()
    message = refusal(checkpoint_dir)
    assert f"1 of the 2 shards that {checkpoint_dir / INDEX} names are missing: {SECOND}" in message


def test_truncated_shard_is_named(checkpoint_dir: Path) -> None:
    shard = checkpoint_dir / FIRST
    shard.write_bytes(shard.read_bytes()[:-10])
    message = refusal(checkpoint_dir)
    assert f"{shard} is truncated: 10 of its" in message


def test_index_names_a_key_that_no_shard_holds(checkpoint_dir: Path) -> None:
    change_index(checkpoint_dir, ghost=FIRST)
    assert f"{FIRST} contains 'ghost', but it does not" in refusal(checkpoint_dir)


def test_tensor_in_two_shards(checkpoint_dir: Path, tensors: dict[str, Tensor]) -> None:
    (checkpoint_dir / INDEX).unlink()
    write_safetensors(checkpoint_dir / SECOND, tensors)
    message = refusal(checkpoint_dir)
    assert f"in both {checkpoint_dir / FIRST} and {checkpoint_dir / SECOND}" in message


def test_file_that_the_index_does_not_name(checkpoint_dir: Path) -> None:
    write_safetensors(checkpoint_dir / "consolidated.safetensors", {})
    assert "consolidated.safetensors" in open_checkpoint(checkpoint_dir).notes[0]
    write_safetensors(checkpoint_dir / "model.safetensors", {})
    assert "contains both model.safetensors and" in refusal(checkpoint_dir)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("pytorch_model.bin", "unpickling can execute code"),
        ("model.pt", "unpickling can execute code"),
        ("consolidated.00.pth", "unpickling can execute code"),
        ("notes.txt", "contains no safetensors or GGUF file"),
        (None, "is empty"),
    ],
)
def test_no_safetensors(tmp_path: Path, file: str | None, reason: str) -> None:
    if file is not None:
        (tmp_path / file).touch()
    message = refusal(tmp_path)
    assert reason in message
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        ("", "not valid JSON"),
        ("7", "not a JSON object"),
        ('{"hidden_size": 1, "hidden_size": 2}', "the key 'hidden_size' twice"),
        ('{"hidden_size": "128"}', "hidden_size is '128', not a size"),
        ('{"hidden_size": true}', "hidden_size is True, not a size"),
        (r'{"model_type": "\udfff"}', "not valid Unicode"),
        ('{"num_experts": 4, "num_local_experts": 8}', "contradicts itself"),
        ('{"quantization_config": {"weight_block_size": [128]}}', "weight_block_size is [128]"),
        ('{"quantization_config": {"weight_block_size": [0, 1]}}', "not two positive integers"),
    ],
)
def test_config(checkpoint_dir: Path, content: str | None, reason: str) -> None:
    config = checkpoint_dir / "config.json"
    config.unlink() if content is None else config.write_text(content)
    message = refusal(checkpoint_dir)
    assert reason in message
    assert "config.json" in message


def test_opening_imports_nothing_heavy(checkpoint_dir: Path) -> None:
    code = (
        "import sys; from ktconv.source import open_checkpoint; open_checkpoint(sys.argv[1]);"
        "print(*{'numpy', 'torch', 'safetensors', 'huggingface_hub'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(checkpoint_dir)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == ""


def test_many_tensors_open_quickly(tmp_path: Path) -> None:
    """Far above the real cost, so that only a quadratic step fails it on a busy machine."""
    nothing = np.zeros((1, 1), np.float32)
    tensors: dict[str, Tensor] = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": nothing
        for layer in range(10)
        for expert in range(256)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    config = simple_config(
        hidden_size=1, moe_intermediate_size=1, num_experts=256, num_hidden_layers=10
    )
    write_checkpoint(tmp_path, tensors, config, shards=8)
    start = time.process_time()
    assert len(open_checkpoint(tmp_path).layers) == 10
    assert time.process_time() - start < 1.0
