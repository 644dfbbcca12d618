"""Quantized weights beside the routed experts: of attention, of shared experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.encoded import KINDS
from helpers.families import Tensor, numbered, random_weights, simple_config, write_checkpoint

from ktconv.errors import CheckpointError
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.source.reading.tensors import SourceTensors
from ktconv.targets.encoded.other_tensors import decoded_others

LAYER = "model.layers.0"
NAMES = (f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.shared_experts.down_proj")
SHAPE = (96, 256)
Values = dict[str, np.ndarray]


def model_with(directory: Path, kind: str, **more: Tensor) -> tuple[Checkpoint, Values, list[str]]:
    """A model whose experts are plain: the weights of NAMES, and the names of all their tensors."""
    rng = np.random.default_rng(5)
    tensors = dict(numbered(f"{LAYER}.mlp.experts", random_weights()))
    values: Values = {}
    names: list[str] = []
    for name in NAMES:
        parts, values[name] = KINDS[kind].of(rng, *SHAPE)
        stored = {f"{name}.{part}": tensor for part, tensor in parts.items()}
        tensors |= stored
        names += stored
    tensors |= {f"{LAYER}.mlp.gate.weight": np.ones((4, 128), np.float32), **more}
    config = simple_config(quantization_config=dict(KINDS[kind].quantization))
    return open_checkpoint(write_checkpoint(directory, tensors, config)), values, names


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_read_like_experts(kind: str, tmp_path: Path) -> None:
    checkpoint, values, _ = model_with(tmp_path, kind)
    source = SourceTensors(checkpoint)
    for name, expected in values.items():
        found = source.find([f"{name}.missing", f"{name}.weight"])
        assert found is not None
        assert found.shape == SHAPE
        np.testing.assert_array_equal(source.matrix(found).values(), expected)
    router = source.find([f"{LAYER}.mlp.gate.weight"])
    assert router is not None
    assert (source.matrix(router).values() == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_decoded_for_engines(kind: str, tmp_path: Path) -> None:
    """All but their primary tensors are left out of the output."""
    checkpoint, values, names = model_with(tmp_path, kind)
    decoded, dropped = decoded_others(checkpoint)
    assert len(decoded) == len(values)
    assert {one.encoding for one in decoded.values()} == {KINDS[kind].name}
    assert decoded.keys() | dropped == set(names)
    assert not decoded.keys() & dropped


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (np.zeros((96, 256), np.uint8), "q_proj.weight is U8, but it has no scale"),
        (np.ones(96, np.float64), "q_proj.weight has dtype F64"),
    ],
)
def test_what_cannot_be_read(tensor: Tensor, reason: str, tmp_path: Path) -> None:
    name = f"{LAYER}.cross_attn.q_proj.weight"
    checkpoint, _, _ = model_with(tmp_path, "awq", **{name: tensor})
    source = SourceTensors(checkpoint)
    found = source.find([name])
    assert found is not None
    with pytest.raises(CheckpointError, match=reason):
        source.matrix(found)


@pytest.mark.parametrize("bits", [4, 8])
def test_bits_by_config_where_no_tensor_says(bits: int, tmp_path: Path) -> None:
    """weight_shape is missing in some exports."""
    kind = KINDS[f"int{bits} packed, channel"]
    parts, expected = kind.of(np.random.default_rng(1), *SHAPE)
    del parts["weight_shape"]
    tensors = dict(numbered(f"{LAYER}.mlp.experts", random_weights()))
    tensors |= {f"{NAMES[0]}.{part}": tensor for part, tensor in parts.items()}
    groups = {"group_0": {"weights": {"num_bits": bits}, "targets": ["Linear"]}}
    quantization = dict(kind.quantization) | {"config_groups": groups}
    model = write_checkpoint(tmp_path, tensors, simple_config(quantization_config=quantization))
    source = SourceTensors(open_checkpoint(model))
    found = source.find([f"{NAMES[0]}.weight"])
    assert found is not None
    np.testing.assert_array_equal(source.matrix(found).values(), expected)
    strange: tuple[Any, ...] = ({}, [], {"group_0": 4}, {"group_0": {"weights": {"num_bits": [4]}}})
    for odd in strange:
        quantization["config_groups"] = odd
        write_checkpoint(tmp_path, tensors, simple_config(quantization_config=quantization))
        open_checkpoint(tmp_path)
