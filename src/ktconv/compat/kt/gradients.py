"""Gradients of fine-tuning's matrices in the buffers that a program has given for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktconv.errors import UsageError
from ktconv.system.units import counted


class OptimizerGrad(NamedTuple):
    """A parameter, and the buffer that becomes its gradient."""

    name: str
    parameter: nn.Parameter
    grad_view: Tensor


class OptimizerGrads:
    """Buffers that backwards write to. Those of parameters become their `grad`, to which further
    backwards add until it is released; others are overwritten each time."""

    def __init__(self) -> None:
        self.registered: list[OptimizerGrad] = []

    def register(self, name: str, parameter: Any, grad_view: Any) -> None:
        """One more; its parameter has no gradient yet. UsageError for what does not fit, or is
        there already."""
        if not isinstance(parameter, nn.Parameter):
            raise UsageError(f"{name} must be a nn.Parameter, not {type(parameter).__name__}")
        if not isinstance(grad_view, Tensor) or (
            (grad_view.shape, grad_view.dtype, grad_view.device)
            != (parameter.shape, parameter.dtype, parameter.device)
        ):
            raise UsageError(f"the gradient of {name} must have its shape, dtype and device")
        for one in self.registered:
            if one.parameter is parameter or one.grad_view is grad_view:
                raise UsageError(f"{name} is registered already, as {one.name}")
        parameter.grad = None
        self.registered.append(OptimizerGrad(name, parameter, grad_view))

    def state(self) -> str:
        """ "empty": nothing is registered; "closed": no parameter has a gradient; "open": each has
        its buffer. UsageError for anything between."""
        if not self.registered:
            return "empty"
        found = {self._state(one) for one in self.registered}
        if len(found) > 1:
            raise UsageError(
                "some parameters of the experts have gradients and others have none",
                "clear all of them (zero_grad(set_to_none=True)), or none",
            )
        return found.pop()

    @staticmethod
    def _state(one: OptimizerGrad) -> str:
        if one.parameter.grad is None:
            return "closed"
        if one.parameter.grad is one.grad_view:
            return "open"
        raise UsageError(
            f"the gradient of {one.name} is another tensor than the buffer given for it",
            "leave it in its place, or set it to None",
        )

    def release(self) -> None:
        """Parameters without gradients, so that the next backward begins from zero."""
        self.state()
        for one in self.registered:
            one.parameter.grad = None

    def write(self, found: Mapping[str, Tensor], buffers: Mapping[str, Tensor], scale: Any) -> None:
        """Puts gradients times `scale` into their buffers, by name."""
        more = self.state() == "open"
        for name, gradient in found.items():
            scaled = gradient if scale == 1 else gradient.float() * scale
            if more:
                buffers[name].add_(scaled.to(buffers[name].dtype))
            else:
                buffers[name].copy_(scaled)
        for one in self.registered:
            one.parameter.grad = one.grad_view


def checked_scale(scale: Any) -> float:
    """UsageError for a factor of gradients that is not above 0."""
    found = float(scale)
    if not (math.isfinite(found) and found > 0):
        raise UsageError(f"optimizer_grad_scale must be a number above 0, not {scale}")
    return found


class CheckpointOutput:
    """The output of a forward that gradient checkpointing asks for a second time."""

    def __init__(self) -> None:
        self.state, self.error = "EMPTY", ""
        self._output: Tensor | None = None

    def poison(self, error: object) -> None:
        """Nothing is used any more: what was computed is not known to be right."""
        self.state, self.error, self._output = "POISONED", str(error), None

    def expect_empty(self) -> None:
        """UsageError where an output is there that no backward has used."""
        self._expect_sound()
        if self._output is not None:
            raise UsageError(
                "the output of a forward is still kept for its checkpoint",
                "call clear_checkpoint_output() where that pass was given up",
            )

    def put(self, output: Tensor, tokens: int) -> None:
        """Keeps an output of this many tokens."""
        self.expect_empty()
        if not output.is_cpu or len(output) < tokens:
            raise UsageError(f"the output to keep must have {counted(tokens, 'token')}, on the CPU")
        self._output, self.state = output[:tokens].contiguous(), "READY"

    def get(self, tokens: int) -> Tensor:
        """The output. UsageError where there is none, or one of other tokens."""
        self._expect_sound()
        if self._output is None or len(self._output) != tokens:
            there = (
                "none" if self._output is None else f"one of {counted(len(self._output), 'token')}"
            )
            raise UsageError(
                f"an output of {counted(tokens, 'token')} is asked for, and {there} is kept"
            )
        return self._output

    def clear(self) -> None:
        """Forgets the output."""
        self._output = None
        if self.state != "POISONED":
            self.state = "EMPTY"

    def _expect_sound(self) -> None:
        if self.state == "POISONED":
            raise UsageError(f"the forward that was kept has failed: {self.error}")


def bf16_matrix(name: str, tensor: Any, shape: tuple[int, ...]) -> Tensor:
    """UsageError unless it is a contiguous bf16 tensor of this shape on the CPU."""
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
        found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise UsageError(f"{name} must be a tensor {list(shape)}, not {found}")
    if tensor.dtype != torch.bfloat16 or not tensor.is_cpu or not tensor.is_contiguous():
        raise UsageError(f"{name} must be contiguous, in bf16 and on the CPU")
    return tensor
