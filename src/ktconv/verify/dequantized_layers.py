"""Level layers for experts that none of our kernels runs: the dequantized weights in float32.

This reports the error that quantization causes in a layer's output.
"""

from __future__ import annotations

from abc import abstractmethod

from ktconv.runtime.layers.experts import expert_output
from ktconv.runtime.layers.load import kernel_activation
from ktconv.runtime.layers.output_norms import output_norm
from ktconv.source import MoELayer, Projection
from ktconv.source.reading.streamed import Streamed, Streams
from ktconv.system.arrays import F32
from ktconv.verify.findings import Facts
from ktconv.verify.hidden_states import Inputs
from ktconv.verify.layers import LayerReference, LayersCheck, Outputs


class DequantizedLayersCheck(LayersCheck):
    compared = "dequantized experts against the source's"

    @abstractmethod
    def _matrix(self, layer: MoELayer, expert: int, proj: Projection) -> Streamed:
        """The values of a matrix as they are in the output, with its bias."""

    def _compare(self, layer: MoELayer, inputs: Inputs, x: F32) -> Facts:
        activation = kernel_activation(layer.activation)
        norm = output_norm(self._source, self._config, layer)

        def streams(expert: int) -> Streams:
            gate = self._matrix(layer, expert, "gate") if layer.gated else None
            return gate, self._matrix(layer, expert, "up"), self._matrix(layer, expert, "down")

        def compute(expert: int, x: F32) -> Outputs:
            packed = expert_output(streams(expert), activation, x, norm=norm)
            source = expert_output(self._source.expert(layer, expert), activation, x, norm=norm)
            return Outputs(packed, packed, source)

        reference = LayerReference(x, compute, self._budget.layer_threads)
        reference.add(inputs)
        shared = self._states.shared(layer, x)
        return reference.facts(layer, inputs, {}, reference.packed, shared)
