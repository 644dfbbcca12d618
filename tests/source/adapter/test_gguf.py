"""Adapters added to experts of GGUF files: names are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import assert_output, matrices_of
from helpers.families import HIDDEN, Weights
from helpers.gguf_files import EXPERTS, INNER, around, metadata, write_gguf
from helpers.lora import Sides, sides, with_lora, write_adapter

import ktconv as library
from ktconv.errors import CheckpointError
from ktconv.source import ModelSource, open_checkpoint

pytestmark = pytest.mark.slow

SOURCE = "model.layers.{}.mlp.experts.{}.{}_proj"
NAMES = ("gate", "up", "down")
TYPES = {"gate": "Q8_0", "up": "Q5_0", "down": "BF16"}  # which the package decodes, too
Key = tuple[int, int, str]  # layer, expert, matrix


def written(directory: Path, layers: int) -> tuple[Path, list[Weights]]:
    """A model whose matrices have types of their own, and the values that its files have."""
    import gguf

    rng, tensors, found = np.random.default_rng(5), dict[str, Any](), []
    for index in range(layers):
        values = {}
        for name in NAMES:
            shape = (HIDDEN, INNER) if name == "down" else (INNER, HIDDEN)
            one = rng.standard_normal((EXPERTS, *shape), np.float32) / 8
            kind = gguf.GGMLQuantizationType[TYPES[name]]
            stored = gguf.quants.quantize(one, kind)
            values[name] = gguf.quants.dequantize(stored, kind).astype(np.float32)
            tensors[f"blk.{index}.ffn_{name}_exps.weight"] = one
        tensors |= around(index)
        found.append(Weights(*(values[name] for name in NAMES)))
    tensors["token_embd.weight"] = np.ones((8, HIDDEN), np.float32)
    types = {f"ffn_{name}_exps": kind for name, kind in TYPES.items()}
    path = write_gguf(directory / "tiny-moe.gguf", tensors, metadata(layers), types=types)
    return path, found


def pairs_of(layers: int) -> dict[Key, Sides]:
    rng = np.random.default_rng(6)
    return {
        (layer, expert, name): sides(rng, *((HIDDEN, INNER) if name == "down" else (INNER, HIDDEN)))
        for layer in range(layers)
        for expert in range(EXPERTS)
        for name in NAMES
    }


def test_experts_of_all_types(tmp_path: Path) -> None:
    """Packed bytes are those of the decoded numbers with LoRA, one layer with a weight of two
    adapters, and `verify` proves them."""
    model, weights = written(tmp_path, 2)
    first = pairs_of(2)
    second = {key: pair for key, pair in pairs_of(1).items() if key[2] != "gate"}
    adapters = [
        write_adapter(
            tmp_path / f"adapter-{n}", {SOURCE.format(*key): one for key, one in pairs.items()}
        )
        for n, pairs in enumerate((first, second))
    ]
    given = [str(adapters[0]), f"{adapters[1]}:-0.25"]
    options: dict[str, Any] = {"method": "int8", "requantize": True, "experts_only": True}
    library.quantize_cpu(model, tmp_path / "out", adapter=given, **options)
    sums = {}
    for layer, own in enumerate(weights):
        stacks = []
        for name in NAMES:
            rows = []
            for expert, one in enumerate(getattr(own, name)):
                key = layer, expert, name
                added = [(first[key], 2.0)]
                added += [(second[key], -0.5)] if key in second else []
                rows.append(with_lora(one, added))
            stacks.append(np.stack(rows))
        sums[layer] = Weights(*stacks)
    assert_output(tmp_path / "out", matrices_of(sums), {}, method="int8", numa=1)
    report = library.verify(tmp_path / "out", source=model, level="weights")
    assert report["passed"], report["failures"]


def test_a_tensor_that_is_no_experts(tmp_path: Path) -> None:
    model, _ = written(tmp_path, 1)
    pair = sides(np.random.default_rng(1), EXPERTS, HIDDEN)
    adapter = write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.gate": pair})
    with pytest.raises(
        CheckpointError, match=r"gate.lora_A.weight .* is no expert's: its name"
    ) as one:
        open_checkpoint(ModelSource(model, adapter=(str(adapter),)))
    assert "convert the safetensors checkpoint" in str(one.value.hint)
