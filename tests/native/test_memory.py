"""The library touches no byte outside of what it was given: canaries, guard pages, check.c."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.amx import kept_directory
from helpers.paths import ROOT
from helpers.random_calls import environment
from native.support import F32, STORED, U8, Source, assert_same, guarded, quantize_pack

from ktconv import native
from ktconv.formats import FORMATS, output_formats, reference
from ktconv.formats.decode import e4m3fn_to_f32

MARGIN = 64


ENCODED = [
    native.Encoding(kind, group)
    for kind, groups in (
        ("int4", (0, 32)), ("int8", (0, 64)), ("fp8", (0, 128)), ("mxfp4", (32,)), ("mxfp8", (32,)),
        ("nvfp4", (16,)), ("bf16", (0,)),
    )
    for group in groups
]  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(96, 192), (129, 320), (1, 64)])
@pytest.mark.parametrize("encoding", ENCODED, ids=str)
def test_encodings_at_guard_pages(
    isa: str, encoding: native.Encoding, shape: tuple[int, int], transposed: bool
) -> None:
    """Source, codes and scales end where unreadable pages begin; the audit reads no further."""
    source = Source("int8", *shape, "BF16", transposed=transposed)
    stored = source.stored(source.bits())
    grid, dtype = encoding.scale_shape(*shape), encoding.scale_array(*shape)
    size = int(np.prod(encoding.code_shape(*shape)))
    with (
        guarded(stored.nbytes) as buffer,
        guarded(size) as codes,
        guarded(max(1, int(np.prod(grid)) * dtype().itemsize)) as room,
    ):
        buffer[:] = stored
        matrix = source.view(buffer, 0)
        scales = room[: int(np.prod(grid)) * dtype().itemsize].view(dtype).reshape(grid)
        native.encode(encoding, matrix, 1.0, codes, scales)
        wanted = native.encode(encoding, source.matrix(), 1.0)
        assert_same("codes", codes, wanted[0].reshape(-1))
        assert_same("scales", np.array(scales), wanted[1])
        if not (transposed and shape[0] % 32):
            found = native.audit_encoded(encoding, matrix, codes, scales, 1.0)
            assert (found.other_codes, found.other_scales) == (0, 0)
        del matrix


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("fmt", output_formats())
def test_guard_pages(isa: str, fmt: str, dtype: str, transposed: bool) -> None:
    source = Source(
        fmt,
        96,
        3 * FORMATS[fmt].traits.col_multiple,
        dtype,
        transposed=transposed,
        pad=5,
        block=(7, 13),
    )
    stored = source.stored(source.bits())
    size = native.packed_size(fmt, source.rows, source.cols)
    with (
        guarded(stored.nbytes) as buffer,
        guarded(size) as packed,
        guarded(4 * source.rows) as scales,
        guarded(native.new_scratch(source.cols).nbytes) as scratch,
    ):
        buffer[:] = stored
        matrix, scale = source.view(buffer, 0), scales.view(np.float32)
        native.quantize_pack(fmt, matrix, packed, scale, scratch)
        expected = reference.quantize_pack(source.fmt, source.values())
        assert_same("packed", packed, expected[0])
        assert_same("scale", scale, expected[1])
        assert native.audit(fmt, matrix, source.rows, 0, packed, scale).invalid == 0
        assert_same("decode", native.decode(matrix), source.values())
        del matrix


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("fmt", output_formats())
def test_canaries(isa: str, fmt: str, shift: int) -> None:
    """Outputs at any alignment; the bytes around them stay."""
    source = Source(fmt, 64, 2 * FORMATS[fmt].traits.col_multiple, "F16")
    size = native.packed_size(fmt, source.rows, source.cols)
    memory = np.full((2, size + 2 * MARGIN + 4 * source.rows), 0xA5, np.uint8)
    first = MARGIN + shift
    inside = slice(first, first + size), slice(first, first + 4 * source.rows)
    packed, scale = memory[0][inside[0]], memory[1][inside[1]].view(np.float32)
    native.quantize_pack(fmt, source.matrix(), packed, scale)
    expected = reference.quantize_pack(source.fmt, source.values())
    assert_same("packed", packed, expected[0])
    assert_same("scale", np.array(scale), expected[1])
    assert native.audit(fmt, source.matrix(), source.rows, 0, packed, scale).invalid == 0
    for row, part in zip(memory, inside, strict=True):
        outside = np.ones(len(row), bool)
        outside[part] = False
        assert (row[outside] == 0xA5).all()


def test_a_misaligned_grid() -> None:
    """As a file may hold it."""
    grid = np.frombuffer(b"\0" + np.float32(0.5).tobytes(), np.float32, offset=1).reshape(1, 1)
    assert not grid.flags.aligned
    codes = Source("int8", 32, 64, "F8_E4M3").bits()
    matrix = native.Matrix(codes.reshape(-1), "F8_E4M3", 32, 64, block_scale=grid, block=(32, 64))
    assert_same("decode", native.decode(matrix), e4m3fn_to_f32(codes) * np.float32(0.5))


def test_threads(isa: str) -> None:
    """Calls do not disturb one another."""
    sources = [Source(fmt, 64, 1024, seed=seed) for fmt in output_formats() for seed in range(4)]
    expected = [quantize_pack(source, source.matrix()) for source in sources]
    gate = threading.Barrier(len(sources))

    def work(source: Source) -> list[tuple[U8, F32]]:
        matrix = source.matrix()
        gate.wait()
        return [quantize_pack(source, matrix) for _ in range(20)]

    with ThreadPoolExecutor(len(sources)) as pool:
        for results, (packed, scale) in zip(pool.map(work, sources), expected, strict=True):
            for found in results:
                assert_same("packed", found[0], packed)
                assert_same("scale", found[1], scale)


# The programs of native/test

FLAGS = ["-std=c11", "-g1", f"-I{ROOT / 'native/include'}"]
# gcc knows sizes of objects only where it optimizes, and takes one of two tables for both.
SANITIZE = [
    "-fsanitize=address,undefined", "-fno-sanitize=object-size", "-fno-sanitize-recover=all"
]  # fmt: skip
TESTS = ROOT / "native/test"
# Written in vector instructions; the audit and encodings are plain loops on every level.
VECTORS = re.compile("(?<!audit_)(?<!encoded_)(?<!encode_)(avx|amx)")


class Build:
    """The library's objects, and the programs linked with them. Objects stay in `kept` as long as
    neither their source nor a header changes."""

    def __init__(
        self, compiler: list[str], kept: Path, folder: Path, vectors: str, others: str
    ) -> None:
        """`vectors`: how to optimize what is written in vector instructions; `others`: all else."""
        self._compiler, self._kept, self._folder = compiler, kept, folder
        self._vectors, self._others = vectors, others
        headers = sorted((ROOT / "native").rglob("*.h"))
        self._headers = hashlib.sha256()
        for header in headers:
            if TESTS not in header.parents:
                self._headers.update(header.read_bytes())
        self._all_headers = self._headers.copy()  # those of programs, which are few, too
        for header in headers:
            if TESTS in header.parents:
                self._all_headers.update(header.read_bytes())
        self._intrinsics = {
            options: self._precompiled(options) for options in {self._vectors, self._others}
        }
        sources = sorted((ROOT / "native/src").rglob("*.c"))
        sources.sort(key=lambda source: "avx512" not in source.name)  # the slow ones first
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self._library = list(pool.map(self._compiled, sources))

    def _precompiled(self, options: str) -> list[str]:
        """What includes the vector instructions, whose header takes half of a file's time."""
        if platform.machine() != "x86_64" or self._compiler[0] != "cc":
            return []
        header = self._folder / f"intrinsics{options}.h"
        header.write_text("#include <immintrin.h>\n")
        command = [*self._compiler, *FLAGS, options, "-x", "c-header", str(header)]
        subprocess.run([*command, "-o", f"{header}.gch"], check=True, capture_output=True)
        return ["-include", str(header)]

    def _compiled(self, source: Path) -> str:
        name = "_".join(source.relative_to(ROOT).parts)
        program = TESTS in source.parents
        vectors = not program and VECTORS.search(source.name)
        options = self._vectors if vectors else self._others
        # Headers follow _GNU_SOURCE and the like where the first of them is included.
        plain = not program and b"_SOURCE\n" not in source.read_bytes()
        first = self._intrinsics[options] if plain else []
        command = [*self._compiler, *FLAGS, options, "-c"]
        key = (self._all_headers if program else self._headers).copy()
        key.update(" ".join(command).encode())
        key.update(source.read_bytes())
        target = self._kept / f"{name}-{key.hexdigest()[:20]}.o"
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}")
            command += [*first, str(source), "-o", str(partial)]
            subprocess.run(command, check=True, capture_output=True)
            partial.rename(target)
            for old in {*self._kept.glob(f"{name}-*.o")} - {target}:
                old.unlink(missing_ok=True)
        return str(target)

    def program(self, *sources: Path) -> str:
        objects = [*self._library, *map(self._compiled, sources)]
        program = self._folder / sources[0].stem
        command = [*self._compiler, *objects, "-lm", "-pthread", "-o", str(program)]
        subprocess.run(command, check=True)
        return str(program)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "0 failures" in done.stdout
    return done.stdout


def works(compiler: list[str], folder: Path) -> bool:
    """Whether this compiler builds a program that starts."""
    source = folder / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    program = folder / "empty"
    built = subprocess.run([*compiler, str(source), "-o", str(program)], capture_output=True)
    return built.returncode == 0 and subprocess.run([str(program)]).returncode == 0


@pytest.fixture(scope="module")
def sanitized(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder, compiler = tmp_path_factory.mktemp("sanitized"), ["cc", *SANITIZE]
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    if not works(compiler, folder):
        pytest.skip("cc does not support -fsanitize=address,undefined here")
    # Vector instructions take long to compile and run for a moment, plain loops the opposite.
    kept = kept_directory(pytestconfig, "ktconv-sanitized")
    return Build(compiler, kept, folder, vectors="-O0", others="-O1")


def test_packing_under_sanitizers(sanitized: Build) -> None:
    run([sanitized.program(TESTS / "check.c")])


def test_training_calls_under_sanitizers(sanitized: Build) -> None:
    run([sanitized.program(TESTS / "train_calls_check.c")])


def with_amx(program: str) -> list[Path]:
    """Where the CPU has no AMX, with the emulator in the program."""
    x86_linux = platform.machine() == "x86_64" and platform.system() == "Linux"
    return [TESTS / program, *([TESTS / "amx_emulator.c"] if x86_linux else [])]


@pytest.mark.parametrize(
    "program", ["moe_check.c", "train_check.c", "gradients_check.c", "strips_check.c"]
)
def test_layers_under_sanitizers(sanitized: Build, program: str) -> None:
    run([sanitized.program(*with_amx(program))])


def test_random_calls_under_sanitizers(sanitized: Build) -> None:
    """An eighth of the cases that test_random_calls runs between unreadable pages."""
    run([sanitized.program(*with_amx("random_check.c")), "--share", "8"])


def test_check_c_on_aarch64(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Another architecture writes the same bytes: check.c knows their hash, and compares what
    NEON writes with scalar."""
    for program in ("aarch64-linux-gnu-gcc", "qemu-aarch64"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    kept, compiler = kept_directory(pytestconfig, "ktconv-aarch64"), "aarch64-linux-gnu-gcc"
    build = Build([compiler, "-static"], kept, tmp_path, vectors="-O2", others="-O2")
    checked = run(["qemu-aarch64", build.program(TESTS / "check.c")])
    assert checked.startswith("levels: scalar neon\n")
    for name in ("moe_check.c", "train_check.c", "strips_check.c"):
        run(["qemu-aarch64", build.program(TESTS / name)])
