"""The library touches no byte outside of what it was given: canaries and guard pages."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import reference
from helpers.looped import each
from native.support import F32, STORED, U8, Source, assert_same, guarded, quantize_pack

from ktconv import native
from ktconv.formats import FORMATS, output_formats
from ktconv.formats.decode import e4m3fn_to_f32

pytestmark = pytest.mark.slow

MARGIN = 64


ENCODED = [
    native.Encoding(kind, group)
    for kind, groups in (
        ("int4", (0, 32)), ("int8", (0, 64)), ("fp8", (0, 128)), ("mxfp4", (32,)), ("mxfp8", (32,)),
        ("nvfp4", (16,)), ("bf16", (0,)),
    )
    for group in groups
]  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODED, ids=str)
@each("shape", [(96, 192), (129, 320), (1, 64)])
@each("transposed", [False, True])
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


@pytest.mark.parametrize("fmt", output_formats())
@each("dtype", STORED)
@each("transposed", [False, True])
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
