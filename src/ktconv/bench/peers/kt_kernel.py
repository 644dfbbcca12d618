"""kt-kernel: its MoE classes, used through the task queue as in its own wrapper.

It gets the same codes and scales as our kernels. Importing it enables flush-to-zero in the
process, so quantizing comes first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.bench.measure import Batch
from ktconv.bench.peers.base import Layer, PeerError, Steps, is_plain
from ktconv.formats import format_named
from ktconv.formats.decode import bf16_to_f32
from ktconv.runtime.layers.experts import GatedMatrices, quantized
from ktconv.system.arrays import F32, Array

Handed = tuple[Array, Array | None]  # codes and scales of a matrix, as kt-kernel takes them


class Kind(Struct, frozen=True):
    """A class of the extension module, its settings, and the step of supported sizes."""

    class_name: str
    settings: dict[str, Any]
    step: int  # hidden and intermediate size must be multiples


KINDS = {
    "int4": Kind("AMXInt4_MOE", {}, 128),
    "int8": Kind("AMXInt8_MOE", {}, 64),
    "gint4-32": Kind("AMXInt4_KGroup_MOE", {"bits": 4, "group_size": 32, "zero_point": False}, 64),
    "mxfp4": Kind("AMXFP4_KGroup_MOE", {"bits": 4, "group_size": 32, "zero_point": False}, 64),
    "mxfp8": Kind("AMXMXFP8_KGroup_MOE", {"bits": 8, "group_size": 32, "zero_point": False}, 64),
    "fp8": Kind("AMXFP8_MOE", {"bits": 8, "group_size": 128, "zero_point": False}, 128),
    "fp8-channel": Kind(
        "AMXFP8PerChannel_MOE", {"bits": 8, "per_channel": True, "zero_point": False}, 128
    ),
    "bf16": Kind("AMXBF16_MOE", {}, 32),
}

_CHUNK = 32  # its buffers are for a multiple of so many tokens


class KtKernel:
    """`method` names a row of FORMATS and of KINDS."""

    def __init__(self, method: str) -> None:
        self._format, self._kind = format_named(method), KINDS[method]
        self._packed = method in ("int4", "int8")

    def prepare(self, layer: Layer) -> None:
        shape = layer.shape
        if not is_plain(shape.activation):
            raise PeerError("only plain SwiGLU is compared")
        if shape.hidden % self._kind.step or shape.intermediate % self._kind.step:
            raise PeerError(f"hidden and intermediate must be multiples of {self._kind.step}")
        self._layer = layer
        origins = sorted(set(layer.origins))
        handed = {o: [self._hand_over(m) for m in layer.source(o)] for o in origins}
        self._bytes = sum(_nbytes(matrix) for matrix in handed[origins[0]])
        self._start([handed[origin] for origin in layer.origins])

    def _hand_over(self, matrix: F32) -> Handed:
        found = quantized(self._format, matrix)
        codes, scale = found.codes, found.scale
        if self._packed:
            layout, (rows, cols) = self._format.layout, matrix.shape
            packed = native.aligned_bytes(layout.weight_size(rows, cols))
            return packed, native.pack_weight(layout, rows, cols, codes, scale, packed)
        if self._format.key == "mxfp4" and scale is not None:
            scale = scale.astype(np.uint16) << 7  # a power of two as bf16
        return np.ascontiguousarray(codes), None if scale is None else np.ascontiguousarray(scale)

    def _start(self, experts: list[list[Handed]]) -> None:
        """It copies and repacks all weights; the arrays are free afterwards."""
        package = importlib.import_module("kt_kernel")
        extension = package.kt_kernel_ext
        self.detail = str(getattr(package, "__cpu_variant__", ""))  # which of its builds runs
        made = getattr(extension.moe, self._kind.class_name, None)
        if made is None:
            raise PeerError(f"this build of kt-kernel has no {self._kind.class_name}")
        pool = extension.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map = 1, [0]
        pool.subpool_thread_count = [self._layer.threads]
        self._queue = extension.CPUInfer(pool)
        shape = self._layer.shape
        self._on_gpu = np.zeros(shape.experts, np.bool_)
        config = extension.moe.MOEConfig(
            shape.experts, shape.top_k, shape.hidden, shape.intermediate, self._on_gpu.ctypes.data
        )
        config.layer_idx = 0
        config.pool = self._queue.backend_
        config.max_len = -(-self._layer.max_tokens // _CHUNK) * _CHUNK
        config.load = self._packed
        for name, value in self._kind.settings.items():
            setattr(config.quant_config, name, value)
        for which, projection in enumerate(("gate", "up", "down")):
            matrices = [expert[which] for expert in experts]
            setattr(config, f"{projection}_projs", [[m[0].ctypes.data for m in matrices]])
            setattr(config, f"{projection}_scales", [[_address(m[1]) for m in matrices]])
        self._moe = made(config)
        order = np.arange(shape.experts, dtype=np.int64)
        self._queue.submit(self._moe.load_weights_task(order.ctypes.data))
        self._queue.sync()

    def expert_bytes(self) -> int:
        return self._bytes

    def values(self, origin: int) -> GatedMatrices:
        gate, up, down = (quantized(self._format, m).values for m in self._layer.source(origin))
        return gate, up, down

    def steps(self, batch: Batch) -> Steps:
        y = np.empty_like(batch.x)
        tokens, top_k = batch.weights.shape
        count = np.array([tokens], np.int32)
        submit, sync, task = self._queue.submit, self._queue.sync, self._moe.forward_task

        def step(ids: Array) -> Callable[[], None]:
            arrays = (count, ids, batch.weights, batch.x, y)
            number, *others = (array.ctypes.data for array in arrays)

            def call() -> None:
                submit(task(number, top_k, *others, False))
                sync()

            return call

        self._alive = (count, batch, y)
        return Steps([step(ids) for ids in batch.ids], lambda: bf16_to_f32(y))

    def close(self) -> None:
        del self._moe, self._queue


def _nbytes(matrix: Handed) -> int:
    codes, scale = matrix
    return codes.nbytes + (0 if scale is None else scale.nbytes)


def _address(array: Array | None) -> int:
    return 0 if array is None else array.ctypes.data
