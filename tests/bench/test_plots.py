"""Pictures: every kind of report can be drawn. How they look is for eyes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench.reports import report, row
from msgspec.structs import replace

from ktconv.bench.plots import plot
from ktconv.errors import UsageError
from ktconv.writer.pictures import picture_file

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")

ROWS = [
    row(1e-4, tokens=1),
    replace(row(3e-4, tokens=64), disturbed=True),
    row(1e-3, tokens=1, method="bf16", unit="bf16", isa="scalar"),
    row(1e-3, tokens=1, engine="torch", isa="own"),
]


@pytest.mark.parametrize("name", ["roofline.png", "sweep.png", "anything.svg", "Sweep-2.pdf"])
@pytest.mark.parametrize("count", [1, 4])
def test_reports_can_be_drawn(name: str, count: int, tmp_path: Path) -> None:
    picture_file(tmp_path / name).check()
    plot(report(*ROWS[:count]), tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000


def test_the_name_decides_which_picture(tmp_path: Path) -> None:
    for name in ("sweep.svg", "roofline.svg"):
        plot(report(*ROWS), tmp_path / name)
    sweep, roofline = ((tmp_path / name).read_text() for name in ("sweep.svg", "roofline.svg"))
    assert "tokens per step" in sweep and "tokens per step" not in roofline
    assert "operations per byte" in roofline and "torch" in roofline


def test_pictures_that_cannot_be_drawn(tmp_path: Path) -> None:
    for name, words in (
        ("plot", "not a picture file"),
        ("a.txt", "not a picture file"),
        ("no/a.png", "directory"),
    ):
        with pytest.raises(UsageError, match=words):
            picture_file(tmp_path / name)
    (tmp_path / "full.png").mkdir()
    with pytest.raises(UsageError, match="is a directory"):
        picture_file(tmp_path / "full.png")
    with pytest.raises(UsageError, match="is a directory"):
        plot(report(*ROWS), tmp_path / "full.png")


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the system, because root may write anywhere."""
    asked = []

    def access(path: Path, _: int) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr(os, "access", access)
    (tmp_path / "there.png").touch()
    for name in ("new.png", "there.png"):
        with pytest.raises(UsageError, match="cannot be written"):
            picture_file(tmp_path / name).check()
    assert asked == [tmp_path, tmp_path / "there.png"]
