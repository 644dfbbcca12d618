"""Level model for experts that none of our kernels runs: the source's, and what those of the output
dequantize to, on the same text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktconv.families.family import Projection
from ktconv.system.arrays import F32
from ktconv.system.text import Notify
from ktconv.verify.model import ModelCheck

if TYPE_CHECKING:
    from torch import Tensor

    from ktconv.model.streamed.experts import Converted

Values = Callable[[int, int], Mapping[Projection, F32] | None]  # of a layer and an expert


class DequantizedModelCheck(ModelCheck):
    models_loaded = 2  # one, and its experts again

    @property
    def _named(self) -> Path:
        return self._output.directory

    @property
    def _converted(self) -> Converted:
        return self._values

    @abstractmethod
    def _values(self, layer: int, expert: int) -> dict[Projection, F32] | None:
        """An expert's matrices as they are in the output; None where it is not there."""

    @contextmanager
    def _pair(self, model: Any, notify: Notify) -> Iterator[tuple[Any, Any]]:
        notify("replacing its experts with the dequantized ones")
        pair = Swapped(model, self._values)
        yield pair, pair


class Pair:
    """Two models behind the interface of one, for `ktconv.model.evaluate`."""

    def __init__(self, source: Any, converted: Any) -> None:
        self._source, self._current, self.config = source, converted, source.config

    @contextmanager
    def originals(self) -> Iterator[None]:
        """A context in which the source's model runs."""
        converted, self._current = self._current, self._source
        try:
            yield
        finally:
            self._current = converted

    def __call__(self, **arguments: Any) -> Any:
        return self._current(**arguments)

    def generate(self, *arguments: Any, **named: Any) -> Any:
        return self._current.generate(*arguments, **named)


class Swapped(Pair):
    """One model with dequantized experts in place of some of its own."""

    def __init__(self, model: Any, values: Values) -> None:
        super().__init__(model, model)
        self._kept: list[tuple[Tensor, Tensor]] = []  # view of a parameter, its other content
        self._put_all(model, values)

    @contextmanager
    def originals(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for view, other in self._kept:
            now = view.clone()
            view.copy_(other)
            other.copy_(now)

    def _put_all(self, model: Any, values: Values) -> None:
        import torch

        from ktconv.model.sites import find_experts

        with torch.no_grad():
            for index, site in find_experts(model).items():
                for expert in range(site.own.count):
                    if (found := values(index, expert)) is None:
                        continue
                    for proj, view in site.own.matrices(expert).items():
                        self._kept.append((view, torch.from_numpy(found[proj]).to(view.dtype)))
        self._exchange()
