"""What both methods of quantize-gpu share: request, preflight, device, and decoded copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ktconv.checkpoint.others import OtherWeight
from ktconv.conversion.run import BaseRequest
from ktconv.conversion.run import Preflight as AnyPreflight
from ktconv.conversion.tasks import Advance, CopyTask, write_tensor
from ktconv.errors import UsageError
from ktconv.reading.buffers import Buffers, BufferSizes
from ktconv.reading.decoded import decoded_rows, source_buffer
from ktconv.targets.pack_quantized.module_classes import ClassCount
from ktconv.targets.pack_quantized.target import Options, PackQuantizedTarget, Plan
from ktconv.writer.staging import Staging


@dataclass(frozen=True)
class Request(BaseRequest):
    """What to quantize and how."""

    options: Options = field(default_factory=Options)
    experts: Path | None = None  # a file of expert_sets: only these experts
    device: str = "auto"  # as torch names it; auto: a GPU if there is one
    max_gpu_memory: int | None = None  # gptq
    max_cpu_memory: int | None = None  # gptq
    self_test: bool = True  # gptq: the first layer is compared with rounding to nearest


@dataclass(frozen=True)
class Preflight(AnyPreflight[PackQuantizedTarget]):
    """A planned quantization; what `--dry-run` prints."""

    request: Request
    classes: Sequence[ClassCount]


@dataclass(frozen=True, slots=True)
class DecodedCopy(CopyTask):
    """A quantized non-expert matrix, written as bf16."""

    weight: OtherWeight

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        decoded = decoded_rows(self.reader, self.weight.matrix, buffers, advance)
        pieces = (rows.view(np.uint8).reshape(-1) for _, rows in decoded)
        record = write_tensor(self.name, pieces, staging, self.verify)
        return {self.name: record | {"decoded_from": self.weight.encoding}}


def buffer_sizes(plan: Plan) -> BufferSizes:
    """What a worker needs to read any matrix."""
    matrices = [m for layer in plan.moe_layers for m in layer.kinds]
    matrices += [weight.matrix for weight in plan.target.decoded.values()]
    return BufferSizes(max((source_buffer(matrix).source for matrix in matrices), default=0))


def device_of(name: str) -> str:
    """The device that `--device` means. UsageError for one that PyTorch does not see here."""
    import torch

    name = name.lower()
    found = torch.accelerator.current_accelerator(check_available=True)
    there = ["cpu"]
    if found is not None:
        there += [
            found.type,
            *(f"{found.type}:{n}" for n in range(torch.accelerator.device_count())),
        ]
    if name == "auto":
        return there[1] if found else "cpu"
    if name not in there:
        raise UsageError(
            f"--device {name} cannot be used: PyTorch sees {', '.join(there)} here",
            "use one of these, or install a PyTorch build for your GPU",
        )
    return name
