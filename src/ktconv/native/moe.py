"""The MoE forward: packed weights, layers and their calls."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from ktconv._native import ffi, lib
from ktconv.native.adapters import ChosenAdapters
from ktconv.native.arrays import (
    Array,
    aligned_bytes,
    check,
    expect_aligned,
    expect_bytes,
    expect_rows,
)
from ktconv.native.layouts import Layout
from ktconv.native.levels import ISA_NAMES, isa_available
from ktconv.native.pool import Pool, open_pool

MAX_COLS: int = lib.KT_MAX_COLS  # of any matrix that the kernels read

GATE_FUNCTIONS = {
    "swiglu": lib.KT_SWIGLU,
    "gelu": lib.KT_GELU,
    "gelu_tanh": lib.KT_GELU_TANH,
    "relu2": lib.KT_RELU2,
    "swiglu_clamped": lib.KT_SWIGLU_CLAMPED,
    "softcap": lib.KT_SOFTCAP,
    "relu": lib.KT_RELU,
    "ungated_gelu": lib.KT_UNGATED_GELU,
    "ungated_gelu_tanh": lib.KT_UNGATED_GELU_TANH,
}

VALUE_DTYPES = {"bf16": lib.KT_BF16, "fp16": lib.KT_F16, "fp32": lib.KT_F32}  # of x and y
_VALUES = {  # uint16 are the bits of bf16
    np.dtype(dtype): VALUE_DTYPES[name]
    for dtype, name in ((np.uint16, "bf16"), (np.float16, "fp16"), (np.float32, "fp32"))
}


class Activation(Struct, frozen=True):
    """Function between the gate and up products and the down one; see kt_activation.

    `function` is one of GATE_FUNCTIONS.
    """

    function: str = "swiglu"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf

    @property
    def gated(self) -> bool:
        """Whether experts have a gate matrix."""
        return bool(lib.kt_function_has_gate(GATE_FUNCTIONS[self.function]) > 0)

    @property
    def products(self) -> int:
        """Matrices of an expert: gate where it has one, up and down."""
        return 2 + self.gated


class PackedMatrix(Struct, frozen=True):
    """One packed matrix of one expert: codes (uint8), scales (bytes or None), bias (float32)."""

    codes: Array
    scale: Array | None = None
    bias: Array | None = None


# Gate, up and down of one part of an expert; gate is None where the activation has no gate.
Expert = tuple[PackedMatrix | None, PackedMatrix, PackedMatrix]


def kernel_levels(*layouts: Layout) -> list[str]:
    """The levels of `isa_available` at which the forward has code of its own for one of `layouts`;
    at the others it runs the code of the next lower level."""
    own = {
        name
        for level, name in ISA_NAMES.items()
        for layout in layouts
        if lib.kt_moe_has_kernels(layout.c(), level)
    }
    return [name for name in isa_available() if name in own]


def part_node(part: int, parts: int, pool: Pool) -> int:
    """The first node of `pool`, from 0 on, whose threads compute this part of a layer."""
    node = int(lib.kt_moe_part_node(parts, part, open_pool(pool)))
    if node < 0:
        raise ValueError(f"part {part} of {parts} does not exist")
    return node


def _check_activation(activation: Activation) -> None:
    """ValueError for one that kt_moe_forward would refuse."""
    if activation.function not in GATE_FUNCTIONS:
        raise ValueError(f"{activation.function!r} is none of {', '.join(GATE_FUNCTIONS)}")
    if not activation.limit >= 0:
        raise ValueError(f"the limit of an activation must not be {activation.limit}")
    alpha, beta = activation.alpha, activation.beta
    if activation.function == "softcap" and not (alpha > 0 and beta > 0):
        raise ValueError(f"alpha and beta of softcap must be above 0, not {alpha} and {beta}")


def _check_expert(activation: Activation, part: int, expert: Expert) -> None:
    """ValueError for a gate too many or too few, and for a bias that would be added twice."""
    if activation.gated != (expert[0] is not None):
        wanted = "need a" if activation.gated else "have no"
        raise ValueError(f"experts with {activation.function} {wanted} gate")
    if part and expert[2].bias is not None:
        raise ValueError("only part 0 has biases of down: they are added once")


def _code(field: Any) -> str:
    """Format of a member of a C struct, for Python's struct."""
    return "P" if field.type.kind == "pointer" else {4: "i", 8: "q"}[ffi.sizeof(field.type)]


# Makes the bytes of one in a fifth of the time that ffi.new takes, which counts for single tokens.
_CALL = ffi.typeof("kt_moe_call")
_CALL_BYTES = struct.Struct("".join(_code(field) for _, field in _CALL.fields) + "0P")
_CALL_POINTER = ffi.typeof("kt_moe_call *")
assert _CALL_BYTES.size == ffi.sizeof(_CALL)


class Call:
    """struct kt_moe_call: numbers and addresses of a call's arrays, 0 for one that is not there."""

    __slots__ = ("c",)

    def __init__(
        self,
        tokens: int,
        top_k: int,
        x: int,
        ids: int,
        weights: int,
        skip: int,
        add: int,
        y: int,
        *,
        id_size: int,
        x_dtype: int,
        y_dtype: int,
    ) -> None:
        made = _CALL_BYTES.pack(
            tokens, top_k, x, ids, weights, skip, add, y, id_size, x_dtype, y_dtype
        )
        self.c = ffi.from_buffer(_CALL_POINTER, made)


class Layer:
    """The experts of one MoE layer, ready for kt_moe_forward; keeps their memory alive.

    `experts[part][expert]` is (gate, up, down), or None for an expert that is not here.
    Raises ValueError when sizes or alignments do not fit, or the activation is impossible: another
    function than GATE_FUNCTIONS, a limit that is negative or NaN, a softcap of 0 or less, a gate
    too many or too few.
    """

    def __init__(
        self,
        layout: Layout,
        activation: Activation,
        hidden: int,
        intermediate: int,
        experts: list[list[Expert | None]],
    ) -> None:
        _check_activation(activation)
        self.layout, self.hidden, self.intermediate = layout, hidden, intermediate
        self.parts, self.experts = len(experts), len(experts[0])
        self.biased = any(
            matrix is not None and matrix.bias is not None
            for row in experts
            for one in row
            if one
            for matrix in one
        )
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
        if intermediate % self.parts:
            raise ValueError(f"{intermediate} columns cannot be cut into {self.parts} parts")
        for part, row in enumerate(experts):
            for index, expert in enumerate(row):
                if expert is not None:
                    _check_expert(activation, part, expert)
                    self._set_expert(self._table[part * self.experts + index], expert)

    def _set_expert(self, entry: Any, expert: Expert) -> None:
        width = self.intermediate // self.parts
        shapes = ((width, self.hidden), (width, self.hidden), (self.hidden, width))
        for name, matrix, (rows, cols) in zip(("gate", "up", "down"), expert, shapes, strict=True):
            if matrix is None:
                continue
            if not self.layout.multiplies(rows, cols):
                raise ValueError(
                    f"{self.layout.format} does not allow a matrix of [{rows}, {cols}]"
                )
            expect_bytes(f"{name} codes", matrix.codes, self.layout.weight_size(rows, cols))
            setattr(entry, name, ffi.from_buffer(matrix.codes))
            if scale_size := self.layout.scale_size(rows, cols):
                if matrix.scale is None:
                    raise ValueError(f"{name} has no scales")
                expect_bytes(f"{name} scales", matrix.scale, scale_size)
                expect_aligned(f"{name} scales", matrix.scale, self.layout.scale_array.itemsize)
                setattr(entry, f"{name}_scale", ffi.from_buffer(matrix.scale))
            if matrix.bias is not None:
                expect_rows(f"{name} bias", matrix.bias, np.float32, (rows,))
                expect_aligned(f"{name} bias", matrix.bias, 4)
                setattr(entry, f"{name}_bias", ffi.cast("float *", ffi.from_buffer(matrix.bias)))

    def arrays(self, part: int) -> list[Array]:
        """Codes and scales of a part: what its threads read."""
        return [
            array
            for expert in self._keep[part]
            for matrix in expert or ()
            if matrix is not None
            for array in (matrix.codes, matrix.scale)
            if array is not None
        ]

    def expert(self, part: int, index: int) -> Expert | None:
        """The matrices of a part of an expert; None for an expert that is not here."""
        return self._keep[part][index]

    def with_activation(self, activation: Activation) -> Layer:
        """A layer of the same matrices under another activation. ValueError as for a new layer."""
        return Layer(self.layout, activation, self.hidden, self.intermediate, self._keep)

    def scratch_size(
        self, tokens: int, top_k: int, pool: Pool, adapters: ChosenAdapters | None = None
    ) -> int:
        """Bytes of memory that a forward of up to `tokens` tokens needs."""
        chosen = ffi.NULL if adapters is None else adapters.c
        size = int(lib.kt_adapted_scratch_size(self.c, chosen, tokens, top_k, open_pool(pool)))
        if not size:
            raise ValueError(f"{tokens} tokens with {top_k} experts each cannot be computed")
        return size

    def scratch(self, tokens: int, top_k: int, pool: Pool) -> Array:
        """A scratch buffer of `scratch_size` bytes; concurrent calls need one each."""
        return aligned_bytes(self.scratch_size(tokens, top_k, pool))

    def touch(self, pool: Pool) -> None:
        """Brings mapped pages into memory, by the threads that will use them."""
        check(lib.kt_moe_touch(self.c, open_pool(pool)))

    def call(
        self,
        pool: Pool,
        x: Array,
        ids: Array,
        weights: Array,
        y: Array,
        scratch: Array,
        *,
        skip: Array | None = None,
        add: Array | None = None,
    ) -> Callable[[], None]:
        """A function that computes y from these arrays each time it is called.

        x, y: uint16 (bf16 bits), float16 or float32 [M, H]; ids: int32 or int64 [M, K], skipped
        where no expert has them; weights: float32 [M, K]; skip: bool [E], experts that count as not
        chosen; add: float32 [M, H], may be y. See kt_moe_call. Nothing but a look at the pool
        (ValueError once it is closed) and the C call happens in it, so it can be timed.
        """
        self._check(x, ids, weights, y, scratch, skip, add)
        places = (x, ids, weights, skip, add, y)
        made = Call(
            *ids.shape,
            *(0 if array is None else array.ctypes.data for array in places),
            id_size=ids.itemsize,
            x_dtype=_VALUES[x.dtype],
            y_dtype=_VALUES[y.dtype],
        )

        def run(_keep: object = (places, scratch)) -> None:
            self.run(pool, made, scratch)

        return run

    def run(
        self, pool: Pool, call: Call, scratch: Array, adapters: ChosenAdapters | None = None
    ) -> None:
        """Computes y of `call`, whose arrays must be those of ktconv.h's kt_moe_call: they are not
        looked at here."""
        memory = ffi.from_buffer(scratch)
        if adapters is None:
            status = lib.kt_moe_forward(self.c, open_pool(pool), call.c, memory, scratch.nbytes)
        else:
            status = lib.kt_adapted_forward(
                self.c, adapters.c, open_pool(pool), call.c, memory, scratch.nbytes
            )
        if status != lib.KT_OK:
            check(status)

    def _check(
        self,
        x: Array,
        ids: Array,
        weights: Array,
        y: Array,
        scratch: Array,
        skip: Array | None,
        add: Array | None,
    ) -> None:
        """ValueError for arrays that kt_moe_forward must not get."""
        if ids.dtype not in (np.int32, np.int64) or not ids.flags.c_contiguous or ids.ndim != 2:
            raise ValueError(
                "ids must be contiguous int32 or int64 [M, K], "
                f"got {ids.dtype.name} {list(ids.shape)}"
            )
        for name, array in (("x", x), ("y", y)):
            if array.dtype not in _VALUES:
                raise ValueError(f"{name} must be uint16, float16 or float32, got {array.dtype}")
            expect_rows(name, array, array.dtype.type, (len(ids), self.hidden))
        expect_rows("weights", weights, np.float32, ids.shape)
        if skip is not None:
            expect_rows("skip", skip, np.bool_, (self.experts,))
        if add is not None:
            expect_rows("add", add, np.float32, (len(ids), self.hidden))
        for what, written in (("y", y), ("scratch", scratch)):
            if not written.flags.writeable:
                raise ValueError(f"{what} cannot be written to")
