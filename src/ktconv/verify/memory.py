"""The memory that a verification takes, from headers and options, before anything is read.

Work that does not fit is done in smaller portions: with fewer threads, and fewer packed experts of
a layer in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from ktconv import native
from ktconv.conversion.records import peak_rss
from ktconv.conversion.run import MEMORY_MARGIN, fit_threads
from ktconv.formats import Format
from ktconv.model.decoded import loaded_bytes
from ktconv.runtime.layers.experts import TOKENS_AT_ONCE
from ktconv.source import Checkpoint, ExpertMatrix, MoELayer
from ktconv.source.reading.matrices import buffer_bytes, chunk_rows, experts_bytes
from ktconv.source.reading.reader import BOUNCE_BYTES
from ktconv.source.reading.streamed import piece_rows
from ktconv.system import machine
from ktconv.system.pool import Pool
from ktconv.system.units import format_size
from ktconv.targets.packed.weights import Geometry
from ktconv.verify.request import VerifyRequest

DEFAULT_MEMORY = 1536 << 20  # beyond what headers and manifest take
LIBRARIES_MEMORY = 400 << 20  # of PyTorch and transformers after import
BF16, F32 = 2, 4
# Number of float32 arrays at the same time: of all tokens of a layer [M, H]; of the tokens of an
# expert, of hidden and of intermediate size.
_OF_ALL_TOKENS, _OF_EXPERT_TOKENS, _OF_MIDDLE = 12, 16, 24
_WINDOW = 512  # tokens, of level model


class LayerNeed(Struct, frozen=True):
    """Bytes of level layers: in total, per thread that computes experts, and per expert of packed
    weights, of which `experts` could run together."""

    fixed: int
    thread: int
    expert: int = 0
    experts: int = 0

    @property
    def least(self) -> int:
        return self.fixed + self.thread + self.expert


class Need(Struct, frozen=True):
    """Bytes per thread that reads weights, of level layers, of loading the source model for
    hidden states, and of what threads share; None or 0 for what is not done."""

    thread: int
    layers: LayerNeed | None = None
    capture: int = 0
    shared: int = 0  # whatever the number of threads


class Budget(Struct, frozen=True):
    """Sizes of portions, and the peak memory that they take."""

    threads: int
    peak: int
    layer_threads: int = 1
    packed: int = 0  # bytes of packed weights in memory at level layers
    why_not_captured: str | None = None  # None: hidden states come from the source model

    def experts_at_once(self, expert_bytes: int) -> int:
        return max(1, self.packed // expert_bytes)


def memory_facts(budget: Budget) -> dict[str, int]:
    """Memory for the JSON: the announced peak and the measured one."""
    return {
        "threads": budget.threads,
        "peak_memory_bytes": budget.peak,
        "peak_rss_bytes": peak_rss(),
    }


def plan_memory(
    need: Need, asked: int | None, threads: int | None, why_not_captured: str | None
) -> Budget:
    """Portions for `asked` bytes in total; by default for 1.5 GiB beyond what is used now, or what
    the smallest portions need. Raises MemoryLimitError where these need more than `asked`."""
    layers, resident = need.layers or LayerNeed(0, 0), machine.resident_memory()
    base = resident + MEMORY_MARGIN + need.shared
    smallest = layers.least + (threads or 1) * need.thread
    limit = asked or max(resident + DEFAULT_MEMORY, base + smallest)
    threads = fit_threads(limit, threads, base + layers.least, need.thread, "verification")
    reading = base + threads * need.thread
    if need.layers is None:
        return Budget(threads, reading)
    loading = reading + max(need.capture, LIBRARIES_MEMORY + layers.least)
    if loading > limit:
        why_not_captured = why_not_captured or (
            f"loading the source model needs {format_size(loading)} of memory, but "
            f"only {format_size(limit)} may be used (--max-memory)"
        )
    libraries, capture = (0, 0) if why_not_captured else (LIBRARIES_MEMORY, need.capture)
    room = limit - base - libraries
    computing, layer_threads, packed = _portions(layers, room, threads, need.thread)
    peak = max(base + libraries + computing, reading + capture)
    return Budget(threads, peak, layer_threads, packed, why_not_captured)


def _portions(need: LayerNeed, room: int, readers: int, reader: int) -> tuple[int, int, int]:
    """Shares of level layers: bytes in total, threads, each with at least one expert, and bytes of
    packed weights. Allocators keep the memory of the `readers`, threads that read weights with
    `reader` bytes each, and reuse it for as many threads."""
    more = max(1, need.thread + need.expert - reader)
    threads = max(1, min(readers, (room - need.fixed - readers * reader) // more))
    fixed = need.fixed + threads * need.thread + (readers - threads) * reader
    packed = min(need.expert * need.experts, room - fixed)
    return fixed + packed, threads, packed


# ---- what portions need ------------------------------------------------------------------


def layers_need(
    layers: Iterable[MoELayer], geometries: Iterable[Geometry], request: VerifyRequest, top_k: int
) -> LayerNeed:
    """Memory of level layers; `geometries` are those of the layers that our kernels run."""
    layers, tokens = list(layers), request.tokens
    hidden = max((layer.hidden_size for layer in layers), default=0)
    inner = max((layer.intermediate_size for layer in layers), default=0)
    at_once = min(tokens, TOKENS_AT_ONCE)
    arrays = at_once * F32 * (_OF_EXPERT_TOKENS * hidden + _OF_MIDDLE * inner)
    pieces = max((_pieces(one) for layer in layers for one in layer.kinds), default=0)
    known = {(one.format, one) for one in geometries if one.format}
    sizes = (
        fmt.expert_bytes(one.hidden, one.intermediate, one.parts, gated=one.gated)
        for fmt, one in known
    )
    scratch = (_scratch(fmt, one, tokens, top_k, request.threads) for fmt, one in known)
    return LayerNeed(
        fixed=tokens * hidden * F32 * _OF_ALL_TOKENS + max(scratch, default=0),
        # If tokens are computed in blocks: hidden states, and results of blocks and in total.
        thread=arrays + pieces + 7 * max(0, tokens - TOKENS_AT_ONCE) * hidden * F32,
        expert=max(sizes, default=0),
        experts=max((len(one.here) for _, one in known), default=0),
    )


def _pieces(matrix: ExpertMatrix) -> int:
    """Memory to read a source or packed matrix, with two pieces as float32."""
    rows = min(chunk_rows(matrix), matrix.rows)
    source = buffer_bytes(matrix, rows) + rows * matrix.cols * 2 * F32 + BOUNCE_BYTES
    packed = min(piece_rows(matrix.cols), matrix.rows) * matrix.cols * (2 + 2 * F32)
    return max(source, packed)


def _scratch(fmt: Format, geometry: Geometry, tokens: int, top_k: int, threads: int | None) -> int:
    """The scratch memory of the kernels for a layer of that size."""
    sizes = geometry.hidden, geometry.intermediate
    experts: list[list[Any]] = [[None] * geometry.experts] * geometry.parts
    activation = native.Activation("swiglu" if geometry.gated else "relu2")
    layer = native.Layer(fmt.layout, activation, *sizes, experts)
    with Pool(threads) as pool:
        return layer.scratch_size(tokens, top_k, pool)


def loading_bytes(checkpoint: Checkpoint) -> int:
    """Memory of transformers with a loaded model: its weights, and the experts of one layer again,
    which are there twice while they are stacked. Does not count pages of mapped files, which the
    system can drop."""
    weights = loaded_bytes(checkpoint)
    if checkpoint.is_gguf:
        return LIBRARIES_MEMORY + weights
    experts = (max(experts_bytes(one), BF16 * _elements(one)) for one in checkpoint.layers)
    return LIBRARIES_MEMORY + weights + max(experts, default=0)


def _elements(layer: MoELayer) -> int:
    each = layer.hidden_size * layer.intermediate_size
    return len(layer.projections) * each * len(layer.experts)


def level_model_bytes(checkpoint: Checkpoint, models: int) -> int:
    """`loading_bytes` of a number of models, and the logits of both on a window."""
    vocabulary = checkpoint.config.vocabulary
    logits = 2 * F32 * _WINDOW * vocabulary if isinstance(vocabulary, int) else 0
    return LIBRARIES_MEMORY + models * (loading_bytes(checkpoint) - LIBRARIES_MEMORY) + logits


def capture_bytes(checkpoint: Checkpoint) -> int:
    """`loading_bytes` with the pages of mapped files."""
    return loading_bytes(checkpoint) + checkpoint.nbytes
