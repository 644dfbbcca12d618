"""Weights that are rounded to bf16 before anything else, as the reference converter does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.families import Tensor, bf16, simple_config, write_checkpoint

from ktconv.source import open_checkpoint
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader

EXPERT = "model.layers.0.mlp.experts.0"


@pytest.mark.parametrize(("stored", "rounded"), [("BF16", False), ("F16", True), ("F32", True)])
def test_only_what_is_not_bf16_is_rounded(stored: str, rounded: bool, tmp_path: Path) -> None:
    """Rounding bf16 changes nothing, and takes time twice: packed, and compared."""
    values = np.full((64, 64), 1.001, np.float32)
    weights: dict[str, Tensor] = {
        "BF16": bf16(values),
        "F16": values.astype(np.float16),
        "F32": values,
    }
    names = ("gate_proj", "up_proj", "down_proj")
    tensors = {f"{EXPERT}.{name}.weight": weights[stored] for name in names}
    config = simple_config(hidden_size=64, moe_intermediate_size=64, num_experts=1)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "model", tensors, config))
    matrix = checkpoint.layers[0].experts[0]["up"]
    source = MatrixReader(SourceReader([], []), matrix, round_to_bf16=True)
    data = np.zeros(matrix.nbytes(64), np.uint8)
    assert bool(source.view(range(64), None, data, 0, 64).c.round_to_bf16) is rounded
