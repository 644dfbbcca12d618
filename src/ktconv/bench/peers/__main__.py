"""A peer's process: a Request on stdin, one Result per line on stdout."""

from __future__ import annotations

import json
import sys

from msgspec import convert
from msgspec.structs import asdict

from ktconv.bench.peers.base import answers
from ktconv.bench.peers.request import Request
from ktconv.bench.peers.worker import work

with answers() as answer:
    for result in work(convert(json.loads(sys.stdin.readline()), Request)):
        answer(asdict(result))
