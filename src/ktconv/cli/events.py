"""Progress as JSON lines on stderr (`--progress json`); docs/progress.md describes the events."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from typing import Any, Literal

from ktconv.cli import calls
from ktconv.system.text import valid_unicode

Mode = Literal["auto", "bar", "lines", "json", "none"]
SCHEMA = 1


class Events:
    """One JSON object a line; nothing follows `finished` or `failed`. Safe for threads."""

    def __init__(self) -> None:
        self.stream = sys.stderr
        self._lock = threading.RLock()
        self._ended = False

    def emit(self, event: str, **fields: Any) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = event in ("finished", "failed")
            line = {"schema": SCHEMA, "event": event, **valid_unicode(fields)}
            print(json.dumps(line), file=self.stream, flush=True)

    def emit_of(self, run: int, event: Mapping[str, Any]) -> None:
        """An event of a run of a list, which is named by its line there; how it ends is told by
        `run_finished`."""
        if event["event"] not in ("finished", "failed"):
            known = {name: value for name, value in event.items() if name != "schema"}
            self.emit(**{**known, "run": run})

    def failed(self, message: str, hint: str | None, code: int) -> None:
        self.emit("failed", exit_code=code, message=message, hint=hint)


class _Notes(io.TextIOBase):
    """A stand-in for stderr: lines that libraries print there, such as warnings, become notes."""

    encoding = "utf-8"  # some ask for it

    def __init__(self, events: Events) -> None:
        self._events, self._rest = events, ""
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._events.stream.fileno()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (_last_state(one) for one in (self._rest + text).split("\n"))
        for line in lines:
            if line.strip():
                self._events.emit("note", text=line.strip())
        return len(text)


def _last_state(line: str) -> str:
    """The visible text of a line with carriage returns, such as a progress bar's."""
    return line[line[:-1].rfind("\r") + 1 :]


class _Command:
    """The progress mode of the running command; `events` only with `--progress json`."""

    mode: Mode = "auto"
    events: Events | None = None


def mode() -> Mode:
    return "none" if calls.is_called() else _Command.mode


def events() -> Events | None:
    """The writer of the running command's events, if it writes any."""
    return None if calls.is_called() else _Command.events


@contextmanager
def shown_as(chosen: Mode) -> Iterator[None]:
    """Progress and messages of the command inside are shown in this way."""
    _Command.mode = chosen
    _Command.events = Events() if chosen == "json" else None
    notes = _Notes(_Command.events) if _Command.events else None
    try:
        with redirect_stderr(notes) if notes else nullcontext():
            yield
    finally:
        _Command.mode, _Command.events = "auto", None
