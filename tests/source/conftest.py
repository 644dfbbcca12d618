from __future__ import annotations

from pathlib import Path

import pytest
from helpers.families import Tensor, numbered, random_weights, simple_config, write_checkpoint


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """One MoE layer of numbered experts that fits simple_config(); tests break it."""
    return numbered("model.layers.0.mlp.experts", random_weights())


@pytest.fixture
def checkpoint_dir(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    """`tensors` in two shards with an index."""
    return write_checkpoint(tmp_path / "model", tensors, simple_config(), shards=2)
