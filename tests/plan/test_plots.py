"""Pictures of plans: every kind can be drawn. How they look is for eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv_done

from ktconv.plan.command import make_plan
from ktconv.plan.plots import _of_places, _of_ranks, _relative
from ktconv.plan.request import PlanRequest

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("options", [
    {}, {"ep": 2, "redundant": 2}, {"hot": "3", "ep": 2}, {"gpu_memory": 20_000},
])  # fmt: skip
def test_plans_can_be_drawn(ragged: Path, options: dict[str, Any], tmp_path: Path) -> None:
    from ktconv.plan.plots import plot

    path = tmp_path / "plan.svg"
    plot(make_plan(PlanRequest(str(ragged), numa=1, **options)), path)
    text = path.read_text()
    assert "before: linear, no copies" in text and "load / mean before" in text


def test_the_command_draws(model: Path, counts: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    ktconv_done("plan", model, "--ep", 4, "--redundant", 4, "--load", counts, "--plot", path)
    assert path.stat().st_size > 1000


def test_what_is_drawn() -> None:
    """Loads over the mean before; layers with fewer places end earlier."""
    before = [([[0, 1], [2, 3]], np.array([1.0, 2, 3, 6])), ([[0], [1]], np.array([1.0, 3]))]
    after = [([[3, 0, 1], [3, 2, 1]], np.array([1.0, 1, 3, 3])), ([[1], [0]], np.array([1.0, 3]))]
    ranks = _relative(before, after, _of_ranks)
    assert ranks[0].tolist() == [[0.5, 1.5], [0.5, 1.5]]
    assert ranks[1].tolist() == [[5 / 6, 7 / 6], [1.5, 0.5]]
    places = _relative(before, after, _of_places)
    assert places[0][0].tolist() == [1 / 3, 2 / 3, 1, 2]
    assert places[0][1, :2].tolist() == [0.5, 1.5] and np.isnan(places[0][1, 2:]).all()
    assert places[1][0].tolist() == [1, 1 / 3, 1 / 3, 1, 1, 1 / 3]
