"""`--method rtn`: each expert matrix rounded to nearest, with the bits of llm-compressor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from ktconv import native
from ktconv.checkpoint import MoELayer, TensorRef
from ktconv.conversion.pipeline import Observer, Task
from ktconv.conversion.plan import LayerUnit
from ktconv.conversion.run import Conversion
from ktconv.conversion.tasks import Advance, ExpertTask, write_tensor
from ktconv.errors import CheckpointError, UsageError
from ktconv.quantize_gpu.common import DecodedCopy, Preflight, Request, buffer_sizes
from ktconv.quantize_gpu.matrices import Deviation
from ktconv.reading.buffers import Buffers, BufferSizes
from ktconv.reading.matrices import MatrixReader, buffer_bytes, chunk_rows, chunks
from ktconv.reading.reader import SourceReader
from ktconv.system.text import Notify, silent
from ktconv.targets.pack_quantized import config
from ktconv.targets.pack_quantized.names import module_name
from ktconv.targets.pack_quantized.scheme import Scheme
from ktconv.targets.pack_quantized.target import CONFIG, RECIPE, RENAMED, Plan, weight_dtype
from ktconv.writer.journal import Record
from ktconv.writer.staging import Staging


def rtn_buffers(layers: Sequence[MoELayer], scheme: Scheme) -> BufferSizes:
    """What a worker needs to round the matrices of these layers."""
    source, packed, cols = 0, 0, 1
    for layer in layers:
        for matrix in layer.kinds:
            rows = min(chunk_rows(matrix), matrix.rows)
            row_bytes = scheme.encoding(False).code_shape(1, matrix.cols)[1]
            source = max(source, buffer_bytes(matrix, rows))
            packed, cols = max(packed, rows * row_bytes), max(cols, matrix.cols)
    return BufferSizes(source, packed, cols)


@dataclass(frozen=True)
class RtnTask(ExpertTask):
    """One projection of one expert: decode, round, write, read back, compare, some rows at a
    time."""

    scheme: Scheme

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        matrix, dtype = self.matrix, weight_dtype(self.matrix)
        module, shape = module_name(self.layer, self.expert, self.proj), (matrix.rows, matrix.cols)
        packed, scale, size = self.scheme.tensors(module, *shape, dtype)
        encoding = self.scheme.encoding(dtype == "F16")
        scales = np.empty(encoding.scale_shape(*shape), np.uint16)
        deviation = Deviation(self.scheme, "rtn", packed.name, dtype)
        digest, done, remaining = hashlib.sha256(), 0, self.source_bytes
        source = MatrixReader(self.reader, matrix, round_to_bf16=dtype != "F16")
        with source.open() as fd:
            factors = source.load_scales()
            for chunk in chunks(matrix, matrix.rows):
                count = source.read(fd, chunk, buffers.source, buffers.bounce)
                view = source.view(chunk, factors, buffers.source, 0, matrix.cols)
                codes = buffers.packed[: packed.nbytes // matrix.rows * view.rows]
                here = scales[chunk.start : chunk.stop]
                try:
                    native.encode(encoding, view, 0.0, codes, here, buffers.scratch)
                except native.NonFiniteError as error:
                    raise source.not_finite(chunk.start + error.row, error.col) from error
                staging.write(packed.name, codes.data, done)
                if self.verify:
                    written = buffers.readback[: codes.nbytes]
                    staging.read(packed.name, written.data, done)
                    codes = written
                digest.update(codes.data)
                deviation.add(view, codes, here)
                done += codes.nbytes
                remaining -= count
                advance(count)
        advance(remaining)  # block scales
        others = ((scale.name, scales), (size.name, np.array(shape, np.int64)))
        return {
            packed.name: {"sha256": digest.hexdigest(), **deviation.finish()},
            **{
                name: write_tensor(name, [array.reshape(-1).view(np.uint8)], staging, self.verify)
                for name, array in others
            },
        }


class Rtn(Conversion):
    """Every matrix by itself."""

    plan: Plan
    request: Request

    def __init__(self, preflight: Preflight, observer: Observer, notify: Notify = silent) -> None:
        super().__init__(preflight, observer)
        self.notify = notify

    @staticmethod
    def check(request: Request, plan: Plan) -> int:
        """Refuse what the method cannot do; bytes of memory that it needs beside the workers'."""
        if request.device.lower() not in ("auto", "cpu"):
            raise UsageError(
                f"--device {request.device} belongs to --method gptq: rounding to nearest runs on "
                "the CPU, faster than weights reach a GPU",
                "omit it",
            )
        return 0

    def buffers(self) -> BufferSizes:
        rounding = rtn_buffers(self.plan.moe_layers, self.plan.target.scheme)
        return rounding.with_those_of(buffer_sizes(self.plan))

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
        transformers is not installed or does not have the model."""
        if find_spec("torch") is None or find_spec("transformers") is None:
            return []
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

    def expert_tasks(self, unit: LayerUnit, reader: SourceReader) -> Iterator[Task]:
        verify, scheme = self.request.verify, self.plan.target.scheme
        for expert in unit.experts:
            for proj in unit.layer.projections:
                yield RtnTask(reader, unit.layer, expert, proj, verify, scheme)
