"""Round to nearest: one expert matrix through llm-compressor's model-free path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktconv.checkpoint import ExpertMatrix, MoELayer, Projection
from ktconv.conversion.plan import matrix_source_bytes
from ktconv.errors import CheckpointError, ResourceError
from ktconv.quantize_gpu.matrices import error_of, write_matrix
from ktconv.reading.buffers import Buffers
from ktconv.reading.decoded import U16, decoded_rows
from ktconv.reading.matrices import ITEM_SIZE
from ktconv.reading.reader import SourceReader, Span
from ktconv.targets.pack_quantized.names import module_name
from ktconv.targets.pack_quantized.scheme import Scheme
from ktconv.targets.pack_quantized.target import held_dtype
from ktconv.writer.staging import Staging

# Per element of a matrix: bf16, its copy in the module, float32 quotients, levels, comparison.
BYTES_PER_ELEMENT = 28


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
                f"the memory of {self._device} ended at {module}", "use --device cpu"
            ) from error
        if f"{module}.weight_packed" not in found:
            raise CheckpointError(f"{module} would stay unquantized: llm-compressor passed it by")
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


@dataclass(frozen=True, slots=True)
class RtnTask:
    """One projection of one expert: decode, round, pack, write, read back, compare."""

    reader: SourceReader
    layer: MoELayer
    expert: int
    proj: Projection
    scheme: Scheme
    rounder: Rounder
    verify: bool  # read back what was written

    @property
    def matrix(self) -> ExpertMatrix:
        return self.layer.experts[self.expert][self.proj]

    @property
    def source_bytes(self) -> int:
        return matrix_source_bytes(self.layer, self.expert, self.proj)

    def spans(self) -> Sequence[Span]:
        return [span_of(self.matrix)]

    def run(
        self, staging: Staging, buffers: Buffers, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        matrix, remaining = self.matrix, self.source_bytes
        weight = np.empty((matrix.rows, matrix.cols), np.uint16)
        for first, rows in decoded_rows(self.reader, matrix, buffers, advance):
            weight[first : first + len(rows)] = rows
            remaining -= len(rows) * matrix.cols * ITEM_SIZE[matrix.tensor.dtype]
        advance(remaining)  # block scales
        module = module_name(self.layer, self.expert, self.proj)
        dtype = held_dtype(matrix)
        arrays = self.rounder.round(module, weight, dtype == "F16")
        return quantized(staging, self.scheme, "rtn", module, weight, arrays, dtype, self.verify)


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


def span_of(matrix: ExpertMatrix) -> Span:
    """The bytes of a file that a matrix lies in."""
    size = ITEM_SIZE[matrix.tensor.dtype]
    last = (matrix.rows - 1) * matrix.row_stride + (matrix.cols - 1) * matrix.col_stride
    start = matrix.tensor.offset + matrix.start * size
    return Span(matrix.tensor.file, start, (last + 1) * size)
