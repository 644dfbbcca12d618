"""A peer's process: a Request on the first line of stdin, then the steps of each turn; Ready and
Times on stdout."""

from __future__ import annotations

import json
import sys

from msgspec import convert

from ktconv.bench.peers.base import answers
from ktconv.bench.sft.peers.request import Request
from ktconv.bench.sft.peers.worker import work

with answers() as answer:
    for facts in work(convert(json.loads(sys.stdin.readline()), Request), sys.stdin):
        answer(facts)
