"""What the library refuses, and how: positions of NaN, statuses, KTCONV_ISA."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from helpers.amx import program_levels
from helpers.looped import each
from ktconv._native import ffi, lib
from native.support import NONFINITE, STORED, Rule, Source, quantize_pack

from ktconv import native
from ktconv.errors import KtconvError
from ktconv.formats import FORMATS, output_formats

pytestmark = [pytest.mark.slow, pytest.mark.process]

# NaN and Inf


@pytest.mark.parametrize("fmt", output_formats())
@pytest.mark.parametrize("rule", ["amax", "search"])
@each("dtype", STORED)
@each("transposed", [False, True])
def test_the_first_nonfinite_is_reported(
    isa: str, rule: Rule, fmt: str, dtype: str, transposed: bool
) -> None:
    cols = 3 * FORMATS[fmt].traits.col_multiple
    source = Source(fmt, 96, cols, dtype, transposed=transposed, rule=rule)
    rng = np.random.default_rng(8)
    for pattern in NONFINITE[dtype] * 2:
        row, col = int(rng.integers(source.rows)), int(rng.integers(source.cols))
        bits = source.bits()
        bits[row, col] = bits[row, -1] = bits[-1, 0] = pattern
        if row == source.rows - 1:
            col = 0
        with pytest.raises(native.NonFiniteError, match=f"row {row}, column {col}") as caught:
            quantize_pack(source, source.matrix(bits))
        assert (caught.value.row, caught.value.col) == (row, col)
        with pytest.raises(native.NonFiniteError) as caught:
            native.quantize(fmt, source.matrix(bits), source.choice)
        assert (caught.value.row, caught.value.col) == (row, col)
        assert isinstance(caught.value, KtconvError)


@pytest.mark.parametrize("fmt", output_formats())
def test_what_rounds_to_infinity_is_nonfinite(isa: str, fmt: str) -> None:
    values = np.ones((32, 128), np.float32)
    values[7, 77] = np.finfo(np.float32).max
    buffer = values.reshape(-1).view(np.uint8)
    source = Source(fmt, 32, 128, "F32")
    quantize_pack(source, native.Matrix(buffer, "F32", 32, 128))
    with pytest.raises(native.NonFiniteError, match="row 7, column 77"):
        quantize_pack(source, native.Matrix(buffer, "F32", 32, 128, round_to_bf16=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_a_bad_block_scale_is_nonfinite(isa: str, bad: float) -> None:
    codes = np.full((32, 128), 0x7E, np.uint8)  # 448
    grid = np.ones((2, 2), np.float32)
    grid[1, 1] = bad
    matrix = native.Matrix(codes.reshape(-1), "F8_E4M3", 32, 128, block_scale=grid, block=(20, 100))
    with pytest.raises(native.NonFiniteError, match="row 20, column 100"):
        quantize_pack(Source("int8", 32, 128, "F8_E4M3"), matrix)


# Statuses

GOOD = {"rows": 32, "cols": 128, "row_stride": 128, "col_stride": 1, "dtype": lib.KT_BF16}


def call(
    name: str,
    changes: dict[str, object],
    fmt: int = lib.KT_FORMAT_INT8,
    scratch: int = -1,
    choice: tuple[int, float | None] | None = None,
) -> int:
    """The status of one entry point for a matrix like GOOD but for `changes`; choice: a rule, and
    the importance of column 77."""
    data = ffi.new("char[]", 32 * 128 * 4)
    grid = ffi.new("float[]", [1.0] * 4)
    ones = ffi.new("float[]", [1.0] * 128)
    fields = {"data": data, **GOOD, **changes}
    if fields.get("block_scale") == "grid":
        fields["block_scale"] = grid
    for vector in ("row_scale", "row_factor", "col_factor"):
        if vector in fields:
            fields[vector] = ones
    matrix = ffi.new("kt_matrix *", fields)
    layout = ffi.new("kt_layout *", (fmt, 0, lib.KT_SCALE_F32))
    size = lib.kt_scratch_size(128) if scratch < 0 else scratch
    out, scale = ffi.new("uint8_t[]", 32 * 128 * 4), ffi.new("float[]", 32)
    work = ffi.new("char[]", lib.kt_scratch_size(128))
    how = ffi.NULL
    if choice is not None:
        importance = ffi.new("float[]", [1.0] * 128)
        importance[77] = choice[1] or 0
        how = ffi.new("kt_choice *", (choice[0], ffi.NULL if choice[1] is None else importance))
    room = (out, scale, work, size, ffi.NULL)
    match name:
        case "decode":
            return int(lib.kt_decode(matrix, ffi.cast("float *", out)))
        case "quantize":
            return int(lib.kt_quantize(layout, matrix, how, *room))
        case "quantize_pack":
            return int(lib.kt_quantize_pack(layout, matrix, how, *room))
    per_row = [ffi.new("float[]", 32) for _ in range(3)]
    found = ffi.new("kt_audit *")
    results = (*per_row, ffi.new("double[]", 64), found, work, size)
    return int(lib.kt_audit_run(layout, matrix, how, 32, 0, out, scale, *results))


FP8 = {"dtype": lib.KT_F8_E4M3, "block_scale": "grid", "scale_stride": 2}
BAD_MATRICES = [
    ({"data": ffi.NULL}, lib.KT_ERR_ARGUMENT),
    ({"rows": 0}, lib.KT_ERR_ARGUMENT),
    ({"cols": -128}, lib.KT_ERR_ARGUMENT),
    ({"dtype": -1}, lib.KT_ERR_ARGUMENT),
    ({"dtype": lib.KT_DTYPE_COUNT}, lib.KT_ERR_ARGUMENT),
    ({"row_stride": 0}, lib.KT_ERR_STRIDE),
    ({"row_stride": -128}, lib.KT_ERR_STRIDE),
    ({"col_stride": 2}, lib.KT_ERR_STRIDE),
    ({"dtype": lib.KT_F8_E4M3}, lib.KT_ERR_SCALE),
    ({"block_scale": "grid"}, lib.KT_ERR_SCALE),
    ({**FP8, "block_rows": 0, "block_cols": 128}, lib.KT_ERR_SCALE),
    ({**FP8, "block_rows": 128, "block_cols": 0}, lib.KT_ERR_SCALE),
    ({**FP8, "block_rows": 128, "block_cols": 128, "row_origin": -1}, lib.KT_ERR_SCALE),
    ({**FP8, "block_rows": 128, "block_cols": 128, "scale_stride": 0}, lib.KT_ERR_SCALE),
    ({"row_scale": "ones", "row_factor": "ones"}, lib.KT_ERR_SCALE),
    ({"row_scale": "ones", "col_factor": "ones"}, lib.KT_ERR_SCALE),
]


@pytest.mark.parametrize("name", ["decode", "quantize", "quantize_pack", "audit"])
@each("changes, status", BAD_MATRICES)
def test_bad_matrices(isa: str, name: str, changes: dict[str, object], status: int) -> None:
    assert call(name, {}) == lib.KT_OK
    assert call(name, changes) == status


@pytest.mark.parametrize("name", ["quantize", "quantize_pack", "audit"])
def test_bad_calls(isa: str, name: str) -> None:
    assert call(name, {}, fmt=2) == lib.KT_ERR_ARGUMENT
    assert call(name, {}, fmt=-1) == lib.KT_ERR_ARGUMENT
    assert call(name, {}, scratch=lib.kt_scratch_size(128) - 1) == lib.KT_ERR_SCRATCH
    assert call(name, {"rows": 16}) == lib.KT_ERR_SHAPE
    assert call(name, {"cols": 96}) == lib.KT_ERR_SHAPE
    assert call(name, {"cols": 64}, fmt=lib.KT_FORMAT_INT4) == lib.KT_ERR_SHAPE
    assert call(name, {"cols": 64}, fmt=lib.KT_FORMAT_INT8) == lib.KT_OK


@pytest.mark.parametrize("name", ["quantize", "quantize_pack", "audit"])
def test_choices(isa: str, name: str) -> None:
    """A rule that is none, importance that amax does not look at, or that is no factor."""
    for rule, importance in [
        (lib.KT_RULE_AMAX, None),
        (lib.KT_RULE_SEARCH, None),
        (lib.KT_RULE_SEARCH_1, None),
        (lib.KT_RULE_SEARCH_1, 1.0),
        (lib.KT_RULE_SEARCH, 1.0),
        (lib.KT_RULE_SEARCH, 0.0),
        (lib.KT_RULE_SEARCH, 2.0**32),
    ]:
        assert call(name, {}, choice=(rule, importance)) == lib.KT_OK
    for rule, importance in [
        (-1, None),
        (3, None),
        (lib.KT_RULE_AMAX, 1.0),
        *(
            (rule, bad)
            for rule in (lib.KT_RULE_SEARCH, lib.KT_RULE_SEARCH_1)
            for bad in (math.nan, math.inf, -1.0, -1e-40, 2.0**33)
        ),
    ]:
        assert call(name, {}, choice=(rule, importance)) == lib.KT_ERR_ARGUMENT


def test_choices_at_the_border() -> None:
    matrix = Source("int8", 32, 128).matrix()
    with pytest.raises(KeyError):
        native.Choice("nearest")
    short = native.Choice("search", np.ones(64, np.float32))
    with pytest.raises(ValueError, match="importance is for 64 columns, not 128"):
        native.quantize("int8", matrix, short)
    with pytest.raises(ValueError, match="importance"):
        native.Choice("search", np.ones(128))
    assert short.columns(0, 32).c.importance[31] == 1


def test_every_status_has_words() -> None:
    words = {ffi.string(lib.kt_strerror(status)) for status in range(9)}
    assert len(words) == 9
    assert ffi.string(lib.kt_strerror(99)) == ffi.string(lib.kt_strerror(-1)) == b"unknown status"


# The border


def test_packed_size() -> None:
    assert native.packed_size("int8", 64, 128) == 8192
    assert native.packed_size("int4", 64, 128) == 4096
    for shape in [(31, 128), (32, 100), (0, 128), (32, -128), (1 << 40, 1 << 40)]:
        with pytest.raises(ValueError, match="does not allow"):
            native.packed_size("int4", *shape)
    with pytest.raises(KeyError):
        native.packed_size("int3", 32, 128)


@pytest.mark.parametrize(
    "view",
    [
        {"start": 1},
        {"row_stride": 65},
        {"row_stride": 1, "col_stride": 33},
        {"start": -1},
    ],
)
def test_views_beyond_the_buffer(view: dict[str, Any]) -> None:
    buffer = np.zeros(32 * 64 * 2, np.uint8)
    native.Matrix(buffer, "BF16", 32, 64)
    with pytest.raises(ValueError, match=r"buffer|start"):
        native.Matrix(buffer, "BF16", 32, 64, **view)
    with pytest.raises(ValueError, match="exceeds"):
        native.Matrix(buffer, "F32", 32, 64)
    with pytest.raises(ValueError, match="uint8"):
        native.Matrix(buffer.view(np.uint16), "BF16", 32, 64)
    with pytest.raises(ValueError, match="uint8"):
        native.Matrix(buffer[::2], "BF16", 16, 64)


def test_grids_that_do_not_cover_the_matrix() -> None:
    codes = np.zeros(32 * 64, np.uint8)

    def matrix(shape: tuple[int, int], **more: object) -> native.Matrix:
        grid = np.ones(shape, np.float32)
        return native.Matrix(codes, "F8_E4M3", 32, 64, block_scale=grid, **more)  # type: ignore[arg-type]

    matrix((2, 3), block=(16, 32), origin=(0, 31))
    for shape, block, origin in [
        ((1, 3), (16, 32), (0, 31)),
        ((2, 2), (16, 32), (0, 31)),
        ((2, 3), (16, 32), (1, 31)),
        ((2, 3), (0, 32), (0, 0)),
        ((2, 3), (16, 32), (-1, 0)),
    ]:
        with pytest.raises(ValueError, match="block"):
            matrix(shape, block=block, origin=origin)
    with pytest.raises(ValueError, match="float32"):
        native.Matrix(codes, "F8_E4M3", 32, 64, block_scale=np.ones((1, 1)), block=(32, 64))


def test_outputs_of_the_wrong_size() -> None:
    source = Source("int8", 32, 64)
    matrix, packed, scale = source.matrix(), np.empty(2048, np.uint8), np.empty(32, np.float32)
    for bad_packed, bad_scale in [
        (packed[:-1], scale),
        (packed, scale[1:]),
        (np.empty(4096, np.uint8)[::2], scale),
        (packed, np.empty(64, np.float32)[::2]),
    ]:
        with pytest.raises(ValueError, match="contiguous bytes"):
            native.quantize_pack("int8", matrix, bad_packed, bad_scale)
        with pytest.raises(ValueError, match="contiguous bytes"):
            native.audit("int8", matrix, 32, 0, bad_packed, bad_scale)
    with pytest.raises(ValueError, match="scratch"):
        native.quantize_pack("int8", matrix, packed, scale, np.empty(64, np.uint8))
    with pytest.raises(ValueError, match="contiguous bytes"):
        native.unpack("int8", packed[:-64], 32, 64)


# KTCONV_ISA


def isa_of_a_process(setting: str | None, code: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "KTCONV_ISA"}
    if setting is not None:
        environment["KTCONV_ISA"] = setting
    return subprocess.run(
        [sys.executable, "-c", f"from ktconv import native\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


ASKED = """
before = native.isa()
try:
    native.use_isa("amx")
except ValueError as error:
    print("refused" if "does not support" in str(error) else error, native.isa() == before)
"""

REFUSED = """
from ktconv._native import lib
from ktconv.errors import UsageError
try:
    native.isa()
except UsageError as error:
    print(error, "|", error.hint, "|", lib.kt_isa_active() < 0)
"""


def test_isa_names_a_level() -> None:
    assert isa_of_a_process("scalar", "print(native.isa())") == "scalar"
    best = program_levels()[-1]
    assert isa_of_a_process(best, "print(native.isa())") == best


@pytest.mark.parametrize("setting", [None, ""])
def test_isa_unset_is_the_best(setting: str | None) -> None:
    assert isa_of_a_process(setting, "print(native.isa())") == program_levels()[-1]


@pytest.mark.parametrize("setting", ["sse9", "AVX512", "scalar "])
def test_unknown_isa(setting: str) -> None:
    words = isa_of_a_process(setting, REFUSED)
    assert f"one of {', '.join(native.ISA_NAMES.values())}" in words
    assert ", ".join(program_levels()) in words


def test_missing_isa() -> None:
    if "amx" in program_levels():
        pytest.skip("this machine has every level")
    assert "does not support" in isa_of_a_process("amx", REFUSED)
    assert isa_of_a_process(None, ASKED) == "refused True"


def test_cpu_features_agree_with_the_levels() -> None:
    found = native.cpu_features()
    assert found["avx512"] == ("avx512" in native.isa_available())
