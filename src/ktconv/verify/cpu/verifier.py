"""Every level on experts for CPUs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from ktconv.errors import UsageError
from ktconv.formats import FORMATS
from ktconv.packed.weights import Geometry
from ktconv.reading.buffers import BufferSizes
from ktconv.system.text import Notify
from ktconv.verify.copies import CopyCheck
from ktconv.verify.cpu import weights
from ktconv.verify.cpu.cover import LEVEL as COVERAGE
from ktconv.verify.cpu.cover import check_cover
from ktconv.verify.cpu.output import CpuOutput, open_cpu_output
from ktconv.verify.cpu.structure import CpuStructureCheck
from ktconv.verify.findings import Facts
from ktconv.verify.layers import LayersCheck
from ktconv.verify.memory import Budget
from ktconv.verify.model import ModelCheck
from ktconv.verify.reading import Context
from ktconv.verify.request import VerifyRequest
from ktconv.verify.totals import Totals
from ktconv.verify.verifier import OutputVerifier

_CHECK_BYTES = 2 << 20  # of a thread: what the check of a matrix has of each of its rows


class CpuVerifier(OutputVerifier):
    output: CpuOutput
    models_loaded = 1

    def __init__(self, request: VerifyRequest, level: str) -> None:
        super().__init__(request, level)
        self.output = open_cpu_output(request.output, request.source)

    def check_options(self) -> None:
        for option, value in (("tp", self.request.tp), ("ep", self.request.ep)):
            if value is not None:
                raise UsageError(
                    f"--{option} applies to GPU experts, but {self.output.directory} contains none",
                    "omit it",
                )

    def check_structure(self) -> Facts:
        return CpuStructureCheck(self.output, self.findings).run()

    def check_more(self) -> dict[str, Facts | None]:
        """Whether this output and another hold every expert once, if that was asked for."""
        other = self.request.beside
        return {COVERAGE: check_cover(self.output, other, self.findings) if other else None}

    def thread_bytes(self) -> int:
        return self.buffer_sizes().nbytes + _CHECK_BYTES

    def geometries(self) -> Iterable[Geometry]:
        return self.output.packed.layers.values()

    def buffer_sizes(self) -> BufferSizes:
        return weights.buffer_sizes(self.output)

    def expert_checks(
        self, context: Context, share: float, rng: random.Random
    ) -> Iterator[weights.ExpertMatrixCheck | CopyCheck]:
        return weights.expert_checks(self.output, context, share, rng)

    def weights_facts(self, totals: Totals) -> Facts:
        counts = {layer: geometry.experts for layer, geometry in self.output.packed.layers.items()}
        return totals.as_dict(FORMATS[self.output.options.method].max_error_steps, counts)

    def layers_check(self, budget: Budget, notify: Notify) -> LayersCheck:
        from ktconv.verify.cpu.layers import CpuLayersCheck

        return CpuLayersCheck(self.output, self.request, budget, self.findings, notify)

    def model_check(self, notify: Notify) -> ModelCheck:
        from ktconv.verify.cpu.model import CpuModelCheck

        return CpuModelCheck(self.output, self.request, self.findings, notify)
