"""Packing weights in memory: the converter's bytes, and little memory beside them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import reference
from helpers.convert import convert
from helpers.families import Weights, random_weights
from helpers.kernel_errors import kernel_error
from helpers.paths import EXAMPLE
from helpers.reference import Choice
from numpy.typing import NDArray

from ktconv.errors import UsageError
from ktconv.formats import FORMATS, split
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import Activation, Layout
from ktconv.runtime.layers import KERNEL_BOUND, Experts, native_experts, open_experts, pack_online

pytestmark = pytest.mark.slow

F32 = NDArray[np.float32]
HIDDEN, INNER, EXPERTS = 256, 384, 3


def weights(seed: int = 0) -> Weights:
    return random_weights(HIDDEN, INNER, EXPERTS, seed)


def packed(stacks: Iterable[Any], method: str, **options: Any) -> Experts:
    gate, up, down = stacks
    return pack_online(gate, up, down, method, **options)


def packed_bytes(experts: Experts) -> list[bytes]:
    """Codes and scales of all matrices, in order."""
    return [
        array.tobytes()
        for row in experts.layer._keep
        for expert in row
        for matrix in expert or ()
        for array in ((matrix.codes, matrix.scale) if matrix else ())
        if array is not None
    ]


# ---- numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["int4", "int8"])
@pytest.mark.parametrize("scale", ["search", "amax"])
def test_bytes_are_those_of_quantize_cpu(method: str, scale: str, tmp_path: Path) -> None:
    """Its default rule is ours; "amax" is that of KTransformers."""
    convert(EXAMPLE, tmp_path / "out", method=method, numa=2, scale=scale)
    source = native_experts(EXAMPLE, 1)
    stacks = [
        f32_to_bf16(np.stack([matrix.values() for matrix in matrices if matrix is not None]))
        for matrices in zip(*map(source.streams, range(source.count)), strict=True)
    ]
    default: dict[str, Any] = {} if scale == "search" else {"scale": scale}
    online = packed(stacks, method, parts=2, **default)
    converted = open_experts(tmp_path / "out", 1)
    assert packed_bytes(online) == packed_bytes(converted)


@pytest.mark.parametrize(("parts", "method"), [(1 + i % 2 * 2, m) for i, m in enumerate(FORMATS)])
def test_numbers_are_those_of_the_reference(parts: int, method: str) -> None:
    """Whole and in three parts, by turns: matrices are cut before they meet a format."""
    given, fmt = weights(), FORMATS[method]
    experts = pack_online(*given, method, parts=parts, threads=2)
    choice = [Choice("search")] if fmt.traits.max_level else []
    for proj, stack in zip(("gate", "up", "down"), given, strict=True):
        index = ("gate", "up", "down").index(proj)
        for expert in range(EXPERTS):
            matrix = experts.streams(expert)[index]
            assert matrix is not None
            values = matrix.values()
            for part in range(parts):
                here = split(proj, HIDDEN, INNER, part, parts).index
                codes, scales = reference.quantize(
                    fmt, np.ascontiguousarray(stack[expert][here]), *choice
                )
                expected = reference.dequantize(fmt, codes, scales)
                np.testing.assert_array_equal(values[here], expected)
    assert kernel_error(experts) < KERNEL_BOUND


@pytest.mark.parametrize("method", ["bf16", "int8", "fp8"])
def test_all_dtypes_of_the_same_numbers_are_one(method: str) -> None:
    """What half precision, bf16 and float32 have: the same bytes; bf16 keeps all of it."""
    exact = Weights(*(f16.astype(np.float32) for f16 in halves(weights())))
    of_f32 = packed(exact, method)
    of_f16 = packed(halves(exact), method)
    of_bits = packed(map(f32_to_bf16, exact), method)
    assert packed_bytes(of_f32) == packed_bytes(of_f16) == packed_bytes(of_bits)
    if method == "bf16":
        down = of_f32.streams(1)[2].values()
        np.testing.assert_array_equal(down, exact.down[1])


def halves(given: Weights) -> Any:
    """Cut to the mantissa of bf16, in the range of half precision."""
    return [
        np.clip(np.where(np.abs(one) < 1e-3, 0, one), -6, 6).astype(np.float16) for one in given
    ]


def test_bf16_rounds_to_nearest() -> None:
    values = np.random.default_rng(0).standard_normal((1, 128, 128)).astype(np.float32)
    experts = pack_online(values, values, values, "bf16")
    expected = bf16_to_f32(f32_to_bf16(values[0]))
    np.testing.assert_array_equal(experts.streams(0)[1].values(), expected)


def test_arrays_of_any_order_and_lists() -> None:
    """Transposed stacks, slices, and a matrix for each expert."""
    given = weights()
    expected = packed_bytes(pack_online(*given, "int4"))
    swapped = [np.ascontiguousarray(one.swapaxes(1, 2)).swapaxes(1, 2) for one in given]
    assert packed_bytes(packed(swapped, "int4")) == expected
    fused = np.concatenate([given.gate, given.up], axis=1)
    views = fused[:, :INNER], fused[:, INNER:], given.down
    assert packed_bytes(packed(views, "int4")) == expected
    assert packed_bytes(packed(map(list, given), "int4")) == expected


# ---- activations and biases ------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_biases_and_activations(parts: int) -> None:
    given, rng = weights(), np.random.default_rng(9)
    biases = [rng.standard_normal((EXPERTS, one.shape[1])).astype(np.float32) for one in given]
    clamped = Activation("swiglu", 1.702, 1.0, 7.0)
    experts = pack_online(
        *given, "bf16", parts=parts, activation=clamped, biases=(biases[0], biases[1], biases[2])
    )
    assert experts.biased and experts.activation == clamped
    for index, bias in enumerate(biases):
        found = experts.streams(2)[index]
        assert found is not None and found.bias is not None
        np.testing.assert_array_equal(found.bias, bias[2])
    assert kernel_error(experts) < KERNEL_BOUND
    before = packed_bytes(experts)
    for one in (*given, *biases):
        one[:] = 0  # the caller's arrays are his
    assert packed_bytes(experts) == before
    down = experts.streams(2)[2]
    assert down.bias is not None and down.bias.any()


def test_experts_without_gates() -> None:
    given = weights()
    experts = pack_online(None, given.up, given.down, "int8", activation=Activation("relu2"))
    assert experts.streams(0)[0] is None
    assert kernel_error(experts) < KERNEL_BOUND


# ---- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["int4", "fp8", "bf16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite(method: str, value: float) -> None:
    """In the second part, so that its rows count from there."""
    given = weights()
    given.down[2, 7, 300] = value
    says = "down of expert 2 has a NaN or an infinity at row 7, column 300"
    with pytest.raises(UsageError, match=says):
        pack_online(*given, method, parts=3)
    given = weights()
    given.up[1, 290, 9] = value
    with pytest.raises(UsageError, match=r"up of expert 1 has .* row 290, column 9"):
        packed(map(f32_to_bf16, given), method, parts=3)


def test_numbers_beyond_bf16() -> None:
    given = weights()
    given.gate[0, 3, 4] = np.finfo(np.float32).max
    with pytest.raises(UsageError, match=r"gate of expert 0 has .*bf16, 3\.40282e\+38, at row 3"):
        pack_online(*given, "bf16")


GIVEN = weights()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "int5"}, "unknown method 'int5'"),
        ({"scale": "best"}, "unknown rule for scales 'best'"),
        ({"parts": 2, "method": "fp8"}, "fp8 does not support intermediate size of a part 192"),
        ({"parts": 0}, "0 parts"),
        (
            {"down": GIVEN.up},
            r"down must have 3 arrays \[256, 384\] .* not float32 \[3, 384, 256\]",
        ),
        ({"up": GIVEN.up[:2]}, "gate must have 2 arrays"),
        ({"up": GIVEN.up[0]}, r"up must have a matrix for each expert, not float32 \[384, 256\]"),
        ({"up": []}, "not 0 of nothing"),
        ({"gate": GIVEN.gate.astype(np.float64)}, "gate must have .*uint16 or float16 or float32"),
        (
            {"gate": [*GIVEN.gate[:2], GIVEN.gate[2][:9]]},
            r"3 of float32 \[384, 256\], float32 \[9,",
        ),
        ({"gate": None}, "experts with the activation swiglu have a gate"),
        ({"activation": Activation("relu2")}, "the activation relu2 have no gate"),
        ({"biases": (None, GIVEN.up[:, :, 0], GIVEN.up[:, :, 0])}, "the bias of down must have"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {**GIVEN._asdict(), "method": "int8", **changes}
    with pytest.raises(UsageError, match=says) as caught:
        pack_online(**arguments)
    assert caught.value.hint


# ---- memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["int4", "fp8", "bf16"])
def test_extra_memory_is_that_of_a_few_matrices(method: str) -> None:
    """However many experts there are; nothing has a layer's size but its packed bytes."""
    hidden, inner, count = 512, 512, 24
    stack = np.zeros((count, inner, hidden), np.uint16)
    matrix = hidden * inner * 4  # bytes in float32
    pack_online(stack, stack, stack, method, threads=1)  # what is made once in a process
    tracemalloc.start()
    try:
        experts = pack_online(stack, stack, stack, method, threads=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    extra = peak - count * experts.expert_bytes
    assert extra < 10 * matrix < 3 * count * matrix / 6


def test_memory_is_bound_before_it_is_written() -> None:
    bound: list[int] = []

    def bind(memory: Any, part: int) -> None:
        bound.append(part)
        memory[:] = 0xEE

    experts = pack_online(*weights(), "gint4-32", parts=2, bind=bind)
    assert bound == [0, 1]
    assert packed_bytes(experts) == packed_bytes(pack_online(*weights(), "gint4-32", parts=2))
    assert experts.format.layout == Layout("gint4", 32, "bf16")
