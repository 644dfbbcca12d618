"""The activation alone: close to float64, the same bits on all levels, NaN stays NaN."""

from __future__ import annotations

from math import erf, inf, nan

import numpy as np
import pytest
from ktconv._native import lib
from native.kernels.product import F32, F64, Activation, Products

SWIGLU, GELU, GELU_TANH = lib.KT_SWIGLU, lib.KT_GELU, lib.KT_GELU_TANH
RELU2, CLAMPED, SOFTCAP = lib.KT_RELU2, lib.KT_SWIGLU_CLAMPED, lib.KT_SOFTCAP
RELU, GELU_ALONE, TANH_ALONE = lib.KT_RELU, lib.KT_UNGATED_GELU, lib.KT_UNGATED_GELU_TANH
KINDS = {
    "silu": Activation(SWIGLU, 1, 0, inf),
    "gpt-oss": Activation(SWIGLU, 1.702, 1, 7),
    "limit": Activation(SWIGLU, 1, 0, 0.5),
    "gelu": Activation(GELU, 1, 0, inf),
    "gelu limit": Activation(GELU, 1, 0, 7),
    "gelu_tanh": Activation(GELU_TANH, 1, 0, inf),
    "relu2": Activation(RELU2, nan, nan, inf),  # alpha and beta are not looked at
    "relu2 limit": Activation(RELU2, 0, 0, 3),
    "relu": Activation(RELU, nan, nan, inf),
    "relu limit": Activation(RELU, 0, 0, 3),
    "ungated gelu": Activation(GELU_ALONE, nan, nan, inf),
    "ungated gelu limit": Activation(GELU_ALONE, 0, 0, 0.5),
    "ungated gelu_tanh": Activation(TANH_ALONE, nan, nan, inf),
    "ungated gelu_tanh limit": Activation(TANH_ALONE, 0, 0, 0.5),
    "clamped": Activation(CLAMPED, nan, nan, 7),
    "clamped at 0": Activation(CLAMPED, 0, 0, 0),
    "softcap": Activation(SOFTCAP, 4, 25, inf),
    "softcap of the gate": Activation(SOFTCAP, 4, inf, inf),
    "softcap of up": Activation(SOFTCAP, inf, 0.25, inf),
    "softcap limit": Activation(SOFTCAP, 1e-3, 1e6, 2),
}
UNGATED = [kind for kind, one in KINDS.items() if not lib.kt_function_has_gate(one.function)]
LEVELS = ("scalar", "avx512")  # AMX has none of its own
BOUND = 1e-6  # relative: exp to 4e-7, tanh to 2.4e-7, erf to 5e-7 (activation.h), some roundings
TINY = 1e-32  # times BOUND: what sigmoid has at -87 and below, where it should go on to 0


def numbers(count: int, seed: int) -> tuple[F32, F32]:
    """Gate and up: most ordinary, some far into saturation, zeros, denormals, limits and their
    neighbours."""
    rng = np.random.default_rng(seed)
    gate, up = rng.standard_normal((2, count)).astype(np.float32) * np.float32(3)
    gate[: count // 4] *= 20
    gate[:32] = np.linspace(-120, 120, 32)
    gate[32:36] = 0, -0.0, 1e-42, -1e-42
    for values, at in ((gate, 40), (up, 60)):
        for limit in (0.5, 7):
            exact = np.float32(limit)
            near = [np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(8))]
            values[at : at + 6] = [*near, *(-one for one in near)]
            at += 6
    up[80:88] = 0, -0.0, 1e-42, -1e-42, 1e-30, -1e-30, 2e9, -2e9
    gate[96:128] = np.linspace(6.9, 7.1, 32)  # where gate * sigmoid(gate) reaches 7
    return gate, up


def exact(a: Activation, gate: F32, up: F32) -> tuple[F64, F64]:
    """The definition in ktconv.h, and what its error is relative to."""
    wide = gate.astype(np.float64)
    g, u = np.minimum(wide, a.limit), np.clip(up.astype(np.float64), -a.limit, a.limit)
    size = np.abs(g * (u + a.beta if a.function == SWIGLU else u))
    if a.function == GELU:
        return gelu(g) * u, size
    if a.function == GELU_TANH:
        return gelu_tanh(g) * u, size
    if a.function in (GELU_ALONE, TANH_ALONE):
        return (gelu if a.function == GELU_ALONE else gelu_tanh)(u), np.abs(u)
    if a.function == SWIGLU:
        return g / (1 + np.exp(-a.alpha * g)) * (u + a.beta), size
    if a.function == RELU2:
        value = np.where(u > 0, u * u, 0)
    elif a.function == RELU:
        value = np.where(u > 0, u, 0)
    elif a.function == CLAMPED:
        value = np.minimum(wide / (1 + np.exp(-wide)), a.limit) * u
    else:
        value = capped(g, a.alpha) / (1 + np.exp(-g)) * capped(u, a.beta)
    return value, np.abs(value) + TINY * np.abs(wide * u)


def gelu(x: F64) -> F64:
    value: F64 = x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2
    return value


def gelu_tanh(x: F64) -> F64:
    value: F64 = x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2
    return value


def capped(x: F64, cap: float) -> F64:
    return x if cap == inf else cap * np.tanh(x / cap)


def bits(values: F32) -> list[int]:
    found: list[int] = values.view(np.uint32).tolist()
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_near_exact_ones(products: Products, level: str, kind: str) -> None:
    gate, up = numbers(4096, 1)
    expected, size = exact(KINDS[kind], gate, up)
    error = np.abs(products.activate(level, KINDS[kind], gate, up) - expected)
    worst = int(np.argmax(error - BOUND * size))
    assert error[worst] <= BOUND * size[worst] + 1e-37, f"at {gate[worst]}, {up[worst]}"


@pytest.mark.parametrize("level", LEVELS)
def test_tanh_is_relative_near_0(products: Products, level: str) -> None:
    """1 * 128 * tanh(up): sigmoid(128) is 1. The bound is epilogue.h's."""
    rng = np.random.default_rng(6)
    up = np.exp2(rng.uniform(-126, 4, 1 << 16)).astype(np.float32)
    up[::2] *= -1
    gate = np.full_like(up, 128)
    found = products.activate(level, Activation(SOFTCAP, inf, 1, inf), gate, up) / 128.0
    expected = np.tanh(up.astype(np.float64))
    assert np.abs(found / expected - 1).max() < 2.4e-7
    denormal = np.array([1e-42, -1e-42, 1e-45, 0, -0.0] * 32, np.float32)
    found = products.activate(level, Activation(SOFTCAP, inf, 1, inf), gate[:160], denormal)
    assert bits(found) == bits(np.float32(128) * denormal)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["gpt-oss", "relu2 limit", "clamped", "softcap", *UNGATED])
def test_biases_come_first(products: Products, level: str, kind: str) -> None:
    """Those of a row for all its tokens."""
    gate, up = (of.reshape(3, 256) for of in numbers(768, 2))
    gate_bias, up_bias = numbers(256, 3)
    found = products.activate(level, KINDS[kind], gate, up, gate_bias, up_bias)
    alone = products.activate(level, KINDS[kind], gate + gate_bias, up + up_bias)
    assert np.array_equal(found.view(np.uint32), alone.view(np.uint32))
    up_alone = products.activate(level, KINDS[kind], gate, up, None, up_bias)
    alone = products.activate(level, KINDS[kind], gate, up + up_bias)
    assert np.array_equal(up_alone.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_strips_do_not_matter(products: Products, level: str, kind: str) -> None:
    gate, up = (of.reshape(5, 192) for of in numbers(960, 4))
    together = products.activate(level, KINDS[kind], gate, up)
    for token in range(5):
        for cut in (slice(0, 32), slice(160, 192)):
            piece = products.activate(level, KINDS[kind], gate[token, cut], up[token, cut])
            assert bits(piece) == bits(together[token, cut])


@pytest.mark.parametrize("kind", KINDS)
def test_levels_agree(products: Products, kind: str) -> None:
    gate, up = numbers(4096, 5)
    huge = np.array([inf, -inf, 3e38, -3e38, 1e-45, -1e-45, 0, -0.0], np.float32)
    gate[128:192], up[128:192] = np.repeat(huge, 8), np.tile(huge, 8)
    found = [products.activate(level, KINDS[kind], gate, up) for level in LEVELS]
    assert np.array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_one(products: Products, level: str, kind: str) -> None:
    """Of gate or up alone: a limit does not make a number of it."""
    gate, up = np.full(64, 1.5, np.float32), np.full(64, 0.25, np.float32)
    gate[[3, 40]], up[[7, 50]] = nan, nan
    found = products.activate(level, KINDS[kind], gate, up)
    where = [7, 50] if kind in UNGATED else [3, 7, 40, 50]
    assert np.flatnonzero(np.isnan(found)).tolist() == where


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", UNGATED)
def test_no_gate_is_read(products: Products, level: str, kind: str) -> None:
    gate, up = numbers(256, 7)
    found = products.activate(level, KINDS[kind], None, up)
    assert bits(found) == bits(products.activate(level, KINDS[kind], gate, up))
    assert (found[up > 1e-15] > 0).all()
    if "relu" in kind:
        assert (found[up <= 0] == 0).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("alone", "beside"), [(GELU_ALONE, GELU), (TANH_ALONE, GELU_TANH)])
def test_gelu_is_the_same_with_and_without_a_gate(
    products: Products, level: str, alone: int, beside: int
) -> None:
    """Of up what it is of a gate beside an up of 1, limits included."""
    _, up = numbers(4096, 8)
    ones = np.ones_like(up)
    for limit in (inf, 7.0):
        found = products.activate(level, Activation(alone, 0, 0, limit), None, up)
        gate = np.maximum(up, np.float32(-limit))  # which a limit does not cut from below
        same = products.activate(level, Activation(beside, 0, 0, limit), gate, ones)
        assert bits(found) == bits(same)


EXTREMES = [  # kind, gate, up, h
    ("gpt-oss", inf, -inf, -7 * 6 / (1 + np.exp(-1.702 * 7))),
    ("relu2", nan, inf, inf),
    ("relu2", nan, -inf, 0),
    ("relu2", nan, 3e38, inf),
    ("relu2 limit", nan, inf, 9),
    ("relu", nan, inf, inf),
    ("relu", nan, -inf, 0),
    ("relu limit", nan, inf, 3),
    ("ungated gelu", nan, inf, inf),
    ("ungated gelu", nan, 3e38, 3e38),
    ("ungated gelu limit", nan, inf, 0.3457312),
    ("ungated gelu limit", nan, -inf, -0.1542688),
    ("ungated gelu_tanh", nan, inf, inf),
    ("ungated gelu_tanh limit", nan, inf, 0.3457140),
    ("ungated gelu_tanh limit", nan, -inf, -0.1542860),
    ("clamped", inf, inf, 49),
    ("clamped", 3e38, -inf, -49),
    ("clamped", 7.1, 8, 49),
    ("clamped", 7, 1, 7 / (1 + np.exp(-7))),  # the gate itself is not cut
    ("clamped at 0", 5, 5, 0),
    ("softcap", inf, inf, 100),
    ("softcap", 3e38, -3e38, -100),
    ("softcap", -inf, -inf, 0),
    ("softcap of the gate", inf, 3, 12),
    ("softcap of up", 100, -inf, -25),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "gate", "up", "expected"), EXTREMES)
def test_extremes(
    products: Products, level: str, kind: str, gate: float, up: float, expected: float
) -> None:
    values = (np.full(32, value, np.float32) for value in (gate, up))
    found = products.activate(level, KINDS[kind], *values)
    assert found.tolist() == pytest.approx([expected] * 32, rel=1e-6, abs=1e-36)
    if "limit" in kind or kind == "clamped":
        factors = 1 if kind.startswith(("relu ", "ungated")) else 2
        assert np.abs(found).max() <= KINDS[kind].limit ** factors
