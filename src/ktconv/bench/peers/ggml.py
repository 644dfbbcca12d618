"""ggml: the graph of a MoE layer that llama.cpp computes, on its CPU backend.

Weights are in the first buffer type whose layout ggml can multiply with, so that formats for which
it has a repacked layout are repacked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import Struct

from ktconv.bench.measure import Batch
from ktconv.bench.peers import ggml_api
from ktconv.bench.peers.base import Layer, PeerError, Steps, is_plain
from ktconv.formats.decode import bf16_to_f32
from ktconv.native import Activation
from ktconv.runtime.layers.experts import GatedMatrices
from ktconv.system.arrays import F32, Array

_ROWS = 256  # quantized at a time by a thread
_TENSORS = 64  # room in a context, and for two more per expert of a token


class Weights(Struct, frozen=True):
    """gate, up and down of all experts."""

    context: int
    buffer: int
    tensors: tuple[int, int, int]
    layout: str  # ggml's name of the buffer type


class Graph(Struct, frozen=True):
    """The layer for one number of tokens."""

    contexts: tuple[int, int]
    buffer: int
    allocator: int
    graph: int
    x: int
    ids: int
    weights: int
    y: int


class GgmlPeer:
    """`kind` is one of TYPES."""

    def __init__(self, kind: str) -> None:
        self._type = ggml_api.TYPES[kind]
        self._graphs: list[Graph] = []

    def prepare(self, layer: Layer) -> None:
        self._api = ggml_api.Ggml()
        self._traits = self._api.get_type_traits(self._type).contents
        shape, block = layer.shape, self._traits.block
        if shape.hidden % block or shape.intermediate % block:
            raise PeerError(f"hidden and intermediate must be multiples of {block}")
        if not (is_plain(shape.activation) or _is_gpt_oss(shape.activation)):
            raise PeerError("only plain SwiGLU and that of gpt-oss are compared")
        self._layer = layer
        self._backend = self._api.backend_cpu_init()
        self._api.backend_cpu_set_n_threads(self._backend, layer.threads)
        self._quantized = {
            origin: [self._quantize(matrix) for matrix in layer.source(origin)]
            for origin in sorted(set(layer.origins))
        }
        self._weights = self._place()
        for which, tensor in enumerate(self._weights.tensors):
            # Repacking takes a tensor as a whole.
            stacked = np.stack([self._quantized[origin][which] for origin in layer.origins])
            self._fill(tensor, stacked)

    def _quantize(self, matrix: F32) -> Array:
        """Rows of blocks, as in a GGUF file."""
        rows, cols = matrix.shape
        source = np.ascontiguousarray(matrix)
        out = np.empty((rows, self._api.row_size(self._type, cols)), np.uint8)

        def part(first: int) -> None:
            count = min(_ROWS, rows - first)
            place = (source.ctypes.data, out.ctypes.data, first * cols, count, cols, None)
            self._api.quantize_chunk(self._type, *place)

        part(0)  # the first call makes tables
        with ThreadPoolExecutor() as threads:
            list(threads.map(part, range(_ROWS, rows, _ROWS)))
        return out

    def _place(self) -> Weights:
        for buffer_type in self._api.buffer_types():
            weights = self._allocate(buffer_type)
            if weights is None:
                continue
            if self._can_multiply(weights):
                return weights
            self._api.backend_buffer_free(weights.buffer)
            self._api.free(weights.context)
        raise PeerError("ggml's CPU backend cannot multiply this type, or memory is short")

    def _allocate(self, buffer_type: int) -> Weights | None:
        api, shape = self._api, self._layer.shape
        wide, tall = (shape.hidden, shape.intermediate), (shape.intermediate, shape.hidden)
        context = api.context(_TENSORS)
        gate, up, down = (
            api.new_tensor_3d(context, self._type, *size, shape.experts)
            for size in (wide, wide, tall)
        )
        buffer = api.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        if not buffer:
            api.free(context)
            return None
        layout = api.backend_buft_name(buffer_type).decode()
        return Weights(context, buffer, (gate, up, down), layout)

    def _can_multiply(self, weights: Weights) -> bool:
        api = self._api
        context = api.context(_TENSORS)
        x, ids, _ = self._inputs(context, 1)
        gate = api.mul_mat_id(context, weights.tensors[0], x, ids)
        down = api.mul_mat_id(context, weights.tensors[2], gate, ids)
        usable = all(api.backend_supports_op(self._backend, product) for product in (gate, down))
        api.free(context)
        return usable

    def _inputs(self, context: int, tokens: int) -> tuple[int, int, int]:
        """x, ids and weights of the routing."""
        api, shape = self._api, self._layer.shape
        return (
            api.new_tensor_3d(context, ggml_api.F32, shape.hidden, 1, tokens),
            api.new_tensor_2d(context, ggml_api.I32, shape.top_k, tokens),
            api.new_tensor_3d(context, ggml_api.F32, 1, shape.top_k, tokens),
        )

    def _fill(self, tensor: int, values: Array) -> None:
        self._api.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    @property
    def detail(self) -> str:
        """ggml's name of the buffer type of the weights."""
        return self._weights.layout

    def expert_bytes(self) -> int:
        return sum(matrix.nbytes for matrix in self._quantized[self._layer.origins[0]])

    def values(self, origin: int) -> GatedMatrices:
        shape = self._layer.shape
        columns = (shape.hidden, shape.hidden, shape.intermediate)
        gate, up, down = (
            self._restored(rows, cols)
            for rows, cols in zip(self._quantized[origin], columns, strict=True)
        )
        return gate, up, down

    def _restored(self, rows: Array, cols: int) -> F32:
        out = np.empty((len(rows), cols), np.float32)
        self._traits.to_float(rows.ctypes.data, out.ctypes.data, out.size)
        return out

    def steps(self, batch: Batch) -> Steps:
        graph = self._graph(len(batch.x))
        self._fill(graph.x, bf16_to_f32(batch.x))
        self._fill(graph.weights, np.ascontiguousarray(batch.weights))
        compute, backend = self._api.backend_graph_compute, self._backend
        into = self._api.get_data(graph.ids)

        def step(ids: Array) -> Callable[[], None]:
            kept = np.ascontiguousarray(ids, np.int32)
            source, size = kept.ctypes.data, kept.nbytes

            def call(kept: Array = kept) -> None:
                ctypes.memmove(into, source, size)
                if compute(backend, graph.graph):
                    raise PeerError("ggml failed to compute the graph")

            return call

        def result() -> F32:
            y = np.empty(batch.x.shape, np.float32)
            ctypes.memmove(y.ctypes.data, self._api.get_data(graph.y), y.nbytes)
            return y

        return Steps([step(ids) for ids in batch.ids], result)

    def _graph(self, tokens: int) -> Graph:
        """Inputs get memory that nothing else may use: they outlive a computation."""
        api = self._api
        plain = api.backend_cpu_buffer_type()
        inputs = api.context(_TENSORS)
        x, ids, weights = self._inputs(inputs, tokens)
        buffer = api.backend_alloc_ctx_tensors_from_buft(inputs, plain)
        context = api.context(_TENSORS + 2 * self._layer.shape.top_k, graphs=1)
        y = self._layer_output(context, x, ids, weights, tokens)
        api.set_output(y)
        graph = api.new_graph(context)
        api.build_forward_expand(graph, y)
        allocator = api.gallocr_new(plain)
        if not buffer or not api.gallocr_alloc_graph(allocator, graph):
            raise PeerError("ggml found no memory for the graph")
        made = Graph((inputs, context), buffer, allocator, graph, x, ids, weights, y)
        self._graphs.append(made)
        return made

    def _layer_output(self, context: int, x: int, ids: int, weights: int, tokens: int) -> int:
        api, shape = self._api, self._layer.shape
        gate, up, down = self._weights.tensors
        gated = self._gated(
            context,
            api.mul_mat_id(context, gate, x, ids),
            api.mul_mat_id(context, up, x, ids),
        )
        outputs = api.mul(context, api.mul_mat_id(context, down, gated, ids), weights)
        row = shape.hidden * np.dtype(np.float32).itemsize
        total: int | None = None
        for slot in range(shape.top_k):
            one = api.view_2d(context, outputs, shape.hidden, tokens, shape.top_k * row, slot * row)
            total = one if total is None else api.add(context, total, one)
        assert total is not None
        return total

    def _gated(self, context: int, gate: int, up: int) -> int:
        activation = self._layer.shape.activation
        if is_plain(activation):
            return int(self._api.swiglu_split(context, gate, up))
        settings = (activation.alpha, activation.limit)
        return int(self._api.swiglu_oai(context, gate, up, *settings))

    def close(self) -> None:
        for made in self._graphs:
            self._api.gallocr_free(made.allocator)
            self._api.backend_buffer_free(made.buffer)
            for context in made.contexts:
                self._api.free(context)
        self._api.backend_buffer_free(self._weights.buffer)
        self._api.free(self._weights.context)
        self._api.backend_free(self._backend)


def _is_gpt_oss(activation: Activation) -> bool:
    """Whether ggml's swiglu_oai computes it: beta is always 1 there, and the limit is finite."""
    return (
        activation.function == "swiglu"
        and activation.beta == 1.0
        and np.isfinite(activation.limit).item()
    )
