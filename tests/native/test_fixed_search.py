"""The rule "search" of whole rows, in fixed point (docs/formats.md, 3.8): the same bits at every
level and in the audit, and errors like those of the search in binary32."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.levels import isa_parts
from helpers.paths import NATIVE, ROOT
from helpers.reference import Choice, fixed_search
from native.support import F32, Source, assert_same, quantize_pack

from ktconv import native
from ktconv.formats import FORMATS
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16

pytestmark = pytest.mark.slow

FORMATS_SEARCHED = pytest.mark.parametrize("fmt", ["int4", "int8"])
LEVELS = ("avx512-base", "avx512-vnni")  # parts of a level, with sums of their own
# Where sums of blocks are added up, and where INT8 has more steps; of short rows, with one tile.
COLS = {"int4": (128, 384, 4096, 8320, 16512), "int8": (64, 192, 448, 512, 2112, 4160, 8128, 8192)}
SHAPES = [(fmt, cols) for fmt, widths in COLS.items() for cols in widths]


def test_where_the_search_begins_is_written_alike() -> None:
    """A coefficient that is wrong by 1/256 in one place changes the scale of hardly any row."""

    def numbers(text: str, begin: str, end: str) -> list[int]:
        found = re.sub(r"/ 256\.0", "", text.partition(begin)[2].partition(end)[0])
        return [int(one) for one in re.findall(r"-?[0-9]{4,}", found)]

    wanted = list(fixed_search._COEFFICIENTS)
    assert len(wanted) == 20
    for path, begin, end in (
        (NATIVE / "src/quantize/fixed.h", "double c[20] = {", "}"),
        (NATIVE / "src/audit/packed_fixed.h", "coefficients[20] = {", "}"),
        (ROOT / "docs/formats.md", "       7483;", "\n\n"),
    ):
        text = path.read_text()
        first = [7483] if path.suffix == ".md" else []
        assert first + numbers(text, begin, end) == wanted, path


def rows_of_all_kinds(cols: int, seed: int = 0) -> F32:
    """32 rows: normal, heavy tails, uniform, outliers, two magnitudes, levels of INT4, constant,
    one weight, zeros, beyond the range that is searched."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((32, cols))
    rows[4:8] = rng.standard_t(3, (4, cols))
    rows[8:12] = rng.uniform(-1, 1, (4, cols))
    rows[12:18, rng.integers(cols)] = np.geomspace(5, 400, 6)
    rows[18:20] = rng.choice([-1.0, 0.1], (2, cols))
    rows[20:24] = rng.integers(-7, 8, (4, cols)) * rng.uniform(0.01, 1, (4, 1))
    rows[24] = 0.3
    rows[25:28] = 0
    rows[25, -1], rows[26, 0] = 1, 1e-30
    rows[28] *= 2.0**-70
    rows[29] *= 2.0**70
    rows[30] /= np.abs(rows[30]).max() * 2.0**60
    found: F32 = rows.astype(np.float32)
    return found


def f32_matrix(values: F32) -> native.Matrix:
    return native.Matrix(values.reshape(-1).view(np.uint8), "F32", *values.shape)


def bf16_matrix(values: F32) -> native.Matrix:
    return native.Matrix(f32_to_bf16(values).reshape(-1).view(np.uint8), "BF16", *values.shape)


def packed(fmt: str, matrix: native.Matrix, rule: str = "search") -> tuple[Any, Any, native.Audit]:
    layout, choice = FORMATS[fmt].layout, native.Choice(rule)
    weight = np.empty(layout.weight_size(matrix.rows, matrix.cols), np.uint8)
    scale = np.full(matrix.rows, np.nan, np.float32)
    native.quantize_pack(layout, matrix, weight, scale, choice=choice)
    codes = native.audit_codes(layout, weight, matrix.rows, matrix.cols)
    return codes, scale, native.audit(layout, matrix, matrix.rows, 0, weight, scale, choice)


def check(fmt: str, matrix: native.Matrix, expected: tuple[Any, Any]) -> None:
    codes, scale, audit = packed(fmt, matrix)
    assert_same("scales", scale, expected[1])
    assert_same("scales of the audit", audit.row_scale, expected[1])
    assert_same("codes", codes, expected[0])


@pytest.mark.parametrize(("fmt", "cols"), SHAPES)
def test_same_bits_as_the_reference(isa: str, fmt: str, cols: int) -> None:
    values = rows_of_all_kinds(cols)
    narrow = bf16_to_f32(f32_to_bf16(values))
    for matrix, exact in ((f32_matrix(values), values), (bf16_matrix(values), narrow)):
        expected = reference.quantize(FORMATS[fmt], exact, Choice("search"))
        check(fmt, matrix, expected)
        plain = native.quantize(FORMATS[fmt].layout, matrix, native.Choice("search"))
        assert_same("plain scales", plain[1], expected[1])


@pytest.mark.parametrize("level", LEVELS)
@FORMATS_SEARCHED
def test_same_bits_at_parts_of_a_level(level: str, fmt: str) -> None:
    if level not in isa_parts():
        pytest.skip(f"this machine does not support {level}")
    values, before = rows_of_all_kinds(8320, 1), native.isa()
    expected = reference.quantize(FORMATS[fmt], values, Choice("search"))
    native.use_isa(level)
    try:
        check(fmt, f32_matrix(values), expected)
    finally:
        native.use_isa(before)


@FORMATS_SEARCHED
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_sources(isa: str, fmt: str, dtype: str, transposed: bool, weighted: bool) -> None:
    """More columns than the audit compares at once; with an importance rows are searched in
    binary32."""
    source = Source(
        fmt, 32, 1152, dtype, transposed, seed=3, rule="search", weighted=weighted, block=(48, 80)
    )
    bits = source.bits()
    weight, scale = quantize_pack(source, source.matrix(bits))
    expected = reference.quantize_pack(FORMATS[fmt], source.values(bits), source.reference_choice)
    assert_same("scales", scale, expected[1])
    assert_same("packed", weight, expected[0])
    audit = native.audit(fmt, source.matrix(bits), 32, 0, weight, scale, source.choice)
    assert_same("scales of the audit", audit.row_scale, expected[1])


@pytest.mark.parametrize(("fmt", "top"), [("int4", 7), ("int8", 127)])
def test_integers_are_found_again(isa: str, fmt: str, top: int) -> None:
    """Rows that were quantized before: the scale is theirs, and the codes are."""
    rng = np.random.default_rng(5)
    codes = rng.integers(-top, top + 1, (32, 512))
    codes[:, 0] = top
    steps = np.geomspace(1e-5, 10, 32).astype(np.float32)
    found, scale, _ = packed(fmt, f32_matrix((codes * steps[:, None]).astype(np.float32)))
    assert (found == codes).all()
    units = FORMATS[fmt].traits.scale_units
    np.testing.assert_allclose(scale * units, steps, rtol=2e-5)


def drawn(kind: str, cols: int) -> F32:
    rng = np.random.default_rng(7)
    rows = {
        "normal": lambda: rng.standard_normal((64, cols)),
        "heavy tails": lambda: rng.standard_t(4, (64, cols)),
        "uniform": lambda: rng.uniform(-1, 1, (64, cols)),
        "outlier": lambda: rng.standard_normal((64, cols)),
    }[kind]()
    if kind == "outlier":
        rows[:, cols // 3] = 12
    found: F32 = bf16_to_f32(f32_to_bf16((0.02 * rows).astype(np.float32)))
    return found


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "uniform", "outlier"])
@pytest.mark.parametrize(
    ("fmt", "cols"),
    [
        *(("int4", cols) for cols in (128, 768, 7168, 14336)),
        *(("int8", cols) for cols in (64, 256, 512, 7168, 14336)),
    ],
)
def test_errors_like_those_in_binary32(fmt: str, cols: int, kind: str) -> None:
    """Sums of squares over all rows: 1.004 times at most, and a third less at best."""
    values = drawn(kind, cols)

    def error(rule: str) -> float:
        codes, scale, _ = packed(fmt, bf16_matrix(values), rule)
        restored = reference.dequantize(FORMATS[fmt], codes, scale).astype(np.float64)
        return float(((values - restored) ** 2).sum())

    assert error("search") < 1.005 * error("search-1")


def test_beyond_the_search_by_importance(isa: str) -> None:
    """Rows with importance, and groups, are searched by the rule of the first revision."""
    values = rows_of_all_kinds(384)
    importance = np.random.default_rng(8).lognormal(0, 1, 384).astype(np.float32)
    for method, given in (("int4", importance), ("gint4-32", None), ("gint8-64", importance)):
        found = [
            native.quantize(FORMATS[method].layout, f32_matrix(values), native.Choice(rule, given))
            for rule in ("search", "search-1")
        ]
        for now, before in zip(*found, strict=True):
            assert_same(method, now, before)
    differ = [packed("int4", f32_matrix(values), rule)[1] for rule in ("search", "search-1")]
    assert (differ[0] != differ[1]).any()
