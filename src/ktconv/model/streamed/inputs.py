"""What goes into the down projection of an expert, seen while its own module runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class DownInputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """As a context, finds the matrix that is multiplied with the parameter `down`: so activations
    are those of the model's code, whatever they are. `found` is None before that."""

    def __init__(self, down: Tensor, intermediate: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place, self._width = down.untyped_storage().data_ptr(), intermediate
        self.found: Tensor | None = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = [one for one in args if isinstance(one, Tensor)]
        if any(self._is_down(one) for one in tensors):
            for one in tensors:
                if not self._is_down(one) and one.ndim > 1 and one.shape[-1] == self._width:
                    self.found = one.reshape(-1, self._width)
        return function(*args, **(kwargs or {}))

    def _is_down(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._place
