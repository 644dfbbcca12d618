"""A peer's process: a Request on the first line of stdin, then the steps of each turn; Ready and
Times on stdout."""

from __future__ import annotations

import sys

from ktconv.bench.peers.base import answers
from ktconv.bench.sft.peers.request import Request
from ktconv.bench.sft.peers.worker import work

with answers() as answer:
    for facts in work(Request.from_json(sys.stdin.readline()), sys.stdin):
        answer(facts)
