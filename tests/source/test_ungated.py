"""Experts that have no gate: up and down projections alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import (
    EXPERTS,
    Tensor,
    Weights,
    bf16,
    numbered,
    random_weights,
    read_matrix,
    simple_config,
    write_checkpoint,
)

from ktconv.errors import CheckpointError
from ktconv.inspect.inspection import inspect_path
from ktconv.source import Checkpoint, open_checkpoint

USUAL = "model.layers.0.mlp.experts"
HIDDEN, INNER = 128, 192
UNGATED = {"model_type": "nemotron_h", "mlp_hidden_act": "relu2"}
UNKNOWN = {"model_type": "nobody_knows"}
NOMIC = {"model_type": "nomic_bert", "mlp_hidden_act": None}


def weights_of(seed: int = 0) -> Weights:
    return random_weights(HIDDEN, INNER, seed=seed)


def by_number(weights: Weights, source: str = USUAL) -> dict[str, Tensor]:
    stored = numbered(source, weights)
    return {name: one for name, one in stored.items() if ".gate_proj." not in name}


def in_stacks(weights: Weights, transposed: bool = False) -> dict[str, Tensor]:
    stacks = {"up_proj": weights.up, "down_proj": weights.down}
    order = (0, 2, 1) if transposed else (0, 1, 2)
    return {f"{USUAL}.{name}": bf16(one.transpose(order)) for name, one in stacks.items()}


def in_rows(weights: Weights) -> dict[str, Tensor]:
    """Of all experts in one axis, those of down turned: Nomic's, of which DBRX's are a superset."""
    rows = {"mlp.w1": weights.up, "mlp.w2": weights.down.transpose(0, 2, 1)}
    return {f"{USUAL}.{name}": bf16(one.reshape(-1, HIDDEN)) for name, one in rows.items()}


def in_gguf(weights: Weights) -> dict[str, Tensor]:
    stacks = {"up": weights.up, "down": weights.down}
    return {f"blk.0.ffn_{name}_exps.weight": bf16(one) for name, one in stacks.items()}


STORED = [by_number, in_stacks, in_rows, in_gguf]


def opened(directory: Path, tensors: dict[str, Tensor], **config: Any) -> Checkpoint:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, **UNGATED, **config}
    return open_checkpoint(write_checkpoint(directory, tensors, simple_config(**sizes)))


def assert_has(checkpoint: Checkpoint, weights: Weights) -> None:
    [layer] = checkpoint.layers
    assert not layer.gated
    assert layer.projections == ("up", "down")
    assert (layer.hidden_size, layer.intermediate_size) == (HIDDEN, INNER)
    assert len(layer.experts) == len(weights.up)
    for expert, matrices in enumerate(layer.experts):
        assert list(matrices) == ["up", "down"]
        for projection, matrix in matrices.items():
            expected = getattr(weights, projection)[expert]
            np.testing.assert_array_equal(read_matrix(matrix), expected)
    assert layer.activation.function == "relu2"


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    "config",
    [UNGATED, {**UNGATED, "mlp_hidden_act": None}, UNKNOWN],
    ids=["both", "by family", "by activation"],
)
def test_up_and_down(stored: Any, config: dict[str, Any], tmp_path: Path) -> None:
    weights = weights_of()
    assert_has(opened(tmp_path, stored(weights), **config), weights)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("named", [None, "gelu", "gelu_new", "relu"])
def test_an_activation_that_nothing_names(stored: Any, named: str | None, tmp_path: Path) -> None:
    """It is not SiLU, as it would be of experts with a gate; GELU and ReLU are usual with one."""
    with pytest.raises(CheckpointError, match="say that they have none") as caught:
        opened(tmp_path, stored(weights_of()), **UNKNOWN, mlp_hidden_act=None, hidden_act=named)
    assert '"mlp_hidden_act": "relu2"' in str(caught.value.hint)
    assert 'like = "nomic_bert"' in str(caught.value.hint)


def test_sizes_of_the_tensors_alone(tmp_path: Path) -> None:
    weights = weights_of()
    unsaid = dict.fromkeys(("hidden_size", "moe_intermediate_size", "num_experts"))
    assert_has(opened(tmp_path, by_number(weights), **unsaid), weights)


def test_stacks_stored_in_out(tmp_path: Path) -> None:
    """Both orders have the same shapes with I and H exchanged."""
    weights = weights_of()
    assert_has(opened(tmp_path, in_stacks(weights, transposed=True)), weights)


def test_stacks_of_other_sizes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"up_proj has hidden size 128, .* hidden_size 64"):
        opened(tmp_path, in_stacks(weights_of()), hidden_size=64)


def test_stacks_that_do_not_fit(tmp_path: Path) -> None:
    tensors = in_stacks(weights_of()) | {
        f"{USUAL}.down_proj": bf16(np.zeros((EXPERTS, HIDDEN, INNER + 1)))
    }
    expected = r"\[4, 192, 128\] and .*\[4, 128, 193\] are not \[E, I, H\] and \[E, H, I\]"
    with pytest.raises(CheckpointError, match=expected):
        opened(tmp_path, tensors)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("config", [{"model_type": "qwen3_moe"}, {**UNKNOWN, "hidden_act": "silu"}])
def test_gates_are_missing(stored: Any, config: dict[str, str], tmp_path: Path) -> None:
    """Of a family that has them, or by the activation in config.json."""
    with pytest.raises(CheckpointError, match=r"(gate_(proj|exps)\S*|mlp\.v1) is missing"):
        opened(tmp_path, stored(weights_of()), **{"mlp_hidden_act": None, **config})


def test_one_gate_is_missing(tmp_path: Path) -> None:
    tensors = numbered(USUAL, weights_of())
    del tensors[f"{USUAL}.2.gate_proj.weight"]
    with pytest.raises(CheckpointError, match=r"experts\.2\.gate_proj\.weight is missing"):
        opened(tmp_path, tensors, **UNKNOWN)


@pytest.mark.parametrize("word", ["up_proj", "down_proj"])
def test_one_of_two_is_missing(word: str, tmp_path: Path) -> None:
    tensors = by_number(weights_of())
    del tensors[f"{USUAL}.1.{word}.weight"]
    with pytest.raises(CheckpointError, match=rf"experts\.1\.{word}\.weight is missing"):
        opened(tmp_path, tensors)


@pytest.mark.parametrize("word", ["up_proj", "down_proj"])
def test_one_stack_is_missing(word: str, tmp_path: Path) -> None:
    tensors = in_stacks(weights_of())
    del tensors[f"{USUAL}.{word}"]
    with pytest.raises(CheckpointError, match=r"experts\.\S+ is missing, although"):
        opened(tmp_path, tensors)


@pytest.mark.parametrize("gates", [1, EXPERTS])
def test_gates_that_the_family_does_not_have(gates: int, tmp_path: Path) -> None:
    weights = weights_of()
    tensors = by_number(weights)
    for expert in range(gates):
        tensors[f"{USUAL}.{expert}.gate_proj.weight"] = bf16(weights.gate[expert])
    expected = "is missing" if gates == 1 else "0.gate_proj.weight is the gate of an expert, but"
    with pytest.raises(CheckpointError, match=expected):
        opened(tmp_path, tensors)


def test_rows_with_a_gate_that_the_family_does_not_have(tmp_path: Path) -> None:
    weights = weights_of()
    tensors = in_rows(weights)
    tensors[f"{USUAL}.mlp.v1"] = bf16(weights.gate.reshape(-1, HIDDEN))
    with pytest.raises(CheckpointError, match=r"mlp\.w1 is the gate of an expert, but experts of"):
        opened(tmp_path, tensors, **NOMIC)


@pytest.mark.parametrize("gone", ["mlp.w1", "mlp.w2"])
def test_rows_that_are_missing(gone: str, tmp_path: Path) -> None:
    tensors = in_rows(weights_of())
    del tensors[f"{USUAL}.{gone}"]
    with pytest.raises(CheckpointError, match=r"mlp\.\S+ is missing, although"):
        opened(tmp_path, tensors, **NOMIC)


def test_a_bias_of_all_experts_together(tmp_path: Path) -> None:
    """Nomic's is added to their sum, by whoever has the other tensors."""
    tensors = in_rows(weights_of()) | {f"{USUAL}.bias": np.ones(HIDDEN, np.float32)}
    checkpoint = opened(tmp_path, tensors, **NOMIC)
    assert not checkpoint.layers[0].biased
    assert [one.name for one in checkpoint.other_tensors] == [f"{USUAL}.bias"]
    explained = inspect_path(str(tmp_path), explained=True)["explained"]
    assert not explained["left_over"]


def test_layers_that_differ(tmp_path: Path) -> None:
    tensors = by_number(weights_of(), "model.layers.1.mlp.experts")
    tensors = {**numbered(USUAL, weights_of()), **tensors}
    expected = r"experts of model\.layers\.1\S+ have no gate, but .*layers\.0\..*gate_proj"
    with pytest.raises(CheckpointError, match=expected):
        opened(tmp_path, tensors, **UNKNOWN, num_hidden_layers=2, mlp_hidden_act=None)
