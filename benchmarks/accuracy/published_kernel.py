"""Errors of layers that kt-kernel computes from the files of a conversion.

Its own SafeTensorLoader reads the files, and its AMX classes compute, called through its task queue
as its wrapper for KTransformers does; that wrapper itself needs a GPU for its buffers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.accuracy.evaluation import LAYER_WINDOWS, Evaluation
from benchmarks.accuracy.texts import cut_in_halves
from ktconv.system import machine
from ktconv.targets.packed.weights import open_packed

_CLASSES = {"int4": "AMXInt4_MOE", "int8": "AMXInt8_MOE"}
_PROJECTIONS = ("gate", "up", "down")
_CHUNK = 32  # its buffers are for a multiple of so many tokens


def print_errors(model: Path, outputs: Sequence[Path], text: Path) -> None:
    """||y - y_source|| / ||y_source|| of the routed experts of each layer, on real inputs: of
    kt-kernel and of ktconv's kernels."""
    _, evaluated = cut_in_halves(text)
    evaluation = Evaluation(model, evaluated, LAYER_WINDOWS)
    print("| output | layer | kt-kernel | ktconv's kernels |\n| --- | ---: | ---: | ---: |")
    for output in outputs:
        with evaluation.on_kernels(output):
            ours = evaluation.layer_errors()
        for own, (layer, error) in zip(ours, _errors(evaluation, output), strict=True):
            print(f"| {output.name} | {layer} | {error:.4f} | {own:.4f} |", flush=True)


def _errors(evaluation: Evaluation, output: Path) -> Iterator[tuple[int, float]]:
    packed = open_packed(output)
    loader = importlib.import_module("kt_kernel.utils.loader").SafeTensorLoader(str(output))
    for layer in sorted(evaluation.sites):
        geometry = packed.geometry(layer)
        if geometry.parts != 1 or geometry.format is None:
            raise SystemExit(f"{output} has {geometry.parts} parts; convert with --numa 1")
        calls = evaluation.calls[layer]
        (_, ids, _), _ = calls[0]
        shape = (geometry.experts, ids.shape[1], geometry.hidden, geometry.intermediate)
        tokens = max(len(wanted) for _, wanted in calls)
        published = PublishedLayer(
            geometry.format.key, shape, loader.load_experts(f"blk.{layer}"), tokens
        )
        yield layer, _error(published, calls)


def _error(layer: PublishedLayer, calls: Sequence[tuple[tuple[Any, ...], Tensor]]) -> float:
    apart = norm = 0.0
    for inputs, wanted in calls:
        apart += float((layer(*inputs).double() - wanted.double()).square().sum())
        norm += float(wanted.double().square().sum())
    return math.sqrt(apart / norm)


class PublishedLayer:
    """The experts of a layer in kt-kernel. `shape`: experts, top k, hidden, intermediate size."""

    def __init__(
        self, method: str, shape: tuple[int, int, int, int], weights: Mapping[str, Any], tokens: int
    ) -> None:
        extension = importlib.import_module("kt_kernel").kt_kernel_ext
        pool = extension.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map = 1, [0]
        pool.subpool_thread_count = [machine.usable_cpus()]
        self._queue = extension.CPUInfer(pool)
        self._on_gpu = np.zeros(shape[0], np.bool_)
        config = extension.moe.MOEConfig(*shape, self._on_gpu.ctypes.data)
        config.layer_idx, config.pool = 0, self._queue.backend_
        config.max_len = -(-tokens // _CHUNK) * _CHUNK
        config.load = True
        for projection in _PROJECTIONS:
            setattr(config, f"{projection}_projs", _addresses(weights[projection]))
            setattr(config, f"{projection}_scales", _addresses(weights[f"{projection}_scale"]))
        self._moe = getattr(extension.moe, _CLASSES[method])(config)
        order = np.arange(shape[0], dtype=np.int64)
        self._queue.submit(self._moe.load_weights_task(order.ctypes.data))
        self._queue.sync()

    def __call__(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """y [M, H] in bf16 of x [M, H], which is rounded to bf16; ids and weights [M, K]."""
        x = hidden.reshape(-1, hidden.shape[-1]).bfloat16().contiguous()
        ids, weights = ids.to(torch.int64).contiguous(), weights.float().contiguous()
        y, count = torch.empty_like(x), torch.tensor([len(x)], dtype=torch.int32)
        addresses = [one.data_ptr() for one in (ids, weights, x, y)]
        self._queue.submit(
            self._moe.forward_task(count.data_ptr(), ids.shape[1], *addresses, False)
        )
        self._queue.sync()
        return y


def _addresses(parts: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Of arrays by part and expert."""
    return [[array.ctypes.data for array in experts] for experts in parts]
