"""How many experts a layer has: tensors and router say it, and config.json is a cross-check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import (
    HIDDEN,
    Tensor,
    bf16,
    fused,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)

from ktconv.errors import CheckpointError
from ktconv.families.config import Config
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.source.agreement import contradictions
from ktconv.source.config import interpret_config


def model(
    directory: Path, counts: list[int], rows: list[int] | None = None, /, made: Any = numbered,
    **config: Any,
) -> Path:  # fmt: skip
    """Layers with these numbers of experts, and routers with these numbers of rows."""
    tensors: dict[str, Tensor] = {}
    for index, count in enumerate(counts):
        block = f"model.layers.{index}.mlp"
        tensors |= made(f"{block}.experts", random_weights(experts=count, seed=index))
        if rows is not None:
            router = np.ones((rows[index], HIDDEN), np.float32)
            tensors[f"{block}.gate.weight"] = bf16(router)
    content = simple_config(**{"num_hidden_layers": len(counts), **config})
    return write_checkpoint(directory, tensors, content)


def counted(checkpoint: Checkpoint) -> list[int]:
    return [len(layer.experts) for layer in checkpoint.layers]


def stacked(source: str, weights: Any) -> dict[str, Tensor]:
    return fused(source, weights, transposed=False)


@pytest.mark.parametrize("made", [numbered, stacked])
@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 6},  # the largest
        {"num_experts": 6, "num_experts_per_layer": [6, 4, 5]},
        {"num_experts": None, "n_routed_experts": 6, "n_routed_experts_per_layer": [6, 4, 5]},
        {"num_experts": [6, 4, 5]},
        {"num_experts": None},
    ],
)
def test_each_layer_has_the_number_of_its_tensors(
    config: dict[str, Any], made: Any, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(model(tmp_path, [6, 4, 5], [6, 4, 5], made=made, **config))
    assert counted(checkpoint) == [6, 4, 5]
    assert any("6 (layer 0), 4 (layer 1), 5 (layer 2)" in note for note in checkpoint.notes)


@pytest.mark.parametrize("made", [numbered, stacked])
@pytest.mark.parametrize(("said", "counts"), [(8, [4, 4]), (2, [4, 4]), (8, [4, 6]), (4, [4, 6])])
def test_a_stale_number_is_named(said: int, counts: list[int], made: Any, tmp_path: Path) -> None:
    """Pruned and renumbered experts whose config.json has another number, larger or smaller."""
    path = model(tmp_path, counts, counts, made=made, num_experts=said)
    with pytest.raises(CheckpointError, match=r"config\.json's num_experts is stale") as caught:
        open_checkpoint(path)
    assert f"is {said}" in str(caught.value) and caught.value.hint is not None
    assert f"Set num_experts to {max(counts)}" in caught.value.hint
    path = model(tmp_path, counts, counts, made=made, num_experts=max(counts))
    assert counted(open_checkpoint(path)) == counts


def test_experts_that_are_missing_are_missing(tmp_path: Path) -> None:
    """The router has their rows, or nothing confirms a smaller number."""
    for rows in ([6, 6], None):
        with pytest.raises(CheckpointError, match="the layer has no expert 4, 5 of 0-5") as caught:
            open_checkpoint(model(tmp_path, [6, 4], rows, num_experts=6))
        assert "Download the checkpoint again" in str(caught.value.hint)
    path = model(tmp_path, [6, 6], [6, 6], num_experts=6)
    tensors = {
        name: tensor
        for name, tensor in _tensors([6, 6]).items()
        if not name.startswith("model.layers.1.mlp.experts.2.")
    }
    write_checkpoint(path, tensors, simple_config(num_hidden_layers=2, num_experts=6))
    with pytest.raises(CheckpointError, match="the layer has no expert 2 of 0-5"):
        open_checkpoint(path)


def _tensors(counts: list[int]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for index, count in enumerate(counts):
        block = f"model.layers.{index}.mlp"
        found |= numbered(f"{block}.experts", random_weights(experts=count, seed=index))
        found[f"{block}.gate.weight"] = bf16(np.ones((count, HIDDEN), np.float32))
    return found


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_router_with_rows_for_other_experts(kind: str, tmp_path: Path) -> None:
    """8 rows for 4 experts: which of them are whose is not known, whatever config.json says."""
    for said in (4, 8, None):
        path = model(tmp_path, [4], [8], model_type=kind, num_experts=said)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        text = str(caught.value)
        assert "[8, 128]" in text or "has no expert 4, 5, 6, 7 of 0-7" in text


def test_rows_that_an_unknown_family_may_have(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model(tmp_path, [4], [5], model_type="new_moe"))
    assert any(
        "1 row more than their layers have experts (layer 0)" in one for one in checkpoint.notes
    )
    with pytest.raises(CheckpointError, match="4 experts, but their router"):
        open_checkpoint(model(tmp_path, [4], [3], model_type="new_moe"))


@pytest.mark.parametrize(("zero", "rows"), [(2, 6), (2, 4), (0, 6)])
def test_rows_of_identity_experts(zero: int, rows: int, tmp_path: Path) -> None:
    """LongCat's router has a row for each of them, too."""
    path = model(
        tmp_path, [4], None, model_type="longcat_flash", num_layers=1, zero_expert_num=zero
    )
    tensors = _tensors([4])
    router = "model.layers.0.mlp.router.classifier.weight"
    tensors[router] = bf16(np.ones((rows, HIDDEN), np.float32))
    del tensors["model.layers.0.mlp.gate.weight"]
    config = simple_config(model_type="longcat_flash", num_layers=1, zero_expert_num=zero)
    path = write_checkpoint(tmp_path, tensors, config)
    if rows == 4 + zero:
        assert counted(open_checkpoint(path)) == [4]
    else:
        with pytest.raises(CheckpointError, match=router.replace(".", r"\.")):
            open_checkpoint(path)


def test_packed_layers_of_different_sizes() -> None:
    """The largest number, or each one's, is that of config.json."""
    sizes = {0: (6, HIDDEN, HIDDEN, True), 1: (4, HIDDEN, HIDDEN, True)}

    def faults(**changes: Any) -> list[int]:
        config = simple_config(num_hidden_layers=2, decoder_sparse_step=1, **changes)
        return [index for _, index in contradictions(interpret_config(Config(config)), sizes)]

    assert faults(num_experts=6) == faults(num_experts=6, num_experts_per_layer=[6, 4]) == []
    assert faults(num_experts=8) == [0, 1]
    assert faults(num_experts=4) == [0]
    assert faults(num_experts=6, num_experts_per_layer=[6, 5]) == [1]
