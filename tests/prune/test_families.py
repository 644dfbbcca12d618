"""Pruned checkpoints of every family and encoding: bytes of the experts that stay, rows of routers,
counts in config.json; and the same through the view that conversions read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import read_model
from helpers.encoded import HIDDEN as SOURCE_HIDDEN
from helpers.encoded import KINDS, encoded_model
from helpers.families import Raw, raw
from helpers.family_list import MADE, SAVED
from helpers.family_models import EXPERTS, write
from helpers.paths import EXAMPLE
from helpers.saved import written

import ktconv
from ktconv.errors import CheckpointError, UsageError
from ktconv.prune.run import Request, prepare, prune
from ktconv.source import Checkpoint, ModelSource, open_checkpoint
from ktconv.source.pruning.kept import Kept, Pruning
from ktconv.source.reading.tensors import SourceTensors
from ktconv.verify.reading import read_tensor

pytestmark = pytest.mark.slow

IDS = (2, 3)  # of four, the second of two groups
TOWERS = ("Qwen3-Omni", "dots3-note")
HASHED = ("DeepSeek-V4-Flash", "DeepSeek-V4-Flash-Base", "DeepSeek-V4.1-Flash")


def pruned(model: Path, ids: tuple[int, ...]) -> tuple[Checkpoint, Checkpoint, Checkpoint]:
    """The model, its view with these experts of each layer, and the checkpoint of them that was
    written."""
    whole, output = open_checkpoint(model), model.parent / "output"
    layers = {layer.index: Kept(len(layer.experts), ids) for layer in whole.layers}
    source = ModelSource(str(model), prune=Pruning(layers).record())
    request = Request(source, output, threads=1)
    assert prune(request, preflight=prepare(request)).complete
    return whole, open_checkpoint(source), open_checkpoint(output)


def changes(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from changes(one.get(key), other.get(key), f"{path}.{key}".strip("."))
    elif one != other:
        yield path, one, other


def values(checkpoint: Checkpoint) -> dict[tuple[int, int, str], np.ndarray[Any, Any]]:
    """The decoded matrices of all experts."""
    tensors, found = SourceTensors(checkpoint), {}
    for layer in checkpoint.layers:
        for expert in range(len(layer.experts)):
            for name, one in zip(
                ("gate", "up", "down"), tensors.expert(layer, expert), strict=True
            ):
                if one is not None:
                    found[layer.index, expert, name] = one.values()
    return found


def check(model: Path, ids: tuple[int, ...], experts: int) -> None:
    whole, view, found = pruned(model, ids)
    assert [len(layer.experts) for layer in found.layers] == [len(ids)] * len(whole.layers)
    assert found.config.content == view.config.content
    before, viewed, after = values(whole), values(view), values(found)
    assert after.keys() == viewed.keys()
    for (layer, new, name), one in after.items():
        assert np.array_equal(one, before[layer, ids[new], name])
        assert np.array_equal(one, viewed[layer, new, name])
    # Everything else is the same, but for an axis of what belongs to experts.
    source, stored = read_model(model), read_model(model.parent / "output")
    others = {one.name: one for one in view.other_tensors}
    assert others.keys() == {one.name for one in found.other_tensors}
    for name, tensor in others.items():
        own, there = raw(stored[name]), name
        if (number := own_number(name, whole)) is not None:  # of LongCat, without weights
            assert number >= len(ids)
            there = name.replace(f".{number}.", f".{number + experts - len(ids)}.")
        assert (tensor.dtype, tensor.shape) == (own.dtype, own.shape)
        expected = left(raw(source[there]), own, ids, experts)
        assert read_tensor(tensor).tobytes() == own.data == expected
    # No tensor is lost: inputs' scales, declared shapes and others that no conversion reads.
    kept = len(source) - len(stored)
    numbered = sum(own_number(name, whole) in set(range(experts)) - set(ids) for name in source)
    assert kept == numbered
    for path, old, new in changes(dict(whole.config.content), dict(found.config.content)):
        key = path.rpartition(".")[2]
        assert (old, new) in ((experts, len(ids)), (2, 1)), (path, old, new)
        assert "expert" in key or "group" in key


def own_number(name: str, whole: Checkpoint) -> int | None:
    """The number of the expert that a tensor is of."""
    for layer in whole.layers:
        if name.startswith(f"{layer.source}."):
            words = name.removeprefix(f"{layer.source}.").split(".")[:2]
            return next((int(word) for word in words if word.isdecimal()), None)
    return None


def left(source: Raw, found: Raw, ids: tuple[int, ...], experts: int) -> bytes:
    """What should be left of a tensor: it is as before, or cut along its first or last axis."""
    if source.shape == found.shape:
        return source.data
    [axis] = (n for n, (a, b) in enumerate(zip(source.shape, found.shape, strict=True)) if a != b)
    size = len(source.data) // int(np.prod(source.shape))
    array = np.frombuffer(source.data, np.uint8).reshape(*source.shape, size)
    gone = [one for one in range(experts) if one not in ids]
    return np.delete(array, gone, axis=axis).tobytes()


@pytest.mark.parametrize("name", [name for name in MADE if name not in (*TOWERS, *HASHED)])
def test_made(name: str, tmp_path: Path) -> None:
    write(MADE[name], tmp_path / "model")
    check(tmp_path / "model", IDS, EXPERTS)


def is_refused(name: str) -> bool:
    """Experts in several towers, chosen by tables of tokens, or by a network of their own."""
    return "deepseek_v4" in name or "ernie4_5_vl" in name or "omni" in name or name == "zaya"


@pytest.mark.parametrize("name", [name for name in SAVED if not is_refused(name)])
def test_saved(name: str, tmp_path: Path) -> None:
    model = written(name, tmp_path)
    if open_checkpoint(model).tower is not None:
        pytest.skip("has several towers")
    check(model, IDS, SAVED[name].experts)


@pytest.mark.parametrize("kind", KINDS)
def test_encodings(kind: str, tmp_path: Path) -> None:
    from helpers.families import bf16, random_weights

    router = {
        "model.layers.0.mlp.gate.weight": bf16(
            random_weights(hidden=SOURCE_HIDDEN, experts=2).gate[:, 0]
        )
    }
    model, _, _ = encoded_model(tmp_path / "model", kind, **router)
    check(model, (1,), 2)


@pytest.mark.parametrize("name", ["Qwen3.5", "DeepSeek-V3 FP8", "Inkling"])
def test_mtp_layers_are_left_out(name: str, tmp_path: Path) -> None:
    """With all their tensors, and their number in config.json."""
    model, output = tmp_path / "model", tmp_path / "output"
    write(MADE[name], model)
    whole = open_checkpoint(model)
    mtp = [layer.index for layer in whole.layers if layer.is_mtp]
    assert mtp
    layers = {one.index: Kept(EXPERTS, IDS) for one in whole.layers if not one.is_mtp}
    request = Request(ModelSource(model, prune=Pruning(layers, tuple(mtp)).record()), output)
    assert prune(request).complete
    found = open_checkpoint(output)
    assert [one.index for one in found.layers] == list(layers)
    assert found.config.checked.num_mtp_layers == 0
    start = MADE[name].mtp
    assert any(one.startswith(start) for one in read_model(model))
    assert not any(one.startswith(start) for one in read_model(output))


@pytest.mark.parametrize("name", HASHED)
def test_experts_by_token_stay(name: str, tmp_path: Path) -> None:
    write(MADE[name], tmp_path / "model")
    with pytest.raises(CheckpointError, match="takes experts from a table of tokens"):
        pruned(tmp_path / "model", IDS)


def test_a_router_that_is_not_one_matrix(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no router of layer 0 under a known name"):
        pruned(written("zaya", tmp_path), IDS)


def test_an_output_whose_experts_have_other_names(tmp_path: Path) -> None:
    """KTransformers' names of MXFP4, beside which the router keeps that of the model."""
    ktconv.quantize_cpu(str(EXAMPLE), str(tmp_path / "model"), method="mxfp4")
    with pytest.raises(CheckpointError, match="has no router of layer 0") as refusal:
        pruned(tmp_path / "model", IDS)
    assert "prune the source, and convert that" in str(refusal.value.hint)


@pytest.mark.parametrize("name", TOWERS)
def test_several_towers(name: str, tmp_path: Path) -> None:
    write(MADE[name], tmp_path / "model")
    with pytest.raises(UsageError, match="has experts in several towers"):
        pruned(tmp_path / "model", IDS)
