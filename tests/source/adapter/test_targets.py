"""Adapters of some experts: their config says which, and what else is missing is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import read_model
from helpers.lora import CONFIG, WEIGHTS, Sides, sides, write_adapter
from helpers.paths import EXAMPLE
from safetensors.numpy import load_file, save_file

import ktconv as library
from ktconv.errors import CheckpointError
from ktconv.runtime import MoELayer
from ktconv.source import ModelSource, open_checkpoint
from ktconv.source.adapter.targets import TargetModules
from ktconv.system import patterns

pytestmark = pytest.mark.slow

HIDDEN, INNER, EXPERTS = 128, 256, 8
SHAPES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
SOURCE = "model.layers.{}.mlp.experts.{}.{}_proj"
Key = tuple[int, int, str]  # layer, expert, projection


def some(keys: list[Key]) -> dict[Key, Sides]:
    rng = np.random.default_rng(3)
    return {key: sides(rng, *SHAPES[key[2]]) for key in keys}


def written(directory: Path, pairs: dict[Key, Sides], **settings: Any) -> Path:
    modules = {SOURCE.format(*key): pair for key, pair in pairs.items()}
    return write_adapter(directory, modules, **settings)


def filled(pairs: dict[Key, Sides]) -> dict[Key, Sides]:
    """The same adapter with all experts of its layers, to most of which it adds zeros."""
    layers, names = {key[0] for key in pairs}, {key[2] for key in pairs}
    zeros = {
        (layer, expert, name): (np.zeros((4, SHAPES[name][1]), np.float32),
                                np.zeros((SHAPES[name][0], 4), np.float32))
        for layer in layers
        for expert in range(EXPERTS)
        for name in names
    }  # fmt: skip
    return zeros | pairs


OF_EXPERTS: list[tuple[list[Key], dict[str, Any]]] = [
    (  # full names of modules
        [(0, 3, "up"), (1, 5, "gate"), (1, 5, "down"), (1, 7, "down")],
        {
            "target_modules": [
                SOURCE.format(*one)
                for one in [(0, 3, "up"), (1, 5, "gate"), (1, 5, "down"), (1, 7, "down")]
            ]
        },
    ),
    (  # their ends, which both layers have
        [(layer, 0, name) for layer in (0, 1) for name in ("up", "down")],
        {"target_modules": ["experts.0.up_proj", "experts.0.down_proj"]},
    ),
    (  # a pattern
        [(1, expert, name) for expert in (1, 2) for name in SHAPES],
        {"target_modules": r".*layers\.1\..*experts\.[12]\.(gate|up|down)_proj"},
    ),
    (  # all but some
        [(0, expert, "up") for expert in range(EXPERTS) if expert != 4],
        {
            "target_modules": ["up_proj"],
            "exclude_modules": ["experts.4.up_proj"],
            "layers_to_transform": [0],
        },
    ),
    (  # by old versions of PEFT: the number of an expert in place of a layer's
        [(layer, expert, "up") for layer in (0, 1) for expert in (2, 6)],
        {"target_modules": ["up_proj"], "layers_to_transform": [2, 6]},
    ),
]


@pytest.mark.parametrize("number", range(len(OF_EXPERTS)))
def test_experts_that_the_config_names(number: int, tmp_path: Path) -> None:
    """Converted and proven, and at inference: as with zeros for the others."""
    keys, settings = OF_EXPERTS[number]
    pairs = some(keys)
    adapter = written(tmp_path / "adapter", pairs, **settings)
    whole = written(tmp_path / "whole", filled(pairs))
    for one in (adapter, whole):
        library.quantize_cpu(EXAMPLE, f"{one}-int8", method="int8", adapter=one)
    found, expected = (read_model(Path(f"{one}-int8")) for one in (adapter, whole))
    assert {name: one.data for name, one in found.items()} == {
        name: one.data for name, one in expected.items()
    }
    report = library.verify(f"{adapter}-int8", source=EXAMPLE, level="weights")
    assert report["passed"]
    rng = np.random.default_rng(1)
    x = rng.standard_normal((16, HIDDEN), np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(16)])
    weights = rng.random((16, 2), np.float32)
    layer = keys[0][0]
    calls = [
        MoELayer.load(EXAMPLE, layer, adapter=one)(x, ids, weights) for one in (adapter, whole)
    ]
    assert np.array_equal(*calls)
    assert not np.array_equal(calls[0], MoELayer.load(EXAMPLE, layer)(x, ids, weights))


def test_others_keep_their_bytes(tmp_path: Path) -> None:
    """A matrix without LoRA stays in its own file and encoding."""
    keys, settings = OF_EXPERTS[0]
    adapter = written(tmp_path / "adapter", some(keys), **settings)
    base = open_checkpoint(ModelSource(EXAMPLE))
    layers = open_checkpoint(ModelSource(EXAMPLE, adapter=(str(adapter),))).layers
    changed = {
        (layer.index, number, name)
        for layer, own in zip(layers, base.layers, strict=True)
        for number, (expert, before) in enumerate(zip(layer.experts, own.experts, strict=True))
        for name in expert
        if expert[name] != before[name]
    }
    assert changed == set(keys)
    assert [layer.encoding for layer in layers] == ["bf16+fp32"] * 2


def test_a_model_merged_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from ktconv.model import load_model
    from ktconv.model.sites import find_experts
    from ktconv.train import load, merge, prepare

    keys, settings = OF_EXPERTS[0]
    pairs = some(keys)
    adapter = written(tmp_path / "adapter", pairs, **settings)
    model, before = (load_model(EXAMPLE, "float32")[0] for _ in range(2))
    merge(model, adapter)
    for layer in (0, 1):
        sites = [find_experts(one)[layer].own for one in (model, before)]
        for expert in range(EXPERTS):
            found, own = (one.matrices(expert) for one in sites)
            matrices: Any = zip(found.values(), own.values(), found, strict=True)
            for now, first, name in matrices:
                a, b = pairs.get((layer, expert, name), (np.zeros((1, 1)), np.zeros((1, 1))))
                change = (now - first).numpy()
                assert np.abs(change - 2 * (b @ a)).max() < 1e-6
    prepare(before, rank=4, alpha=8, targets=("gate", "up", "down"))
    with pytest.raises(CheckpointError, match=r"has LoRA of up in layer 0, the model of gate"):
        load(before, adapter)
    every = [(layer, 5, name) for layer in (0, 1) for name in SHAPES]
    of_one = written(
        tmp_path / "one", some(every), target_modules=[SOURCE.format(*key) for key in every]
    )
    with pytest.raises(CheckpointError, match=r"leaves gate of expert 0 in layer 0 as it is"):
        load(before, of_one)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": ["up_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": r".*experts\.\d+\.up_proj"},
        {"target_modules": ["up_proj"], "layers_to_transform": [0, 1]},
        {"target_modules": ["up_proj"], "exclude_modules": ["experts.2.up_proj"]},
        {"target_modules": [SOURCE.format(0, expert, "up") for expert in range(EXPERTS)]},
    ],
)
def test_a_matrix_that_the_config_names_and_the_file_lacks(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    pairs = some([(0, expert, "up") for expert in range(EXPERTS) if expert != 3])
    adapter = written(tmp_path / "adapter", pairs, **settings)
    with pytest.raises(CheckpointError, match=r"not contain .*0.mlp.experts.3.up_proj") as error:
        open_checkpoint(ModelSource(EXAMPLE, adapter=(str(adapter),)))
    assert "target_modules" in str(error.value.hint)


def test_half_of_a_matrix(tmp_path: Path) -> None:
    keys, settings = OF_EXPERTS[0]
    adapter = written(tmp_path / "adapter", some(keys), **settings)
    stored = load_file(adapter / WEIGHTS)
    del stored["base_model.model.model.layers.1.mlp.experts.7.down_proj.lora_A.weight"]
    save_file(stored, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"not contain .*experts.7.down_proj.lora_A.weight"):
        open_checkpoint(ModelSource(EXAMPLE, adapter=(str(adapter),)))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"((.|..)+)+\d", "patterns of target_modules take too long"),
        ("(", "include .* which is no regular expression"),
    ],
)
def test_patterns_that_cannot_be_matched(
    pattern: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.05)
    adapter = written(tmp_path / "adapter", some([(0, 1, "up")]), target_modules=pattern)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(ModelSource(EXAMPLE, adapter=(str(adapter),)))


def test_the_rule_is_that_of_peft(tmp_path: Path) -> None:
    """For names that have numbers of layers, of experts, both and none."""
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists

    modules = [SOURCE.format(*key) for key in ((0, 1, "up"), (1, 0, "up"), (2, 2, "down"))]
    modules += ["model.layers.1.self_attn.q_proj", "lm_head", "layers.1.up_proj", "up_proj"]
    for settings in (
        {"target_modules": ["up_proj"]},
        {"target_modules": ["proj", "experts.0.up_proj"]},
        {"target_modules": [*modules[:2], "down_proj"], "layers_to_transform": 0},
        {"target_modules": ["up_proj", "q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]},
        {"target_modules": r".*\.up_proj|lm_head"},
        {"target_modules": r"up_proj"},
        {"target_modules": ["up_proj"], "exclude_modules": r".*experts\.0.*"},
        {"target_modules": ["up_proj", "lm_head"], "exclude_modules": ["layers.1.up_proj"]},
    ):
        config = peft.LoraConfig(**settings)
        own = TargetModules(tmp_path, json.loads(json.dumps(settings)), [])
        for module in modules:
            wanted = bool(check_target_module_exists(config, module))
            assert own.has(module) == wanted, (settings, module)


def test_a_config_of_others(tmp_path: Path) -> None:
    """Of tensors that are all there, the config says nothing that is needed."""
    pairs = some([(0, expert, "up") for expert in range(EXPERTS)])
    adapter = written(tmp_path / "adapter", pairs, target_modules=["q_proj"])
    assert json.loads((adapter / CONFIG).read_text())["target_modules"] == ["q_proj"]
    checkpoint = open_checkpoint(ModelSource(EXAMPLE, adapter=(str(adapter),)))
    assert "8 matrices of experts" in " ".join(checkpoint.notes)
