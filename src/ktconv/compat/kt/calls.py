"""Calls of a layer, at once or in the background, and the part that the next layer adds."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import torch
from msgspec import Struct
from torch import Tensor

from ktconv.compat.kt.inputs import Inputs
from ktconv.runtime import MoELayer, split_deferred
from ktconv.runtime.staging import delivered, fetch, memory_for


class Deferred(Struct, frozen=True):
    """The sum [tokens, H] in fp32 of experts that layer `producer` has left to layer `consumer`."""

    producer: int
    consumer: int
    tokens: int
    sum: Sum


class Sum(Protocol):
    """A tensor that is being computed."""

    def wait(self) -> Tensor:
        """It, once it is there; raises what its computation raised."""

    def failed(self) -> bool:
        """Whether `wait` would raise; waits as well."""


class Running(Protocol):
    """A call whose result is being computed; `like` is x, as the caller has it."""

    like: Tensor

    def result(self) -> Tensor:
        """A new tensor like the input; raises what the computation raised."""


class FutureSum(Struct):
    """Sum of a thread of Python."""

    done: Future[Tensor]

    def wait(self) -> Tensor:
        return self.done.result()

    def failed(self) -> bool:
        return self.done.exception() is not None


class InThread(Struct):
    """A call in a thread of Python, which waits for its inputs."""

    like: Tensor  # to whose shape, dtype and device the result goes
    y: Tensor
    done: Future[None]

    def result(self) -> Tensor:
        """A new tensor like the input, once it is computed; raises what the computation raised."""
        self.done.result()
        return as_input(self.like, delivered(self.y, self.like.device))


class Share(Struct, frozen=True):
    """Division of a call between layers: it adds `carried`, and leaves to layer `consumer` what is
    not among each token's `keep` experts of largest weight; None: nothing."""

    carried: Deferred | None = None
    keep: int = 0
    producer: int = 0
    consumer: int | None = None


def call(layer: MoELayer, inputs: Inputs, skip: Tensor, share: Share) -> Tensor:
    """The result of a call at once, of tensors on the CPU, that leaves nothing."""
    add = None if share.carried is None else share.carried.sum.wait()
    y = layer(inputs.x, inputs.ids, inputs.weights, skip=skip, add_to=add)
    return as_input(inputs.like, y)


def start(
    layer: MoELayer, inputs: Inputs, skip: Tensor, share: Share
) -> tuple[Running, Deferred | None]:
    """A call in the background of tensors on any devices, and what it leaves. Inputs may change at
    once. UsageError while a CUDA graph is being captured."""
    pool, skip = layer.pool, skip.clone()
    fetched = fetch(inputs.x, inputs.ids, inputs.weights, copy=True)
    y = memory_for(inputs.x.shape, inputs.x.dtype, inputs.x.device)
    left: list[Tensor] = []  # ids that are deferred, once they are known

    def now() -> None:
        x, ids, weights = fetched.wait()
        add = None if share.carried is None else share.carried.sum.wait()
        if share.consumer is not None:
            ids, later = split_deferred(ids, weights, share.keep)
            left.append(later)
        layer(x, ids, weights, skip=skip, add_to=add, out=y)

    running = InThread(inputs.like, y, pool.submit(now))
    if share.consumer is None:
        return running, None

    def later() -> Tensor:
        running.done.result()  # raises where nothing was left
        x, _, weights = fetched.wait()
        total = torch.empty(y.shape, dtype=torch.float32, device="cpu")
        return layer(x, left[0], weights, skip=skip, out=total)  # type: ignore[no-any-return]

    rest = pool.submit(later)
    return running, Deferred(share.producer, share.consumer, inputs.tokens, FutureSum(rest))


def as_input(like: Tensor, y: Tensor) -> Tensor:
    """A result in the dtype and shape of `like`."""
    if y.shape == like.shape and y.dtype == like.dtype:
        return y
    return y.to(like.dtype).reshape(like.shape)
