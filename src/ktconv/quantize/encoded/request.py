"""Request, preflight, device, and decoded copies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import field

from ktconv.conversion.run import BaseRequest
from ktconv.conversion.run import Preflight as AnyPreflight
from ktconv.conversion.tasks import Advance, CopyTask, write_tensor
from ktconv.source.others import OtherWeight
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.decoded import decoded_rows
from ktconv.source.reading.matrices import buffers_of
from ktconv.targets.encoded.module_classes import ClassCount
from ktconv.targets.encoded.target import EncodedTarget, Options, Plan
from ktconv.writer.staging import Staging


class Request(BaseRequest, frozen=True):
    """The request: what to quantize and how."""

    options: Options = field(default_factory=Options)
    experts: Path | None = None  # a file of expert_sets: only these experts
    exclude_experts: Path | None = None  # the same: all but these
    device: str = "auto"  # as torch names it; auto: a GPU if there is one
    max_gpu_memory: int | None = None  # gptq
    max_cpu_memory: int | None = None  # gptq
    self_test: bool = True  # gptq: the first layer is compared with rounding to nearest


class Preflight(AnyPreflight[EncodedTarget], frozen=True):
    """A planned quantization; what `--dry-run` prints."""

    request: Request
    classes: Sequence[ClassCount]
    buffers: BufferSizes  # of a worker


class DecodedCopy(CopyTask, frozen=True):
    """A quantized non-expert matrix, written as bf16."""

    weight: OtherWeight

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        decoded = decoded_rows(self.reader, self.weight.matrix, buffers, advance)
        pieces = (rows.view(np.uint8).reshape(-1) for _, rows in decoded)
        record = write_tensor(self.name, pieces, staging, self.verify)
        return {self.name: record | {"decoded_from": self.weight.encoding}}


def buffer_sizes(plan: Plan) -> BufferSizes:
    """Buffers that a worker needs to read any matrix."""
    matrices = [m for layer in plan.moe_layers for m in layer.kinds]
    matrices += [weight.matrix for weight in plan.target.decoded.values()]
    return buffers_of(matrices)
