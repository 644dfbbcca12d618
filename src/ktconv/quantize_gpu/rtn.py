"""`--method rtn`: each expert matrix rounded to nearest by llm-compressor's model-free path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np

from ktconv.checkpoint import ExpertMatrix, TensorRef
from ktconv.conversion.pipeline import Observer, Task
from ktconv.conversion.plan import LayerUnit, Unit
from ktconv.conversion.run import Conversion
from ktconv.conversion.tasks import Advance, ExpertTask
from ktconv.errors import CheckpointError, ResourceError
from ktconv.quantize_gpu.common import DecodedCopy, Preflight, Request, buffer_sizes, device_of
from ktconv.quantize_gpu.matrices import write_matrix
from ktconv.reading.buffers import Buffers, BufferSizes
from ktconv.reading.decoded import decoded_rows
from ktconv.reading.reader import SourceReader
from ktconv.system.arrays import U16, Array
from ktconv.system.text import Notify, silent
from ktconv.targets.pack_quantized import config
from ktconv.targets.pack_quantized.names import module_name, target_pattern
from ktconv.targets.pack_quantized.scheme import Scheme
from ktconv.targets.pack_quantized.target import CONFIG, RECIPE, RENAMED, Plan, weight_dtype
from ktconv.writer.journal import Record
from ktconv.writer.staging import Staging

# Per element of a matrix: bf16, its copy in the module, float32 quotients, levels, comparison.
BYTES_PER_ELEMENT = 28

QUANTIZERS = ("llmcompressor", "compressed-tensors")


class Rounder:
    """llm-compressor's `ModelFreePtqConverter` for one scheme, one matrix at a time.

    `model_free_ptq` calls the same for whole shards, so that the bits are the same.
    """

    def __init__(self, scheme: Scheme, pattern: str, device: str) -> None:
        import torch

        from ktconv.quantize_gpu.llm_compressor import quiet

        with quiet():
            from compressed_tensors.quantization import QuantizationConfig
            from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
            from llmcompressor.entrypoints.model_free.validate import validate_config

            group = {"targets": [pattern], "weights": scheme.weight_arguments()}
            config = QuantizationConfig(config_groups={"experts": group})
            self._converter = ModelFreePtqConverter(validate_config(config, None, []))
        torch.set_num_threads(1)  # workers are threads already
        self._device = torch.device(device)

    def round(self, module: str, weight: U16, half: bool) -> dict[str, Array]:
        """Parts of the packed matrix by name; bits of two-byte floats are uint16."""
        import torch

        dtype = torch.float16 if half else torch.bfloat16
        try:
            tensor = torch.from_numpy(weight.view(np.int16)).view(dtype).to(self._device)
            found = self._converter.process({f"{module}.weight": tensor})
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"out of memory on {self._device} at {module}", "use --device cpu"
            ) from error
        if f"{module}.weight_packed" not in found:
            raise CheckpointError(f"{module} would stay unquantized: llm-compressor skipped it")
        return {name.removeprefix(f"{module}."): as_array(part) for name, part in found.items()}


def as_array(tensor: Any) -> Array:
    """A tensor of torch as a numpy array; two-byte floats as their bits."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: Array = tensor.numpy()
    return array


@dataclass(frozen=True)
class RtnTask(ExpertTask):
    """One projection of one expert: decode, round, pack, write, read back, compare."""

    scheme: Scheme
    rounder: Rounder

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        remaining = self.source_bytes

        def count(nbytes: int) -> None:
            nonlocal remaining
            remaining -= nbytes
            advance(nbytes)

        weight = decoded(self.reader, self.matrix, buffers, count)
        advance(remaining)  # block scales
        module = module_name(self.layer, self.expert, self.proj)
        dtype = weight_dtype(self.matrix)
        arrays = self.rounder.round(module, weight, dtype == "F16")
        return write_matrix(staging, self.scheme, "rtn", module, weight, arrays, dtype, self.verify)


def decoded(reader: SourceReader, matrix: ExpertMatrix, buffers: Buffers, advance: Advance) -> U16:
    """A matrix of the source as the bits of two-byte floats."""
    half = weight_dtype(matrix) == "F16"
    weight: U16 = np.empty((matrix.rows, matrix.cols), np.uint16)
    for first, rows in decoded_rows(reader, matrix, buffers, advance, half):
        weight[first : first + len(rows)] = rows
    return weight


class Rtn(Conversion):
    """Every matrix by itself, through llm-compressor's model-free path."""

    plan: Plan
    request: Request
    _rounder: Rounder

    def __init__(self, preflight: Preflight, observer: Observer, notify: Notify = silent) -> None:
        super().__init__(preflight, observer)
        self.notify = notify

    @staticmethod
    def check(request: Request, plan: Plan) -> int:
        """Refuse what the method cannot do; bytes of memory that it needs beside the workers'."""
        return 0

    def buffers(self) -> BufferSizes:
        return buffer_sizes(self.plan)

    def copy_task(self, reader: SourceReader, tensor: TensorRef, name: str) -> Task:
        weight = self.plan.target.decoded.get(tensor.name)
        if weight is None:
            return super().copy_task(reader, tensor, name)
        return DecodedCopy(reader, tensor, name, self.request.verify, weight)

    def made_files(self) -> Mapping[str, bytes]:
        return {
            CONFIG: config.config_json(self.plan, self._renamed),
            RECIPE: config.recipe_yaml(self.plan),
        }

    @cached_property
    def _renamed(self) -> list[str]:
        """Linear layers of transformers' model that have other names in the output; none where
        transformers does not have the model."""
        from ktconv.model.load import linear_modules

        checkpoint = self.plan.checkpoint
        try:
            found = linear_modules(checkpoint.side_directory or checkpoint.path)
        except CheckpointError:
            return []
        return sorted({*found}.difference(config.quantization_config(self.plan)["ignore"]))

    def about_made_files(self) -> Record:
        return {RENAMED: self._renamed} if self._renamed else {}

    def card(self) -> str:
        return config.card(self.plan, self.source_card, self.errors)

    def origin(self) -> Record:
        """Library versions, because rounding may change between them."""
        return {"quantizer": {name: version(name) for name in QUANTIZERS}}

    def run_pipeline(self, units: Sequence[Unit]) -> None:
        pattern, device = target_pattern(self.plan.moe_layers), device_of(self.request.device)
        self._rounder = Rounder(self.plan.target.scheme, pattern, device)

        from transformers.initialization import no_init_weights

        # llm-compressor makes a linear layer for every matrix, to fill it at once.
        with no_init_weights():
            super().run_pipeline(units)

    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        verify = self.request.verify
        for expert in unit.experts:
            for proj in unit.layer.projections:
                yield RtnTask(
                    reader, unit.layer, expert, proj, verify, self.plan.target.scheme, self._rounder
                )
