"""Two levels of scales as one grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ktconv.checkpoint.encodings.grids import load_outer_scale
from ktconv.checkpoint.types import OuterScale, TensorRef
from ktconv.errors import CheckpointError

TENSOR = TensorRef("experts.0.weight_scale_2", Path("a.safetensors"), "F32", (1,), 0, 4)


def both(block: float, outer: float, divides: bool) -> float:
    grid = np.array([[1.0, block]], np.float32)
    data = np.float32(outer).tobytes()
    return float(load_outer_scale(OuterScale(TENSOR, divides=divides), grid, data)[0, 1])


def test_levels_are_multiplied_or_divided() -> None:
    assert both(3.0, 0.5, False) == 1.5
    assert both(3.0, 0.5, True) == 6.0


@pytest.mark.parametrize(("block", "divides"), [(1e-30, False), (1e30, True)])
def test_levels_beyond_float32_are_refused(block: float, divides: bool) -> None:
    """Weights would become zeros or infinities."""
    with pytest.raises(CheckpointError, match=r"weight_scale_2 has the scale 1.*e-30.* (0.0|inf)"):
        both(block, 1e-30, divides)
