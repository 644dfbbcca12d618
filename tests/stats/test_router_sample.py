"""Whether statistics are of a version of this model, by a sample of its router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import (
    bf16,
    fp8,
    fp8_values,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)
from helpers.gguf_files import around, experts, metadata, write_gguf
from msgspec.structs import replace

from ktconv.errors import UsageError
from ktconv.source import Checkpoint, open_checkpoint
from ktconv.stats.origin import Origin, source_sha256
from ktconv.stats.router_sample import notes_on_origin, router_sample

HIDDEN, EXPERTS = 128, 4
FILE = Path("importance.safetensors")
GATE = "model.layers.{}.mlp.gate.weight"


def router(seed: int, layer: int = 0) -> Any:
    return np.random.default_rng([seed, layer]).normal(0, 0.1, (EXPERTS, HIDDEN)).astype("f4")


def opened(
    path: Path, layers: dict[int, Any], encode: Any = bf16, more: dict[str, Any] | None = None
) -> Checkpoint:
    """A model with these routers (None: no router), and experts in some encoding."""
    tensors: dict[str, Any] = dict(more or {})
    for index, weights in layers.items():
        source = f"model.layers.{index}.mlp.experts"
        tensors |= numbered(source, random_weights(HIDDEN, 128, EXPERTS, index), encode=encode)
        if weights is not None:
            tensors[GATE.format(index)] = weights
    config = simple_config(num_hidden_layers=len(layers), num_experts=EXPERTS)
    return open_checkpoint(write_checkpoint(path, tensors, config))


def origin(checkpoint: Checkpoint, **changes: Any) -> Origin:
    """Of statistics recorded on this checkpoint."""
    sample = router_sample(checkpoint)
    found = Origin("a/model", source_sha256(checkpoint), "text", "1" * 64, 9, "2" * 64, sample)
    return replace(found, **changes)


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    return opened(tmp_path / "model", {0: bf16(router(1)), 1: bf16(router(1, 1))})


def test_the_sample_is_of_the_last_router(model: Checkpoint) -> None:
    values = np.array(json.loads(router_sample(model)))
    bits = router(1, 1).view(np.uint32) & 0xFFFF0000
    cols = np.linspace(0, HIDDEN - 1, 16).astype(int)
    np.testing.assert_allclose(values, bits.view("f4")[:, cols].ravel(), rtol=1e-3)
    assert len(router_sample(model)) < 1000


def test_the_recorded_model_and_its_copies_need_no_word(model: Checkpoint) -> None:
    assert notes_on_origin(FILE, origin(model), model) == []
    assert notes_on_origin(FILE, None, model) == []  # as of an imatrix


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_versions_of_a_model_are_accepted(
    dtype: str, noise: float, model: Checkpoint, tmp_path: Path
) -> None:
    """Experts in F32 rather than BF16; the router in another dtype, a little trained."""
    drawn = np.random.default_rng(7).normal(0, noise, (2, EXPERTS, HIDDEN))
    routers = {n: (router(1, n) + drawn[n]).astype(dtype) for n in (0, 1)}
    version = opened(tmp_path / "version", routers, lambda values: values)
    (note,) = notes_on_origin(FILE, origin(model), version)
    assert "recorded on a/model, not on" in note and "a version of the same model" in note


def test_a_quantized_router_is_decoded(model: Checkpoint, tmp_path: Path) -> None:
    positive = fp8_values()[:127]  # ascending
    values = router(1, 1) * 64
    codes = np.abs(values[..., None]).clip(None, 448) - positive
    codes = np.abs(codes).argmin(-1).astype(np.uint8) | np.signbit(values).astype(np.uint8) << 7
    scale = {f"{GATE.format(1)}_scale_inv": np.full((1, 1), 1 / 64, np.float32)}
    version = opened(tmp_path / "fp8", {0: bf16(router(1)), 1: fp8(codes)}, more=scale)
    (note,) = notes_on_origin(FILE, origin(model), version)
    assert "a version of the same model" in note


def test_another_model_of_the_same_sizes_is_refused(model: Checkpoint, tmp_path: Path) -> None:
    other = opened(tmp_path / "other", {n: bf16(router(2, n)) for n in (0, 1)})
    assert source_sha256(other) == source_sha256(model)  # only values differ
    with pytest.raises(UsageError, match=r"a/model, not on .*other, which is another model"):
        notes_on_origin(FILE, origin(model), other)


def test_equal_numbers_show_nothing_in_common(model: Checkpoint, tmp_path: Path) -> None:
    zeros = opened(tmp_path / "zeros", {n: bf16(np.zeros((EXPERTS, HIDDEN))) for n in (0, 1)})
    with pytest.raises(UsageError, match="another model"):
        notes_on_origin(FILE, origin(model), zeros)


def test_models_without_router_are_not_judged(model: Checkpoint, tmp_path: Path) -> None:
    none = opened(tmp_path / "none", {0: None, 1: None})
    assert router_sample(none) == ""
    for recorded, used in ((origin(none), model), (origin(model), none)):
        (note,) = notes_on_origin(FILE, recorded, used)
        assert "routers cannot be compared" in note


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[1, 2", "{}", '["a"]', "[NaN, 1]", "[1e999]", "[1.5, 2.5]", "[true]", "[" * 50_000],
)
def test_samples_that_are_none(text: str, model: Checkpoint) -> None:
    recorded = origin(model, source_sha256="0" * 64, router=text)
    (note,) = notes_on_origin(FILE, recorded, model)
    assert "routers cannot be compared" in note


def test_gguf_of_the_same_model(model: Checkpoint, tmp_path: Path) -> None:
    """Other names, a router of F32."""

    tensors: dict[str, Any] = {}
    for index in (0, 1):
        tensors |= experts(index, random_weights(HIDDEN, 128, EXPERTS, index)) | around(index)
        tensors[f"blk.{index}.ffn_gate_inp.weight"] = router(1, index)
    pairs = metadata(2, expert_feed_forward_length=128)
    gguf = open_checkpoint(write_gguf(tmp_path / "model.gguf", tensors, pairs))
    (note,) = notes_on_origin(FILE, origin(model), gguf)
    assert "a version of the same model" in note
    tensors["blk.1.ffn_gate_inp.weight"] = router(2, 1)
    other = open_checkpoint(write_gguf(tmp_path / "other.gguf", tensors, pairs))
    with pytest.raises(UsageError, match="another model"):
        notes_on_origin(FILE, origin(model), other)
