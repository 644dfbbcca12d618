"""Entry points called without one of their buffers, with sizes beyond 64 bits, in another float
mode."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import numpy as np
import pytest
from ktconv._native import ffi, lib

ROWS, COLS = 32, 128
# Calls by name: pointers that must be given, in order, with the bytes behind each; numbers stay.
CALLS: dict[str, list[str | int | float]] = {
    "kt_decode": ["matrix", "room"],
    "kt_quantize": ["layout", "matrix", "optional", "room", "room", "scratch", -1, "optional"],
    "kt_quantize_pack": ["layout", "matrix", "optional", "room", "room", "scratch", -1, "optional"],
    "kt_pack": ["layout", ROWS, COLS, "room", "optional", "room", "optional"],
    "kt_unpack": ["layout", ROWS, COLS, "room", "optional", "room", "optional"],
    "kt_encode": ["encoding", "matrix", 1.0, "room", "room", "scratch", -1, "optional"],
    "kt_largest": ["matrix", "room", "scratch", -1, "optional"],
    "kt_encoded_sizes": ["encoding", ROWS, COLS, "room"],
    "kt_audit_run": [
        "layout", "matrix", "optional", ROWS, 0, "room", "room", "room", "room", "room", "optional",
        "room", "scratch", -1,
    ],
    "kt_audit_codes": ["layout", "room", ROWS, COLS, "room"],
    "kt_audit_encoded": ["encoding", "matrix", 1.0, "room", "room", "room"],
    "kt_encode_audit": [
        "encoding", "matrix", 1.0, "room", "room", "scratch", -1, "room", "room", "optional",
    ],
    "kt_compensate": [
        7, ROWS, COLS, "room", ROWS, "ones", "room", 1, "room", "room", "room", "room",
    ],
}  # fmt: skip
LARGE = 1 << 40  # rows and columns whose product does not fit


def status(name: str, arguments: list[Any], kept: list[Any]) -> int:
    """Of a call with zeros behind every pointer; None: NULL."""
    values = {
        "layout": lambda: ffi.new("kt_layout *", (lib.KT_FORMAT_INT8, 0, lib.KT_SCALE_F32)),
        "encoding": lambda: ffi.new("kt_encoding *", (lib.KT_ENCODE_INT8, 32, 0, 0)),
        "matrix": lambda: ffi.new("kt_matrix *", {
            "data": room(), "rows": ROWS, "cols": COLS, "row_stride": COLS, "col_stride": 1,
            "dtype": lib.KT_BF16,
        }),
        "room": lambda: room(),
        "ones": lambda: keep(ffi.new("float[]", [1.0] * (COLS * COLS))),
        "scratch": lambda: keep(ffi.new("char[]", lib.kt_scratch_size(COLS))),
        "optional": lambda: ffi.NULL,
    }  # fmt: skip

    def keep(value: Any) -> Any:
        kept.append(value)
        return value

    def room() -> Any:
        return keep(ffi.new("char[]", ROWS * COLS * 8))

    given = []
    for one in arguments:
        if one is None:
            given.append(ffi.NULL)
        elif isinstance(one, str):
            given.append(keep(values[one]()))
        else:
            given.append(lib.kt_scratch_size(COLS) if one == -1 else one)
    function = getattr(lib, name)
    types = ffi.typeof(function).args
    cast = [
        ffi.cast(kind, value) if kind.kind == "pointer" else value
        for kind, value in zip(types, given, strict=True)
    ]
    return int(function(*cast))


@pytest.mark.parametrize("name", CALLS)
def test_a_buffer_that_is_missing(name: str) -> None:
    arguments = CALLS[name]
    assert status(name, arguments, []) == lib.KT_OK
    for at, one in enumerate(arguments):
        if isinstance(one, str) and one != "optional":
            without = [*arguments[:at], None, *arguments[at + 1 :]]
            wanted = lib.KT_ERR_SCRATCH if one == "scratch" else lib.KT_ERR_ARGUMENT
            assert status(name, without, []) == wanted, at


@pytest.mark.parametrize("name", ["kt_pack", "kt_unpack", "kt_audit_codes", "kt_encoded_sizes"])
def test_a_matrix_that_no_memory_holds(name: str) -> None:
    large = [LARGE if isinstance(one, int) else one for one in CALLS[name]]
    assert status(name, large, []) == lib.KT_ERR_SHAPE


DOWNWARD = {"x86_64": 0x400, "aarch64": 0x800000}  # FE_DOWNWARD


@pytest.mark.parametrize("name", [name for name in CALLS if name != "kt_encoded_sizes"])
def test_the_callers_float_mode_is_given_back(name: str) -> None:
    """Another rounding direction, which shows in a quotient."""
    libm = ctypes.CDLL("libm.so.6")
    one, three = np.ones(1, np.float32), np.full(1, 3, np.float32)
    usual, kept = one / three, list[Any]()
    assert libm.fesetround(DOWNWARD[platform.machine()]) == 0
    try:
        before = one / three
        found = status(name, CALLS[name], kept)
        after = one / three
    finally:
        libm.fesetround(0)
    assert found == lib.KT_OK
    assert before[0] < usual[0] and after[0] == before[0]
