"""A peer's process: a Request on stdin, one Result per line on stdout."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from ktconv.bench.peers.base import PeerError
from ktconv.bench.peers.request import Request
from ktconv.bench.peers.worker import work


def main() -> None:
    """Peers print what they like: their stdout goes to stderr."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        for result in work(Request.from_json(sys.stdin.read())):
            results.write(json.dumps(asdict(result)) + "\n")
    except (PeerError, ImportError, MemoryError) as error:
        results.write(json.dumps({"problem": str(error) or type(error).__name__}) + "\n")
    results.flush()
    sys.stderr.flush()
    os._exit(0)  # some peers' threads do not end in an orderly way


main()
