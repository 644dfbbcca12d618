"""The peers by name, and which of them are installed."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

from msgspec import Struct

from ktconv.bench.peers.base import Peer
from ktconv.bench.presets import Shape
from ktconv.formats import format_named
from ktconv.system import machine
from ktconv.system.text import Notify


class Package(Struct, frozen=True):
    """A peer, where it comes from, and our methods that it is compared with."""

    name: str
    package: str  # on PyPI
    module: str
    methods: tuple[str, ...]


class Spec(Package, frozen=True):
    """A row of PEERS. `methods` read about as many bytes for the same kind of weights; `unit` is
    the kind of product that it uses."""

    unit: str
    make: Callable[[], Peer]


def _make(module: str, name: str, *arguments: str) -> Peer:
    """Imports what the peer needs only when it is measured."""
    made: Peer = getattr(import_module(f"ktconv.bench.peers.{module}"), name)(*arguments)
    return made


def _specs() -> Iterable[Spec]:
    for name, unit in (
        ("int4", "int8"),
        ("int8", "int8"),
        ("gint4-32", "int8"),
        ("mxfp4", "bf16"),
        ("mxfp8", "bf16"),
        ("fp8", "bf16"),
        ("fp8-channel", "bf16"),
        ("bf16", "bf16"),
    ):
        make = partial(_make, "kt_kernel", "KtKernel", name)
        yield Spec(f"kt-kernel {name}", "kt-kernel", "kt_kernel", (name,), unit, make)
    for name, unit, methods in (
        ("q4_0", "int8", ("int4", "gint4-32")),
        ("q4_k", "int8", ("int4", "gint4-32")),
        ("q8_0", "int8", ("int8",)),
        ("mxfp4", "int8", ("mxfp4",)),
        ("bf16", "bf16", ("bf16",)),
    ):
        make = partial(_make, "ggml", "GgmlPeer", name)
        yield Spec(f"ggml {name}", "llama-cpp-python", "llama_cpp", methods, unit, make)
    make = partial(_make, "torch_bf16", "TorchBf16")
    yield Spec("torch bf16", "torch", "torch", ("bf16",), "bf16", make)


PEERS = {spec.name: spec for spec in _specs()}


P = TypeVar("P", bound=Package)


def chosen(peers: Iterable[P], methods: Collection[str], notify: Notify) -> list[P]:
    """The peers for these methods that can be measured; says why the others cannot."""
    found = {peer: why_not(peer) for peer in peers if not {*methods}.isdisjoint(peer.methods)}
    for reason in sorted(set(filter(None, found.values()))):
        notify(f"peers: {reason}")
    return [peer for peer, reason in found.items() if not reason]


def fit(method: str, shape: Shape, copies: int) -> bool:
    """Whether memory suffices for the copies of a layer's packed weights."""
    sizes = shape.hidden, shape.intermediate
    each = format_named(method).expert_bytes(*sizes, gated=shape.activation.gated)
    return copies * each * shape.experts < machine.available_memory()


def why_not(spec: Package) -> str | None:
    """Reason why a peer cannot be measured here, without importing it; None if it can."""
    if find_spec(spec.module) is None:
        return f"{spec.package} is not installed"
    if spec.module != "torch" and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"{spec.package} is measured on Linux on x86-64 only"
    return None
