"""The emulator against independent arithmetic: without trust in it, AMX kernels prove nothing.

Where the CPU has AMX the same tests run on the hardware."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import amx
from helpers.paths import NATIVE
from numpy.typing import NDArray

from ktconv import native
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16

Array = NDArray[Any]
KINDS = {"ssd": 0, "sud": 1, "usd": 2, "uud": 3, "bf16": 4}


def config(shapes: dict[int, tuple[int, int]]) -> Array:
    """LDTILECFG's 64 bytes; shapes: tile -> (rows, bytes per row)."""
    words = np.zeros(64, np.uint8)
    words[0] = 1
    for tile, (rows, colsb) in shapes.items():
        words[16 + 2 * tile], words[48 + tile] = colsb, rows
    return words


def pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(scope="module")
def library(pytestconfig: pytest.Config) -> Path:
    if "amx" not in native.isa_available() or amx.compiler() is None:
        pytest.skip("needs a C compiler, and AMX or AVX-512 to emulate it with")
    cache = amx.kept_directory(pytestconfig)
    return amx.build_library(NATIVE / "test/amx_instructions.c", cache, "-O1")


@pytest.fixture
def one(library: Path, tiles: amx.Emulator | None) -> Iterator[ctypes.CDLL]:
    """The instructions, one by one."""
    loaded = ctypes.CDLL(str(library))
    matrix = (ctypes.c_void_p, ctypes.c_ssize_t)
    loaded.kt_test_product.argtypes = [ctypes.c_int, *matrix, *matrix, *matrix]
    for name in ("load", "stream_load", "store"):
        getattr(loaded, f"kt_test_{name}").argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
    yield loaded
    loaded.kt_test_release()


def multiply(one: ctypes.CDLL, kind: str, a: Array, b: Array, c: Array) -> Array:
    """c + a * b by tiles of exactly these sizes (arrays of bytes, 2-D)."""
    shapes = {0: c.shape, 1: a.shape, 2: b.shape}
    one.kt_test_load_config(pointer(config(shapes)))
    out = c.copy()
    one.kt_test_product(
        KINDS[kind], pointer(a), a.strides[0], pointer(b), b.strides[0], pointer(out), c.shape[1]
    )
    return out


SIZES = [(16, 16, 16), (1, 1, 1), (3, 16, 5), (16, 2, 16), (7, 9, 11)]  # rows m, k/4, n


@pytest.mark.parametrize("kind", ["ssd", "sud", "usd", "uud"])
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_int8_products(one: ctypes.CDLL, kind: str, m: int, k: int, n: int) -> None:
    rng = np.random.default_rng([m, k, n])
    a, b = rng.integers(0, 256, (m, 4 * k), np.uint8), rng.integers(0, 256, (k, 4 * n), np.uint8)
    c = rng.integers(0, 1 << 32, (m, n), np.uint64).astype(np.uint32)
    wide_a = a.view(np.int8 if kind[0] == "s" else np.uint8).astype(np.int64)
    wide_b = b.view(np.int8 if kind[1] == "s" else np.uint8).astype(np.int64)
    columns = wide_b.reshape(k, n, 4).transpose(0, 2, 1).reshape(4 * k, n)
    expected = (c.astype(np.int64) + wide_a @ columns).astype(np.uint32)  # wraps around
    got = multiply(one, kind, a, b, c.view(np.uint8).reshape(m, 4 * n))
    assert np.array_equal(got.view(np.uint32), expected)


def bf16_truth(a: Array, b: Array, c: Array) -> Array:
    """Exact products and float32 sums, even and odd columns apart: sums of these magnitudes are
    exact in float64, so each fused operation is one rounding of it."""
    m, k, n = len(a), len(b), c.shape[1]
    left = bf16_to_f32(a.view(np.uint16)).reshape(m, k, 2).astype(np.float64)
    right = bf16_to_f32(b.view(np.uint16)).reshape(k, n, 2).astype(np.float64)
    sums = np.zeros((m, n, 2), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for i in range(k):
            sums = (sums + left[:, None, i] * right[None, i]).astype(np.float32)
            sums[np.abs(sums) < np.finfo(np.float32).tiny] = 0
        return c + (sums[..., 0] + sums[..., 1])


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_bf16_products(one: ctypes.CDLL, m: int, k: int, n: int) -> None:
    rng = np.random.default_rng([m, k, n])
    a, b = (
        f32_to_bf16(rng.standard_normal(shape).astype(np.float32)).view(np.uint8)
        for shape in ((m, 2 * k), (k, 2 * n))
    )
    c = rng.standard_normal((m, n)).astype(np.float32)
    got = multiply(one, "bf16", a, b, c.view(np.uint8).reshape(m, 4 * n)).view(np.float32)
    assert np.array_equal(got, bf16_truth(a, b, c))


def test_bf16_special_values(one: ctypes.CDLL) -> None:
    """Denormals count as zero, tiny results are flushed, NaN and Inf come through."""
    values = {"denormal": 0x0001, "tiny": 0x0080, "inf": 0x7F80, "nan": 0x7FC0, "-0": 0x8000}
    a = np.zeros((16, 2), np.uint16)
    a[: len(values), 0] = list(values.values())
    b = np.zeros((1, 2), np.uint16)
    b[0, 0] = 0x3F00  # a half: the smallest normal number becomes too small
    got = multiply(
        one, "bf16", a.view(np.uint8), b.view(np.uint8), np.zeros((16, 4), np.uint8)
    ).view(np.float32)[:, 0]
    assert got[0] == 0
    assert got[1] == 0
    assert got[2] == np.inf
    assert np.isnan(got[3])
    assert got[4] == 0
    assert not got[5:].any()


@pytest.mark.parametrize("load", ["load", "stream_load"])
@pytest.mark.parametrize(("rows", "colsb"), [(16, 64), (1, 4), (5, 32), (16, 12)])
def test_load_and_store(one: ctypes.CDLL, load: str, rows: int, colsb: int) -> None:
    one.kt_test_load_config(pointer(config({3: (rows, colsb)})))
    source = np.random.default_rng(0).integers(0, 256, (16, 100), np.uint8)
    target = np.full((16, 80), 0xEE, np.uint8)
    getattr(one, f"kt_test_{load}")(pointer(source), 100)
    one.kt_test_store(pointer(target), 80)
    assert np.array_equal(target[:rows, :colsb], source[:rows, :colsb])
    target[:rows, :colsb] = 0xEE
    assert (target == 0xEE).all(), "bytes outside of the tile were written"
    one.kt_test_zero()
    one.kt_test_store(pointer(target), 80)
    assert not target[:rows, :colsb].any()


def test_strides_may_be_zero_or_negative(one: ctypes.CDLL) -> None:
    one.kt_test_load_config(pointer(config({3: (4, 64)})))
    source = np.arange(256, dtype=np.uint8).reshape(4, 64)
    target = np.zeros((4, 64), np.uint8)
    one.kt_test_load(pointer(source[3:]), -64)
    one.kt_test_store(pointer(target), 64)
    assert np.array_equal(target, source[::-1])
    one.kt_test_load(pointer(source), 0)
    one.kt_test_store(pointer(target), 64)
    assert (target == source[0]).all()


def test_address_forms(one: ctypes.CDLL) -> None:
    one.kt_test_load_config(pointer(config({3: (16, 64)})))
    source = np.random.default_rng(1).integers(0, 256, 1024, np.uint8)
    target = np.zeros(4096, np.uint8)
    one.kt_test_addresses(pointer(source), pointer(target))
    for start in (0, 1024, 2048):
        assert np.array_equal(target[start : start + 1024], source), start
    assert not target[3072:].any()


def test_what_was_performed_is_a_breakpoint(one: ctypes.CDLL, emulator: amx.Emulator) -> None:
    """Which virtual machines raise in an eighth of the time."""
    code = ctypes.cast(one.kt_test_product, ctypes.c_void_p)
    rng = np.random.default_rng(2)
    a, b = (rng.integers(0, 256, (16, 64), np.uint8) for _ in range(2))
    zeros = np.zeros((16, 64), np.uint8)
    first, second = (multiply(one, "ssd", a, b, zeros) for _ in range(2))
    assert np.array_equal(first, second) and first.any()
    assert b"\xcc\xe2" in ctypes.string_at(code, 64)


def test_configuration_is_kept_and_released(one: ctypes.CDLL) -> None:
    wanted = config({0: (16, 64), 5: (3, 20)})
    one.kt_test_load_config(pointer(wanted))
    stored = np.full(64, 0xEE, np.uint8)
    one.kt_test_store_config(pointer(stored))
    assert np.array_equal(stored, wanted)
    one.kt_test_release()
    one.kt_test_store_config(pointer(stored))
    assert not stored.any()


def test_threads_have_tiles_of_their_own(one: ctypes.CDLL) -> None:
    barrier = threading.Barrier(3)
    results: dict[int, Array] = {}

    def use(number: int) -> None:
        one.kt_test_load_config(pointer(config({3: (16, 64)})))
        source = np.full((16, 64), number, np.uint8)
        one.kt_test_load(pointer(source), 64)
        barrier.wait()
        target = np.zeros((16, 64), np.uint8)
        one.kt_test_store(pointer(target), 64)
        results[number] = target
        one.kt_test_release()

    threads = [threading.Thread(target=use, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((results[number] == number).all() for number in (1, 2, 3))


def test_threads_come_and_go(one: ctypes.CDLL) -> None:
    """More of them, one after another, than the emulator has room for at once."""
    shapes = config({3: (16, 64)})
    stored = np.zeros((640, 64), np.uint8)

    def use(number: int) -> None:
        one.kt_test_store_config(pointer(stored[number]))  # of this thread: not configured
        one.kt_test_load_config(pointer(shapes))

    for number in range(len(stored)):
        thread = threading.Thread(target=use, args=(number,))
        thread.start()
        thread.join()
    assert not stored.any()


def test_start_row(one: ctypes.CDLL) -> None:
    """Where an interrupted load goes on; whatever ends afterwards begins with row 0 again."""
    shapes = config({3: (16, 64)})
    shapes[1] = 5
    source = np.full((16, 64), 7, np.uint8)
    target = np.full((16, 64), 0xEE, np.uint8)
    one.kt_test_load_config(pointer(shapes))
    one.kt_test_load(pointer(source), 64)
    one.kt_test_store(pointer(target), 64)
    assert not target[:5].any()
    assert (target[5:] == 7).all()
    for end in (one.kt_test_zero, lambda: one.kt_test_load(pointer(source), 64)):
        one.kt_test_load_config(pointer(shapes))
        end()
        stored = np.zeros(64, np.uint8)
        one.kt_test_store_config(pointer(stored))
        assert stored[1] == 0


def test_counters(one: ctypes.CDLL, emulator: amx.Emulator) -> None:
    emulator.reset()
    multiply(one, "ssd", *(np.zeros((16, 64), np.uint8) for _ in range(3)))
    multiply(one, "bf16", *(np.zeros((16, 64), np.uint8) for _ in range(3)))
    one.kt_test_release()
    found, expected = emulator.counts(), amx.Counts(2, 6, 2, 0, 1, 1, 1)
    if native.cpu_features()["amx_tile"]:  # a CPU with AMX configures and releases itself
        expected = replace(expected, configs=found.configs, releases=0)
        assert found.configs >= 1
    assert found == expected


DIES = """
import ctypes, sys
import numpy as np
lib = ctypes.CDLL(sys.argv[1])
config = np.zeros(64, np.uint8)
memory = np.zeros(4096, np.uint8)
PLACE, ROW = ctypes.c_void_p(memory.ctypes.data), ctypes.c_ssize_t(64)
exec(sys.argv[2])
"""
CONFIGURED = "config[0] = 1; config[48:56] = 16; config[16:32:2] = 64; "
LOAD = "lib.kt_test_load_config(ctypes.c_void_p(config.ctypes.data)); "
PRODUCT = "lib.kt_test_product(0, PLACE, ROW, PLACE, ROW, PLACE, ROW)"
FAULTS = {
    "palette 2": ("config[0] = 2; " + LOAD, signal.SIGSEGV),
    "17 rows": (CONFIGURED + "config[48] = 17; " + LOAD, signal.SIGSEGV),
    "65 bytes": (CONFIGURED + "config[16] = 65; " + LOAD, signal.SIGSEGV),
    "rows without bytes": (CONFIGURED + "config[16] = 0; " + LOAD, signal.SIGSEGV),
    "reserved byte": (CONFIGURED + "config[2] = 1; " + LOAD, signal.SIGSEGV),
    "no configuration": ("lib.kt_test_zero()", signal.SIGILL),
    "tile without rows": (
        CONFIGURED + "config[51] = config[22] = 0; " + LOAD + "lib.kt_test_zero()",
        signal.SIGILL,
    ),
    "unmapped memory": (
        CONFIGURED + LOAD + "lib.kt_test_load(ctypes.c_void_p(16), ROW)",
        signal.SIGSEGV,
    ),
    "start_row behind the tile": (
        CONFIGURED + "config[1] = 16; " + LOAD + "lib.kt_test_load(PLACE, ROW)",
        signal.SIGILL,
    ),
    "a has other rows than c": (CONFIGURED + "config[49] = 15; " + LOAD + PRODUCT, signal.SIGILL),
    "b has other columns than c": (
        CONFIGURED + "config[20] = 60; " + LOAD + PRODUCT,
        signal.SIGILL,
    ),
    "a has other columns than b has rows": (
        CONFIGURED + "config[18] = 60; " + LOAD + PRODUCT,
        signal.SIGILL,
    ),
    "a product of half a group": (
        CONFIGURED + "config[16] = config[20] = 62; " + LOAD + PRODUCT,
        signal.SIGILL,
    ),
    "no instruction": ("lib.kt_test_undefined()", signal.SIGILL),
    "a breakpoint of others": ("lib.kt_test_breakpoint()", signal.SIGTRAP),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_faults_end_the_program(
    library: Path, emulator: amx.Emulator, tmp_path: Path, name: str
) -> None:
    code, number = FAULTS[name]
    done = subprocess.run(
        [sys.executable, "-c", DIES, str(library), code],
        env=emulator.environment(tmp_path / "report"),
        capture_output=True,
        check=False,
    )
    assert done.returncode == -number, done.stderr


TWICE = """
import ctypes, faulthandler, sys
emulator, lib = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(sys.argv[2])
faulthandler.enable()
emulator.kt_amx_emulator_install()
lib.kt_test_undefined()
"""


def test_handlers_that_raise_again(library: Path, emulator: amx.Emulator) -> None:
    """faulthandler puts back the handler that it found, which is the emulator."""
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(emulator.path), str(library)],
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGILL, done.stderr
    assert done.stderr.count(b"Fatal Python error: Illegal instruction") == 1
