"""What both methods of quantize-gpu share: the request, and everything of a run but how an
expert's matrix is rounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ktconv.checkpoint import TensorRef
from ktconv.conversion.pipeline import Observer, Task
from ktconv.conversion.run import BaseRequest, Conversion
from ktconv.conversion.run import Preflight as AnyPreflight
from ktconv.errors import UsageError
from ktconv.quantize_gpu.decoded_copy import DecodedCopy
from ktconv.reading.buffers import BufferSizes
from ktconv.reading.decoded import source_buffer
from ktconv.reading.reader import SourceReader
from ktconv.system.text import Notify, silent
from ktconv.targets.pack_quantized import config
from ktconv.targets.pack_quantized.module_classes import ClassCount
from ktconv.targets.pack_quantized.target import (
    CONFIG,
    RECIPE,
    Options,
    PackQuantizedTarget,
    Plan,
)


@dataclass(frozen=True)
class Request(BaseRequest):
    """What to quantize and how."""

    options: Options = field(default_factory=Options)
    experts: Path | None = None  # a file of expert_sets: only these experts
    device: str = "auto"  # as torch names it; auto: a GPU if there is one
    max_gpu_memory: int | None = None  # gptq
    max_cpu_memory: int | None = None  # gptq
    self_test: bool = True  # gptq: one layer is tried before hours of work


@dataclass(frozen=True)
class Preflight(AnyPreflight[PackQuantizedTarget]):
    """A planned quantization; what `--dry-run` prints."""

    request: Request
    classes: Sequence[ClassCount]


class GpuConversion(Conversion):
    """One run; subclasses round."""

    plan: Plan
    request: Request

    @staticmethod
    def check(request: Request, plan: Plan) -> int:
        """Refuse what the method cannot do; bytes of memory that it takes beside the workers'."""
        return 0

    def __init__(self, preflight: Preflight, observer: Observer, notify: Notify = silent) -> None:
        super().__init__(preflight, observer)
        self.notify = notify

    def buffers(self) -> BufferSizes:
        return buffer_sizes(self.plan)

    def copy_task(self, reader: SourceReader, tensor: TensorRef, name: str) -> Task:
        matrix = self.plan.target.decoded.get(tensor.name)
        if matrix is None:
            return super().copy_task(reader, tensor, name)
        return DecodedCopy(reader, matrix, name, self.request.verify)

    def made_files(self) -> Mapping[str, bytes]:
        return {CONFIG: config.config_json(self.plan), RECIPE: config.recipe_yaml(self.plan)}

    def card(self) -> str:
        return config.card(self.plan)


def buffer_sizes(plan: Plan) -> BufferSizes:
    """What a worker needs to read any matrix."""
    matrices = [m for u in plan.layers if u.layer for m in u.layer.experts[0].values()]
    matrices += plan.target.decoded.values()
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
