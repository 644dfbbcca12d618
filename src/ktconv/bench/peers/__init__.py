"""Other implementations of the same layer, measured beside ours on the same weights and routing.

`available()` lists them; `measure(request)` runs one in a process of its own.
"""

from __future__ import annotations

from ktconv.bench.peers.base import PeerError
from ktconv.bench.peers.launch import measure
from ktconv.bench.peers.request import Request, Result
from ktconv.bench.peers.table import PEERS, Availability, Spec, available

__all__ = [
    "PEERS",
    "Availability",
    "PeerError",
    "Request",
    "Result",
    "Spec",
    "available",
    "measure",
]
