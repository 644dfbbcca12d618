"""A process of its own for every peer: thread pools and CPU modes must not disturb others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import ktconv
from ktconv.bench.peers.base import PeerError
from ktconv.bench.peers.request import Request, Result

# `-m` and `-c` look for modules in the working directory first, which may be a checkpoint.
_START = "import sys; sys.path[:] = filter(None, sys.path); import ktconv.bench.peers.__main__"
_ERROR_LINES = 3  # of a crashed peer's last words


def measure(request: Request) -> Iterator[Result]:
    """One result per number of tokens, as they are ready. Raises PeerError."""
    paths = [str(Path(ktconv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            env=environment,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it ended at once; its last words say why
                process.stdin.write(json.dumps(asdict(request)))
                process.stdin.close()
            done = 0
            for line in process.stdout:
                facts = json.loads(line)
                if "problem" in facts:
                    raise PeerError(facts["problem"])
                done += 1
                yield Result(**facts)
            process.wait()
            if done < len(request.tokens):
                words.seek(0)
                raise PeerError(_last_words(process.returncode, words.read()))
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _last_words(status: int, text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()][-_ERROR_LINES:]
    return f"its process ended with status {status}: {' / '.join(lines) or 'it said nothing'}"
