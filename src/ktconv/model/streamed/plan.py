"""Plans a pass from headers and config.json: bytes, memory, disk and time, before it runs.

Memory, in the layers (and similarly in the head, where logits take the place of experts):

- what the process has, and the embedding
- the largest layer without its experts, and its largest tensor again while it is converted
- experts that are decoded, of which two at least are in memory, and the tokens of one
- one window on its way: the outputs of each of the layer's linear modules, and of a few others
- of windows that wait for experts: what their forward passes refer to, six times [T, H] and the
  mask; only `parked` of them, since others are dropped and repeated
- of all windows: what goes to the experts and what comes back, unless that is in a file
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import Struct

from ktconv.errors import DiskSpaceError, MemoryLimitError, MemoryShortError
from ktconv.families.config import USUAL_TOP_K
from ktconv.model.streamed.experts import ROWS_AT_ONCE, expert_memory
from ktconv.model.streamed.packed import TOKENS_AT_ONCE
from ktconv.source import Checkpoint, ExpertMatrix, MoELayer
from ktconv.source.reading.matrices import MatrixReader, experts_bytes
from ktconv.source.reading.reader import SourceReader
from ktconv.system import machine
from ktconv.system.text import path_text
from ktconv.system.units import counted, format_duration, format_size

if TYPE_CHECKING:
    from ktconv.model.streamed.parts import PartedModel

_MARGIN = 160 << 20  # what libraries take when they are first used, and allocators keep
_SHARE = 0.9  # of the memory that is free, where no option says how much may be used
_OF_PARKED = 6  # [T, H] that a waiting forward pass refers to: see `_Windows`
_OF_ACTIVE = 8  # [T, H] of a forward pass beside the outputs of its linear modules
_OF_LINEAR_ATTENTION = 6  # measured: queries and keys repeated per head, decays, chunks
MEASURED_SECONDS = 0.06  # of each measurement
_READ_BYTES = 64 << 20
_PRODUCT = 1024
_LOGIT_ROWS = 32 * 8 * 6  # bytes per word of the vocabulary while two sides are compared
_KERNEL_TOKENS = 4096  # of which the kernels have scratch memory at a time
BF16, F32, I64 = 2, 4, 8


class Speed(NamedTuple):
    """Speed of this machine per second: bytes of source read, bytes of encoded experts decoded
    (infinite where they are not encoded), FLOPs of dense weights and of experts."""

    read: float
    decode: float
    dense: float
    experts: float


class PassPlan(Struct, frozen=True):
    """Requirements of a pass; bytes, but for what is named otherwise."""

    read: int  # of the source
    peak_memory: int
    experts_memory: int  # of decoded experts
    windows: int
    parked: int  # runs of windows that may wait in memory for experts
    runs: int  # of windows on each side, in a layer
    scratch_memory: int  # what of Scratch may be in memory
    scratch_file: int  # the rest of it
    states: int  # what is kept between layers, of two layers
    folder: Path | None
    dense_flops: float
    expert_flops: float
    decoded: int  # of the source, where experts are encoded
    speed: Speed | None = None

    @property
    def disk(self) -> int:
        """Bytes in the work folder."""
        return self.states + self.scratch_file

    @property
    def seconds(self) -> float | None:
        """About: the slower of reading and of computing, which overlap."""
        if self.speed is None:
            return None
        computing = self.dense_flops / self.speed.dense + self.expert_flops / self.speed.experts
        return max(self.read / self.speed.read, computing + self.decoded / self.speed.decode)

    def lines(self) -> list[str]:
        """Lines for people."""
        parts = [f"reads {format_size(self.read)} once"]
        parts.append(f"peak memory about {format_size(self.peak_memory)}")
        where = f" in {self.folder}" if self.folder else ""
        parts.append(f"{format_size(self.disk)} of hidden states{where}")
        if self.seconds is not None:
            parts.append(f"about {format_duration(max(1.0, self.seconds))}")
        found = ["; ".join(parts)]
        if self.parked < self.runs:
            found.append(
                f"attention is computed twice for {self.runs - self.parked} of "
                f"{counted(self.runs, 'window')}, which do not fit into memory together"
            )
        return found

    def facts(self) -> dict[str, Any]:
        """Facts for JSON."""
        return {
            "source_bytes": self.read,
            "peak_memory_bytes": self.peak_memory,
            "windows": self.windows,
            "windows_in_memory": self.parked,
            "disk_bytes": self.disk,
            "flops": self.dense_flops + self.expert_flops,
            "estimated_seconds": self.seconds,
        }


def plan_pass(
    parted: PartedModel,
    windows: Sequence[int],
    sides: int = 1,
    *,
    threads: int = 1,
    converted: bool = False,
    head: bool = True,
    layers: int | None = None,
    taps: int = 0,
    max_memory: int | None = None,
    option: str = "--max-memory",
    folder: Path | None = None,
    speed: Speed | None = None,
) -> PassPlan:
    """The plan for `windows`, the tokens of each, with `threads` threads that decode experts.

    `layers`: how many are passed; None: all. `converted`: side 1 has matrices of its own in place
    of the source's, rather than packed ones. `taps`: bytes that those take. `max_memory`: of the
    process in total, as `option` says; None: what is free. `folder`: where states are kept. Raises
    MemoryLimitError or MemoryShortError where even the least is too much, DiskSpaceError where the
    disk of `folder` is too small.
    """
    sizes, tokens = _Sizes(parted), sum(windows)
    runner = _Runner(parted, tokens, threads, converted, packed=sides > 1 and not converted)
    need = _Need(sizes, windows, sides, head, runner.least + taps)
    limit = _limit(need.least, max_memory, option)
    experts = runner.share(limit - need.layers)
    need.runner += experts - runner.experts_least
    parked, scratch = need.share(limit)
    file = max(0, need.scratch(parked) - scratch)
    states = 2 * sides * tokens * sizes.hidden * sizes.itemsize
    if folder is not None:
        _check_disk(folder, states + file)
    runs = sides * len(windows)
    again = 1 + (runs - parked) / runs
    passed = len(parted.layers) if layers is None else layers
    experts_of = [layer.source for index, layer in parted.experts.items() if index < passed]
    flops = again * _dense_flops(sizes, windows, sides, passed)
    if head:
        flops += 2.0 * sizes.head_elements * tokens * sides
    return PassPlan(
        read=parted.outside_bytes
        + sum(parted.layer_bytes[:passed])
        + sum(map(experts_bytes, experts_of)),
        peak_memory=need.peak(parked, scratch),
        experts_memory=experts,
        windows=len(windows),
        parked=parked,
        runs=runs,
        scratch_memory=scratch,
        scratch_file=file,
        states=states,
        folder=folder,
        dense_flops=flops,
        expert_flops=sum(_expert_flops(parted, layer) for layer in experts_of) * tokens * sides,
        decoded=sum(experts_bytes(layer) for layer in experts_of if _is_encoded(layer)),
        speed=speed,
    )


# ---- sizes of the model ----------------------------------------------------------------


class _Sizes:
    """Sizes of a model without its experts' matrices, from the parameters that it has on the meta
    device."""

    def __init__(self, parted: PartedModel) -> None:
        self.itemsize: int = parted.dtype.itemsize
        config = parted.model.config.get_text_config()
        self.hidden = int(config.hidden_size)
        self.vocabulary = int(config.vocab_size)
        heads = int(getattr(config, "num_attention_heads", 0) or 0)
        self.attention = heads * int(getattr(config, "head_dim", 0) or self.hidden // (heads or 1))
        eager = getattr(parted.model.config, "_attn_implementation", None) == "eager"
        self.eager_heads = heads if eager else 0
        self.top_k = max(
            (_top_k(parted, layer.index) for layer in parted.experts.values()), default=0
        )
        self.layers = [
            _parameters(layer, _stacked(parted, index)) for index, layer in enumerate(parted.layers)
        ]
        self.first_experts = min(parted.experts, default=len(self.layers))
        self.experts = max(
            (layer.site.stored.count for layer in parted.experts.values()), default=0
        )
        embedding, head = parted.model.get_input_embeddings(), parted.model.get_output_embeddings()
        self.embedding = sum(_nbytes(one) for one in embedding.parameters())
        self.head = 0 if head is None else sum(_nbytes(one) for one in head.parameters())
        self.head_elements = 0 if head is None else sum(one.numel() for one in head.parameters())

    @property
    def layer(self) -> int:
        """Bytes of the largest layer, with its largest tensor again."""
        nbytes = ([_nbytes(one) for one in layer] for layer in self.layers)
        return max(sum(layer) + 2 * max(layer, default=0) for layer in nbytes)

    @property
    def outputs(self) -> int:
        """Bytes per token of what the linear modules of a layer put out, and of float32 copies:
        one, but several in linear attention, which has convolutions (three dimensions)."""
        found = 0
        for layer in self.layers:
            numbers = sum(int(one.shape[0]) for one in layer if one.ndim == 2)
            copies = _OF_LINEAR_ATTENTION if any(one.ndim == 3 for one in layer) else 1
            found = max(found, numbers * (self.itemsize + copies * F32))
        return found


def _nbytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * int(parameter.element_size())


def _stacked(parted: PartedModel, index: int) -> set[int]:
    layer = parted.experts.get(index)
    return set() if layer is None else {id(one) for _, one, _ in layer.site.stored.parameters}


def _parameters(layer: torch.nn.Module, but: set[int]) -> list[torch.Tensor]:
    return [one for one in layer.parameters() if id(one) not in but]


def _top_k(parted: PartedModel, layer: int) -> int:
    return parted.checkpoint.config.top_k(layer) or USUAL_TOP_K


def _is_encoded(layer: MoELayer) -> bool:
    matrix = layer.experts[0]["up"]
    return matrix.quantization is not None or matrix.tensor.dtype not in ("BF16", "F16", "F32")


# ---- memory ----------------------------------------------------------------------------


class _Runner:
    """Bytes of memory that the experts take: those that are decoded ahead of the one that runs,
    and the tokens of the one, or of a call of the kernels."""

    def __init__(
        self, parted: PartedModel, tokens: int, threads: int, converted: bool, packed: bool
    ) -> None:
        self.experts_least = self._most = self._tokens = 0
        for index, layer in parted.experts.items():
            source, top_k = layer.source, _top_k(parted, index)
            hidden, inner = source.hidden_size, source.intermediate_size
            each = expert_memory(source, parted.dtype)
            if converted:  # as float32, and as `dtype`
                each += expert_memory(source, parted.dtype)
                each += len(source.projections) * hidden * inner * F32
            self.experts_least = max(self.experts_least, 2 * each)
            self._most = max(self._most, (1 + threads) * each)
            # Inputs, outputs, and outputs times weights; both parts of the middle, their product.
            own = min(ROWS_AT_ONCE, tokens) * (4 * hidden + 5 * inner) * F32
            kernels = min(TOKENS_AT_ONCE, tokens) * 4 * hidden * BF16
            # A bound of what kt_moe_scratch_size answers.
            kernels += min(_KERNEL_TOKENS, tokens) * (3 * inner * top_k + 4 * hidden)
            self._tokens = max(self._tokens, own, kernels if packed else 0)

    @property
    def least(self) -> int:
        return self.experts_least + self._tokens

    def share(self, room: int) -> int:
        """Bytes for experts, with those beyond the least that are free."""
        return min(self._most, self.experts_least + room // 4)


class _Need:
    """Bytes of memory that a pass takes, of which the experts take `runner`."""

    def __init__(
        self, sizes: _Sizes, windows: Sequence[int], sides: int, head: bool, runner: int
    ) -> None:
        self._sizes, self._windows, self._sides = sizes, windows, sides
        longest, tokens = max(windows), sides * sum(windows)
        base = machine.resident_memory() + _MARGIN + sizes.embedding
        row = sizes.hidden * sizes.itemsize
        mask = longest**2 * sizes.itemsize
        scores = sizes.eager_heads * longest**2 * (2 * sizes.itemsize + F32)
        linear = longest * sizes.outputs
        active = longest * _OF_ACTIVE * sizes.hidden * F32 + linear + 2 * mask + scores
        # Which experts a token goes to, with its weights; twice while tokens are sorted by expert.
        routing = tokens * sizes.top_k * (3 * I64 + F32)
        self._fixed, self._active, self.runner = base + sizes.layer + routing, active, runner
        self._head = base + (
            sizes.head
            + sides * longest * sizes.vocabulary * sizes.itemsize
            + _LOGIT_ROWS * sizes.vocabulary
            + active
            if head
            else 0
        )
        self._each = longest * (row * (_OF_PARKED - 1) + sizes.experts * 2 * F32) + mask
        self._rows = longest * row
        self._outputs = tokens * row

    @property
    def layers(self) -> int:
        """Memory in the layers, with one window in memory at a time: it is on its way, or with
        experts."""
        return self._fixed + max(self._active, self.runner)

    @property
    def least(self) -> int:
        """Memory with one window in memory at a time, and none that waits."""
        return max(self.layers, self._head)

    def scratch(self, parked: int) -> int:
        """Bytes of tensors in Scratch: all that windows get from experts, and those given to
        experts that do not wait in memory."""
        return self._outputs + max(0, self._sides * len(self._windows) - parked) * self._rows

    def share(self, limit: int) -> tuple[int, int]:
        """Number of windows that may wait in memory, and bytes of Scratch that may be there."""
        runs, room = self._sides * len(self._windows), max(0, limit - self.layers)
        for_runs = room - self.scratch(0)
        parked = max(0, min(runs, for_runs // self._each))
        return parked, min(self.scratch(parked), room - parked * (self._each + self._rows))

    def peak(self, parked: int, scratch: int) -> int:
        return max(self.layers + parked * (self._each + self._rows) + scratch, self._head)


def _limit(least: int, max_memory: int | None, option: str) -> int:
    if max_memory is not None:
        if least > max_memory:
            raise MemoryLimitError(
                f"{option} {format_size(max_memory)} is too small: running this model layer by "
                f"layer needs {format_size(least)}",
                f"use {option} {-(-least // (1 << 20))}MiB, or shorter windows of text",
            )
        return max_memory
    resident = machine.resident_memory()
    limit = resident + int(_SHARE * machine.available_memory())
    if least > limit:
        raise MemoryShortError(
            f"running this model layer by layer needs {format_size(least)} of memory, but only "
            f"{format_size(limit)} can be used",
            "use a machine with more memory, or shorter windows of text",
        )
    return limit


def _check_disk(folder: Path, needed: int) -> None:
    there = sum(path.lstat().st_size for path in folder.glob("*.bin")) if folder.is_dir() else 0
    free = machine.disk_free(folder) + there
    if needed > free:
        raise DiskSpaceError(
            f"{format_size(needed)} of hidden states are kept in {folder}, but only "
            f"{format_size(free)} are free on that disk",
            "use --work-dir DIR on a larger disk, or less text",
        )


# ---- FLOPs and time --------------------------------------------------------------------


def _dense_flops(sizes: _Sizes, windows: Sequence[int], sides: int, passed: int) -> float:
    """FLOPs of attention and of all that is no expert in all layers, for both sides where they
    differ."""
    found = 0.0
    for index, layer in enumerate(sizes.layers[:passed]):
        weights = sum(one.numel() for one in layer if one.ndim > 1)
        scores = 2.0 * sizes.attention * sum(length**2 for length in windows)  # a half is masked
        once = 2.0 * weights * sum(windows) + scores
        found += once * (sides if index >= sizes.first_experts else 1)
    return found


def _expert_flops(parted: PartedModel, layer: MoELayer) -> float:
    """FLOPs of a token's experts in a layer."""
    each = 2.0 * len(layer.projections) * layer.hidden_size * layer.intermediate_size
    return each * _top_k(parted, layer.index)


def measure_speed(parted: PartedModel, tokens: int, window: int) -> Speed:
    """Measure this machine in about a third of a second, for `tokens` in windows of `window`. At
    most a hundredth of the source is read."""
    layer = next(iter(parted.experts.values())).source
    rows = tokens * _top_k(parted, layer.index) // len(layer.experts)
    hidden, inner = layer.hidden_size, layer.intermediate_size
    matrix, threads = layer.experts[0]["up"], torch.get_num_threads()
    few, dtype = max(1, min(rows, ROWS_AT_ONCE)), parted.dtype
    return Speed(
        read=_read_speed(parted),
        decode=_decode_speed(parted, matrix) if _is_encoded(layer) else math.inf,
        dense=_product_speed(min(window, ROWS_AT_ONCE), hidden, hidden, dtype, threads),
        experts=_product_speed(few, hidden, inner, dtype, threads),
    )


@cache  # passes of the same shapes in one process wait for it once
def _product_speed(rows: int, inputs: int, outputs: int, dtype: torch.dtype, threads: int) -> float:
    """FLOPs per second of a matrix product, of a part of it where it is large. `threads`: those
    that torch has."""
    inputs, outputs = min(inputs, _PRODUCT), min(outputs, _PRODUCT)
    left, right = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
    torch.nn.functional.linear(left[:1], right)  # what it does once is not counted
    started, done = time.perf_counter(), 0.0
    while time.perf_counter() - started < MEASURED_SECONDS:
        torch.nn.functional.linear(left, right)
        done += 2.0 * rows * inputs * outputs
    return done / (time.perf_counter() - started)


def _read_speed(parted: PartedModel) -> float:
    """Bytes per second of reading from the largest file, at most a hundredth of the source."""
    checkpoint = parted.checkpoint
    size = min(_READ_BYTES, checkpoint.nbytes // 100)
    buffer = memoryview(bytearray(4 << 20))
    started, done = time.perf_counter(), 0
    file, nbytes = max(_sizes(checkpoint), key=lambda found: found[1])
    size = min(size, nbytes - nbytes // 2)
    with SourceReader(checkpoint.files, checkpoint.sources).open(file) as opened:
        while done < size and time.perf_counter() - started < MEASURED_SECONDS:
            piece = buffer[: size - done]
            opened.read(piece, nbytes // 2 + done)
            done += len(piece)
    return done / (time.perf_counter() - started) if done > 1 << 20 else math.inf


def _sizes(checkpoint: Checkpoint) -> list[tuple[Path, int]]:
    """The files of weights with their sizes."""
    known = {source.name: source.nbytes for source in checkpoint.sources}
    return [(path, known[path_text(path.name)]) for path in checkpoint.files]


def _decode_speed(parted: PartedModel, matrix: ExpertMatrix) -> float:
    """Bytes of source per second that all threads decode."""
    checkpoint = parted.checkpoint
    source = MatrixReader(SourceReader(checkpoint.files, checkpoint.sources), matrix)
    started, done = time.perf_counter(), 0
    for chunk, _ in source.decoded():
        done += matrix.nbytes(len(chunk))
        if time.perf_counter() - started > MEASURED_SECONDS:
            break
    return torch.get_num_threads() * done / (time.perf_counter() - started)
