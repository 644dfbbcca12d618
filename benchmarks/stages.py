#!/usr/bin/env python3
"""Run a ktconv command, and say on stderr what CPU time its workers needed for what.

    stages.py quantize-cpu MODEL OUTPUT ...

The last line is a JSON object: seconds of CPU time of all threads, per stage.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ktconv import native
from ktconv.cli.entry import main
from ktconv.quantize.packed import task
from ktconv.source.reading.matrices import MatrixReader
from ktconv.targets.packed.matrix_check import MatrixCheck
from ktconv.writer.staging import ShardStaging

spent: dict[str, float] = defaultdict(float)
lock = threading.Lock()


def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        begin = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            with lock:
                spent[stage] += time.thread_time() - begin

    return run


class Digest:
    """sha256 whose updates are timed."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.update = timed("checksum", self._digest.update)
        self.hexdigest = self._digest.hexdigest


class TimedHashes:
    sha256 = Digest


def instrument() -> None:
    for owner, name, stage in (
        (MatrixReader, "read", "reading"),
        (MatrixReader, "load_scales", "reading"),
        (native, "quantize_pack", "decoding and packing"),
        (ShardStaging, "write", "writing"),
        (ShardStaging, "read", "reading back"),
        (MatrixCheck, "compare", "audit"),
    ):
        setattr(owner, name, timed(stage, getattr(owner, name)))
    task.hashlib = TimedHashes  # type: ignore[assignment, attr-defined]


if __name__ == "__main__":
    instrument()
    try:
        sys.exit(main())
    finally:
        print(json.dumps(spent), file=sys.stderr, flush=True)
