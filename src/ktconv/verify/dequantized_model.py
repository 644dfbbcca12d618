"""Levels layers and model for experts that none of our kernels runs: the source's, and what those
of the output dequantize to, in float32 and on the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ktconv.runtime.layers.experts import expert_output
from ktconv.runtime.layers.load import kernel_activation
from ktconv.runtime.layers.output_norms import output_norm
from ktconv.source import MoELayer, Projection
from ktconv.source.reading.streamed import Streamed, Streams
from ktconv.system.arrays import F32
from ktconv.system.text import Notify
from ktconv.verify.findings import Facts
from ktconv.verify.hidden_states import Inputs
from ktconv.verify.layers import LayerReference, LayersCheck, Outputs
from ktconv.verify.model import ModelCheck

if TYPE_CHECKING:
    from torch import Tensor

    from ktconv.model.streamed.experts import Converted

    # The values of a matrix as they are in an output, with its bias.
    Dequantize = staticmethod[[Any, MoELayer, int, Projection], Streamed]

Values = Callable[[int, int], Mapping[Projection, F32] | None]  # of a layer and an expert


class DequantizedModelCheck(ModelCheck):
    _dequantized: ClassVar[Dequantize]
    models_loaded = 2  # one, and its experts again

    @property
    def _named(self) -> Path:
        return self._output.directory

    @property
    def _converted(self) -> Converted:
        return self._values

    def _values(self, layer: int, expert: int) -> dict[Projection, F32] | None:
        """An expert's matrices as they are in the output; None where it is not there."""
        if expert not in self._output.experts_in(layer):
            return None
        source = self._output.source_layers[layer]
        return {
            proj: self._dequantized(self._output, source, expert, proj).values()
            for proj in source.projections
        }

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


class DequantizedLayersCheck(LayersCheck):
    _dequantized: ClassVar[Dequantize]
    compared = "dequantized experts against the source's"

    def _compare(self, layer: MoELayer, inputs: Inputs, x: F32) -> Facts:
        activation = kernel_activation(layer.activation)
        norm = output_norm(self._source, self._config, layer)

        def streams(expert: int) -> Streams:
            matrix = partial(self._dequantized, self._output, layer, expert)
            return matrix("gate") if layer.gated else None, matrix("up"), matrix("down")

        def compute(expert: int, x: F32) -> Outputs:
            packed = expert_output(streams(expert), activation, x, norm=norm)
            source = expert_output(self._source.expert(layer, expert), activation, x, norm=norm)
            return Outputs(packed, packed, source)

        reference = LayerReference(x, compute, self._budget.layer_threads)
        reference.add(inputs)
        shared = self._states.shared(layer, x)
        return reference.facts(layer, inputs, {}, reference.packed, shared)
