"""Copies in other shards: transformers takes the last that it meets, ktconv that of the index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.convert import Converted, convert, read_model
from helpers.paths import EXAMPLE

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file

from ktconv.model import load_model

pytestmark = pytest.mark.torch

INDEX = "model.safetensors.index.json"


@pytest.fixture
def overlaid(tmp_path: Path) -> Path:
    """The example, whose last shard has wrong copies of the first expert and the norm."""
    model = Path(shutil.copytree(EXAMPLE, tmp_path / "model"))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    save_file(tensors, model / "a.safetensors", {"format": "pt"})
    wrong = [*[name for name in tensors if ".experts." in name][:3], "model.norm.weight"]
    own = next(name for name in tensors if name not in wrong)
    stale = {name: -tensors[name] for name in wrong}
    last = {own: tensors[own], **stale, "unused": torch.ones(4)}
    save_file(last, model / "b.safetensors", {"format": "pt"})
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {own: "b.safetensors"}
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return model


def test_the_source_is_loaded_as_it_is_converted(
    overlaid: Path, tmp_path: Path, converted_example: Converted
) -> None:
    ids = torch.arange(32)[None]
    with torch.inference_mode():
        expected = load_model(EXAMPLE, "float32")[0](ids).logits
        found = load_model(overlaid, "float32")[0](ids).logits
    assert torch.equal(found, expected)
    convert(overlaid, tmp_path / "out", method="int8")
    expected_output = converted_example(method="int8")
    assert read_model(tmp_path / "out") == read_model(expected_output)
