"""A model's own experts module with room for a single expert, whose matrices come one after the
other: its arithmetic, without the memory of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ktconv.errors import CheckpointError
from ktconv.families.family import Projection
from ktconv.model.stored import StoredExperts, bias_name, stored_in

# What modules call their numbers of experts, of those per token, and of experts that change
# nothing (LongCat: one beside the real one, see `_routed`).
_COUNTS = {
    "num_experts": 1,
    "moe_num_experts": 1,
    "num_routed_experts": 1,
    "moe_topk": 1,
    "zero_expert_num": 1,
    "total_experts": 2,
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class OneExpert:
    """`own` are all experts of a layer, on the meta device.

    `matrices` [out, in] and `biases` [out] are views of the parameters of the one expert that is in
    memory; these are on the device that is PyTorch's default, and not yet filled. CheckpointError
    where it is not known how the module is called.
    """

    def __init__(self, own: StoredExperts, dtype: torch.dtype) -> None:
        if own.call is None:
            raise CheckpointError(f"{type(own.module).__name__} is called in a way not known")
        self._call = own.call
        self._identities = own.identities
        self._module: Any = _copied(own.module)
        for name, tensor in zip(own.parameter_names, own.tensors, strict=True):
            first = 1 if tensor.ndim == 3 else tensor.shape[0] // own.count
            _put(self._module, name, torch.empty((first, *tensor.shape[1:]), dtype=dtype))
            if own.biased:
                biases = getattr(own.module, bias_name(name))
                _put(self._module, bias_name(name), torch.zeros((1, biases.shape[1]), dtype=dtype))
        _count_one(self._module)
        found = stored_in(self._module)
        assert found is not None, "the same parameters are in another number"
        self.matrices: Mapping[Projection, Tensor] = found.matrices(0)
        self.biases: Mapping[Projection, Tensor] = found.biases(0)
        self.down = found.tensors[-1]
        self.hidden, self.intermediate = found.hidden, found.intermediate

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[n, H]: the expert's output for rows [n, H], times weights [n]."""
        with torch.no_grad():
            y: Tensor = getattr(self, f"_{self._call}")(rows, weights[:, None])
        return y.reshape(rows.shape)

    def seen(self, rows: Tensor, weights: Tensor) -> Seen:
        """Run the expert, and record what happened in it."""
        seen = Seen(self.down, self.intermediate)
        with seen:
            y = self(rows, weights)
        if seen.added is None:  # by modules that do not add up experts themselves
            seen.added = y
        return seen

    def sum_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Dtype in which the module adds up, with weights of this dtype."""
        device = self.down.device
        rows = torch.zeros((1, self.hidden), dtype=self.down.dtype, device=device)
        added = self.seen(rows, torch.zeros(1, dtype=weights, device=device)).added
        assert added is not None
        return added.dtype

    def _routed(self, rows: Tensor, weights: Tensor) -> Tensor:
        ids = torch.zeros(weights.shape, dtype=torch.int64, device=rows.device)
        if self._identities:
            # LongCat's module needs two experts per token: the second, with weight 0, is the one
            # that changes nothing.
            ids = torch.cat([ids, ids + 1], dim=1)
            weights = torch.cat([weights, torch.zeros_like(weights)], dim=1)
        return self._forward(rows, ids, weights)

    def _sorted(self, rows: Tensor, weights: Tensor) -> Tensor:
        return self._forward(rows) * weights.to(rows.dtype)

    def _logits(self, rows: Tensor, weights: Tensor) -> Tensor:
        ids = torch.zeros(weights.shape, dtype=torch.int64, device=rows.device)
        self._module.route_tokens_to_experts = lambda _: (ids, weights)
        return self._forward(rows, None)

    def _block(self, rows: Tensor, weights: Tensor) -> Tensor:
        token = torch.arange(len(rows), device=rows.device)
        self._module.router = _Routed(token, weights[:, 0], len(rows))
        return self._forward(rows[None])

    def _forward(self, *arguments: Any) -> Tensor:
        kind: Any = type(self._module)
        found: Tensor = kind.forward(self._module, *arguments)
        return found


class _Routed(nn.Module):
    """Router in place of JetMoE's that sends all rows to the one expert."""

    def __init__(self, token: Tensor, weights: Tensor, count: int) -> None:
        super().__init__()
        self._found = None, token, weights, [count], None

    def forward(self, _: Tensor) -> Sequence[Any]:
        return self._found


def _copied(module: nn.Module) -> nn.Module:
    """A module of the same class with the same tensors, but with hooks and children of its own."""
    found = copy(module)
    content = vars(found)
    content.pop("forward", None)
    for name in _HOOKS:
        content[name] = type(content[name])()
    for name in ("_parameters", "_buffers"):
        content[name] = dict(content[name])
    content["_modules"] = {
        name: None if child is None else _copied(child) for name, child in module._modules.items()
    }
    return found


def _put(module: nn.Module, path: str, tensor: Tensor) -> None:
    place, _, name = path.rpartition(".")
    parameters = module.get_submodule(place)._parameters
    parameters[name] = nn.Parameter(tensor, requires_grad=False)


def _count_one(module: Any) -> None:
    for part in module.modules():
        for name, count in _COUNTS.items():
            if isinstance(getattr(part, name, None), int) and name in vars(part):
                setattr(part, name, count)
    bias = module._parameters.get("bias")  # of JetMoE's block: added once, by who has the block
    if bias is not None:
        _put(module, "bias", torch.zeros_like(bias, device="cpu"))
    if "config" in vars(module):
        module.config = copy(module.config)
        module.config._experts_implementation = "eager"
        for name, count in _COUNTS.items():
            if hasattr(module.config, name):
                setattr(module.config, name, count)


_ADDING = (torch.ops.aten.index_add_, torch.ops.aten.index_add)


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that sees what an expert's module does, whatever code that is.

    `inner` is the matrix [n, I] that is multiplied with the parameter `down`; `added` is what is
    first added to the module's sum, and so the expert's output before any rounding to the dtype of
    its input. Both are None until then.
    """

    def __init__(self, down: Tensor, intermediate: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._down, self._width = [down], intermediate
        self.inner: Tensor | None = None
        self.added: Tensor | None = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket in _ADDING and self.added is None:
            self.added = args[3]
        tensors = [one for one in args if isinstance(one, Tensor)]
        if any(self._is_down(one) for one in tensors):
            for one in tensors:
                if not self._is_down(one) and one.ndim > 1 and one.shape[-1] == self._width:
                    self.inner = one.reshape(-1, self._width)
        result = function(*args, **(kwargs or {}))
        if len(tensors) == 1 and self._is_down(tensors[0]) and isinstance(result, Tensor):
            self._down.append(result)  # a view, or a copy in another dtype
        return result

    def _is_down(self, tensor: Tensor) -> bool:
        place = tensor.untyped_storage().data_ptr()
        return any(place == one.untyped_storage().data_ptr() for one in self._down)
