"""Experts of any encoding in another weight format, and weights under another activation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.encoded import HIDDEN, INNER, KINDS, SOURCE, encoded_model
from helpers.families import bf16, numbered, random_weights, simple_config, write_checkpoint
from helpers.gguf_files import biases as gguf_biases
from helpers.gguf_files import experts as gguf_experts
from helpers.gguf_files import metadata, write_gguf

from ktconv.errors import CheckpointError, UsageError
from ktconv.formats.decode import f32_to_bf16, round_to_bf16
from ktconv.native import Activation
from ktconv.runtime.layers import pack_online
from ktconv.runtime.layers.requantized import requantized_experts
from ktconv.source import open_checkpoint
from ktconv.system.pool import Pool


@pytest.mark.parametrize("kind", sorted(KINDS)[::4])
def test_values_are_those_of_the_source_rounded(tmp_path: Path, kind: str) -> None:
    """To bf16, to nearest; a slot has the expert that the map says."""
    path, weights, _ = encoded_model(tmp_path, kind)
    made = requantized_experts(open_checkpoint(path), 0, "bf16", parts=3, slots=[1, 0, 1])
    assert (made.hidden, made.intermediate, made.parts, made.count) == (HIDDEN, INNER, 3, 3)
    for expert in (0, 1):
        for matrix, expected in zip(made.streams(expert), weights, strict=True):
            assert matrix is not None
            np.testing.assert_array_equal(matrix.values(), round_to_bf16(expected[expert]))


def test_bytes_are_those_of_arrays(tmp_path: Path) -> None:
    path, weights, _ = encoded_model(tmp_path, "awq")
    made = requantized_experts(open_checkpoint(path), None, "int8")
    packed = pack_online(*weights, "int8")
    for expert in (0, 1):
        for one, other in zip(made.streams(expert), packed.streams(expert), strict=True):
            assert one is not None and other is not None
            np.testing.assert_array_equal(one.values(), other.values())


def test_biases_come_along(tmp_path: Path) -> None:
    """In a GGUF file of gpt-oss's kind."""
    own = gguf_experts() | gguf_biases()
    pairs = metadata(**{"attention.head_count": 1})
    path = write_gguf(tmp_path / "m.gguf", own, pairs, architecture="gpt-oss")
    made = requantized_experts(open_checkpoint(path), 0, "bf16")
    assert made.biased and made.activation.alpha != 1
    for name, matrix in zip(("gate", "up", "down"), made.streams(2), strict=True):
        assert matrix is not None and matrix.bias is not None
        np.testing.assert_array_equal(matrix.bias, own[f"blk.0.ffn_{name}_exps.bias"][2])


def test_a_number_that_is_none_is_named(tmp_path: Path) -> None:
    weights = random_weights(256, 128)
    weights.up[1, 3, 7] = np.nan
    config = simple_config(hidden_size=256, moe_intermediate_size=128)
    path = write_checkpoint(tmp_path, numbered(SOURCE, weights, encode=bf16), config)
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight .*\[3, 7\]"):
        requantized_experts(open_checkpoint(path), 0, "int8")
    with pytest.raises(UsageError, match="no experts of layer 5"):
        requantized_experts(open_checkpoint(path), 5, "int8")


def test_another_activation_on_the_same_memory() -> None:
    weights = random_weights(256, 128)
    plain = pack_online(*weights, "bf16")
    limit = Activation(limit=0.5)
    other, packed = plain.with_activation(limit), pack_online(*weights, "bf16", activation=limit)
    x = f32_to_bf16(np.random.default_rng(0).standard_normal((3, 256), np.float32))
    ids, scores = np.array([[0], [2], [1]]), np.ones((3, 1), np.float32)
    with Pool(1) as pool:
        first = plain.forward(x, ids, scores, pool)
        found = other.forward(x, ids, scores, pool)
        assert np.array_equal(found, packed.forward(x, ids, scores, pool))
        assert not np.array_equal(found, first)
        assert np.array_equal(plain.forward(x, ids, scores, pool), first)
    assert other.layer.c.expert != plain.layer.c.expert
    assert other.layer.c.expert[0].up == plain.layer.c.expert[0].up
    with pytest.raises(ValueError, match="gate"):
        plain.with_activation(Activation("relu2"))
