"""LoRA adapters beside a model, and in place of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import done, ktconv, ktconv_done, refused, run, write_model
from helpers.convert import convert
from helpers.families import bf16, random_weights, write_safetensors

from ktconv.source import ModelSource, open_checkpoint
from ktconv.source.adapter.beside import is_adapter_file

FILES = ("adapter_config.json", "adapter_model.safetensors", "fused_expert_lora.safetensors")
ONE = {"layers.0.experts.gate_lora_a": bf16(random_weights().up[0])}


def add_adapter(directory: Path, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / FILES[0]).write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8, **config})
    )
    for name in FILES[1:]:
        write_safetensors(directory / name, ONE)
    (directory / "adapter_model.safetensors.index.json").write_text("{}")
    return directory


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("indexed", [True, False])
def test_beside_a_model(tmp_path: Path, shards: int, indexed: bool) -> None:
    """With an index, or without one, when all other shards are read."""
    model = add_adapter(write_model(tmp_path / "model", shards=shards))
    clean = write_model(tmp_path / "clean", shards=shards)
    if not indexed:
        (model / "model.safetensors.index.json").unlink(missing_ok=True)
    note = f"a LoRA adapter lies in {model} and is not merged"
    [found] = open_checkpoint(model).notes
    assert found.startswith(note) and all(name in found for name in FILES)
    assert note in done(model, tmp_path / "dry", "--dry-run")
    assert note in " ".join(ktconv_done("inspect", model).split())
    for source in (model, clean):
        done(source, tmp_path / f"{source.name}-out")
    names = [
        {path.name for path in (tmp_path / f"{one}-out").iterdir()} for one in ("model", "clean")
    ]
    assert names[0] == names[1]
    for path in (tmp_path / "model-out").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "clean-out" / path.name).read_bytes()
    ktconv_done("verify", tmp_path / "model-out", "--source", model, "--level", "weights")


def test_beside_the_files_of_config(tmp_path: Path) -> None:
    model, other = write_model(tmp_path / "model"), add_adapter(write_model(tmp_path / "other"))
    done(model, tmp_path / "out", "--config", other)
    assert not (tmp_path / "out" / FILES[0]).exists()
    assert str(other) in open_checkpoint(ModelSource(model, other)).notes[0]


def test_in_layer_folders_that_are_merged(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    convert(model, tmp_path / "layers", layout="layers")
    manifest = json.loads((tmp_path / "layers" / "ktconv.json").read_text())
    del manifest["side_files"]  # of an earlier version, which copied it
    (tmp_path / "layers" / "ktconv.json").write_text(json.dumps(manifest))
    (tmp_path / "layers" / FILES[0]).write_text("{}")
    ktconv_done("merge", tmp_path / "layers", tmp_path / "out")
    assert not (tmp_path / "out" / FILES[0]).exists()


def test_in_an_output_it_is_a_flaw(tmp_path: Path) -> None:
    """Loaders read it."""
    model = write_model(tmp_path / "model")
    convert(model, tmp_path / "out")
    (tmp_path / "out" / FILES[0]).write_text("{}")
    found = ktconv("verify", tmp_path / "out")
    assert found.exit_code == 1 and f"{FILES[0]} was not written by this conversion" in found.stdout


def test_in_place_of_a_model(tmp_path: Path) -> None:
    model, adapter = write_model(tmp_path / "model"), add_adapter(tmp_path / "adapter")
    for name in ("tokenizer.json", "config.json", "optimizer.pt", "training_args.bin"):
        (adapter / name).write_text("{}")  # what a trainer puts there
    convert(model, tmp_path / "out")
    convert(model, tmp_path / "layers", layout="layers")
    words = f"{adapter} is a LoRA adapter of org/base, not a model"
    refused(run(adapter, tmp_path / "new"), 2, words)
    for command in (
        ("inspect", adapter),
        ("plan", adapter, "--ep", 2),
        ("stats", adapter),
        ("verify", tmp_path / "out", "--source", adapter),
        ("merge", tmp_path / "layers", tmp_path / "new", "--source", adapter),
        ("quantize-gpu", adapter, tmp_path / "new"),
    ):
        refused(ktconv(*command), 2, words)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"adapter_model.safetensors": ""}, "is a LoRA adapter, not a model"),
        ({"fused_expert_lora.safetensors": ""}, "is a LoRA adapter, not a model"),
        ({"adapters.safetensors": "", "adapter_config.json": "{"}, "is a LoRA adapter, not"),
        ({"adapter_model.bin": "", "adapter_config.json": "{}"}, "is a LoRA adapter, not a"),
        ({"adapter_config.json": '{"peft_type": "IA3"}'}, "is an adapter of type 'IA3', not"),
    ],
)
def test_kinds_of_adapter(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    refused(ktconv("inspect", tmp_path), 2, f"{tmp_path} {words}")


def test_pickled_weights_beside_one_are_a_model(tmp_path: Path) -> None:
    add_adapter(tmp_path)
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    assert "contains only pickle weights" in refused(ktconv("inspect", tmp_path), 2)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model-lora-merged.safetensors", "adapter.safetensors", "config.json"],
)
def test_names_of_other_files(name: str) -> None:
    assert not is_adapter_file(name)
