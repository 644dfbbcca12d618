"""Every level on experts for CPUs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from ktconv.errors import UsageError
from ktconv.formats import FORMATS
from ktconv.quantize.packed.backward import backward_buffers, backward_memory
from ktconv.quantize.packed.task import quantize_buffers
from ktconv.source import MoELayer
from ktconv.source.reading.buffers import BufferSizes
from ktconv.system.units import counted
from ktconv.targets.packed.target import Options
from ktconv.targets.packed.weights import Geometry
from ktconv.verify.findings import Facts
from ktconv.verify.memory import LayerNeed
from ktconv.verify.packed.backward import BackwardCheck
from ktconv.verify.packed.cover import LEVEL as COVERAGE
from ktconv.verify.packed.cover import check_cover
from ktconv.verify.packed.model import PackedLayersCheck, PackedModelCheck
from ktconv.verify.packed.output import PackedOutput, open_cpu_output
from ktconv.verify.packed.proofs import Proofs, proofs_of
from ktconv.verify.packed.resharded import parts_before
from ktconv.verify.packed.structure import PackedStructureCheck
from ktconv.verify.packed.weights import ExpertMatrixCheck
from ktconv.verify.reading import Context
from ktconv.verify.totals import Totals
from ktconv.verify.verifier import OutputVerifier

_CHECK_BYTES = 2 << 20  # per thread: what the check of a matrix keeps for each of its rows


class PackedVerifier(OutputVerifier):
    output: PackedOutput
    _proofs: Proofs
    structure_class = PackedStructureCheck
    layers_class = PackedLayersCheck
    model_class = PackedModelCheck
    open = staticmethod(open_cpu_output)

    def check_options(self) -> None:
        for option, value in (("tp", self.request.tp), ("ep", self.request.ep)):
            if value is not None:
                raise UsageError(
                    f"--{option} applies to GPU experts, but {self.output.directory} contains none",
                    "omit it",
                )
        self._proofs = proofs_of(self.output, self.request.importance, self.request.calibrate)

    def check_more(self) -> Facts:
        """Whether this output and another together contain every expert once, for --with."""
        other = self.request.beside
        return {COVERAGE: check_cover(self.output, other, self.findings) if other else None}

    def thread_bytes(self) -> int:
        return self.buffer_sizes().nbytes + _CHECK_BYTES + self._transposing()

    def layers_need(self, top_k: int) -> LayerNeed:
        need = super().layers_need(top_k)
        if not self.request.gradients:
            return need
        from ktconv.verify.packed.gradients import with_gradients

        return with_gradients(need, self.output.packed.layers.values(), self.request, top_k)

    def shared_bytes(self) -> int:
        return self._proofs.memory

    def buffer_sizes(self) -> BufferSizes:
        sizes = quantize_buffers(self._layers(), FORMATS[self.output.options.method])
        for options in self._transposed():
            sizes = sizes.with_those_of(backward_buffers(self._layers(), options))
        return sizes

    def _transposing(self) -> int:
        return max((backward_memory(self._layers(), one) for one in self._transposed()), default=0)

    def _layers(self) -> Sequence[MoELayer]:
        """Layers of the source."""
        return self.output.checkpoint.layers if self.output.checkpoint else ()

    def _transposed(self) -> Sequence[Options]:
        """Options with the numbers of parts that matrices of backward passes are compared in."""
        output = self.output
        if output.backward is None:
            return ()
        counts = {output.options.numa, *parts_before(output)}
        return [replace(output.options, numa=count) for count in counts]

    def expert_checks(
        self, context: Context, share: float, rng: random.Random
    ) -> Iterator[ExpertMatrixCheck | BackwardCheck]:
        packed, checkpoint = self.output.packed, self.output.checkpoint
        backward = self.output.backward
        sources = checkpoint.layers if checkpoint and context.second else ()
        source_of = {layer.index: layer for layer in sources}
        for layer, geometry in packed.layers.items():
            if geometry.format is None or geometry.format.key != self.output.options.method:
                continue  # reported by level structure
            source = self._matching(layer, geometry, source_of.get(layer))
            count = max(1, round(len(geometry.here) * share))
            for expert in sorted(rng.sample(geometry.here, count)):
                for proj in geometry.projections:
                    yield ExpertMatrixCheck(
                        context, self.output, layer, expert, proj, source, self._proofs
                    )
                for proj in geometry.projections if backward is not None else ():
                    assert backward is not None
                    yield BackwardCheck(context, self.output, layer, expert, proj, source, backward)

    def _matching(self, layer: int, geometry: Geometry, source: MoELayer | None) -> MoELayer | None:
        """The source of a layer, if it has the same dimensions."""
        if source is None:
            return None  # an unexpected layer, which level structure reports
        there = len(source.experts), source.hidden_size, source.intermediate_size
        here = geometry.experts, geometry.hidden, geometry.intermediate
        if there == here and source.gated == geometry.gated:
            return source
        message = (
            f"layer {layer} has {counted(here[0], 'expert')} of hidden {here[1]} and "
            f"intermediate {here[2]}, "
            f"its source {there[0]} of {there[1]} and {there[2]}."
        )
        if there == here:
            words = ["with gates" if one.gated else "without gates" for one in (geometry, source)]
            message = f"layer {layer} has experts {words[0]}, its source {words[1]}."
        self.findings.fail("structure", "dimensions", message, layer=layer)
        return None

    def weights_facts(self, totals: Totals) -> Facts:
        counts = {layer: geometry.experts for layer, geometry in self.output.packed.layers.items()}
        options = self.output.options
        bound = None  # of codes that make up for the errors of others
        if options.calibrate is None:
            bound = FORMATS[options.method].error_steps(options.scale)
        return totals.as_dict(bound, counts) | self._proofs.as_dict()
