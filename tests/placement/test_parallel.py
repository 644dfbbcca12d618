"""How many GPUs can share the experts of a layer."""

from __future__ import annotations

import pytest

from ktconv.placement.parallel import LayerShape, expert_parallel, placed, tensor_parallel


def layer(intermediate: int, group_size: int | None, bits: int = 4) -> LayerShape:
    return LayerShape(range(8), intermediate, bits, group_size)


@pytest.mark.parametrize(("shape", "size", "reason"), [
    (layer(768, 128), 2, None),
    (layer(768, 128), 4, "192 of the 768 columns of down (w2)"),
    (layer(768, 64), 4, None),
    (layer(768, 64), 5, "intermediate size 768 is not divisible by 5"),
    (layer(768, None), 8, None),  # one scale per row: columns can be cut anywhere
    (layer(72, None), 6, "12 columns of down (w2) of 4 bits do not fill int32 words"),
    (layer(72, None, bits=8), 6, None),
])  # fmt: skip
def test_tensor_parallel(shape: LayerShape, size: int, reason: str | None) -> None:
    split = tensor_parallel([shape], size)
    assert split.possible == (reason is None)
    assert reason is None or reason in str(split.reason)


def test_expert_parallel() -> None:
    assert placed(range(8), 4, "linear") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert placed(range(8), 4, "round_robin") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert placed(range(8), 3, "linear") == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert placed(range(2), 3, "linear") == [[0], [1], []]
    assert expert_parallel([layer(256, 128)], 4).possible
    assert not expert_parallel([layer(256, 128)], 3).possible
    for size in range(1, 10):
        for placement in ("linear", "round_robin"):
            ranks = placed([1, 4, 5, 9, 12], size, placement)
            assert len(ranks) == size and sorted(expert for rank in ranks for expert in rank) == [
                1,
                4,
                5,
                9,
                12,
            ]
