"""Where codes change, and beside it, every level has the codes and the findings of the scalar one:
quick ways hold for most weights, and these are the others."""

from __future__ import annotations

import numpy as np
import pytest

from ktconv import native
from ktconv.native import EncodedAudit, Encoding, Matrix, audit_encoded, encode, largest
from ktconv.system.arrays import F32, U8, Array

ROWS, COLS = 48, 1024
ENCODINGS = [
    Encoding("int4", 32), Encoding("int4", 128), Encoding("int4", 128, half=True),
    Encoding("int4", 128, search=True), Encoding("int4", 32, half=True, search=True),
    Encoding("mxfp4", 32), Encoding("nvfp4", 16),
]  # fmt: skip
# Of NVFP4: usual, scales that are cut at 448, scales that become 1/8.
TENSOR_SCALES = [2688.0, 2688.0 * 1000, 1e-4]


def weights() -> F32:
    """Multiples of 1/8 of a number for each row, and their neighbours: halves of steps under most
    scales; some rows have only zeros but one."""
    random = np.random.default_rng(11)
    eighths = random.integers(-60, 61, (ROWS, COLS)).astype(np.float32) / np.float32(60)
    unit = random.choice(np.array([0.5, 1.0, 1.171875, 1.3, 2.0**-30, 2.0**30], np.float32), ROWS)
    found = eighths * unit[:, None]
    beside = random.integers(-1, 2, found.shape)
    found = np.where(beside > 0, np.nextafter(found, np.float32(np.inf)), found)
    found = np.where(beside < 0, np.nextafter(found, np.float32(-np.inf)), found)
    found[5:8] = 0
    found[6, 700] = -1
    return np.ascontiguousarray(found, np.float32)


def matrix(values: F32, dtype: str) -> Matrix:
    stored: Array = values
    if dtype == "BF16":
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    return Matrix(stored.view(np.uint8).reshape(-1), dtype, ROWS, COLS)


def findings(encoding: Encoding, source: Matrix, scale: float) -> list[U8 | Array | EncodedAudit]:
    """Codes and scales, and what the audit finds in them, in codes that are one off, and under
    scales that are."""
    codes, scales = encode(encoding, source, scale)
    found: list[U8 | Array | EncodedAudit] = [codes.copy(), scales.copy()]
    found.append(audit_encoded(encoding, source, codes, scales, scale))
    codes[::3, ::7] ^= 0x11
    found.append(audit_encoded(encoding, source, codes, scales, scale))
    codes[::3, ::7] ^= 0x11
    scales[::5, ::2] ^= 1
    found.append(audit_encoded(encoding, source, codes, scales, scale))
    return found


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_levels_agree_where_codes_change(isa: str, encoding: Encoding, dtype: str) -> None:
    source = matrix(weights(), dtype)
    for scale in TENSOR_SCALES if encoding.kind == "nvfp4" else [0.0]:
        native.use_isa(isa)
        found = findings(encoding, source, scale)
        native.use_isa("scalar")
        for here, there in zip(found, findings(encoding, source, scale), strict=True):
            if isinstance(here, EncodedAudit):
                assert str(here) == str(there)  # a NaN is one
            else:
                assert np.array_equal(here, there)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_the_largest_magnitude_of_each_dtype(isa: str, dtype: str) -> None:
    values = weights()
    values.view(np.uint32)[...] &= 0xFFFF0000
    for row, col in ((0, 0), (ROWS - 1, COLS - 1), (20, 33)):
        values[row, col] *= -1
        values[row, col] -= 2.0**31 * (row + 1)
        values.view(np.uint32)[...] &= 0xFFFF0000
        assert largest(matrix(values, dtype)) == float(np.abs(values).max())
