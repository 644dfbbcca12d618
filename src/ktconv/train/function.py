"""Packed experts with LoRA as a function of autograd, of tensors on the CPU; inputs of
other devices, and their gradients, come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ktconv.errors import UsageError
from ktconv.native import Call, aligned_bytes
from ktconv.native.training import Gradients, Lora, Training
from ktconv.runtime import MoELayer, workspace
from ktconv.runtime.arguments import Arguments, arguments
from ktconv.runtime.arrays import FLOATS, operand
from ktconv.runtime.compute import described, worded
from ktconv.runtime.staging import delivered, on_cpu
from ktconv.system.arrays import Array

DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}  # of LoRA matrices
_ALIGNMENT = 64  # of what is saved


class Setting(NamedTuple):
    """Parts of a call besides tensors. `names` are those of its LoRA matrices, which follow in that
    order; without any, packed weights are alone."""

    layer: MoELayer
    names: tuple[str, ...] = ()
    rank: int = 0
    scale: float = 1.0
    dropout: float = 0.0
    seed: int = 0

    def training(self, matrices: Sequence[Tensor]) -> Training:
        """Arguments for the C library. The matrices must stay alive."""
        lora = None
        if matrices:
            places = {name: one.data_ptr() for name, one in zip(self.names, matrices, strict=True)}
            dtype = DTYPES[matrices[0].dtype]
            lora = Lora(self.rank, places, dtype, self.scale, self.dropout, self.seed)
        return Training(self.layer.packed.layer, lora, self.layer.pool)


class PackedLoRA(torch.autograd.Function):
    """y of `computed`, with gradients of x, weights and the LoRA matrices."""

    @staticmethod
    def forward(
        ctx: Any,
        setting: Setting,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        skip: Tensor | None,
        *matrices: Tensor,
    ) -> Tensor:
        call = _call(setting, x, ids, weights, skip)
        saved = _forward(setting, call, matrices, save=True)
        ctx.setting, ctx.dtype = setting, weights.dtype
        read = call.x, call.ids, call.weights, call.skip
        arrays = (None if one is None else one.owner for one in read)
        # Also x and matrices as they are: torch refuses a backward of what has changed meanwhile.
        ctx.save_for_backward(*arrays, saved, *matrices)
        return _tensor(call)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # with create_graph; without an error they would count as 0
            raise UsageError(
                "packed experts have no gradients of gradients", "leave out create_graph=True"
            )
        x, ids, weights, skip, saved, *matrices = ctx.saved_tensors
        _, of_x, _, of_weights, _, *of_matrices = ctx.needs_input_grad
        call = _call(ctx.setting, x, ids, weights, skip)
        wanted = dict(zip(ctx.setting.names, matrices, strict=True))
        found = {
            name: torch.empty_like(one)
            for (name, one), needed in zip(wanted.items(), of_matrices, strict=True)
            if needed
        }
        if of_x:
            found["dx"] = _tensor(call)  # what the forward has for y
        if of_weights:
            found["dweights"] = torch.empty_like(call.weights.owner)
        _backward(ctx.setting, call, matrices, dy, saved, found)
        of_call = found.get("dweights")
        return (
            None,
            found.get("dx"),
            None,
            None if of_call is None else of_call.to(ctx.dtype),
            None,
            *(found.get(name) for name in wanted),
        )


def computed(
    setting: Setting,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    skip: Tensor | None,
    *matrices: Tensor,
) -> Tensor:
    """Call like `MoELayer.__call__`, with LoRA. Gradients follow where something needs them."""
    needed = any(one.requires_grad for one in (x, weights, *matrices))
    if needed and torch.is_grad_enabled():
        y: Tensor = PackedLoRA.apply(setting, x, ids, weights, skip, *matrices)  # type: ignore[no-untyped-call]
        return y
    call = _call(setting, x, ids, weights, skip)
    _forward(setting, call, matrices, save=False)
    return _tensor(call)


def base_gradients(
    setting: Setting,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    skip: Tensor | None,
    dy: Tensor,
    *matrices: Tensor,
) -> dict[str, Tensor]:
    """Gradients of the packed weights of BF16, fp32: gate (where there is one) and up [E, I, H],
    down [E, H, I], by these names."""
    layer = setting.layer
    e, h, i = layer.experts, layer.hidden, layer.intermediate
    shapes = {"gate": (e, i, h), "up": (e, i, h), "down": (e, h, i)}
    if not layer.activation.gated:
        del shapes["gate"]
    call = _call(setting, x, ids, weights, skip)
    saved = _forward(setting, call, matrices, save=True)
    found = {
        name: torch.empty(shape, dtype=torch.float32, device="cpu")
        for name, shape in shapes.items()
    }
    _backward(setting, call, matrices, dy, saved, found)
    return found


def _call(
    setting: Setting, x: Tensor, ids: Tensor, weights: Tensor, skip: Tensor | None
) -> Arguments:
    """The arguments, checked; its y is new memory."""
    layer = setting.layer
    with torch.no_grad():
        return arguments(layer.hidden, layer.experts, x, ids, weights, skip, None, None)


def _forward(
    setting: Setting, call: Arguments, matrices: Sequence[Tensor], *, save: bool
) -> Tensor:
    """Computes y, and returns what the backward needs."""
    if not call.tokens or not call.top_k:
        _tensor(call).zero_()
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    training = setting.training(matrices)
    size = _sized(partial(training.saved_size, call.tokens, call.top_k)) if save else 0
    saved = _aligned(size)

    def run(made: Call, scratch: Array) -> None:
        training.forward(made, saved.data_ptr() if save else 0, scratch)

    _run(setting, training, call, run)
    return saved


def _backward(
    setting: Setting,
    call: Arguments,
    matrices: Sequence[Tensor],
    dy: Tensor,
    saved: Tensor,
    found: dict[str, Tensor],
) -> None:
    """Computes the gradients that are `found`, by their names of kt_moe_gradients."""
    if not call.tokens or not call.top_k:
        for one in found.values():
            one.zero_()
        return
    training = setting.training(matrices)
    given = operand("the gradient of the result", dy, tuple(call.y.owner.shape), FLOATS)
    if saved.data_ptr() % _ALIGNMENT:  # a copy, as hooks of saved tensors make
        saved = _aligned(saved.numel()).copy_(saved)
    places = {name: one.data_ptr() for name, one in found.items()} | {"dy": given.address}
    of_lora = DTYPES[matrices[0].dtype] if matrices else "fp32"

    def run(made: Call, scratch: Array) -> None:
        gradients = Gradients(places, given.dtype, call.x.dtype, of_lora)
        training.backward(made, saved.data_ptr(), gradients, scratch)

    _run(setting, training, call, run)


def _run(
    setting: Setting,
    training: Training,
    call: Arguments,
    run: Callable[[Call, Array], None],
) -> None:
    """Call `run` with workspace of the pool."""
    size = _sized(partial(training.scratch_size, call.tokens, call.top_k))
    memory = workspace.take(setting.layer.pool, size)
    try:
        worded(partial(run, described(call), memory))
    finally:
        workspace.give(setting.layer.pool, memory)


def _sized(size: Callable[[], int]) -> int:
    """UsageError for what cannot be computed."""
    found: list[int] = []
    worded(lambda: found.append(size()))
    return found[0]


def _aligned(size: int) -> Tensor:
    """Memory for what is saved, in huge pages where it is large, which torch's is not: its rows
    lie in more pages than a core knows the places of."""
    return torch.from_numpy(aligned_bytes(size))


def _tensor(call: Arguments) -> Tensor:
    found: Tensor = call.y.owner
    return found


def fetched(
    x: Tensor, ids: Tensor, weights: Tensor, skip: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Copy arguments to the CPU; gradients go back to where each came from."""
    named = {"x": x, "ids": ids, "weights": weights}
    named |= {} if skip is None else {"skip": skip}
    for name, one in named.items():
        if not isinstance(one, Tensor):
            raise UsageError(f"{name} must be a tensor of torch, not {type(one).__name__}")
    inputs = list(named.values())
    if any(one.is_meta for one in inputs):
        raise UsageError(
            "packed experts got an input on meta, which has no values",
            "load the other parts of the model, or move them to a device that computes",
        )
    far = [one for one in inputs if not one.is_cpu]
    near = iter(_Fetched.apply(*far) if far else ())  # type: ignore[no-untyped-call]
    x, ids, weights, *rest = (one if one.is_cpu else next(near) for one in inputs)
    return x, ids, weights, rest[0] if rest else None


def returned(y: Tensor, device: torch.device) -> Tensor:
    """y on `device`; its gradient comes back to the CPU."""
    if device.type == "cpu":
        return y
    found: Tensor = _Returned.apply(y, device)  # type: ignore[no-untyped-call]
    return found


class _Fetched(torch.autograd.Function):
    """Copies on the CPU."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.devices = [one.device for one in tensors]
        ctx.set_materialize_grads(False)
        return tuple(on_cpu(*tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = zip(gradients, ctx.devices, strict=True)
        return tuple(None if one is None else delivered(one, device) for one, device in given)


class _Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, device: torch.device) -> Tensor:
        return delivered(y, device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return on_cpu(dy)[0], None
