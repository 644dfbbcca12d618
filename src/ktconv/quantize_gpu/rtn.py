"""`--method rtn`: each expert matrix rounded to nearest by llm-compressor's model-free path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv.checkpoint import PROJECTIONS, ExpertMatrix
from ktconv.conversion.pipeline import Task
from ktconv.conversion.plan import Unit
from ktconv.conversion.tasks import Advance, ExpertTask
from ktconv.errors import CheckpointError, ResourceError
from ktconv.quantize_gpu.common import GpuConversion, device_of
from ktconv.quantize_gpu.matrices import error_of, write_matrix
from ktconv.reading.buffers import Buffers
from ktconv.reading.decoded import U16, decoded_rows
from ktconv.reading.reader import SourceReader
from ktconv.targets.pack_quantized.names import module_name, target_pattern
from ktconv.targets.pack_quantized.scheme import Scheme
from ktconv.targets.pack_quantized.target import held_dtype
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

    def round(self, module: str, weight: U16, half: bool) -> dict[str, NDArray[Any]]:
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


def as_array(tensor: Any) -> NDArray[Any]:
    """A tensor of torch as a numpy array; two-byte floats as their bits."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        bits: NDArray[Any] = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: NDArray[Any] = tensor.numpy()
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
        dtype = held_dtype(self.matrix)
        arrays = self.rounder.round(module, weight, dtype == "F16")
        return quantized(staging, self.scheme, "rtn", module, weight, arrays, dtype, self.verify)


def decoded(reader: SourceReader, matrix: ExpertMatrix, buffers: Buffers, advance: Advance) -> U16:
    """A matrix of the source as the bits of two-byte floats."""
    weight: U16 = np.empty((matrix.rows, matrix.cols), np.uint16)
    for first, rows in decoded_rows(reader, matrix, buffers, advance):
        weight[first : first + len(rows)] = rows
    return weight


def quantized(
    staging: Staging,
    scheme: Scheme,
    method: str,
    module: str,
    weight: U16,
    arrays: Mapping[str, NDArray[Any]],
    dtype: str,
    verify: bool,
) -> dict[str, Any]:
    """Write a quantized matrix; checksums and errors for the manifest."""
    rows, cols = weight.shape
    records = write_matrix(staging, scheme.tensors(module, rows, cols, dtype), arrays, verify)
    name = f"{module}.weight_packed"
    records[name] |= error_of(scheme, method, name, arrays, weight, dtype == "F16")
    return records


class Rtn(GpuConversion):
    """Every matrix by itself, through llm-compressor's model-free path."""

    _rounder: Rounder

    def origin(self) -> Record:
        """Library versions, because rounding may change between them."""
        return {"quantizer": {name: version(name) for name in QUANTIZERS}}

    def convert(self, pending: Sequence[Unit]) -> None:
        layers = [unit.layer for unit in self.plan.layers if unit.layer]
        device = device_of(self.request.device)
        self._rounder = Rounder(self.plan.target.scheme, target_pattern(layers), device)

        from transformers.initialization import no_init_weights

        # llm-compressor makes a linear layer for every matrix, to fill it at once.
        with no_init_weights():
            super().convert(pending)

    def expert_tasks(self, unit: Unit, reader: SourceReader) -> Iterator[Task]:
        assert unit.layer is not None
        verify = self.request.verify
        for expert in unit.experts:
            for proj in PROJECTIONS:
                yield RtnTask(
                    reader, unit.layer, expert, proj, verify, self.plan.target.scheme, self._rounder
                )
