"""Parts of an expert's tensors for tensor parallelism, applied and put together again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ktconv.errors import UsageError
from ktconv.plan.placement.slices import Shard, tp_slice

I, H = 4, 2  # noqa: E741


def load(tensors: dict[Shard, Any], tp: int, rank: int, kind: str = "weight", **more: Any) -> Any:
    """A rank's parameter of one expert, whose untouched entries are nan."""
    parameter = None
    for shard, tensor in tensors.items():
        part = tp_slice(tensor.shape, shard, tp, rank, kind, **more)  # type: ignore[arg-type]
        if parameter is None:
            parameter = np.full(part.shape, np.nan)
        assert parameter.shape == part.shape
        parameter[part.destination] = tensor[part.source]
    return parameter


def numbered(*shape: int, start: int = 0) -> Any:
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape)


W1, W3, W2 = numbered(I, H), numbered(I, H, start=100), numbered(H, I, start=200)


def test_weights() -> None:
    w13 = load({"w1": W1, "w3": W3}, 2, 1)
    assert (w13 == np.concatenate([W1[2:], W3[2:]])).all()
    assert (load({"w2": W2}, 2, 1) == W2[:, 2:]).all()
    part = tp_slice((I, H), "w3", 2, 1)
    assert part.as_dict() == {
        "source": [[2, 4], [0, 2]], "destination": [[2, 4], [0, 2]], "shape": [4, 2],
    }  # fmt: skip


def test_without_a_gate_there_are_no_halves() -> None:
    assert (load({"w1": W1}, 2, 1, gated=False) == W1[2:]).all()
    with pytest.raises(UsageError, match="no w3"):
        tp_slice((I, H), "w3", 2, 0, gated=False)


def test_transposed_and_stacked() -> None:
    assert (load({"w1": W1.T, "w3": W3.T}, 2, 0, transposed=True)
            == np.concatenate([W1[:2], W3[:2]]).T).all()  # fmt: skip
    assert (load({"w2": W2.T}, 2, 1, transposed=True) == W2[:, 2:].T).all()
    three = {"w1": numbered(3, I, H), "w3": numbered(3, I, H, start=50)}
    w13 = load(three, 2, 1, stacked=True)  # type: ignore[arg-type]
    assert (w13 == np.concatenate([one[:, 2:] for one in three.values()], axis=1)).all()
    w2 = numbered(3, H, I)
    assert (load({"w2": w2}, 2, 1, stacked=True) == w2[:, :, 2:]).all()
    assert (load({"w2": w2.transpose(0, 2, 1)}, 2, 1, stacked=True, transposed=True)
            == w2[:, :, 2:].transpose(0, 2, 1)).all()  # fmt: skip


def test_scales() -> None:
    group = numbered(H, 2)  # of w2, with groups of 2
    assert (load({"w2": group}, 2, 1, "group", per=2) == group[:, 1:]).all()
    assert (load({"w2": group}, 2, 1, "group", per=2, act_order=True) == group).all()
    rows = {"w1": numbered(I, 1), "w3": numbered(I, 1, start=9)}
    assert load(rows, 2, 1, "group").ravel().tolist() == [2, 3, 11, 12]  # type: ignore[arg-type]
    for shape in ((H,), (H, 1)):
        channel = numbered(*shape)
        assert (load({"w2": channel}, 2, 1, "channel") == channel).all()
    for shape in ((I,), (I, 1)):
        halves = {"w1": numbered(*shape), "w3": numbered(*shape, start=9)}
        found = load(halves, 2, 1, "channel")  # type: ignore[arg-type]
        assert found.ravel().tolist() == [2, 3, 11, 12]
    blocks = numbered(6, 3)  # 768 x 384 in blocks of 128
    assert (load({"w1": blocks}, 3, 2, "block", per=128, gated=False) == blocks[4:]).all()


def test_one_number() -> None:
    for one in (np.array(3.0), np.array([3.0])):
        found = load({"w1": one, "w3": one + 1}, 2, 1, "tensor")
        assert found.tolist() == [3, 4]
        assert load({"w2": one}, 2, 1, "tensor").tolist() == 3
        assert load({"w1": one}, 2, 1, "tensor", gated=False).tolist() == [3]
    # Without dimensions a tensor is never cut, whatever it is.
    assert load({"w1": np.array(3.0), "w3": np.array(4.0)}, 2, 1).tolist() == [3, 4]
    many = np.arange(3.0)
    assert load({"w1": many, "w3": many + 5}, 2, 1, "tensor", stacked=True).tolist() == [
        [0, 5], [1, 6], [2, 7],
    ]  # fmt: skip


def test_group_index() -> None:
    index = numbered(I)
    assert load({"w2": index}, 2, 1, "g_idx").tolist() == [2, 3]
    inputs = numbered(H)
    assert load({"w1": inputs, "w3": inputs}, 2, 1, "g_idx").tolist() == inputs.tolist()


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 12])
def test_all_parts_are_the_whole(tp: int) -> None:
    w1, w3, w2 = numbered(12, 5), numbered(12, 5, start=60), numbered(5, 12, start=120)
    w13 = [load({"w1": w1, "w3": w3}, tp, rank) for rank in range(tp)]
    halves = [np.split(one, 2) for one in w13]
    assert (np.concatenate([gate for gate, _ in halves]) == w1).all()
    assert (np.concatenate([up for _, up in halves]) == w3).all()
    columns = [load({"w2": w2}, tp, rank) for rank in range(tp)]
    assert (np.concatenate(columns, axis=1) == w2).all()


@pytest.mark.parametrize(("shape", "shard", "tp", "more", "words"), [
    ((5, 2), "w1", 2, {}, "intermediate size 5 is not divisible by 2"),
    ((2, 3), "w2", 2, {"kind": "group", "per": 128}, "192 .* not divisible by the 128"),
    # 2 blocks could be dealt to 2 GPUs, but the second stands for less: a block would be cut.
    ((2, 2), "w2", 2, {"kind": "block", "per": 128, "intermediate": 192}, "would have 96"),
    ((2, 2), "w2", 2, {"kind": "block", "per": 128, "intermediate": 300}, "2 entries are not"),
    ((6, 2), "w1", 4, {"per": 8}, "12 .* not divisible by the 8"),
    ((4,), "w1", 2, {}, "should have 2 dimensions"),
    ((4, 2, 2), "w2", 2, {}, "should have 2 dimensions"),
    ((4, 2), "w2", 2, {"kind": "g_idx"}, "should have 1 dimensions"),
    ((4, 2), "w2", 2, {"kind": "tensor"}, "is not one number of w2"),
    ((4, 2), "w4", 2, {}, "'w4' is unknown"),
    ((4, 2), "w2", 2, {"kind": "row"}, "'row' is unknown"),
])  # fmt: skip
def test_what_is_refused(
    shape: tuple[int, ...], shard: Any, tp: int, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        tp_slice(shape, shard, tp, 0, **more)


def test_ranks() -> None:
    for rank, words in ((-1, "0 or more"), (2, "is not one of 2 GPUs"), (0.5, "an integer")):
        with pytest.raises(UsageError, match=words):
            tp_slice((4, 2), "w1", 2, rank)  # type: ignore[arg-type]
