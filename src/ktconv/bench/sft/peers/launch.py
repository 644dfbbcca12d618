"""A peer in a process of its own, which runs a turn of steps whenever it is asked to."""

from __future__ import annotations

import json
from dataclasses import asdict

from ktconv.bench.peers.launch import PeerProcess
from ktconv.bench.sft.peers.request import Ready, Request
from ktconv.bench.sft.steps import Times

_MODULE = "ktconv.bench.sft.peers.__main__"


class PeerRunner:
    """Raises PeerError if the peer cannot be measured; close it in any case."""

    def __init__(self, request: Request) -> None:
        self._process = PeerProcess(_MODULE)
        try:
            self._process.send(json.dumps(asdict(request)))
            self.ready = Ready(**self._process.receive())
        except BaseException:
            self.close()
            raise

    def turn(self, steps: int) -> Times:
        self._process.send(str(steps))
        return Times(**self._process.receive())

    def close(self) -> None:
        self._process.close()
