"""A peer's process, as it sees it: lines of JSON for the caller, and an end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ktconv.bench.peers.base import PeerError


@contextmanager
def answers() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that sends facts to the caller, who also learns why the work ended early. Peers
    print what they like: their stdout goes to stderr. The process ends with the context."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(facts: dict[str, Any]) -> None:
        results.write(json.dumps(facts) + "\n")

    try:
        yield answer
    except (PeerError, ImportError, MemoryError) as error:
        answer({"problem": str(error) or type(error).__name__})
    results.flush()
    sys.stderr.flush()
    os._exit(0)  # some peers' threads do not end in an orderly way
