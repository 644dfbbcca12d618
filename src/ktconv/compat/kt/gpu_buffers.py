"""Weights of one expert in the order of GPU kernels, written to memory that the caller names.

SGLang stages experts in host memory for prefill on the GPU, one expert at a time and cut into its
tensor-parallel ranks: a rank has rows of gate, the same rows of up behind them, and the columns of
down that belong to these rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.compat.kt.methods import Method
from ktconv.errors import UsageError
from ktconv.formats import PROJECTIONS, Format, Projection, nvfp4, split
from ktconv.formats.decode import E4M3FN_VALUES, f32_to_bf16
from ktconv.native import PackedMatrix
from ktconv.runtime.layers import Experts
from ktconv.system.arrays import F32, Array
from ktconv.system.numbers import whole, wholes
from ktconv.system.threads import run_tasks
from ktconv.system.units import counted

# kt_formats that GPU kernels compute with.
_OWN = ("bf16", "fp8", "gint4", "mxfp4", "mxfp8", "nvfp4")


class Buffers(Struct, frozen=True):
    """Addresses of each rank's memory for one expert; those of scales are 0 where it has none.
    `dense`: the expert is written as BF16, whatever the kernels multiply with."""

    w13: Sequence[int]
    w13_scale: Sequence[int]
    w2: Sequence[int]
    w2_scale: Sequence[int]
    dense: bool

    @property
    def ranks(self) -> int:
        """Number of tensor-parallel ranks."""
        return len(self.w13)


def checked_buffers(
    experts: Experts, method: Method, ranks: object, slot: object, *given: object
) -> Buffers:
    """The four lists of addresses, one of each rank. UsageError for a slot that does not exist, a
    number of ranks that does not divide the experts, and addresses that are missing."""
    count = whole("gpu_tp_count", ranks, 1)
    found = whole("expert_id", slot, 0)
    if found >= experts.count:
        raise UsageError(
            f"expert_id is {found}, but the layer has {counted(experts.count, 'expert')}"
        )
    if experts.layer.expert(0, found) is None:
        raise UsageError(f"expert {found} has no weights here")
    names = ("w13_weight_ptrs", "w13_scale_ptrs", "w2_weight_ptrs", "w2_scale_ptrs")
    lists = [wholes(name, one, 0) for name, one in zip(names, given, strict=True)]
    for name, one in zip(names, lists, strict=True):
        if len(one) != count:
            raise UsageError(
                f"{name} must have the addresses of {counted(count, 'rank')}, not {len(one)}"
            )
    dense = not method.formats or experts.format.code not in _OWN  # no formats: of GGUF files
    _check_scales(experts.format, dense, names, lists)
    _check_ranks(experts, dense, count)
    w13, w13_scale, w2, w2_scale = lists
    return Buffers(w13, w13_scale, w2, w2_scale, dense)


def _check_scales(
    fmt: Format, dense: bool, names: Sequence[str], lists: Sequence[Sequence[int]]
) -> None:
    for name, one in zip(names, lists, strict=True):
        wanted = "scale" not in name or _has_scales(fmt, dense)
        if wanted and 0 in one:
            raise UsageError(f"{name} has the address 0", "give memory for each rank")
        if not wanted and any(one):
            raise UsageError(
                f"{fmt.key} weights are written as BF16, which has no scales",
                f"give 0 for each rank as {name}",
            )


def _has_scales(fmt: Format, dense: bool) -> bool:
    return not dense and fmt.scale_dtype != "none"


def _check_ranks(experts: Experts, dense: bool, ranks: int) -> None:
    fmt, width = experts.format, experts.intermediate
    unit = max(_scale_unit(fmt)) if _has_scales(fmt, dense) else 1
    if width % (ranks * unit):
        raise UsageError(
            f"{width} intermediate columns of {fmt.key} cannot be cut into {counted(ranks, 'rank')}"
        )


def write_expert(experts: Experts, slot: int, buffers: Buffers, threads: int) -> None:
    """Writes the codes and scales of `slot` into `buffers`, or the BF16 numbers next to it where
    they are dense: those of GGUF files, and integers with a scale for each row, or of 8 bits in
    groups.

    E4M3 with float32 scales, INT4 in groups (number + 8, an even column in the lower bits) with
    scales in bf16, MXFP4 with scales in bf16, MXFP8 with exponents as they are, NVFP4 with both
    levels of scales multiplied and rounded to bf16. A task for each matrix of each part, on
    `threads` threads.
    """
    fmt, parts = experts.format, experts.parts
    sizes = experts.hidden, experts.intermediate
    if buffers.dense:
        _write_values(experts, slot, buffers)
        return

    def write(task: tuple[Projection, int]) -> None:
        proj, part = task
        expert = experts.layer.expert(part, slot)
        assert expert is not None  # what checked_buffers sees to
        matrix = expert[PROJECTIONS.index(proj)]
        if matrix is None:
            return
        place = split(proj, *sizes, part, parts)
        start, shape = (place.row_start, place.col_start), place.shape
        codes, scales = _plain(fmt, matrix, shape)
        target = _Target(buffers, proj, sizes)
        unit = 1, shape[1] // codes.shape[1]
        target.put(codes, start, shape, unit, (buffers.w13, buffers.w2))
        if scales is not None:
            own = (buffers.w13_scale, buffers.w2_scale)
            target.put(scales, start, shape, _scale_unit(fmt), own)

    tasks = [(proj, part) for part in range(parts) for proj in PROJECTIONS]
    run_tasks(tasks, lambda: write, min(threads, len(tasks)))


def _scale_unit(fmt: Format) -> tuple[int, int]:
    """Rows and columns that share a scale as it is written; 0 columns: all of a row."""
    return (1, nvfp4.GROUP) if fmt.traits.inner_scales else (fmt.traits.scale_rows, fmt.group)


def _plain(fmt: Format, matrix: PackedMatrix, shape: tuple[int, int]) -> tuple[Array, Array | None]:
    """Codes [rows, bytes of a row] and scales [rows of scales, scales of a row] as written."""
    codes, scales = native.unpack_weight(fmt.layout, *shape, matrix.codes, matrix.scale)
    if scales is None:
        return codes, None
    if fmt.traits.inner_scales:
        nibbles, inner = nvfp4.parts_of(codes)
        folded: F32 = E4M3FN_VALUES[inner] * scales[:, None]
        return nibbles, f32_to_bf16(folded)
    if fmt.code == "gint4" and scales.dtype == np.float32:
        scales = f32_to_bf16(scales)
    if fmt.code == "mxfp4" and scales.dtype == np.uint8:  # E8M0
        scales = scales.astype(np.uint16) << np.uint16(7)  # the exponent bits of bf16
    return codes, scales.reshape(len(scales), -1)


def _write_values(experts: Experts, slot: int, buffers: Buffers) -> None:
    streams = experts.streams(int(experts.origins[slot]))
    sizes = experts.hidden, experts.intermediate
    for proj, stream in zip(PROJECTIONS, streams, strict=True):
        if stream is not None:
            values, own = f32_to_bf16(stream.values()), (buffers.w13, buffers.w2)
            _Target(buffers, proj, sizes).put(values, (0, 0), values.shape, (1, 1), own)


class _Target(Struct, frozen=True):
    """The places of a matrix in the memory of ranks."""

    buffers: Buffers
    proj: Projection
    sizes: tuple[int, int]  # hidden and intermediate size of the layer

    def put(
        self, values: Array, start: tuple[int, int], shape: tuple[int, int], unit: tuple[int, int],
        addresses: tuple[Sequence[int], Sequence[int]],
    ) -> None:  # fmt: skip
        """Writes the values of the elements `shape` of the matrix from `start` on: each is of
        `unit` rows and columns, 0 columns for all of a row. `addresses`: of w13 and w2."""
        width = self.sizes[1] // self.buffers.ranks
        axis = 1 if self.proj == "down" else 0
        for rank in range(self.buffers.ranks):
            first = max(start[axis], rank * width)
            last = min(start[axis] + shape[axis], (rank + 1) * width)
            if first >= last:
                continue
            source = _places(range(first - start[axis], last - start[axis]), axis, unit)
            place = _places(range(first - rank * width, last - rank * width), axis, unit)
            self._memory(rank, values, unit, addresses)[place] = values[source]

    def _memory(
        self,
        rank: int,
        values: Array,
        unit: tuple[int, int],
        addresses: tuple[Sequence[int], Sequence[int]],
    ) -> Array:
        """The rank's matrix, with the dtype of `values`: up lies behind gate."""
        hidden, width = self.sizes[0], self.sizes[1] // self.buffers.ranks
        rows, cols = (hidden, width) if self.proj == "down" else (width, hidden)
        rows, cols = rows // unit[0], cols // unit[1] if unit[1] else 1
        nbytes = rows * cols * values.itemsize
        address = addresses[self.proj == "down"][rank] + (nbytes if self.proj == "up" else 0)
        memory = memoryview((ctypes.c_char * nbytes).from_address(address))
        return np.frombuffer(memory.cast("B"), values.dtype).reshape(rows, cols)


def _places(elements: range, axis: int, unit: tuple[int, int]) -> tuple[slice, slice]:
    """The values of rows (axis 0) or columns `elements` of a matrix, and of all of the other."""
    step = unit[axis]
    own = slice(elements.start // step, elements.stop // step) if step else slice(None)
    return (slice(None), own) if axis else (own, slice(None))
