"""Progress of a command: a bar on terminals, a line per unit, or events for programs.

The ETA comes from the bytes of the last half minute, so that it follows the disk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from ktconv.cli.events import Events
from ktconv.conversion.pipeline import Observer
from ktconv.system.stores import transfer
from ktconv.system.text import Notify
from ktconv.system.units import counted, format_duration, format_rate, format_size

WINDOW_SECONDS = 30.0
EVENT_SECONDS = 1.0  # between events of progress


class Rate:
    """Bytes per second over the last half minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, done: int = 0) -> None:
        self._clock = clock
        self._points: deque[tuple[float, int]] = deque([(clock(), done)])

    def update(self, done: int) -> None:
        now = self._clock()
        if now - self._points[-1][0] > 0.2:
            self._points.append((now, done))
        while len(self._points) > 2 and now - self._points[0][0] > WINDOW_SECONDS:
            self._points.popleft()

    def per_second(self, done: int) -> float:
        start, before = self._points[0]
        elapsed = self._clock() - start
        return (done - before) / elapsed if elapsed > 0 else 0.0


class Progression(Observer):
    """Counts bytes and units; the base of both observers.

    The total is known when the run starts: units that are already done never start, so `begin`
    receives what remains.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.total = sum(sizes.values())
        self.done = 0
        self.unit = ""
        self.rate, self.network = Rate(), Rate(done=transfer.nbytes)

    def begin(self, keys: list[str]) -> None:
        self.total = sum(self.sizes[key] for key in keys)
        self.rate, self.network = Rate(), Rate(done=transfer.nbytes)

    def advanced(self, source_bytes: int) -> None:
        self.done += source_bytes
        self.rate.update(self.done)
        self.network.update(transfer.nbytes)

    def unit_started(self, key: str) -> None:
        self.unit = key

    def eta(self) -> str:
        speed = self.rate.per_second(self.done)
        return format_duration((self.total - self.done) / speed) if speed else "?"

    def speeds(self) -> str:
        """Rates of the source, and of the network for a remote one."""
        return ", ".join(filter(None, [self.speed(), self.network_speed(), self.retries()]))

    def speed(self) -> str:
        return format_rate(self.rate.per_second(self.done))

    def network_speed(self) -> str:
        """Empty for sources on this machine, as `retries`."""
        if not transfer.stores:
            return ""
        return f"network {format_rate(self.network.per_second(transfer.nbytes))}"

    def retries(self) -> str:
        count = transfer.retries if transfer.stores else 0
        return counted(count, "retry") if count else ""

    def __enter__(self) -> Progression:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class QuietObserver(Progression):
    """Only what the user must know."""

    def __init__(self, sizes: Mapping[str, int], notify: Notify) -> None:
        super().__init__(sizes)
        self._notify = notify

    def noted(self, text: str) -> None:
        self._notify(text)


class LineObserver(QuietObserver):
    """One line per finished unit, for logs."""

    def unit_finished(self, key: str) -> None:
        share = 100 * self.done / self.total if self.total else 100
        self._notify(
            f"{key} done, {format_size(self.done)} of {format_size(self.total)} ({share:.0f} %), "
            f"{self.speeds()}, ETA {self.eta()}"
        )


class EventObserver(Progression):
    """JSON events: what starts, at most one a second of progress, and each finished unit."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        events: Events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(sizes)
        self._events, self._clock = events, clock
        self._units, self._started = list(sizes), False
        self._last = clock()

    def begin(self, keys: list[str]) -> None:
        super().begin(keys)
        self._units = keys
        self._start()

    def advanced(self, source_bytes: int) -> None:
        self._start()
        super().advanced(source_bytes)
        if self._clock() - self._last >= EVENT_SECONDS:
            self._last = self._clock()
            self._emit("progress", self.unit)

    def unit_started(self, key: str) -> None:
        self._start()
        super().unit_started(key)

    def unit_finished(self, key: str) -> None:
        self._start()
        self._emit("unit_finished", key)

    def noted(self, text: str) -> None:
        self._events.emit("note", text=text)

    def _start(self) -> None:
        """Not every command calls `begin`."""
        if not self._started:
            self._started = True
            self._events.emit("started", units=self._units, bytes=self.total)

    def _emit(self, event: str, unit: str) -> None:
        speed = self.rate.per_second(self.done)
        left = max(self.total - self.done, 0)
        self._events.emit(
            event,
            unit=unit,
            done_bytes=self.done,
            total_bytes=self.total,
            bytes_per_second=round(speed),
            eta_seconds=round(left / speed, 1) if speed else None,
            **self._network(),
        )

    def _network(self) -> dict[str, int]:
        """The network's rate, bytes and requests, for remote sources."""
        if not transfer.stores:
            return {}
        return {
            "network_bytes": transfer.nbytes,
            "network_bytes_per_second": round(self.network.per_second(transfer.nbytes)),
            "network_requests": transfer.requests,
            "network_retries": transfer.retries,
        }
