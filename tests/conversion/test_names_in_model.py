"""What the model calls a tensor of an output."""

from __future__ import annotations

from pathlib import Path

from helpers.families import fused, numbered, random_weights, simple_config, write_checkpoint

from ktconv.conversion.records import ErrorSummary, name_in_model
from ktconv.source import open_checkpoint

SOURCE = "model.layers.0.mlp.experts"


def test_matrices_of_numbered_experts(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, numbered(SOURCE, random_weights()), simple_config())
    layers = open_checkpoint(model).layers
    down = f"{SOURCE}.2.down_proj.weight"
    assert name_in_model("blk.0.ffn_down_exps.2.scales", layers) == down
    assert name_in_model("blk.0.ffn_down_exps.2.numa.0.weight", layers) == down
    for same in ("blk.7.ffn_down_exps.2.scales", "blk.0.ffn_down_exps.99.scales", down):
        assert name_in_model(same, layers) == same
    errors = ErrorSummary(lost=1, lost_names=["blk.0.ffn_up_exps.1.qweight"])
    assert errors.lost_line(layers, "`").endswith(f"are not: `{SOURCE}.1.up_proj.weight`")
    assert errors.lost_line(()).endswith("are not: blk.0.ffn_up_exps.1.qweight")


def test_matrices_in_tensors_of_all_experts(tmp_path: Path) -> None:
    tensors = fused(SOURCE, random_weights(), transposed=False)
    layers = open_checkpoint(write_checkpoint(tmp_path, tensors, simple_config())).layers
    found = name_in_model("blk.0.ffn_gate_exps.1.scales", layers)
    assert found == f"{SOURCE}.gate_up_proj, expert 1"
