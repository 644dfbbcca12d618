"""Watches an expert's own module while it runs: what it multiplies and adds up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
