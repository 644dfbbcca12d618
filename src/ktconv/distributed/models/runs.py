"""Runs the entries of a list, each in a process of its own: one that dies takes no other along,
and all end with this one.

A process reports by the events of `--progress json` and the document of `--json`.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Literal

from msgspec import Struct, field

from ktconv.distributed.models.listing import Entry
from ktconv.system import children
from ktconv.system.units import format_size

State = Literal["waiting", "running", "done", "failed"]


class Run(Struct):
    """An entry, and how far it is."""

    entry: Entry
    state: State = "waiting"
    units: int = 0  # to convert in this run
    finished: int = 0
    exit_code: int | None = None
    seconds: float = 0.0
    message: str | None = None
    hint: str | None = None
    last_line: str | None = None  # on stderr that is no event
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """State for people."""
        if self.state == "running":
            return f"running {self.finished}/{self.units}" if self.units else "running"
        if self.state == "failed":
            return f"failed: {self.message}"
        if self.state == "done" and "complete" not in self.report:  # of --dry-run
            read, written, needed = (
                format_size(self.report[f"{name}_bytes"])
                for name in ("source", "output", "disk_needed")
            )
            return f"planned: {read} of source, {written} of output, {needed} of disk needed"
        return self.state

    def facts(self) -> dict[str, Any]:
        return {
            "line": self.entry.line,
            "model": self.entry.shown,
            "output": str(self.entry.output),
            "state": self.state,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "message": self.message,
            "hint": self.hint,
            "report": self.report or None,
        }


Changed = Callable[[Run, dict[str, Any]], None]  # a run, and the event that it sent


# The command, with words from stdin: everybody on a machine sees the arguments of processes, and
# URLs can have signatures and passwords.
_PROGRAM = (
    "import json, sys; sys.argv = ['ktconv', *json.loads(sys.stdin.readline())]; "
    "from ktconv.cli.entry import main; main()"
)


class Fleet:
    """The runs of a list. `common`: options of all, which those of a line follow and overrule."""

    def __init__(
        self, entries: Sequence[Entry], common: Sequence[str], at_once: int, changed: Changed
    ) -> None:
        self.runs = [Run(entry) for entry in entries]
        self._common, self._at_once, self._changed = common, at_once, changed
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self._stopped = False

    @property
    def exit_code(self) -> int:
        """0 where all are done, else the largest of theirs."""
        return max((run.exit_code or 0 for run in self.runs), default=0)

    def run(self) -> None:
        """Runs everything that is not stopped by an interrupt, which is raised."""
        with ThreadPoolExecutor(self._at_once) as pool, self._stopping():
            for done in [pool.submit(self._run, run) for run in self.runs]:
                done.result()

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with self._lock:
                self._stopped = True
                for process in self._processes:
                    process.terminate()  # it says what is kept, and how to go on
            raise

    def _run(self, run: Run) -> None:
        words = ["quantize-cpu", run.entry.model, str(run.entry.output)]
        words += [*self._common, *run.entry.words, "--json", "--progress", "json"]
        with self._lock:
            if self._stopped:
                return
            process = children.start(_PROGRAM, stderr=subprocess.PIPE, errors="replace")
            self._processes.add(process)
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as words_of_child:
                words_of_child.write(json.dumps(words))
        started = time.monotonic()
        run.state = "running"
        entry = run.entry
        about = {"model": entry.shown, "output": str(entry.output)}
        self._changed(run, {"event": "run_started", **about})
        with process, ThreadPoolExecutor(1) as reader:
            assert process.stdout is not None
            assert process.stderr is not None
            output = reader.submit(process.stdout.read)
            for line in process.stderr:
                self._event(run, line)
            self._end(run, process.wait(), output.result())
        run.seconds = time.monotonic() - started
        with self._lock:
            self._processes.discard(process)
        ended = {"exit_code": run.exit_code, "message": run.message, "hint": run.hint}
        self._changed(run, {"event": "run_finished", **ended})

    def _event(self, run: Run, line: str) -> None:
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError, KeyError):  # of the interpreter, or of a library
            run.last_line = line.strip() or run.last_line
            return
        if kind == "started":
            run.units, run.finished = len(event["units"]), 0
        elif kind == "unit_finished":
            run.finished += 1
        elif kind == "failed":
            run.message, run.hint = event["message"], event["hint"]
        self._changed(run, event)

    def _end(self, run: Run, code: int, output: str) -> None:
        run.exit_code = code if code >= 0 else 3
        run.state = "done" if code == 0 else "failed"
        try:
            found = json.loads(output)
        except ValueError:
            found = {}
        run.report = found if code == 0 else {}
        if code == 0:
            run.message = run.hint = None
        elif code < 0:
            run.message = f"it was killed by signal {-code}"
            run.hint = "run the same command again: finished layers are kept"
        elif run.message is None:
            run.message = run.last_line or f"it ended with exit code {code}"
