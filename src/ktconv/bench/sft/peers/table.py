"""The peers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module

from ktconv.bench.peers.table import Package
from ktconv.bench.sft.steps import Trained
from ktconv.formats import FORMATS
from ktconv.runtime.layers.experts import GatedMatrices
from ktconv.train.gradients import Call

Make = Callable[[Sequence[GatedMatrices], Call, int], Trained]  # of experts, a call and threads


class Spec(Package, frozen=True):
    """A row of PEERS. `method` of ours has the same weights.

    `waiting`: threads besides those that compute which wait without sleeping, so that they need
    CPUs of their own."""

    method: str
    make: Make
    waiting: int = 0


def _torch(experts: Sequence[GatedMatrices], call: Call, threads: int) -> Trained:
    """Imports what the peer needs only when it is measured."""
    made: Trained = import_module("ktconv.bench.sft.peers.torch_loop").TorchLoop(experts, call)
    return made


def _kt_kernel(method: str, experts: Sequence[GatedMatrices], call: Call, threads: int) -> Trained:
    module = import_module("ktconv.bench.sft.peers.kt_kernel")
    made: Trained = module.KtKernel(method, experts, call, threads)
    return made


def _specs() -> Iterable[Spec]:
    yield Spec("torch bf16", "torch", "torch", tuple(FORMATS), "bf16", _torch)
    for method in ("bf16", "int8"):
        make = partial(_kt_kernel, method)
        yield Spec(f"kt-kernel {method}", "kt-kernel", "kt_kernel", (method,), method, make, 1)


PEERS = {spec.name: spec for spec in _specs()}
