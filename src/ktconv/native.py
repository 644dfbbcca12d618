"""The border to the C library: the one module that touches cffi.

Every function checks sizes and contiguity, calls, and turns a status into an
exception. Calls release the GIL, so Python threads run them in parallel.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconv._native import ffi, lib
from ktconv.errors import CheckpointError, UsageError

Array = npt.NDArray[Any]

FORMATS: dict[str, int] = {"int8": lib.KT_INT8, "int4": lib.KT_INT4}
DTYPES: dict[str, tuple[int, int]] = {  # safetensors name -> (kt_dtype, bytes per element)
    "BF16": (lib.KT_BF16, 2),
    "F16": (lib.KT_F16, 2),
    "F32": (lib.KT_F32, 4),
    "F8_E4M3": (lib.KT_F8_E4M3, 1),
}
ISA_NAMES = {lib.KT_ISA_SCALAR: "scalar", lib.KT_ISA_AVX512: "avx512", lib.KT_ISA_AMX: "amx"}


class NonFiniteError(CheckpointError):
    """A NaN or Inf at (row, col) of a source matrix."""

    def __init__(self, row: int, col: int) -> None:
        super().__init__(f"the matrix holds a NaN or an infinity at row {row}, column {col}")
        self.row, self.col = row, col


def isa() -> str:
    """The level in use. Raises UsageError when KTCONV_ISA cannot be used."""
    level = lib.kt_isa_active()
    if level == -lib.KT_ERR_ASSUME_UNKNOWN:
        value = os.environ.get("KTCONV_ASSUME")
        raise UsageError(f"KTCONV_ASSUME={value} names no level", "unset it, or write amx")
    if level < 0:
        raise UsageError(
            f"KTCONV_ISA={os.environ.get('KTCONV_ISA')} cannot be used: {_words(-level)}",
            f"unset it, or choose one of: {', '.join(isa_available())}",
        )
    return ISA_NAMES[level]


def isa_available() -> list[str]:
    """The levels that this machine can run, lowest first."""
    return [name for level, name in ISA_NAMES.items() if level <= lib.kt_isa_available()]


def use_isa(name: str) -> None:
    """Use this level from now on. Not while other threads compute."""
    levels = {name: level for level, name in ISA_NAMES.items()}
    _check(lib.kt_isa_use(levels[name]))


def cpu_features() -> dict[str, bool]:
    """What CPU and OS report, by the names of struct kt_cpu."""
    cpu = ffi.new("kt_cpu *")
    lib.kt_cpu_detect(cpu)
    return {name: bool(getattr(cpu, name)) for name, _ in ffi.typeof("kt_cpu").fields}


class Matrix:
    """A strided view of source weights; keeps the memory it points to alive.

    `buffer` is contiguous uint8 memory, `start` and the strides count elements of
    `dtype` (a safetensors name). `block_scale` is a float32 grid for FP8, with blocks
    of `block` = (rows, cols) and the matrix starting at element `origin` of the grid.
    """

    def __init__(
        self,
        buffer: Array,
        dtype: str,
        rows: int,
        cols: int,
        *,
        start: int = 0,
        row_stride: int | None = None,
        col_stride: int = 1,
        block_scale: Array | None = None,
        block: tuple[int, int] = (1, 1),
        origin: tuple[int, int] = (0, 0),
        round_to_bf16: bool = False,
    ) -> None:
        code, size = DTYPES[dtype]
        row_stride = cols if row_stride is None else row_stride
        last = start + (rows - 1) * row_stride + (cols - 1) * col_stride
        if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous or start < 0:
            raise ValueError("buffer must be contiguous uint8, start must not be negative")
        if (last + 1) * size > buffer.nbytes:
            raise ValueError(f"[{rows}, {cols}] from element {start} on exceeds the buffer")
        self.rows, self.cols = rows, cols
        self.c = ffi.new("kt_matrix *")
        self._keep = (buffer, block_scale)
        self.c.data = ffi.from_buffer("char[]", buffer) + start * size
        self.c.rows, self.c.cols, self.c.dtype = rows, cols, code
        self.c.row_stride, self.c.col_stride = row_stride, col_stride
        self.c.round_to_bf16 = round_to_bf16
        if block_scale is not None:
            self._set_scale(block_scale, block, origin)

    def _set_scale(self, grid: Array, block: tuple[int, int], origin: tuple[int, int]) -> None:
        if grid.dtype != np.float32 or grid.ndim != 2 or not grid.flags.c_contiguous:
            raise ValueError("block_scale must be a contiguous 2-D float32 array")
        if min(block) < 1 or min(origin) < 0:
            raise ValueError(f"blocks of {block} from {origin} on are not a grid")
        needed = [
            (begin + length - 1) // size + 1
            for begin, length, size in zip(origin, (self.rows, self.cols), block, strict=True)
        ]
        if grid.shape[0] < needed[0] or grid.shape[1] < needed[1]:
            raise ValueError(f"block_scale is {grid.shape}, the matrix needs {tuple(needed)}")
        grid = np.require(grid, requirements="A")  # C reads whole floats
        self._keep = (self._keep[0], grid)
        self.c.block_scale = ffi.cast("float *", ffi.from_buffer(grid))
        self.c.scale_stride = grid.shape[1]
        self.c.block_rows, self.c.block_cols = block
        self.c.row_origin, self.c.col_origin = origin


def packed_size(format: str, rows: int, cols: int) -> int:
    """Bytes of a packed matrix; ValueError if the format cannot hold the shape."""
    size = int(lib.kt_packed_size(FORMATS[format], rows, cols))
    if not size:
        raise ValueError(f"{format} cannot hold a matrix of [{rows}, {cols}]")
    return size


def scratch_size(cols: int) -> int:
    """Bytes of scratch for matrices of up to `cols` columns."""
    return int(lib.kt_scratch_size(cols))


def new_scratch(cols: int) -> Array:
    """Scratch for matrices of up to `cols` columns; one per thread."""
    return np.empty(scratch_size(cols), np.uint8)


def decode(matrix: Matrix) -> Array:
    """The matrix as float32 [rows, cols]."""
    out = np.empty((matrix.rows, matrix.cols), np.float32)
    _check(lib.kt_decode(matrix.c, ffi.cast("float *", ffi.from_buffer(out))))
    return out


def quantize(format: str, matrix: Matrix) -> tuple[Array, Array]:
    """Codes int8 [rows, cols] and scales float32 [rows]."""
    codes = np.empty((matrix.rows, matrix.cols), np.int8)
    scale = np.empty(matrix.rows, np.float32)
    scratch, bad = new_scratch(matrix.cols), ffi.new("kt_position *")
    status = lib.kt_quantize(
        FORMATS[format],
        matrix.c,
        ffi.cast("int8_t *", ffi.from_buffer(codes)),
        ffi.cast("float *", ffi.from_buffer(scale)),
        ffi.from_buffer(scratch),
        scratch.nbytes,
        bad,
    )
    _check(status, bad)
    return codes, scale


def pack(format: str, codes: Array) -> Array:
    """Packed bytes (uint8, 1-D) of int8 codes [rows, cols]."""
    codes = np.ascontiguousarray(codes, np.int8)
    packed = np.empty(packed_size(format, *codes.shape), np.uint8)
    source = ffi.cast("int8_t *", ffi.from_buffer(codes))
    _check(lib.kt_pack(FORMATS[format], source, *codes.shape, _bytes(packed)))
    return packed


def unpack(format: str, packed: Array, rows: int, cols: int) -> Array:
    """Codes int8 [rows, cols] of packed bytes."""
    _expect("packed", packed, packed_size(format, rows, cols))
    codes = np.empty((rows, cols), np.int8)
    target = ffi.cast("int8_t *", ffi.from_buffer(codes))
    _check(lib.kt_unpack(FORMATS[format], _bytes(packed), rows, cols, target))
    return codes


def quantize_pack(
    format: str, matrix: Matrix, packed: Array, scale: Array, scratch: Array | None = None
) -> None:
    """Quantizes and packs in one pass, into `packed` (uint8) and `scale` (float32 [rows]).

    Raises NonFiniteError with the first NaN or Inf.
    """
    _expect("packed", packed, packed_size(format, matrix.rows, matrix.cols))
    _expect("scale", scale, 4 * matrix.rows)
    scratch = new_scratch(matrix.cols) if scratch is None else scratch
    floats = _aligned_floats(scale)
    bad = ffi.new("kt_position *")
    status = lib.kt_quantize_pack(
        FORMATS[format],
        matrix.c,
        _bytes(packed, writable=True),
        ffi.cast("float *", ffi.from_buffer(floats, require_writable=True)),
        ffi.from_buffer(scratch, require_writable=True),
        scratch.nbytes,
        bad,
    )
    _check(status, bad)
    if floats is not scale:
        np.copyto(scale, floats)


@dataclass(slots=True)
class Audit:
    """What `audit` found in some rows: sums over all elements, and maxima of each row."""

    squared_source: float
    squared_error: float
    squared_value: float
    max_steps: float
    zeros: int
    invalid: int  # codes outside the format's range, or not 0 under scale 0
    row_error: Array  # float32 [rows]: largest |source - dequantized|
    row_amax: Array  # float32 [rows]: largest |source|
    row_scale: Array  # float32 [rows]: what the rule makes of that


def audit(format: str, source: Matrix, rows: int, first: int, packed: Array, scale: Array) -> Audit:
    """Compares rows from `first` on of a packed matrix [rows, cols] with their source.

    `packed` (uint8) and `scale` (float32 [rows]) are those of the whole matrix. Shares no code
    with quantize and pack.
    """
    _expect("packed", packed, packed_size(format, rows, source.cols))
    _expect("scale", scale, 4 * rows)
    error, amax, rule = (np.empty(source.rows, np.float32) for _ in range(3))
    sums = ffi.new("kt_audit *")
    status = lib.kt_audit_run(
        FORMATS[format],
        source.c,
        rows,
        first,
        _bytes(packed),
        ffi.cast("float *", ffi.from_buffer(_aligned_floats(scale))),
        ffi.cast("float *", ffi.from_buffer(error)),
        ffi.cast("float *", ffi.from_buffer(amax)),
        ffi.cast("float *", ffi.from_buffer(rule)),
        sums,
    )
    _check(status)
    return Audit(
        sums.squared_source,
        sums.squared_error,
        sums.squared_value,
        sums.max_steps,
        sums.zeros,
        sums.invalid,
        error,
        amax,
        rule,
    )


def audit_codes(format: str, packed: Array, rows: int, cols: int) -> Array:
    """`unpack` by the audit's own path."""
    _expect("packed", packed, packed_size(format, rows, cols))
    codes = np.empty((rows, cols), np.int8)
    target = ffi.cast("int8_t *", ffi.from_buffer(codes))
    _check(lib.kt_audit_codes(FORMATS[format], _bytes(packed), rows, cols, target))
    return codes


# ---- MoE forward ----

MAX_COLS: int = lib.KT_MAX_COLS  # of any matrix that the kernels read
KERNELS = {
    "int8": lib.KT_KERNEL_INT8,
    "int4": lib.KT_KERNEL_INT4,
    "bf16": lib.KT_KERNEL_BF16,
    "fp8": lib.KT_KERNEL_FP8,
    "mxfp4": lib.KT_KERNEL_MXFP4,
    "gint4": lib.KT_KERNEL_GINT4,
}
_SCALE_BYTES = {"f32": 4, "bf16": 2, "ue8m0": 1}
SCALE_DTYPES = {
    "none": lib.KT_SCALE_NONE,
    "f32": lib.KT_SCALE_F32,
    "bf16": lib.KT_SCALE_BF16,
    "ue8m0": lib.KT_SCALE_UE8M0,
}
GATE_FUNCTIONS = {
    "swiglu": lib.KT_SWIGLU,
    "gelu": lib.KT_GELU,
    "gelu_tanh": lib.KT_GELU_TANH,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How the kernels read weights; see kt_layout in ktconv.h."""

    kernel: str
    group: int = 0
    scale_dtype: str = "f32"

    def c(self) -> Any:
        return ffi.new(
            "kt_layout *",
            (KERNELS[self.kernel], self.group, SCALE_DTYPES[self.scale_dtype]),
        )

    def weight_size(self, rows: int, cols: int) -> int:
        """Bytes of packed codes; 0 if the layout cannot hold that shape."""
        return int(lib.kt_weight_size(self.c(), rows, cols))

    def scale_size(self, rows: int, cols: int) -> int:
        """Bytes of packed scales."""
        return int(lib.kt_weight_scale_size(self.c(), rows, cols))


@dataclass(frozen=True, slots=True)
class Activation:
    """What happens between the gate and up products and the down one; see kt_activation."""

    function: str = "swiglu"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf


_LARGEST = {"int8": 127, "int4": 7}  # codes
_FP8_BLOCK = 128


def _check_codes(layout: Layout, rows: int, cols: int, codes: Array) -> None:
    if largest := _LARGEST.get(layout.kernel):
        _expect_rows("codes", codes, np.int8, (rows, cols))
        if codes.max() > largest or codes.min() < -largest:
            raise ValueError(f"{layout.kernel} codes must be {-largest}..{largest}")
    elif layout.kernel in ("mxfp4", "gint4"):
        _expect_rows("codes", codes, np.uint8, (rows, cols // 2))
    else:
        _expect_rows(
            "codes", codes, np.uint16 if layout.kernel == "bf16" else np.uint8, (rows, cols)
        )


def _check_scale(layout: Layout, rows: int, cols: int, scale: Array | None) -> None:
    if layout.scale_dtype == "none":
        if scale is not None:
            raise ValueError(f"{layout.kernel} has no scales")
        return
    if scale is None:
        raise ValueError(f"{layout.kernel} needs scales")
    dtype = {"f32": np.float32, "bf16": np.uint16, "ue8m0": np.uint8}[layout.scale_dtype]
    shape: tuple[int, ...] = (rows,)
    if layout.group:
        shape = (-(-rows // _FP8_BLOCK) if layout.kernel == "fp8" else rows, cols // layout.group)
    _expect_rows("scale", scale, dtype, shape)


def pack_weight(
    layout: Layout, rows: int, cols: int, codes: Array, scale: Array | None, packed: Array
) -> Array:
    """Packs row-major codes into `packed` (uint8); returns the packed scales (uint8).

    `codes` and `scale` have the dtypes and shapes that kt_weight_pack wants. Raises ValueError for
    others, for a shape that the layout cannot hold, for INT8 and INT4 codes out of their range, and
    for scales that are not finite.
    """
    size = layout.weight_size(rows, cols)
    if not size:
        raise ValueError(f"{layout.kernel} cannot hold a matrix of [{rows}, {cols}]")
    codes = np.ascontiguousarray(codes)
    scale = None if scale is None else np.ascontiguousarray(scale)
    _check_codes(layout, rows, cols, codes)
    _check_scale(layout, rows, cols, scale)
    _expect("packed", packed, size)
    packed_scale = aligned_bytes(max(1, layout.scale_size(rows, cols)))
    status = lib.kt_weight_pack(
        layout.c(),
        rows,
        cols,
        ffi.from_buffer(codes),
        ffi.NULL if scale is None else ffi.from_buffer(scale),
        ffi.from_buffer(packed, require_writable=True),
        ffi.from_buffer(packed_scale, require_writable=True),
    )
    if status == lib.KT_ERR_NONFINITE:
        raise ValueError("a scale or a code is NaN or infinite")
    _check(status)
    return packed_scale


def aligned_bytes(size: int) -> Array:
    """uint8 memory that starts at a cache line."""
    memory = np.empty(size + 63, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


class Pool:
    """Threads of the C library. `cpus` and `nodes` have one number per thread, as kt_pool_create's;
    ValueError if they do not."""

    def __init__(
        self, threads: int, cpus: list[int] | None = None, nodes: list[int] | None = None
    ) -> None:
        for what, places in (("cpus", cpus), ("nodes", nodes)):
            if places is not None and len(places) != threads:
                raise ValueError(f"{what} are {len(places)} numbers for {threads} threads")
        place = ffi.NULL if cpus is None else ffi.new("int32_t[]", cpus)
        node = ffi.NULL if nodes is None else ffi.new("int32_t[]", nodes)
        out = ffi.new("kt_pool **")
        _check(lib.kt_pool_create(threads, place, node, out))
        self.c = ffi.gc(out[0], lib.kt_pool_destroy)
        self.threads = threads

    def close(self) -> None:
        """Ends the threads; the pool cannot be used afterwards."""
        if self.c:
            ffi.release(self.c)
            self.c = ffi.NULL

    def empty(self, times: int) -> None:
        """Runs a job that does nothing, `times` times."""
        _check(lib.kt_pool_empty(self.c, times))


def bind_memory(memory: Array, os_node: int) -> None:
    """Asks for the pages of `memory` to be on a NUMA node, by the system's number."""
    _check(lib.kt_memory_bind(ffi.from_buffer(memory), memory.nbytes, os_node))


@dataclass(frozen=True, slots=True)
class Projection:
    """One packed matrix of one expert: codes (uint8), scales (bytes or None), bias (float32)."""

    codes: Array
    scale: Array | None = None
    bias: Array | None = None


class Layer:
    """The experts of one MoE layer, ready for kt_moe_forward; keeps their memory alive.

    `experts[part][expert]` is (gate, up, down), or None for an expert that is not here.
    Raises ValueError when sizes or alignments do not fit, or a limit is negative or NaN.
    """

    def __init__(
        self,
        layout: Layout,
        activation: Activation,
        hidden: int,
        intermediate: int,
        experts: list[list[tuple[Projection, Projection, Projection] | None]],
    ) -> None:
        self.layout, self.hidden, self.intermediate = layout, hidden, intermediate
        self.parts, self.experts = len(experts), len(experts[0])
        self._keep = experts
        self._table = ffi.new("kt_expert[]", self.parts * self.experts)
        self.c = ffi.new("kt_moe *")
        self.c.layout = layout.c()[0]
        self.c.activation = (
            GATE_FUNCTIONS[activation.function],
            activation.alpha,
            activation.beta,
            activation.limit,
        )
        self.c.hidden, self.c.intermediate = hidden, intermediate
        self.c.experts, self.c.parts, self.c.expert = self.experts, self.parts, self._table
        if not activation.limit >= 0:
            raise ValueError(f"the limit of an activation must not be {activation.limit}")
        if intermediate % self.parts:
            raise ValueError(f"{intermediate} columns cannot be cut into {self.parts} parts")
        for part, row in enumerate(experts):
            for index, expert in enumerate(row):
                if expert is not None:
                    if part and expert[2].bias is not None:
                        raise ValueError("only part 0 has biases of down: they are added once")
                    self._set_expert(self._table[part * self.experts + index], expert)

    def _set_expert(self, entry: Any, expert: tuple[Projection, Projection, Projection]) -> None:
        width = self.intermediate // self.parts
        shapes = ((width, self.hidden), (width, self.hidden), (self.hidden, width))
        for name, matrix, (rows, cols) in zip(("gate", "up", "down"), expert, shapes, strict=True):
            size = self.layout.weight_size(rows, cols)
            if not size:
                raise ValueError(f"{self.layout.kernel} cannot hold a matrix of [{rows}, {cols}]")
            _expect(f"{name} codes", matrix.codes, size)
            setattr(entry, name, ffi.from_buffer(matrix.codes))
            if scale_size := self.layout.scale_size(rows, cols):
                if matrix.scale is None:
                    raise ValueError(f"{name} has no scales")
                _expect(f"{name} scales", matrix.scale, scale_size)
                _expect_aligned(
                    f"{name} scales", matrix.scale, _SCALE_BYTES[self.layout.scale_dtype]
                )
                setattr(entry, f"{name}_scale", ffi.from_buffer(matrix.scale))
            if matrix.bias is not None:
                _expect_rows(f"{name} bias", matrix.bias, np.float32, (rows,))
                _expect_aligned(f"{name} bias", matrix.bias, 4)
                setattr(entry, f"{name}_bias", ffi.cast("float *", ffi.from_buffer(matrix.bias)))

    def scratch_size(self, tokens: int, top_k: int, pool: Pool) -> int:
        """Bytes of memory that a forward of up to `tokens` tokens needs."""
        size = int(lib.kt_moe_scratch_size(self.c, tokens, top_k, _open(pool)))
        if not size:
            raise ValueError(f"{tokens} tokens with {top_k} experts each cannot be computed")
        return size

    def scratch(self, tokens: int, top_k: int, pool: Pool) -> Array:
        """That memory; calls at once need one each."""
        return aligned_bytes(self.scratch_size(tokens, top_k, pool))

    def touch(self, pool: Pool) -> None:
        """Brings mapped pages into memory, by the threads that will use them."""
        _check(lib.kt_moe_touch(self.c, _open(pool)))

    def call(
        self, pool: Pool, x: Array, ids: Array, weights: Array, y: Array, scratch: Array
    ) -> Callable[[], None]:
        """A function that computes y from these arrays each time it is called.

        x, y: uint16 (bf16 bits) [M, H]; ids: int32 or int64 [M, K], -1 is skipped; weights:
        float32 [M, K]. Nothing but a look at the pool (ValueError once it is closed) and the C
        call happens in it, so it can be timed.
        """
        if ids.dtype not in (np.int32, np.int64) or not ids.flags.c_contiguous or ids.ndim != 2:
            raise ValueError(
                "ids must be contiguous int32 or int64 [M, K], "
                f"got {ids.dtype.name} {list(ids.shape)}"
            )
        _expect_rows("x", x, np.uint16, (len(ids), self.hidden))
        _expect_rows("y", y, np.uint16, (len(ids), self.hidden))
        _expect_rows("weights", weights, np.float32, ids.shape)
        for what, written in (("y", y), ("scratch", scratch)):
            if not written.flags.writeable:
                raise ValueError(f"{what} cannot be written to")
        keep = (x, ids, weights, y, scratch)
        layer = self.c
        arguments = (
            *ids.shape,
            ffi.cast("uint16_t *", x.ctypes.data),
            ffi.cast("void *", ids.ctypes.data),
            ids.itemsize,
            ffi.cast("float *", weights.ctypes.data),
            ffi.cast("uint16_t *", y.ctypes.data),
            ffi.cast("void *", scratch.ctypes.data),
            scratch.nbytes,
        )

        def run(_keep: object = keep) -> None:
            status = lib.kt_moe_forward(layer, _open(pool), *arguments)
            if status != lib.KT_OK:
                _check(status)

        return run


UNITS = {"int8": lib.KT_UNIT_INT8, "bf16": lib.KT_UNIT_BF16}


def limit_read(pool: Pool, memory: Array, streams: int) -> None:
    """Reads all of `memory` once, in so many streams per thread, to be timed."""
    _check(lib.kt_limit_read(pool.c, ffi.from_buffer(memory), memory.nbytes, streams))


def limit_dot(pool: Pool, unit: str, rounds: int) -> None:
    """Each thread does rounds * limit_ops() operations of a unit, to be timed."""
    _check(lib.kt_limit_dot(pool.c, UNITS[unit], rounds))


def limit_ops() -> int:
    """Operations of a round of limit_dot."""
    return int(lib.kt_limit_ops())


def _expect_rows(what: str, array: Array, dtype: Any, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{what} must be contiguous {np.dtype(dtype).name} {list(shape)}, "
            f"got {array.dtype.name} {list(array.shape)}"
        )


def _bytes(array: Array, writable: bool = False) -> Any:
    return ffi.cast("uint8_t *", ffi.from_buffer(array, require_writable=writable))


def _aligned_floats(scale: Array) -> Array:
    """`scale` itself, or a copy where a float cannot lie: files align nothing."""
    return scale if scale.ctypes.data % 4 == 0 else scale.copy()


def _expect_aligned(what: str, array: Array, size: int) -> None:
    if array.ctypes.data % size:
        raise ValueError(f"{what} must be aligned to {size} bytes")


def _open(pool: Pool) -> Any:
    """The pool's pointer; ValueError once it is closed."""
    if not pool.c:
        raise ValueError("the pool is closed")
    return pool.c


def _expect(what: str, array: Array, nbytes: int) -> None:
    if array.nbytes != nbytes or not array.flags.c_contiguous:
        raise ValueError(f"{what} must be {nbytes} contiguous bytes, got {array.nbytes}")


def _words(status: int) -> str:
    return str(ffi.string(lib.kt_strerror(status)).decode())


def _check(status: int, bad: Any = None) -> None:
    if status == lib.KT_OK:
        return
    if status == lib.KT_ERR_NONFINITE:
        raise NonFiniteError(int(bad.row), int(bad.col))
    raise ValueError(_words(status))
