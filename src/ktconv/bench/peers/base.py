"""The interface of a peer, another implementation of the same MoE layer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from ktconv.bench.measure import Batch
from ktconv.bench.presets import Shape
from ktconv.formats.decode import bf16_to_f32
from ktconv.native import Activation
from ktconv.runtime.layers.experts import GatedMatrices, gated
from ktconv.system.arrays import F32


class PeerError(Exception):
    """Reason why a peer cannot be measured here, in one sentence for people."""


class Layer(Struct, frozen=True):
    """The layer that a peer builds. Expert e has the matrices `source(origins[e])`, each in memory
    of its own, because shared memory would stay in the cache."""

    shape: Shape
    origins: Sequence[int]
    source: Callable[[int], GatedMatrices]
    threads: int
    max_tokens: int


class Steps(Struct, frozen=True):
    """A batch bound to a peer: one call per routing of the batch, and y after a call."""

    calls: Sequence[Callable[[], None]]
    result: Callable[[], F32]


class Peer(Protocol):
    """One implementation at one weight format. Used in a process of its own."""

    def prepare(self, layer: Layer) -> None:
        """Quantize, pack and start threads. Raises PeerError for an unsupported layer."""

    def expert_bytes(self) -> int:
        """Bytes of one expert's weights, scales included."""

    def values(self, origin: int) -> GatedMatrices:
        """The values of the quantized matrices of `source(origin)`."""

    def steps(self, batch: Batch) -> Steps: ...

    def close(self) -> None: ...


def reference(
    activation: Activation,
    values: Callable[[int], GatedMatrices],
    batch: Batch,
    tokens: Sequence[int],
) -> F32:
    """y of some tokens under the batch's first routing, in float32.

    `values(e)` gives the matrices of expert e.
    """
    x = bf16_to_f32(batch.x[list(tokens)])
    y = np.zeros_like(x)
    for row, token in enumerate(tokens):
        for expert, weight in zip(batch.ids[0][token], batch.weights[token], strict=True):
            if expert >= 0:
                gate, up, down = values(int(expert))
                middle = gated(activation, gate @ x[row], up @ x[row])
                y[row] += weight * (down @ middle)
    return y


def is_plain(activation: Activation) -> bool:
    """SiLU(gate) * up and nothing else."""
    return activation == Activation()


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
