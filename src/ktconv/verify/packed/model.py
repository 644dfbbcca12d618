"""Levels layers and model for experts on CPUs: our kernels run, in level model in place of the
model's own experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ktconv import native
from ktconv.formats import FORMATS
from ktconv.formats.decode import bf16_to_f32
from ktconv.runtime.layers import KERNEL_BOUND, Experts
from ktconv.runtime.layers.load import kernel_activation, packed_experts
from ktconv.runtime.layers.output_norms import output_norm
from ktconv.source import MoELayer
from ktconv.system.arrays import F32
from ktconv.system.pool import Pool
from ktconv.system.text import Notify
from ktconv.verify.findings import Facts, Progression
from ktconv.verify.hidden_states import LEVEL as LAYERS
from ktconv.verify.hidden_states import Inputs
from ktconv.verify.layers import LayerReference, LayersCheck, Outputs, relative
from ktconv.verify.model import LEVEL, ModelCheck
from ktconv.verify.packed.output import PackedOutput

if TYPE_CHECKING:
    from ktconv.model.streamed.calls import ExpertLayer, ExpertRunner
    from ktconv.model.streamed.experts import SourceExperts


class PackedModelCheck(ModelCheck):
    _output: PackedOutput
    models_loaded = 1

    @property
    def _named(self) -> Path:
        return self._output.source.path

    @property
    def _bits(self) -> int:
        return FORMATS[self._output.options.method].traits.bits

    def run(self, progression: Progression, notify: Notify) -> Facts | None:
        from ktconv.model.matching import UnlikeExperts

        try:
            return super().run(progression, notify)
        except UnlikeExperts as error:
            self._findings.fail(LEVEL, "experts", f"{error}.")
            return None

    def _runner(
        self, own: SourceExperts, layers: Mapping[int, ExpertLayer]
    ) -> AbstractContextManager[ExpertRunner]:
        from ktconv.model.streamed.packed import BothExperts

        output, settings = self._output.directory, self._output.source.config
        return BothExperts(own, output, layers, settings, self._request.threads)

    @contextmanager
    def _pair(self, model: Any, notify: Notify) -> Iterator[tuple[Any, Any]]:
        from ktconv.model import replace_experts

        directory, threads = self._output.directory, self._request.threads
        with replace_experts(model, directory, threads=threads, keep=True) as replaced:
            yield model, replaced


class PackedLayersCheck(LayersCheck):
    compared = "kernels against float32"
    _output: PackedOutput

    def _kernels(self) -> Facts:
        formats = {one.format for one in self._output.packed.layers.values() if one.format}
        isas = native.kernel_levels(*(one.layout for one in formats))
        facts: Facts = {"isas": isas, "kernel_bound": KERNEL_BOUND}
        if self._request.gradients:
            from ktconv.verify.packed.gradients import RANK

            facts["lora_rank"] = RANK
        return facts

    def _compare(self, layer: MoELayer, inputs: Inputs, x: F32) -> Facts:
        experts = self._experts(layer)

        def compute(expert: int, x: F32) -> Outputs:
            packed, rounded = experts.outputs(experts.streams(expert), x)
            return Outputs(packed, rounded, experts.output(self._source.expert(layer, expert), x))

        reference = LayerReference(x, compute, self._budget.layer_threads)
        kernel_error, y = self._outputs(experts, inputs, reference)
        for isa, error in kernel_error.items():
            if not error <= KERNEL_BOUND:
                message = (
                    f"layer {layer.index} on {isa}: the kernels have an error of {error:.3g} from "
                    f"float32 arithmetic on the same packed weights; the limit is {KERNEL_BOUND:g}."
                )
                self._findings.fail(LAYERS, "kernel", message, layer=layer.index, value=error)
        facts = reference.facts(layer, inputs, kernel_error, y, self._states.shared(layer, x))
        if self._request.gradients:
            facts["gradients"] = self._gradients(layer, inputs)
        return facts

    def _gradients(self, layer: MoELayer, inputs: Inputs) -> Facts:
        from ktconv.verify.packed.gradients import Weights, check_gradients

        # Of folded experts LoRA's B of up and A of down belong to folded weights.
        folded = self._output.options.fold
        source = None if folded else partial(self._source.expert, layer)
        weights = Weights(layer.index, partial(self._experts, layer), source)
        at_once = self._budget.experts_at_once
        with Pool(self._request.threads) as pool:
            return check_gradients(
                weights, inputs, at_once, pool, self._findings, self._request.seed
            )

    def _experts(self, layer: MoELayer, slots: Sequence[int] | None = None) -> Experts:
        """Experts of a layer, or some of them. Mapped plainly: pages are read once or twice, and
        moving them to the NUMA nodes that compute them reads each, too."""
        return packed_experts(
            self._output.packed,
            layer.index,
            kernel_activation(layer.activation),
            output_norm(self._source, self._config, layer),
            slots,
        )

    def _outputs(
        self, experts: Experts, inputs: Inputs, reference: LayerReference
    ) -> tuple[dict[str, float], F32]:
        """The largest error of each ISA level, and the output of the last one.

        Experts whose packed weights fit into memory together run in one call.
        """
        errors: dict[str, float] = {}
        total = np.zeros(inputs.x.shape, np.float32)
        with Pool(self._request.threads) as pool:
            ids, count = inputs.experts, self._budget.experts_at_once(experts.expert_bytes)
            for first in range(0, len(ids), count):
                part = inputs.only(ids[first : first + count])
                expected, y = reference.add(part), total
                for isa, y in _on_all_levels(experts, part, pool):
                    error = relative(y, expected)
                    errors[isa] = float(np.maximum(errors.get(isa, 0.0), error))  # NaN stays
                total += y
                experts.release()
        return errors, total


def _on_all_levels(experts: Experts, inputs: Inputs, pool: Pool) -> Iterator[tuple[str, F32]]:
    before = native.isa()
    try:
        for isa in native.kernel_levels(experts.layer.layout):
            native.use_isa(isa)
            yield isa, bf16_to_f32(experts.forward(inputs.x, inputs.ids, inputs.weights, pool))
    finally:
        native.use_isa(before)
