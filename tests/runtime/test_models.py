"""Layers of models with something around their experts, against the model's own modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import convert
from helpers.family_list import MADE, SAVED
from helpers.family_models import HIDDEN, Model, write
from helpers.paths import EXAMPLE
from helpers.saved import written

from ktconv.errors import CheckpointError, UsageError
from ktconv.formats.decode import round_to_bf16
from ktconv.runtime import DeferredExperts, MoELayer, Pool
from ktconv.system.arrays import F32, I64
from ktconv.targets.expert_sets import expert_set

pytestmark = pytest.mark.slow

TOKENS = 9
DAMAGED = b"blk.0.ffn_down_exps.2.numa.0.scale"
Batch = tuple[F32, I64, F32]


def random_batch(experts: int, hidden: int, top_k: int, tokens: int = TOKENS) -> Batch:
    rng = np.random.default_rng([experts, hidden, top_k])
    x: F32 = round_to_bf16(rng.standard_normal((tokens, hidden), np.float32))
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int64)
    return x, np.ascontiguousarray(ids), rng.random((tokens, top_k), np.float32)


def error(found: F32, truth: F32) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def packed(source: Path, **options: Any) -> Path:
    output = source.parent / "int8"
    convert(source, output, method="int8", allow_activation_mismatch=True, **options)
    return output


# ---- against transformers --------------------------------------------------------------


def by_ids(module: Any, x: Any, ids: Any, weights: Any) -> Any:
    return module(x, ids, weights)


def by_rows(module: Any, x: Any, ids: Any, weights: Any) -> Any:
    """Llama 4's are given every token for each expert, times its weight or 0."""
    import torch

    experts = module.gate_up_proj.shape[0]
    scores = torch.zeros(len(x), experts).scatter(1, ids, weights)
    inputs = x.repeat(experts, 1) * scores.T.reshape(-1, 1)
    return module(inputs).reshape(experts, *x.shape).sum(dim=0)


@pytest.mark.parametrize(
    ("name", "called", "top_k"),
    [("gpt_oss", by_ids, 2), ("llama4", by_rows, 1), ("muse_spark", by_ids, 2)],
)
def test_the_models_own_experts(
    name: str, called: Callable[..., Any], top_k: int, tmp_path: Path, pool: Pool
) -> None:
    """Biases and clamps, weights on inputs, norms of outputs: as the checkpoint stores them, and
    converted."""
    torch = pytest.importorskip("torch")
    source = written(name, tmp_path)
    from ktconv.model import load_model
    from ktconv.model.sites import find_experts

    model, _ = load_model(source, "float32")
    batch = random_batch(SAVED[name].experts, HIDDEN, top_k)
    tensors = [torch.from_numpy(array) for array in batch]
    native, converted = (MoELayer.load_all(path, pool=pool) for path in (source, packed(source)))
    for number, site in find_experts(model).items():
        with torch.no_grad():
            truth = called(site.module, *tensors).numpy()
        assert native[number].method == "bf16" and converted[number].method == "int8"
        assert error(native[number](*batch), truth) < 0.006
        assert 1e-4 < error(converted[number](*batch), truth) < 0.03


# ---- experts whose outputs are normalised ----------------------------------------------


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> MoELayer:
    model: Model = MADE["Muse-Spark"]
    assert model.post_norm
    source = tmp_path_factory.mktemp("normed") / "model"
    write(model, source)
    return MoELayer.load(packed(source), 1, pool=pool)


def test_norms_of_outputs(normed: MoELayer) -> None:
    """Of each expert before its weight: outputs have the size of their weights alone."""
    x, ids, weights = random_batch(normed.experts, normed.hidden, 2)
    y = normed(x, ids, weights)
    assert error(y, normed._packed.reference(np.asarray(bits(x)), ids, weights)) < 0.03
    one = normed(x, ids[:, :1], np.ones_like(weights[:, :1]))
    assert np.allclose(np.square(one).mean(axis=1), 1, atol=0.02)
    assert error(normed(4 * x, ids, weights), y) < 0.9  # were it linear, 3


def bits(x: F32) -> Any:
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def test_a_batch_of_norms_is_its_tokens(normed: MoELayer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where outputs are normalised some tokens at a time."""
    x, ids, weights = random_batch(normed.experts, normed.hidden, 3, tokens=23)
    whole = normed(x, ids, weights)
    for t in range(len(x)):
        assert np.array_equal(normed(x[t], ids[t], weights[t]), whole[t])
    for rows in (1, 7, 24):
        monkeypatch.setattr("ktconv.runtime.compute._ROWS", rows)
        assert np.array_equal(normed(x, ids, weights), whole)


def test_all_that_calls_take_with_norms(normed: MoELayer) -> None:
    """Masks, ids of no expert, sums, dtypes, out and deferral, as without norms."""
    x, ids, weights = random_batch(normed.experts, normed.hidden, 2)
    skip = np.arange(normed.experts) == 1
    y = normed(x, ids, weights)
    masked = normed(x, ids, weights, skip=skip)
    assert not np.array_equal(masked, y)
    for nobody in (-1, normed.experts, 1 << 40):
        assert np.array_equal(normed(x, np.where(ids == 1, nobody, ids), weights), masked)
    add = x[::-1].copy()
    assert np.array_equal(normed(x, ids, weights, add_to=add, out=add), y + x[::-1])
    assert np.array_equal(normed(bits(x), ids, weights), bits(round_to_bf16(y)))
    assert not normed(x, ids[:, :0], weights[:, :0]).any()
    assert np.array_equal(normed.submit(x, ids, weights).wait(), y)
    with DeferredExperts(1) as deferred:
        parts = [deferred(normed, x, ids, weights, last=last) for last in (False, True)]
    assert np.allclose(sum(parts), 2 * y, atol=1e-5)
    with pytest.raises(UsageError, match="ids must"):
        normed(x, ids.astype(np.float32), weights)


def test_norms_and_a_closed_pool(normed: MoELayer) -> None:
    with Pool(1) as pool:
        layer = MoELayer(normed._packed, pool)
    with pytest.raises(UsageError, match="the pool is closed"):
        layer(*random_batch(layer.experts, layer.hidden, 2))


def test_norms_that_are_not_in_the_output(tmp_path: Path, pool: Pool) -> None:
    write(MADE["Muse-Spark"], tmp_path / "model")
    output = packed(tmp_path / "model", experts_only=True)
    with pytest.raises(CheckpointError, match="the norm of experts' outputs in layer") as refusal:
        MoELayer.load(output, pool=pool)
    assert "--experts-only" in str(refusal.value.hint)


# ---- weights on inputs -----------------------------------------------------------------


def test_weights_on_inputs_need_one_expert(make_layer: Callable[..., MoELayer]) -> None:
    layer = make_layer("bf16")
    layer._packed.weight_on_input = True
    x, ids, weights = random_batch(layer.experts, layer.hidden, 1)
    y = layer(x, ids, weights)
    assert error(y, layer(round_to_bf16(x * weights), ids, np.ones_like(weights))) == 0
    assert error(y, weights * layer(x, ids, np.ones_like(weights))) > 0.05
    weights[3], ids[3] = np.nan, -1
    assert not layer(x, ids, weights)[3].any()
    assert not layer(x, ids[:, :0], weights[:, :0]).any()
    with pytest.raises(UsageError, match="one expert per token, not 2"):
        layer(x, np.repeat(ids, 2, axis=1), np.repeat(weights, 2, axis=1))


# ---- outputs that are not whole --------------------------------------------------------


def test_an_output_without_its_hot_experts(tmp_path: Path, pool: Pool) -> None:
    """Both parts add up to the whole."""
    hot = {0: [1, 6], 1: [0, 3, 7]}
    convert(EXAMPLE, tmp_path / "all", method="int8")
    convert(EXAMPLE, tmp_path / "cold", method="int8", exclude_experts=expert_set(hot))
    for number, experts in hot.items():
        whole, cold = (
            MoELayer.load(tmp_path / path, number, pool=pool) for path in ("all", "cold")
        )
        assert np.flatnonzero(cold.slots < 0).tolist() == experts
        assert cold.weight_bytes == whole.weight_bytes * (8 - len(experts)) // 8
        x, ids, weights = random_batch(8, whole.hidden, 3)
        gone = cold.slots < 0
        here = cold(x, ids, weights, skip=gone)
        elsewhere = whole(x, ids, weights, skip=~gone)
        assert np.allclose(here + elsewhere, whole(x, ids, weights), atol=1e-5)
        with pytest.raises(UsageError, match="no weights here"):
            cold(x, ids, weights)
        cold.touch()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    convert(EXAMPLE, tmp_path / "out", method="int8")
    return tmp_path / "out"


def shard_of(output: Path) -> Path:
    """The file with the tensor that is damaged."""
    return next(path for path in output.glob("*.safetensors") if DAMAGED in path.read_bytes())


def cut(output: Path) -> None:
    shard = shard_of(output)
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1000)


def unnamed(output: Path) -> None:
    shard = shard_of(output)
    data = shard.read_bytes()
    shard.write_bytes(data.replace(DAMAGED, DAMAGED.replace(b".2.", b".9.")))


def gone(output: Path) -> None:
    shard_of(output).unlink()


def not_finite(output: Path) -> None:
    shard = shard_of(output)
    data = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    at = start + header[DAMAGED.decode()]["data_offsets"][0]
    data[at : at + 4] = np.float32(np.nan).tobytes()
    shard.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, unnamed, gone, not_finite])
def test_damaged_outputs(damage: Callable[[Path], None], output: Path, pool: Pool) -> None:
    """Are refused when they are loaded, by the name of what is damaged."""
    damage(output)
    with pytest.raises((CheckpointError, UsageError)) as refusal:
        MoELayer.load(output, 0, pool=pool)
    assert "out" in str(refusal.value) and refusal.value.hint


def test_an_unknown_or_empty_folder(tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=path.name):
            MoELayer.load(path, pool=pool)
