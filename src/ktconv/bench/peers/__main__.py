"""A peer's process: a Request on stdin, one Result per line on stdout."""

from __future__ import annotations

import sys

from msgspec.structs import asdict

from ktconv.bench.peers.base import answers
from ktconv.bench.peers.request import Request
from ktconv.bench.peers.worker import work

with answers() as answer:
    for result in work(Request.from_json(sys.stdin.readline())):
        answer(asdict(result))
