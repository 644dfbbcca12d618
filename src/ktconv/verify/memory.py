"""The memory that a verification takes, from headers and options, before anything is read.

Work that does not fit is done in smaller portions: with fewer threads, and fewer packed experts of
a layer in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ktconv import native
from ktconv.checkpoint import Checkpoint, ExpertMatrix, MoELayer
from ktconv.conversion.records import peak_rss
from ktconv.conversion.run import MEMORY_MARGIN, fit_threads
from ktconv.errors import MemoryLimitError
from ktconv.families.config import text_section
from ktconv.moe.experts import TOKENS_AT_ONCE
from ktconv.moe.streamed import piece_rows
from ktconv.packed.weights import Geometry
from ktconv.reading.matrices import chunk_rows, experts_bytes
from ktconv.reading.reader import BOUNCE_BYTES
from ktconv.system import machine
from ktconv.system.pool import Pool
from ktconv.system.units import format_size
from ktconv.verify.request import VerifyRequest

DEFAULT_MEMORY = 1536 << 20  # beyond what headers and manifest take
LIBRARIES_MEMORY = 400 << 20  # of PyTorch and transformers after import
F32 = 4
# Number of float32 arrays at the same time: of all tokens of a layer [M, H]; of the tokens of an
# expert, of hidden and of intermediate size.
_OF_ALL_TOKENS, _OF_EXPERT_TOKENS, _OF_MIDDLE = 12, 16, 24
_WINDOW = 512  # tokens, of level model


@dataclass(frozen=True, slots=True)
class LayerNeed:
    """Bytes of level layers: in total, per thread that computes experts, and per expert of packed
    weights, of which `experts` could run together."""

    fixed: int
    thread: int
    expert: int = 0
    experts: int = 0

    @property
    def least(self) -> int:
        return self.fixed + self.thread + self.expert


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes per thread that reads weights, of level layers, of loading the source model for hidden
    states, and of level model. None for what is not done."""

    thread: int
    layers: LayerNeed | None = None
    capture: int | None = None
    model: int | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """Sizes of portions, and the peak memory that they take."""

    threads: int
    peak: int
    layer_threads: int = 1
    packed: int = 0  # bytes of packed weights in memory at level layers
    why_not_captured: str | None = None  # None: hidden states come from the source model

    def experts_at_once(self, expert_bytes: int) -> int:
        return max(1, self.packed // expert_bytes)


def memory_facts(budget: Budget) -> dict[str, int]:
    """For the JSON: the announced peak and the measured one."""
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
    return _Planner(need, asked, threads).plan(why_not_captured)


class _Planner:
    def __init__(self, need: Need, asked: int | None, threads: int | None) -> None:
        self._need, self._asked = need, asked
        resident = machine.resident_memory()
        self._base = resident + MEMORY_MARGIN
        self._layers = need.layers or LayerNeed(0, 0)
        smallest = max(self._layers.least, need.model or 0) + (threads or 1) * need.thread
        self._limit = asked or max(resident + DEFAULT_MEMORY, self._base + smallest)
        least = self._base + self._layers.least
        self._threads = fit_threads(self._limit, threads, least, need.thread, "verification")

    def plan(self, why_not_captured: str | None) -> Budget:
        self._check_model()
        reading = self._threads * self._need.thread
        if self._need.layers is None:
            return Budget(self._threads, self._base + reading)
        why_not = why_not_captured or self._why_not_captured()
        libraries = 0 if why_not else LIBRARIES_MEMORY
        threads, packed, computing = self._portions(self._limit - self._base - libraries)
        capture = 0 if why_not else self._need.capture or 0
        peak = max(reading, libraries + computing, reading + max(capture, self._need.model or 0))
        return Budget(self._threads, self._base + peak, threads, packed, why_not)

    def _portions(self, room: int) -> tuple[int, int, int]:
        """Of level layers: threads, each with at least one expert, bytes of packed weights, and
        bytes in total. Allocators keep the memory of threads that read weights, and reuse it for
        as many threads."""
        need, reader = self._layers, self._need.thread
        most = (room - need.fixed - self._threads * reader) // max(
            1, need.thread + need.expert - reader
        )
        threads = max(1, min(self._threads, most))
        fixed = need.fixed + threads * need.thread + (self._threads - threads) * reader
        packed = min(need.expert * need.experts, room - fixed)
        return threads, packed, fixed + packed

    def _why_not_captured(self) -> str | None:
        """Why there is too little memory to load the source model for hidden states; else None."""
        loading = max(self._need.capture or 0, LIBRARIES_MEMORY + self._layers.least)
        needed = self._base + self._threads * self._need.thread + loading
        if needed <= self._limit:
            return None
        return (
            f"loading the source model needs {format_size(needed)} of memory, but "
            f"only {format_size(self._limit)} may be used (--max-memory)"
        )

    def _check_model(self) -> None:
        needed = self._base + self._threads * self._need.thread + (self._need.model or 0)
        if self._need.model and self._asked and needed > self._asked:
            raise MemoryLimitError(
                f"--max-memory {format_size(self._asked)} is too small: --level model needs "
                f"{format_size(needed)}",
                f"use --max-memory {-(-needed // (1 << 20))}MiB or --level layers",
            )


# ---- what portions need ------------------------------------------------------------------


def layers_need(
    layers: Iterable[MoELayer],
    geometries: Iterable[Geometry],
    request: VerifyRequest,
    top_k: int,
) -> LayerNeed:
    """Memory of level layers; `geometries` are those of the layers that our kernels run."""
    layers, tokens = list(layers), request.tokens
    hidden = max((layer.hidden_size for layer in layers), default=0)
    inner = max((layer.intermediate_size for layer in layers), default=0)
    at_once = min(tokens, TOKENS_AT_ONCE)
    arrays = at_once * F32 * (_OF_EXPERT_TOKENS * hidden + _OF_MIDDLE * inner)
    pieces = max((_pieces(one) for layer in layers for one in layer.kinds), default=0)
    known = {one for one in geometries if one.format}
    expert = max((_expert_bytes(one) for one in known), default=0)
    return LayerNeed(
        fixed=tokens * hidden * F32 * _OF_ALL_TOKENS
        + max((_scratch(one, tokens, top_k, request.threads) for one in known), default=0),
        # If tokens are computed in blocks: hidden states, and results of blocks and in total.
        thread=arrays + pieces + 7 * max(0, tokens - TOKENS_AT_ONCE) * hidden * F32,
        expert=expert,
        experts=max((len(one.here) for one in known), default=0),
    )


def _pieces(matrix: ExpertMatrix) -> int:
    """Memory to read a source or packed matrix, with two pieces as float32."""
    rows = min(chunk_rows(matrix), matrix.rows)
    source = matrix.nbytes(rows) + rows * matrix.cols * 2 * F32 + BOUNCE_BYTES
    packed = min(piece_rows(matrix.cols), matrix.rows) * matrix.cols * (2 + 2 * F32)
    return max(source, packed)


def _expert_bytes(geometry: Geometry) -> int:
    assert geometry.format is not None
    return geometry.format.expert_bytes(geometry.hidden, geometry.intermediate, geometry.parts)


def _scratch(geometry: Geometry, tokens: int, top_k: int, threads: int | None) -> int:
    """The scratch memory of the kernels for a layer of that size."""
    assert geometry.format is not None
    layer = native.Layer(
        geometry.format.layout,
        native.Activation(),
        geometry.hidden,
        geometry.intermediate,
        [[None] * geometry.experts] * geometry.parts,
    )
    with Pool(threads) as pool:
        return layer.scratch_size(tokens, top_k, pool)


def loading_bytes(checkpoint: Checkpoint) -> int:
    """Memory of transformers with a loaded model: its weights, and the experts of one layer again,
    which are there twice while they are stacked. Does not count pages of mapped files, which the
    system can drop."""
    weights = sum(source.nbytes for source in checkpoint.sources)
    experts = (experts_bytes(layer) for layer in checkpoint.layers)
    return LIBRARIES_MEMORY + weights + max(experts, default=0)


def level_model_bytes(checkpoint: Checkpoint, models: int) -> int:
    """`loading_bytes` of so many models, and the logits of both on a window."""
    vocabulary = text_section(checkpoint.config).get("vocab_size")
    logits = 2 * F32 * _WINDOW * vocabulary if isinstance(vocabulary, int) else 0
    return LIBRARIES_MEMORY + models * (loading_bytes(checkpoint) - LIBRARIES_MEMORY) + logits


def capture_bytes(checkpoint: Checkpoint) -> int:
    """`loading_bytes` with the pages of mapped files."""
    return loading_bytes(checkpoint) + sum(source.nbytes for source in checkpoint.sources)
