"""Scales as grids: two levels as one, and what is looked at before weights are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ktconv.errors import CheckpointError
from ktconv.source.encodings.grids import load_block_scale, load_outer_scale, scan_block_scale
from ktconv.source.types import BlockGrid, OuterScale, TensorRef

TENSOR = TensorRef("experts.0.weight_scale_2", Path("a.safetensors"), "F32", (1,), 0, 4)


def both(block: float, outer: float, divides: bool) -> float:
    grid = np.array([[1.0, block]], np.float32)
    data = np.float32(outer).tobytes()
    return float(load_outer_scale(OuterScale(TENSOR, divides=divides), grid, data)[0, 1])


def test_levels_are_multiplied_or_divided() -> None:
    assert both(3.0, 0.5, False) == 1.5
    assert both(3.0, 0.5, True) == 6.0


def test_levels_beyond_float32_are_refused() -> None:
    """Weights would become infinities; those that become zeros are what they are."""
    with pytest.raises(CheckpointError, match=r"weight_scale_2 has the scale 1.*e-30.* inf"):
        both(1e30, 1e-30, True)
    assert both(1e-30, 1e-30, False) == 0
    assert both(3.0, 0.0, False) == 0 and both(0.0, 2.0, True) == 0


# Words of numbers without a sign, the smallest and the largest among them, with one, and of none.
WORDS: dict[str, tuple[type, list[int], list[int], list[int]]] = {
    "F32": (
        np.uint32, [0, 1, 0x3F800000, 0x7F7FFFFF, 1 << 31], [0x80000001],
        [0x7F800000, 0x7FC00000, 0xFF800000],
    ),
    "BF16": (np.uint16, [0, 1, 0x3F80, 0x7F7F, 0x8000], [0x8001], [0x7F80, 0x7FFF, 0xFF80]),
    "F16": (np.uint16, [0, 1, 0x3C00, 0x7BFF, 0x8000], [0x8001], [0x7C00, 0x7E00, 0xFC00]),
    "E4M3": (np.uint8, [0, 1, 0x38, 0x7E, 0x80], [0x81], [0x7F, 0xFF]),
    "E8M0": (np.uint8, [0, 1, 127, 254], [], [255]),
}  # fmt: skip


def grid_of(number: str, count: int, any_sign: bool) -> BlockGrid:
    return BlockGrid(TENSOR, number, 0, count, 1, 1, 16, 0, 0, any_sign=any_sign)


@pytest.mark.parametrize("any_sign", [False, True])
@pytest.mark.parametrize("number", WORDS)
def test_scanning_finds_what_loading_refuses(number: str, any_sign: bool) -> None:
    """And as many zeros, whatever the sign of the largest word."""
    dtype, fine, negative, none = WORDS[number]
    for words in (fine[:-1], fine, fine[1:2], [*fine, *fine], *([[*fine, *negative]] * any_sign)):
        scale, cols = grid_of(number, len(words), any_sign), 16 * len(words)
        data = np.array(words, dtype).tobytes()
        grid = load_block_scale(scale, 1, cols, data)
        zeros, largest = scan_block_scale(scale, 1, cols, data)
        assert zeros == np.count_nonzero(grid == 0) and largest == np.abs(grid).max()
    for word in (*none, *(() if any_sign else negative)):
        words = [*fine, word, fine[0]]
        scale, cols = grid_of(number, len(words), any_sign), 16 * len(words)
        said = []
        for way in (load_block_scale, scan_block_scale):
            with pytest.raises(CheckpointError, match="not a finite number") as caught:
                way(scale, 1, cols, np.array(words, dtype).tobytes())
            said.append(str(caught.value))
        assert said[0] == said[1]
