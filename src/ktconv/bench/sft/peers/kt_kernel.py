"""kt-kernel: its classes for fine-tuning, used through the task queue as in its own wrapper.

Transposed weights of INT8 are made from the forward's at each backward (share_backward_bb): without
them, and without files of them, it leaves out the base's part of gradients. Importing it enables
flush-to-zero in the process, so quantizing comes first.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from ktconv import native
from ktconv.bench.peers.base import PeerError
from ktconv.formats import FORMATS
from ktconv.formats.decode import f32_to_bf16
from ktconv.runtime.layers.experts import GatedMatrices, quantized
from ktconv.system.arrays import F32, Array
from ktconv.train.gradients import MATRICES, Call, Found, matrices_of

_PROJECTIONS = ("gate", "up", "down")
_CHUNK = 32  # its buffers are for a multiple of so many tokens


class Kind(Struct, frozen=True):
    """A class of the extension module, and the step of supported sizes."""

    class_name: str
    step: int  # hidden and intermediate size must be multiples


KINDS = {"bf16": Kind("AMXBF16_SFT_MOE", 32), "int8": Kind("AMXInt8_SFT_MOE", 64)}


class KtKernel:
    """`method` is one of KINDS. LoRA matrices stay the same, so kt-kernel gets them only once."""

    saved_bytes: int | None = None
    scratch_bytes: int | None = None

    def __init__(
        self, method: str, experts: Sequence[GatedMatrices], call: Call, threads: int
    ) -> None:
        up, kind = experts[0][1], KINDS[method]
        if any(size % kind.step for size in up.shape):
            raise PeerError(f"hidden and intermediate must be multiples of {kind.step}")
        self._call, (self._tokens, self._top_k) = call, call.ids.shape
        self._alive: list[Any] = []
        given = self._bf16(experts) if method == "bf16" else self._int8(experts)
        self._lora = list(matrices_of(call.lora).values())
        self._start(kind, up.shape, len(experts), given, threads)
        self._make_room(call)

    def _bf16(self, experts: Sequence[GatedMatrices]) -> dict[str, Any]:
        """Fields of the configuration: addresses of stacked matrices."""
        each = zip(*experts, strict=True)
        stacks = [np.stack([f32_to_bf16(matrix) for matrix in matrices]) for matrices in each]
        self._alive += stacks
        return {f"{p}_proj": s.ctypes.data for p, s in zip(_PROJECTIONS, stacks, strict=True)}

    def _int8(self, experts: Sequence[GatedMatrices]) -> dict[str, Any]:
        """Addresses of packed codes and scales of each expert, for one NUMA part."""
        fields: dict[str, Any] = {"share_backward_bb": True}
        for projection, matrices in zip(_PROJECTIONS, zip(*experts, strict=True), strict=True):
            packed = [_packed(matrix) for matrix in matrices]
            self._alive += packed
            fields[f"{projection}_projs"] = [[codes.ctypes.data for codes, _ in packed]]
            fields[f"{projection}_scales"] = [[scale.ctypes.data for _, scale in packed]]
        return fields

    def _start(
        self,
        kind: Kind,
        sizes: tuple[int, ...],
        experts: int,
        given: dict[str, Any],
        threads: int,
    ) -> None:
        extension = importlib.import_module("kt_kernel").kt_kernel_ext
        made = getattr(extension.moe, kind.class_name, None)
        if made is None:
            raise PeerError(f"this build of kt-kernel has no {kind.class_name}")
        pool = extension.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map = 1, [0]
        pool.subpool_thread_count = [threads]
        self._queue = extension.CPUInfer(pool)
        config, order = extension.moe.MOESFTConfig(), torch.arange(experts)
        lora, (intermediate, hidden) = self._call.lora, sizes
        rank = self._lora[0].shape[1]
        fields = {
            "expert_num": experts, "num_experts_per_tok": self._top_k, "layer_idx": 0,
            "hidden_size": hidden, "intermediate_size": intermediate,
            "max_len": -(-self._tokens // _CHUNK) * _CHUNK,
            "lora_rank": rank, "lora_alpha": lora.scale * rank, "lora_dropout": 0.0,
            "max_cache_depth": 1, "full_weight_grad": False,
            # As its wrapper has it, so that gradients are overwritten.
            "authoritative_optimizer_grads": True,
            "physical_to_logical_map": order.data_ptr(), "pool": self._queue.backend_,
        }  # fmt: skip
        for name, value in (fields | given).items():
            setattr(config, name, value)
        self._moe = made(config)
        self._run(self._moe.load_weights_task())
        self._moe.update_lora_weights(*_addresses(self._lora))
        self._alive = [order]

    def _make_room(self, call: Call) -> None:
        gradients = [torch.zeros_like(matrix) for matrix in self._lora]
        self._y, self._dx = torch.zeros_like(call.x), torch.zeros_like(call.x)
        self._dw, self._count = torch.zeros_like(call.weights), np.array([len(call.x)], np.int32)
        self._gradients = dict(zip(MATRICES, gradients, strict=True))

    def _run(self, task: Any) -> None:
        self._queue.submit(task)
        self._queue.sync()

    def forward(self, ids: Tensor) -> None:
        arrays = (ids, self._call.weights, self._call.x, self._y)
        count = self._count.ctypes.data
        self._run(self._moe.forward_sft_task(count, self._top_k, *_addresses(arrays), True))

    def backward(self) -> None:
        arrays = (self._call.dy, self._dx, *self._gradients.values(), self._dw)
        self._run(self._moe.backward_task(*_addresses(arrays), 0, 0, 0, False, 1.0))

    def found(self) -> Found:
        return {"y": self._y, "dx": self._dx, "dw": self._dw, **self._gradients}


def values(method: str, matrices: GatedMatrices) -> tuple[F32, F32, F32]:
    """Values with which it computes in place of gate, up and down."""
    gate, up, down = (quantized(FORMATS[method], matrix).values for matrix in matrices)
    return gate, up, down


def _packed(matrix: F32) -> tuple[Array, Array]:
    found = quantized(FORMATS["int8"], matrix)
    assert found.scale is not None
    layout = FORMATS["int8"].layout
    rows, cols = matrix.shape
    codes = native.aligned_bytes(layout.weight_size(rows, cols))
    return codes, native.pack_weight(layout, rows, cols, found.codes, found.scale, codes)


def _addresses(arrays: Sequence[Tensor]) -> list[int]:
    return [array.data_ptr() for array in arrays]
