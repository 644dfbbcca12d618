"""Level layers for experts on GPUs: no GPU kernel runs here."""

from __future__ import annotations

from ktconv.source import MoELayer, Projection
from ktconv.source.reading.streamed import Streamed
from ktconv.verify.dequantized_layers import DequantizedLayersCheck
from ktconv.verify.encoded.output import EncodedOutput
from ktconv.verify.encoded.weights import dequantized


class EncodedLayersCheck(DequantizedLayersCheck):
    _output: EncodedOutput

    def _matrix(self, layer: MoELayer, expert: int, proj: Projection) -> Streamed:
        module = self._output.experts[layer.index, expert, proj]
        return dequantized(self._output, module, layer.experts[expert][proj])
