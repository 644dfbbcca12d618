"""Names of tensors and the parameters that they belong to."""

from __future__ import annotations

import pytest

from ktconv.errors import CheckpointError, UsageError
from ktconv.plan.placement.names import expert_params_mapping

QWEN = ("gate_proj", "down_proj", "up_proj")


def test_rows() -> None:
    mapping = expert_params_mapping(*QWEN, 2, 1)
    assert len(mapping.rows) == 9
    assert mapping.rows[0] == ("experts.w13_", "experts.0.gate_proj.", 0, "w1")
    assert mapping.rows[1] == ("experts.w2_", "experts.0.down_proj.", 0, "w2")
    assert mapping.rows[2] == ("experts.w13_", "experts.0.up_proj.", 0, "w3")
    assert mapping.rows[6] == ("experts.w13_", "experts.0.gate_proj.", 2, "w1")
    assert expert_params_mapping(None, "down_proj", "up_proj", 2).rows[2:] == [
        ("experts.w13_", "experts.1.up_proj.", 1, "w1"),
        ("experts.w2_", "experts.1.down_proj.", 1, "w2"),
    ]


def test_targets() -> None:
    mapping = expert_params_mapping(*QWEN, 2, 1)
    prefix = "model.layers.3.mlp."
    assert mapping.targets(f"{prefix}experts.0.up_proj.weight_scale") == [
        (f"{prefix}experts.w13_weight_scale", 0, "w3"),
        (f"{prefix}experts.w13_weight_scale", 2, "w3"),
    ]
    assert mapping.targets("experts.1.down_proj.weight") == [("experts.w2_weight", 1, "w2")]


@pytest.mark.parametrize("name", [
    "model.layers.0.mlp.shared_experts.0.gate_proj.weight",  # ends like a routed expert's
    "model.layers.0.mlp.experts.2.gate_proj.weight",
    "model.layers.0.mlp.experts.00.gate_proj.weight",
    "model.layers.0.mlp.experts.0.gate_proj",
    "model.layers.0.mlp.experts.0.gate_proj.",
    "model.layers.0.mlp.experts.0.gate_projection.weight",
    "model.layers.0.mlp.gate.weight",
    "",
])  # fmt: skip
def test_names_of_no_row(name: str) -> None:
    with pytest.raises(CheckpointError, match="is not a tensor of one of the 6 expert matrices"):
        expert_params_mapping(*QWEN, 2, 1).targets(name)


def test_names_that_cannot_be_told_apart() -> None:
    for gate, down, up in (("w", "w", "u"), ("g", "d", ""), (None, "u", "u")):
        with pytest.raises(UsageError, match="cannot be told apart"):
            expert_params_mapping(gate, down, up, 2)
