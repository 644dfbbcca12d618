"""Progress as a bar on a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from ktconv.cli.progress import Progression
from ktconv.system.text import printable
from ktconv.system.units import counted, format_size

if TYPE_CHECKING:
    from ktconv.distributed.models.runs import Run

BAR_WIDTH = 60  # columns; lines serve narrower terminals better
NETWORK_WIDTH, RETRIES_WIDTH = 80, 96  # columns with which the bar shows these, too


class _Live(ProgressColumn):
    """A column computed from the progression at each refresh."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__(Column(no_wrap=True))
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text())


class BarObserver(Progression):
    """A bar with bytes, speed, layer and ETA on stderr."""

    @staticmethod
    def fits() -> bool:
        """Whether stderr is a terminal that can move its cursor and has room for a bar."""
        if sys.stderr is None or not sys.stderr.isatty():
            return False
        console = Console(stderr=True)
        return not console.is_dumb_terminal and console.width >= BAR_WIDTH

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _Live(lambda: f"{format_size(self.done)} of {format_size(self.total)}"),
            _Live(self.speed),
            _Live(lambda: self.network_speed() if self._width() >= NETWORK_WIDTH else ""),
            _Live(lambda: self.retries() if self._width() >= RETRIES_WIDTH else ""),
            _Live(lambda: f"ETA {self.eta()}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("planning", total=self.total)

    def _width(self) -> int:
        return self._bar.console.width

    def begin(self, keys: list[str]) -> None:
        super().begin(keys)
        self._bar.update(self._task, total=self.total)

    def advanced(self, source_bytes: int) -> None:
        super().advanced(source_bytes)
        self._bar.update(self._task, completed=self.done)

    def unit_started(self, key: str) -> None:
        super().unit_started(key)
        self._bar.update(self._task, description=printable(key))

    def noted(self, text: str) -> None:
        self._bar.console.print(Text(text))  # above the bar

    def __enter__(self) -> Progression:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class FleetBar(BarObserver):
    """A bar of the models of a list that have begun, all together: how much others read is not
    known yet."""

    def __init__(self, count: int) -> None:
        super().__init__({})
        self._count, self._ended = count, 0
        self._begun: dict[int, tuple[int, int]] = {}  # by line: bytes done, and of all
        self._lock = threading.Lock()
        self.unit_started(f"0 of {counted(count, 'model')} ended")

    def changed(self, run: Run, event: Mapping[str, Any]) -> None:
        """A run of the list sent an event; called from several threads."""
        line, kind = run.entry.line, event["event"]
        with self._lock:
            if kind == "started":
                self._begun[line] = 0, event["bytes"]
            elif kind in ("progress", "unit_finished"):
                self._begun[line] = event["done_bytes"], event["total_bytes"]
            elif kind == "run_finished":
                self._ended += 1
                done, total = self._begun.get(line, (0, 0))
                self._begun[line] = (total, total) if run.state == "done" else (done, done)
                self.unit_started(f"{self._ended} of {counted(self._count, 'model')} ended")
            self.total = sum(total for _, total in self._begun.values())
            self._bar.update(self._task, total=self.total)
            self.advanced(sum(done for done, _ in self._begun.values()) - self.done)
