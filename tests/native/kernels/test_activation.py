"""The activation alone: close to float64, the same bits on both levels, NaN stays NaN."""

from __future__ import annotations

from math import erf, inf, nan

import numpy as np
import pytest
from native.kernels.product import F32, F64, Activation, Products

SWIGLU, GELU, GELU_TANH = 0, 1, 2
KINDS = {
    "silu": Activation(SWIGLU, 1, 0, inf),
    "gpt-oss": Activation(SWIGLU, 1.702, 1, 7),
    "limit": Activation(SWIGLU, 1, 0, 0.5),
    "gelu": Activation(GELU, 1, 0, inf),
    "gelu limit": Activation(GELU, 1, 0, 7),
    "gelu_tanh": Activation(GELU_TANH, 1, 0, inf),
}
LEVELS = ("scalar", "avx512")  # AMX has none of its own
BOUND = 1e-6  # of |g (u + beta)|: exp to 3e-7 and erf to 5e-7 (epilogue.h), some roundings


def numbers(count: int, seed: int) -> tuple[F32, F32]:
    """Gate and up: most ordinary, some far into saturation, zeros and denormals."""
    rng = np.random.default_rng(seed)
    gate, up = rng.standard_normal((2, count)).astype(np.float32) * np.float32(3)
    gate[: count // 4] *= 20
    gate[:32] = np.linspace(-120, 120, 32)
    gate[32:36] = 0, -0.0, 1e-42, -1e-42
    return gate, up


def exact(a: Activation, gate: F32, up: F32) -> tuple[F64, F64]:
    """The definition in ktconv.h, and |g (u + beta)|."""
    g = np.minimum(gate.astype(np.float64), a.limit)
    u = np.clip(up.astype(np.float64), -a.limit, a.limit)
    size = np.abs(g * (u + a.beta))
    if a.function == GELU:
        return g * (1 + np.vectorize(erf)(g / np.sqrt(2))) / 2 * u, size
    if a.function == GELU_TANH:
        return g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) / 2 * u, size
    return g / (1 + np.exp(-a.alpha * g)) * (u + a.beta), size


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_near_exact_ones(products: Products, level: str, kind: str) -> None:
    gate, up = numbers(4096, 1)
    expected, size = exact(KINDS[kind], gate, up)
    error = np.abs(products.activate(level, KINDS[kind], gate, up) - expected)
    worst = int(np.argmax(error - BOUND * size))
    assert error[worst] <= BOUND * size[worst] + 1e-37, f"at {gate[worst]}, {up[worst]}"


@pytest.mark.parametrize("level", LEVELS)
def test_biases_come_first(products: Products, level: str) -> None:
    gate, up = numbers(256, 2)
    gate_bias, up_bias = numbers(256, 3)
    found = products.activate(level, KINDS["gpt-oss"], gate, up, gate_bias, up_bias)
    alone = products.activate(level, KINDS["gpt-oss"], gate + gate_bias, up + up_bias)
    assert np.array_equal(found.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_levels_agree(products: Products, kind: str) -> None:
    gate, up = numbers(4096, 4)
    found = [products.activate(level, KINDS[kind], gate, up) for level in LEVELS]
    assert np.array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_one(products: Products, level: str, kind: str) -> None:
    """Of gate or up alone: a limit does not make a number of it."""
    gate, up = np.full(64, 1.5, np.float32), np.full(64, 0.25, np.float32)
    gate[[3, 40]], up[[7, 50]] = nan, nan
    found = products.activate(level, KINDS[kind], gate, up)
    assert np.flatnonzero(np.isnan(found)).tolist() == [3, 7, 40, 50]


@pytest.mark.parametrize("level", LEVELS)
def test_infinities_meet_the_limit(products: Products, level: str) -> None:
    gate, up = np.full(32, inf, np.float32), np.full(32, -inf, np.float32)
    limited, _ = exact(KINDS["gpt-oss"], np.full(1, 7, np.float32), np.full(1, -7, np.float32))
    found = products.activate(level, KINDS["gpt-oss"], gate, up)
    assert np.allclose(found, limited, rtol=1e-6)
