"""Bytes, speed and ETA: counted right, from the last half minute."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from helpers.convert import convert
from helpers.paths import EXAMPLE
from rich.console import Console

from ktconv.cli import progress
from ktconv.cli.bar import BarObserver
from ktconv.cli.progress import LineObserver, Rate
from ktconv.quantize.packed.run import Request, quantize_cpu
from ktconv.system.stores import Transfer
from ktconv.system.units import format_duration
from ktconv.targets.packed.target import Options


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (123, "2:03"), (3723, "1:02:03")],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_rate_before_anything() -> None:
    assert Rate(Clock()).per_second(0) == 0


def test_rate_is_steady() -> None:
    clock = Clock()
    rate = Rate(clock)
    for second in range(1, 10):
        clock.now = 100 + second
        rate.update(second * 500)
        assert rate.per_second(second * 500) == pytest.approx(500)


def test_rate_follows_the_disk() -> None:
    """A fast start (page cache) is forgotten after half a minute."""
    clock, done = Clock(), 0
    rate = Rate(clock)
    for second in range(1, 101):
        clock.now = 100 + second
        done += 1000 if second <= 50 else 10
        rate.update(done)
    assert rate.per_second(done) == pytest.approx(10)


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    observer = LineObserver(
        {"layer-00000": 600, "layer-00001": 400, "other-00001": 99}, said.append
    )
    observer.begin(["layer-00000", "layer-00001"])
    observer.unit_started("layer-00000")
    observer.advanced(600)
    observer.unit_finished("layer-00000")
    observer.advanced(400)
    observer.unit_finished("layer-00001")
    assert said[0].startswith("layer-00000 done, 600 B of 1.0 kB (60 %), ")
    assert said[1].startswith("layer-00001 done, 1.0 kB of 1.0 kB (100 %), ")
    assert said[1].endswith("ETA 0:00")


@pytest.mark.parametrize("numa", [1, 2])
@pytest.mark.parametrize("layout", ["safetensors", "layers"])
def test_all_bytes_are_counted(layout: str, numa: int, tmp_path: Path) -> None:
    """The count ends at exactly the total, in a fresh run and in one that continues."""
    options = Options(layout=layout, numa=numa)  # type: ignore[arg-type]
    for output, layers in (("fresh", None), ("continued", [0])):
        if layers:
            convert(EXAMPLE, tmp_path / output, layers=layers, layout=layout, numa=numa)
        request = Request(str(EXAMPLE), tmp_path / output, options, threads=2)
        said: list[str] = []
        observer = LineObserver({}, said.append)
        from ktconv.quantize.packed.run import prepare

        preflight = prepare(request)
        observer.sizes = {unit.key: unit.source_bytes for unit in preflight.plan.units}
        report = quantize_cpu(request, observer, preflight)
        assert observer.done == observer.total == report.source_bytes > 0
        assert len(said) == len(report.converted)


def test_bar() -> None:
    """Bytes, speed, unit and ETA in one line."""
    observer = BarObserver({"layer-00000": 600, "layer-00001": 400})
    text = io.StringIO()
    observer._bar.live.console = Console(file=text, force_terminal=True, width=120)
    with observer:
        observer.begin(["layer-00000", "layer-00001"])
        observer.unit_started("layer-00001")
        observer.advanced(250)
        observer._bar.refresh()
    shown = text.getvalue()
    assert "layer-00001" in shown
    assert "250 B of 1.0 kB" in shown
    assert "B/s" in shown
    assert "ETA" in shown


@pytest.mark.parametrize("width", [60, 80, 96])
def test_a_bar_with_a_network_is_one_line(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "transfer", Transfer(retries=12, stores=1))
    observer = BarObserver({"layer-00003": 671_000_000_000})
    text = io.StringIO()
    observer._bar.live.console = Console(file=text, force_terminal=False, width=width)
    observer.begin(["layer-00003"])
    observer.unit_started("layer-00003")
    observer._bar.console.print(observer._bar.get_renderable())
    (line,) = text.getvalue().splitlines()
    assert "layer-00003" in line and "671.0 GB" in line and "ETA ?" in line
    assert ("network 0 B/s" in line) == (width >= 80)
    assert ("12 retries" in line) == (width >= 96)
