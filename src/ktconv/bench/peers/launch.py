"""A process of its own for every peer: thread pools and CPU modes must not disturb others."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from msgspec import to_builtins

import ktconv
from ktconv.bench.peers.base import PeerError
from ktconv.bench.peers.request import Request, Result
from ktconv.system import children

_MODULE = "ktconv.bench.peers.__main__"
_ERROR_LINES = 3  # of a crashed peer's last words


def measure(request: Request) -> Iterator[Result]:
    """One result per number of tokens, as they are ready. Raises PeerError."""
    with closing(PeerProcess(_MODULE)) as process:
        process.send(json.dumps(to_builtins(request)))
        for _ in request.tokens:
            yield Result(**process.receive())


class PeerProcess:
    """Runs a module that reads lines from stdin and writes lines of JSON to stdout."""

    def __init__(self, module: str) -> None:
        # `-m` and `-c` look for modules in the working directory first, which may be a checkpoint.
        start = f"import sys; sys.path[:] = filter(None, sys.path); import {module}"
        paths = [str(Path(ktconv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by close()
        self._process = children.start(start, stderr=self._words, environment=environment)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    def send(self, line: str) -> None:
        with suppress(BrokenPipeError):  # it ended; `receive` says why
            self._to.write(line + "\n")
            self._to.flush()

    def receive(self) -> dict[str, Any]:
        """The next line. PeerError if the peer has a problem, or has ended."""
        line = self._from.readline()
        if not line:
            self._process.wait()
            self._words.seek(0)
            raise PeerError(_last_words(self._process.returncode, self._words.read()))
        facts: dict[str, Any] = json.loads(line)
        if "problem" in facts:
            raise PeerError(facts["problem"])
        return facts

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._to.close()
        self._from.close()
        self._words.close()


def _last_words(status: int, text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()][-_ERROR_LINES:]
    return f"its process ended with status {status}: {' / '.join(lines) or 'it said nothing'}"
