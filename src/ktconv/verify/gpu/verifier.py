"""Every level on experts for GPUs."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ktconv.checkpoint import TensorRef
from ktconv.errors import UsageError
from ktconv.reading.buffers import BufferSizes
from ktconv.system.text import Notify
from ktconv.verify.findings import Facts
from ktconv.verify.gpu import weights
from ktconv.verify.gpu.mapping import LEVEL as MAPPING
from ktconv.verify.gpu.mapping import check_mapping, check_sizes
from ktconv.verify.gpu.output import GpuOutput, open_gpu_output
from ktconv.verify.gpu.structure import GpuStructureCheck
from ktconv.verify.layers import LayersCheck
from ktconv.verify.memory import Budget
from ktconv.verify.model import ModelCheck
from ktconv.verify.reading import Context
from ktconv.verify.request import VerifyRequest
from ktconv.verify.runner import Check
from ktconv.verify.totals import ItemResult, Totals
from ktconv.verify.verifier import OutputVerifier


class GpuVerifier(OutputVerifier):
    output: GpuOutput
    models_loaded = 2

    def __init__(self, request: VerifyRequest, level: str) -> None:
        super().__init__(request, level)
        self.output = open_gpu_output(request.output, request.source)

    def check_options(self) -> None:
        check_sizes("tp", self.request.tp)
        check_sizes("ep", self.request.ep)
        other, directory = self.request.beside, self.output.directory
        if other is not None:
            raise UsageError(
                f"--with is for an output of quantize-cpu, and {directory} is one of quantize-gpu",
                f"swap them: ktconv verify {other} --with {directory}",
            )

    def check_structure(self) -> Facts:
        return GpuStructureCheck(self.output, self.findings).run()

    def check_more(self) -> dict[str, Facts | None]:
        """How an engine would load and split the experts."""
        return {MAPPING: check_mapping(self.output, self.request, self.findings)}

    def thread_bytes(self) -> int:
        return weights.thread_bytes(self.output)

    def buffer_sizes(self) -> BufferSizes:
        return weights.buffer_sizes(self.output)

    def expert_checks(
        self, context: Context, share: float, rng: random.Random
    ) -> Iterator[weights.ModuleCheck]:
        return weights.expert_checks(self.output, context, share, rng)

    def copy_checks(
        self, context: Context, tensor: TensorRef, origin: TensorRef | None
    ) -> Iterator[Check[ItemResult]]:
        matrix = self.output.decoded.get(tensor.name)
        if matrix is None:
            yield from super().copy_checks(context, tensor, origin)
        elif tensor.dtype == "BF16" and tensor.shape == (matrix.rows, matrix.cols):
            yield weights.DecodedCheck(context, tensor, matrix)

    def weights_facts(self, totals: Totals) -> Facts:
        counts = {index: len(layer.experts) for index, layer in self.output.source_layers.items()}
        return totals.as_dict(weights.largest_error(self.output), counts)

    def layers_check(self, budget: Budget, notify: Notify) -> LayersCheck:
        from ktconv.verify.gpu.layers import GpuLayersCheck

        return GpuLayersCheck(self.output, self.request, budget, self.findings, notify)

    def model_check(self, notify: Notify) -> ModelCheck:
        from ktconv.verify.gpu.model import GpuModelCheck

        return GpuModelCheck(self.output, self.request, self.findings, notify)
