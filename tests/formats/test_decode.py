"""Source encodings against their definitions, over every bit pattern where feasible."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktconv.formats.decode import (
    bf16_to_f32,
    e4m3fn_to_f32,
    e8m0_to_f32,
    f16_to_f32,
    f32_to_bf16,
    round_to_bf16,
)

ALL_BYTES = np.arange(256, dtype=np.uint8)
ALL_U16 = np.arange(65536, dtype=np.uint16)


def test_bf16_round_trips() -> None:
    values = bf16_to_f32(ALL_U16)
    finite = ~np.isnan(values)
    assert np.array_equal(f32_to_bf16(values)[finite], ALL_U16[finite])
    assert np.isnan(round_to_bf16(values)[~finite]).all()
    assert values[0x3F80] == 1.0
    assert values[0xC2FE] == -127.0


def test_f16_is_exact() -> None:
    values = f16_to_f32(ALL_U16)
    assert values[0x3C00] == 1.0
    assert values[0x0001] == 2.0**-24
    assert values[0xFBFF] == -65504.0
    assert values[0x7C00] == np.inf
    assert np.isnan(values[0x7C01])


def test_e4m3fn_landmarks() -> None:
    values = e4m3fn_to_f32(ALL_BYTES)
    landmarks = {0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x7E: 448.0}
    for code, value in landmarks.items():
        assert values[code] == value
        assert values[code | 0x80] == -value
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7F, 0xFF]
    assert math.copysign(1.0, values[0x80]) == -1.0
    assert (np.diff(values[:0x7F]) > 0).all()


def test_e4m3fn_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.from_numpy(ALL_BYTES.copy()).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(theirs, e4m3fn_to_f32(ALL_BYTES), equal_nan=True)


def test_e8m0() -> None:
    values = e8m0_to_f32(ALL_BYTES)
    assert values.dtype == np.float32
    assert (values[0], values[127], values[254]) == (2.0**-127, 1.0, 2.0**127)
    assert np.isnan(values[255])
    assert (values[1:255] == 2 * values[:254]).all()


@given(bits=st.integers(0, 2**32 - 1))
def test_bf16_rounding_is_nearest_even(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    rounded = f32_to_bf16(value)
    if np.isnan(value[0]):
        assert np.isnan(bf16_to_f32(rounded)[0])
        return
    low, high = bits >> 16, (bits >> 16) + 1  # the next magnitude, Inf included
    distance = (bits & 0xFFFF) - 0x8000
    nearest = high if distance > 0 or (distance == 0 and low % 2) else low
    assert int(rounded[0]) == nearest


def test_bf16_rounding_examples() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001], np.uint32)
    rounded = f32_to_bf16(bits.view(np.float32))
    assert rounded.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0]


def test_bf16_rounding_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 16, np.uint32)
    values = bits.view(np.float32)
    theirs = torch.from_numpy(values.copy()).bfloat16().float().numpy()
    assert np.array_equal(theirs, round_to_bf16(values), equal_nan=True)
