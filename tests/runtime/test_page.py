"""The examples of docs/runtime.md and of the README."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import convert
from helpers.paths import EXAMPLE, ROOT
from safetensors.numpy import save_file

PAGE = "docs/runtime.md"
WORDS = {"gate_proj": (256, 128), "up_proj": (256, 128), "down_proj": (128, 256)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a MODEL, its OUTPUT, and two adapters."""
    path = tmp_path_factory.mktemp("page")
    shutil.copytree(EXAMPLE, path / "MODEL")
    convert(path / "MODEL", path / "OUTPUT", method="int4")
    for seed, name in enumerate(("ADAPTER", "OTHER")):
        (path / name).mkdir()
        write_adapter(path / name, np.random.default_rng(seed))
    return path


def write_adapter(directory: Path, rng: np.random.Generator) -> None:
    """LoRA of rank 4 of all experts in layer 1 of the example."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for expert in range(8):
        for word, (outputs, inputs) in WORDS.items():
            name = f"base_model.model.model.layers.1.mlp.experts.{expert}.{word}.lora"
            tensors[f"{name}_A.weight"] = rng.standard_normal((4, inputs), np.float32) / 10
            tensors[f"{name}_B.weight"] = rng.standard_normal((outputs, 4), np.float32) / 10
    save_file(tensors, directory / "adapter_model.safetensors")


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks continue one another; what they print is in their comments."""
    monkeypatch.chdir(folder)
    known: dict[str, Any] = {}
    found = blocks(PAGE)
    assert len(found) == 7
    for block in found:
        exec(block, known)
        printed = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == printed
    assert known["y"].shape == (5, known["layer"].hidden)


def test_the_readme(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    block = next(block for block in blocks("README.md") if "ktconv.runtime" in block)
    known = {
        "x": np.ones((2, 128), "f4"),
        "ids": np.array([[1], [5]]),
        "weights": np.ones((2, 1), "f4"),
    }
    exec(block.replace('"OUTPUT", 3', '"OUTPUT", 1'), known)
    assert known["y"].any() and '"OUTPUT", 3' in block
