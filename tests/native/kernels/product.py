"""Packs weights, makes activation rows and calls one product, through native/test/product.c."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import NATIVE
from ktconv._native import lib
from numpy.typing import NDArray

from ktconv import _native, native
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16

Array = NDArray[Any]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-wrapv", "-fPIC"]  # as native/build_ffi.py
COMPILED = Path(_native.__file__)
LIBC = ctypes.CDLL(None, use_errno=True)

STRIP = 32
LEVELS = {name: level for level, name in native.ISA_NAMES.items()}
STATUS_NONFINITE = lib.KT_ERR_NONFINITE
# Tokens from which on a product goes through tiles: least_tokens of each format.
AMX_LEAST = {"bf16": 1, "fp8": 2, "mxfp8": 2, "mxfp4": 3, "nvfp4": 4, "int8": 6, "int4": 2}
AMX_LEAST_GROUPS = {"gint4": {32: 7, 64: 4, 128: 3}, "gint8": {32: 2, 64: 2, 128: 2}}
# Both sides of each way to cut them.
_TILE_TOKENS = [16, 17, 32, 33, 48, 49, 64, 65, 80, 81, 96]


class Layout(ctypes.Structure):
    """kt_layout."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("scale_dtype", ctypes.c_int32),
    )

    @classmethod
    def of(cls, format: str, group: int = 0, scale: str = "none") -> Layout:
        return cls(native.FORMATS[format], group, native.SCALE_DTYPES[scale])


class Activation(ctypes.Structure):
    """kt_activation."""

    _fields_ = (
        ("function", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


def link_products(compiler: str, directory: Path) -> Path:
    """product.c, linked with a copy of the compiled module: the functions that users run, at levels
    of their own. Both files are in `directory`."""
    kernels, library = directory / "kernels.so", directory / "products.so"
    shutil.copyfile(COMPILED, kernels)
    command = [
        compiler,
        *FLAGS,
        f"-I{NATIVE / 'include'}",
        "-shared",
        str(NATIVE / "test/product.c"),
    ]
    command += ["-L", str(directory), f"-l:{kernels.name}", "-Wl,-rpath,$ORIGIN", "-Wl,-z,defs"]
    subprocess.run([*command, "-lm", "-o", str(library)], check=True)
    return library


class Guarded:
    """Bytes that end `before` bytes before an unreadable page."""

    def __init__(self, size: int, before: int = 0) -> None:
        inner = -(-(size + before) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, inner + mmap.PAGESIZE)
        whole = np.frombuffer(self._memory, np.uint8)
        self._last = ctypes.c_void_p(whole.ctypes.data + inner)
        self._protect(0)
        self.bytes: U8 = whole[inner - before - size : inner - before]

    def _protect(self, mode: int) -> None:
        if LIBC.mprotect(self._last, ctypes.c_size_t(mmap.PAGESIZE), mode):
            raise OSError(ctypes.get_errno(), "mprotect")

    def __del__(self) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)


def guarded_copy(array: Array, before: int = 0) -> U8:
    """The bytes of `array` against a guard page; unguarded again once nobody refers to them."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    guard = Guarded(flat.size, before)
    guard.bytes[:] = flat
    view = guard.bytes.view(_Held)
    view.guard = guard
    return view


class _Held(np.ndarray[Any, Any]):
    """An array that keeps its guard page alive."""

    guard: Guarded | None = None

    def __array_finalize__(self, base: object) -> None:
        self.guard = getattr(base, "guard", None)


def address(array: Array | None) -> ctypes.c_void_p | None:
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


@dataclass
class Weight:
    """A packed matrix; both buffers end at guard pages."""

    layout: Layout
    rows: int
    cols: int
    codes: U8
    scale: U8 | None

    @property
    def strips(self) -> int:
        return self.rows // STRIP

    def moved(self, before: int) -> Weight:
        """The same with codes that end `before` bytes before the guard page."""
        codes = guarded_copy(self.codes, before)
        return Weight(self.layout, self.rows, self.cols, codes, self.scale)


class Refused(Exception):
    """kt_pack's status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"kt_pack returned {status}")
        self.status = status


class Products:
    """The functions of product.c."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        for name in ("kt_packed_size", "kt_scale_size"):
            getattr(self._lib, name).restype = ctypes.c_size_t
        for name in ("kt_test_stride", "kt_test_panel_size"):
            getattr(self._lib, name).restype = ctypes.c_int64
        self._lib.kt_isa_active()  # the levels are read once: now
        self.max_tokens = int(self._lib.kt_test_max_tokens())
        self.max_strips = int(self._lib.kt_test_max_strips())
        self.max_products = int(self._lib.kt_test_max_products())
        self._panel = guarded_copy(np.full(self._lib.kt_test_panel_size(), 0xA5, np.uint8))

    def use(self, layout: Layout, level: str) -> None:
        """Products are of that level from now on; skips the test if there are none."""
        if not self._lib.kt_test_has_product(ctypes.byref(layout), LEVELS[level]):
            pytest.skip(f"no {level} product of this kernel on this machine")

    def sizes(self, layout: Layout, rows: int, cols: int) -> tuple[int, int]:
        """Bytes of codes and scales; (0, 0) for a shape or layout that the kernels refuse."""
        shape = (ctypes.byref(layout), ctypes.c_int64(rows), ctypes.c_int64(cols))
        if self._lib.kt_product_check(*shape):
            return 0, 0
        return self._lib.kt_packed_size(*shape), self._lib.kt_scale_size(*shape)

    def pack(
        self, layout: Layout, rows: int, cols: int, codes: Array, scale: Array | None = None
    ) -> Weight:
        """kt_pack, into memory that held something else and ends at guard pages."""
        code_size, scale_size = self.sizes(layout, rows, cols)
        packed = guarded_copy(np.full(code_size, 0x5A, np.uint8))
        packed_scale = guarded_copy(np.full(scale_size, 0x5A, np.uint8)) if scale_size else None
        source = guarded_copy(codes)
        source_scale = None if scale is None else guarded_copy(scale)
        status = self._lib.kt_pack(
            ctypes.byref(layout),
            ctypes.c_int64(rows),
            ctypes.c_int64(cols),
            address(source),
            address(source_scale),
            address(packed),
            address(packed_scale),
        )
        if status:
            raise Refused(status)
        return Weight(layout, rows, cols, packed, packed_scale)

    def rows(self, layout: Layout, x: F32) -> U8:
        """Activation rows uint8 [tokens, stride] of x, against a guard page."""
        tokens, cols = x.shape
        values = np.ascontiguousarray(x, np.float32)
        stride = self._lib.kt_test_stride(ctypes.byref(layout), ctypes.c_int64(cols))
        rows = guarded_copy(np.full(tokens * stride, 0xA5, np.uint8))
        self._lib.kt_test_rows(
            ctypes.byref(layout),
            ctypes.c_int64(tokens),
            ctypes.c_int64(cols),
            address(values),
            address(rows),
        )
        return rows.reshape(tokens, stride)

    def product(self, w: Weight, x: U8, strip: int = 0, strips: int = 1) -> F32:
        """float32 [tokens, 32 * strips], columns in the order of w's rows."""
        tokens = len(x)
        if not x.flags.c_contiguous or x.ctypes.data % 64:
            x = guarded_copy(x).reshape(x.shape)
        poison = np.full(strips * tokens * STRIP, np.nan, np.float32)
        out = guarded_copy(poison)
        self._lib.kt_test_product(
            ctypes.byref(w.layout),
            ctypes.c_int64(w.rows),
            ctypes.c_int64(w.cols),
            address(w.codes),
            address(w.scale),
            ctypes.c_int64(strip),
            ctypes.c_int64(strips),
            address(x),
            ctypes.c_int64(tokens),
            address(out),
            address(self._panel),
        )
        values = np.array(out).view(np.float32).reshape(strips, tokens, STRIP)
        return np.ascontiguousarray(values.transpose(1, 0, 2).reshape(tokens, strips * STRIP))

    def activate(
        self,
        level: str,
        activation: Activation,
        gate: F32 | None,
        up: F32,
        gate_bias: F32 | None = None,
        up_bias: F32 | None = None,
    ) -> F32:
        """The activation of gate and up [tokens, a multiple of 32], or of one token; biases are of
        rows. Skips levels that are not there."""
        rows = np.atleast_2d(up)
        tokens, width = rows.shape
        stride = width + 3  # what is between two tokens is not the kernel's
        out = guarded_copy(np.full(tokens * stride - 3, np.nan, np.float32))

        def strips(of: F32 | None) -> U8 | None:
            if of is None:
                return None
            cut = np.atleast_2d(of).reshape(tokens, width // STRIP, STRIP)
            return guarded_copy(cut.transpose(1, 0, 2))

        biases = [None if bias is None else guarded_copy(bias) for bias in (gate_bias, up_bias)]
        values = [strips(gate), strips(up), *biases]
        there = self._lib.kt_test_activate(
            LEVELS[level],
            ctypes.byref(activation),
            ctypes.c_int64(width // STRIP),
            ctypes.c_int64(tokens),
            *map(address, values),
            address(out),
            ctypes.c_int64(stride),
        )
        if not there:
            pytest.skip(f"no {level} activation on this machine")
        between = np.full(3, np.nan, np.float32)
        found = np.append(np.array(out).view(np.float32), between).reshape(tokens, stride)
        assert np.isnan(found[:, width:]).all()
        return np.ascontiguousarray(found[:, :width]).reshape(up.shape)

    def everything(self, w: Weight, x: U8) -> F32:
        """The product with all rows of w, float32 [tokens, rows], in calls of all widths."""
        parts: list[F32] = []
        strip = 0
        while strip < w.strips:
            most = min(self.max_strips, self.max_products // len(x))
            strips = min(1 + strip % most, w.strips - strip)
            parts.append(self.product(w, x, strip, strips))
            strip += strips
        return np.concatenate(parts, axis=1)


def least_tokens(level: str, kernel: str) -> int:
    """From how many on a float format's bits depend on nothing but the token."""
    return AMX_LEAST[kernel] if level == "amx" else 1


def tile_tokens(least: int) -> list[int]:
    """Numbers of tokens that go through tiles, the least first."""
    return [least, *(tokens for tokens in _TILE_TOKENS if tokens > least)]


def loads_per_product(tokens: int) -> tuple[int, int]:
    """Loads and products of AMX tiles for a strip and a step of columns (amx_tiles.h): whole blocks
    of 32 tokens and a rest of more than 16 take four loads for four products, a rest of fewer
    three for two. So 1 for multiples of 32 and up to 15 less, 1.5 for up to 16 tokens, 1.17 for
    33 to 48, 1.1 for 65 to 80; 97 are computed as 48 and 49, 1.07 together."""
    rest = tokens % 32
    few = 0 < rest <= 16
    blocks = tokens // 32 + (rest > 16)
    return 4 * blocks + 3 * few, 4 * blocks + 2 * few


def sums_loaded_again(tokens: int, strips: int, chunks: int) -> int:
    """Tiles of sums that are loaded where codes are tiles: of more than 32 tokens each chunk of
    columns but the first loads those of all passes but one, at which it turns back
    (amx_stream.h)."""
    halves = -(-tokens // 16)
    passes = [4] * (halves // 2) + [2] * (halves % 2)
    loads, turn = 0, 0
    for chunk in range(strips * chunks):
        if chunk % chunks:
            loads += sum(passes) - passes[turn]
        turn = len(passes) - 1 - turn
    return loads


def tiles_of_strips(tokens: int, strips: int, cols: int, scaled: bool = False) -> tuple[int, int]:
    """Loads and products of formats that become bf16: a step has 32 columns. For more than 32
    tokens each block of four steps but the first loads the sums again (amx_blocks.h), unless they
    are scaled behind each block."""
    loads, products = loads_per_product(tokens)
    steps = cols // 32
    again = 2 * -(-tokens // 16) * (-(-steps // 4) - 1) if tokens > 32 and not scaled else 0
    return strips * (steps * loads + again), strips * steps * products


def bf16_rounded(x: F32) -> F64:
    """What a BF16 activation row holds."""
    return bf16_to_f32(f32_to_bf16(x)).astype(np.float64)


def activations(tokens: int, cols: int, seed: int) -> F32:
    """Ordinary values, a few large."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    x[rng.random(x.shape) < 0.01] *= 30
    return x


def assert_near(found: F32, exact: F64, bound: F64) -> None:
    """|found - exact| <= bound everywhere; says where it is worst."""
    error = np.abs(found.astype(np.float64) - exact)
    excess = np.where(np.isfinite(error), error - bound, np.inf)
    worst: Sequence[int] = np.unravel_index(int(np.argmax(excess)), excess.shape)  # type: ignore[assignment]
    at = tuple(worst)
    assert excess[at] <= 0, f"at {at}: {found[at]} is {error[at]} from {exact[at]}, not {bound[at]}"


def assert_batch_independent(products: Products, w: Weight, x: U8, least: int = 1) -> F32:
    """Tokens give the same bits among themselves, `least` or more, as among all others; the
    common result."""
    together = products.everything(w, x)
    for size in (1, 2, 3, 5, 7, 12, 13, 17, 33):
        for first in range(0, len(x) - least, max(size, len(x) // 5)):
            if size < least:
                continue
            part = products.everything(w, x[first : first + size])
            assert np.array_equal(
                part.view(np.uint32), together[first : first + size].view(np.uint32)
            ), f"tokens {first} to {first + len(part)} of {len(x)} differ from those in the batch"
    return together
