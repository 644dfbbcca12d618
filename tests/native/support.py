"""Source matrices of every dtype and orientation, with the float32 values they stand for; memory
that ends where it is read no further."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import pytest
from helpers.reference import Choice
from numpy.typing import NDArray

from ktconv import native
from ktconv.formats import FORMATS, Format
from ktconv.formats.decode import bf16_to_f32, e4m3fn_to_f32, f16_to_f32, round_to_bf16

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Bits = NDArray[np.unsignedinteger]

LIBC = ctypes.CDLL(None, use_errno=True)
Rule = Literal["amax", "search", "search-1"]
STORED = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F8_E4M3": np.uint8}
NONFINITE = {
    "BF16": [0x7F80, 0xFF80, 0x7FC1, 0xFF81],
    "F16": [0x7C00, 0xFC00, 0x7E01, 0xFC01],
    "F32": [0x7F800000, 0xFF800000, 0x7FC00001, 0xFF800001],
    "F8_E4M3": [0x7F, 0xFF],
}
# The largest magnitude that stays finite through a rounding to bf16.
LARGEST_ROUNDED = np.uint32(0x7F7F7FFF)

ROWS = (
    "ordinary",
    "zeros",
    "denormals",
    "int8 limit",
    "int4 limit",
    "below the limits",
    "largest",
    "int8 ties",
    "int4 ties",
    "any exponent",
    "tiny",
    "one magnitude",
)


def _row(kind: str, cols: int, rng: np.random.Generator) -> NDArray[np.uint32]:
    """binary32 bits of one row."""
    sign = rng.integers(0, 2, cols, np.uint32) << np.uint32(31)
    mantissa = rng.integers(0, 1 << 23, cols, np.uint32)
    at = int(rng.integers(cols))

    def exponents(low: int, high: int) -> NDArray[np.uint32]:
        return sign | rng.integers(low, high, cols, np.uint32) << np.uint32(23) | mantissa

    def limit(bits: int) -> NDArray[np.uint32]:
        row = sign | rng.integers(0, bits, cols, np.uint32)
        row[at] = bits
        return row

    def ties(largest: int) -> NDArray[np.uint32]:
        row = rng.integers(-largest, largest, cols).astype(np.float32) + np.float32(0.5)
        row[at] = rng.choice([-largest, largest])
        return row.view(np.uint32)

    match kind:
        case "zeros":
            return sign
        case "denormals":
            return sign | mantissa
        case "int8 limit":
            return limit(0x03FE0000)
        case "int4 limit":
            return limit(0x03E00000)
        case "below the limits":
            return limit(int(rng.choice([0x03FDFFFF, 0x03DFFFFF, 0x03DF0000])))
        case "largest":
            row = exponents(116, 126)
            row[at] = sign[at] | np.uint32(0x7F7FFFFF)
            return row
        case "int8 ties":
            return ties(127)
        case "int4 ties":
            return ties(112)
        case "any exponent":
            return exponents(0, 255)
        case "tiny":
            return exponents(0, 29)  # both sides of where AVX-512 looks for denormals
        case "one magnitude":
            return sign | np.uint32(0x3F9D0000)
    return exponents(116, 126)


@lru_cache(maxsize=256)
def _words(rows: int, cols: int, seed: int, kinds: tuple[str, ...]) -> NDArray[np.uint32]:
    """binary32 bits [rows, cols]. Tests take the same ones at every level, several times each."""
    rng = np.random.default_rng(seed)
    words = np.stack([_row(str(rng.choice(kinds)), cols, rng) for _ in range(rows)])
    words.flags.writeable = False
    return words


def bits_of(dtype: str, rows: int, cols: int, seed: int, kinds: tuple[str, ...] = ROWS) -> Bits:
    """Finite stored numbers [rows, cols] of `dtype`; row n is of a random one of `kinds`."""
    words = _words(rows, cols, seed, kinds)
    match dtype:
        case "F32":
            return words.copy()
        case "BF16":
            return (words >> np.uint32(16)).astype(np.uint16)
        case "F16":
            halves = (words >> np.uint32(16)).astype(np.uint16)
            infinite = halves & np.uint16(0x7C00) == 0x7C00
            return np.where(infinite, halves ^ np.uint16(0x4000), halves)
    bytes_ = words >> np.uint32(24) & np.uint32(0x80) | words >> np.uint32(16) & np.uint32(0x7F)
    return np.where(bytes_ & np.uint32(0x7F) == 0x7F, 0x3A, bytes_).astype(np.uint8)


@dataclass(frozen=True)
class Source:
    """How a matrix lies in memory; `repr` is enough to build it again."""

    format: str
    rows: int
    cols: int
    dtype: str = "BF16"
    transposed: bool = False
    pad: int = 0  # elements between the stored rows
    start: int = 0  # elements before the matrix
    offset: int = 0  # bytes by which memory is off its alignment
    rounded: bool = False
    block: tuple[int, int] = (128, 128)
    origin: tuple[int, int] = (0, 0)
    seed: int = 0
    kinds: tuple[str, ...] = ROWS
    rule: Rule = "amax"
    weighted: bool = False  # with an importance, of the search
    factored: bool = False  # with factors of rows and columns

    @property
    def fmt(self) -> Format:
        return FORMATS[self.format]

    @property
    def choice(self) -> native.Choice:
        return native.Choice(self.rule, self.importance())

    @property
    def reference_choice(self) -> Choice:
        return Choice(self.rule, self.importance())

    def importance(self) -> F32 | None:
        """Of many magnitudes, a few of them zero."""
        if not self.weighted:
            return None
        rng = np.random.default_rng(self.seed + 2)
        found = rng.lognormal(0, 2, self.cols).astype(np.float32)
        return np.where(rng.random(self.cols) < 0.1, np.float32(0), found)

    def factors(self) -> tuple[F32 | None, F32 | None]:
        """Of rows and of columns: powers of 2^(1/8), none above 1 so that nothing overflows."""
        if not self.factored:
            return None, None
        rng = np.random.default_rng(self.seed + 3)
        rows, cols = (rng.integers(-16, 1, count) for count in (self.rows, self.cols))
        return (2.0 ** (rows / 8)).astype(np.float32), (2.0 ** (cols / 8)).astype(np.float32)

    @property
    def strides(self) -> tuple[int, int]:
        return (1, self.rows + self.pad) if self.transposed else (self.cols + self.pad, 1)

    def bits(self) -> Bits:
        bits = bits_of(self.dtype, self.rows, self.cols, self.seed, self.kinds)
        if self.rounded and self.dtype == "F32":
            bits = bits & np.uint32(1 << 31) | np.minimum(
                bits & np.uint32(0x7FFFFFFF), LARGEST_ROUNDED
            )
        return bits

    def grid(self) -> F32 | None:
        """Block scales for FP8: ordinary, a few tiny, negative or zero."""
        if self.dtype != "F8_E4M3":
            return None
        shape = [
            (o + length - 1) // b + 1
            for o, length, b in zip(self.origin, (self.rows, self.cols), self.block, strict=True)
        ]
        rng = np.random.default_rng(self.seed + 1)
        scales = rng.uniform(1e-4, 2, shape).astype(np.float32)
        odd = rng.choice(np.array([0, 1e-36, 1e-39, -0.25, 2.0**100], np.float32), shape)
        return np.where(rng.random(shape) < 0.1, odd, scales)

    def values(self, bits: Bits | None = None) -> F32:
        """The float32 [rows, cols] that the matrix stands for, from the definitions."""
        bits = self.bits() if bits is None else bits
        match self.dtype:
            case "BF16":
                values = bf16_to_f32(bits)
            case "F16":
                values = f16_to_f32(bits)
            case "F32":
                values = bits.view(np.float32)
            case _:
                grid = self.grid()
                assert grid is not None
                row = (self.origin[0] + np.arange(self.rows)) // self.block[0]
                col = (self.origin[1] + np.arange(self.cols)) // self.block[1]
                values = e4m3fn_to_f32(bits) * grid[np.ix_(row, col)]
        if self.rounded:
            values = round_to_bf16(values)
        row_factor, col_factor = self.factors()
        if row_factor is not None and col_factor is not None:
            values = values * row_factor[:, None] * col_factor
        return values

    def stored(self, bits: Bits) -> U8:
        """The bytes from the first to the last element, as they lie in memory."""
        size = STORED[self.dtype]().itemsize
        row_stride, col_stride = self.strides
        last = (self.rows - 1) * row_stride + (self.cols - 1) * col_stride
        flat = np.zeros(last + 1, STORED[self.dtype])
        view = np.lib.stride_tricks.as_strided(
            flat, bits.shape, (row_stride * size, col_stride * size)
        )
        view[...] = bits
        return flat.view(np.uint8)

    def view(self, buffer: U8, start: int) -> native.Matrix:
        """The matrix from element `start` of `buffer` on."""
        row_factor, col_factor = self.factors()
        return native.Matrix(
            buffer,
            self.dtype,
            self.rows,
            self.cols,
            start=start,
            row_stride=self.strides[0],
            col_stride=self.strides[1],
            block_scale=self.grid(),
            block=self.block,
            origin=self.origin,
            row_factor=row_factor,
            col_factor=col_factor,
            round_to_bf16=self.rounded,
        )

    def matrix(self, bits: Bits | None = None) -> native.Matrix:
        stored = self.stored(self.bits() if bits is None else bits)
        before = self.offset + self.start * STORED[self.dtype]().itemsize
        memory = np.full(before + stored.nbytes, 0xA5, np.uint8)
        memory[before:] = stored
        return self.view(memory[self.offset :], self.start)

    def but(self, **changes: object) -> Source:
        return replace(self, **changes)  # type: ignore[arg-type]


def quantize_pack(source: Source, matrix: native.Matrix) -> tuple[U8, F32]:
    """Payload and scales by the library, from memory that holds something else before."""
    packed = np.full(native.packed_size(source.format, source.rows, source.cols), 0x5A, np.uint8)
    scale = np.full(source.rows, np.nan, np.float32)
    native.quantize_pack(source.format, matrix, packed, scale, choice=source.choice)
    return packed, scale


# And whether there is an importance.
RULES: list[tuple[Rule, bool]] = [
    ("amax", False), ("search", False), ("search", True), ("search-1", False)
]  # fmt: skip
every_rule = pytest.mark.parametrize(
    ("rule", "weighted"), RULES, ids=["amax", "search", "weighted", "search-1"]
)


def assert_same(what: str, found: NDArray[np.generic], expected: NDArray[np.generic]) -> None:
    """Bit for bit; names the first differing byte."""
    a, b = found.reshape(-1).view(np.uint8), expected.reshape(-1).view(np.uint8)
    assert a.size == b.size, f"{what}: {a.size} bytes, not {b.size}"
    wrong = np.flatnonzero(a != b)
    assert not wrong.size, f"{what}: {wrong.size} bytes differ, the first are {wrong[:4]}"


@contextmanager
def guarded(size: int) -> Iterator[U8]:
    """`size` bytes that end where an unreadable page begins."""
    page = mmap.PAGESIZE
    inner = -(-size // page) * page
    memory = mmap.mmap(-1, inner + page)
    whole = np.frombuffer(memory, np.uint8)
    last = ctypes.c_void_p(whole.ctypes.data + inner)
    if LIBC.mprotect(last, ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    yield whole[inner - size : inner]
    LIBC.mprotect(last, ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE)
