"""Gradients of fine-tuning against finite differences of a float64 loss that knows no backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from ktconv._native import ffi, lib
from native.test_forward import Array, weights_of

from ktconv import native
from ktconv.formats import FORMATS
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import Activation, Pool
from ktconv.native.pool import open_pool
from ktconv.runtime.layers import Experts, pack_experts

TOKENS, TOP_K, EXPERTS, HIDDEN, INNER, RANK, PARTS = 6, 2, 3, 128, 256, 4, 2
SCALE = 1.5
BOUND = 0.006  # of the length of a gradient, as activations are bf16
SHAPES = {
    "gate_a": (RANK, HIDDEN), "gate_b": (INNER, RANK),
    "up_a": (RANK, HIDDEN), "up_b": (INNER, RANK),
    "down_a": (RANK, INNER), "down_b": (HIDDEN, RANK),
}  # fmt: skip
Values = Mapping[str, Array]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    return x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


# Activations, and what they do to gate and up.
CASES: dict[str, tuple[Activation, Callable[[Array, Array], Array]]] = {
    "bf16": (Activation(), lambda g, u: g * sigmoid(g) * u),
    "fp8": (Activation("swiglu", 1.702, 1.0), lambda g, u: g * sigmoid(1.702 * g) * (u + 1)),
    "mxfp4": (Activation("ungated_gelu_tanh"), lambda g, u: gelu_tanh(u)),
    "mxfp8": (Activation("swiglu", 1.702, 1.0), lambda g, u: g * sigmoid(1.702 * g) * (u + 1)),
}


def drawn(seed: int, *shape: int, scale: float = 1.0) -> Array:
    """float32 numbers that bf16 has too."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)
    return bf16_to_f32(f32_to_bf16(values))


def arguments(activation: Activation) -> dict[str, Array]:
    """All that has a gradient; the matrices of gate where experts have one."""
    names = [name for name in SHAPES if activation.gated or not name.startswith("gate")]
    lora = {
        name: drawn(i, EXPERTS, *SHAPES[name], scale=SHAPES[name][-1] ** -0.5)
        for i, name in enumerate(names)
    }
    return {"dx": drawn(20, TOKENS, HIDDEN), "dweights": drawn(21, TOKENS, TOP_K), **lora}


def with_lora(values: Values, matrix: Array, name: str, expert: int) -> Array:
    """W + scale B A, in float64."""
    return matrix + SCALE * values[f"{name}_b"][expert] @ values[f"{name}_a"][expert]


def dequantized(layer: Experts, expert: int) -> dict[str, Array]:
    streams = zip(("gate", "up", "down"), layer.streams(expert), strict=True)
    return {name: one.values().astype(np.float64) for name, one in streams if one is not None}


def loss(method: str, base: list[dict[str, Array]], ids: Array, dy: Array, values: Values) -> float:
    """Sum of dy * y."""
    total = 0.0
    for (token, choice), expert in np.ndenumerate(ids):
        full = {name: with_lora(values, w, name, expert) for name, w in base[expert].items()}
        x = values["dx"][token]
        gate = full["gate"] @ x if "gate" in full else np.zeros(())
        y = full["down"] @ CASES[method][1](gate, full["up"] @ x)
        total += values["dweights"][token, choice] * float(dy[token] @ y)
    return total


def pointer(array: Array) -> Any:
    return ffi.cast("void *", native.address_of(array))


def gradients_of(layer: Experts, ids: Array, dy: Array, values: dict[str, Array]) -> Values:
    """By the library, in float32."""
    with closing(Pool(2)) as pool:
        return compute(layer, open_pool(pool), ids, dy, values)


def compute(layer: Experts, pool: Any, ids: Array, dy: Array, values: dict[str, Array]) -> Values:
    found = {name: np.full_like(array, np.nan) for name, array in values.items()}
    y, moe = np.empty((TOKENS, HIDDEN), np.float32), layer.layer.c
    lora = ffi.new("kt_lora *", {"rank": RANK, "scale": SCALE, "dtype": lib.KT_F32})
    wanted = ffi.new("kt_moe_gradients *", {"dy": pointer(dy), "dx": pointer(found["dx"])})
    wanted.dy_dtype = wanted.dx_dtype = lib.KT_F32
    for name in found.keys() - {"dx"}:
        setattr(wanted, name, ffi.cast("float *", native.address_of(found[name])))
        if name in SHAPES:
            setattr(lora, name, pointer(values[name]))
    call = ffi.new("kt_moe_call *", {"tokens": TOKENS, "top_k": TOP_K, "id_size": 8})
    call.x, call.ids, call.y = pointer(values["dx"]), pointer(ids), pointer(y)
    call.weights = ffi.cast("float *", native.address_of(values["dweights"]))
    call.x_dtype = call.y_dtype = lib.KT_F32
    saved = native.aligned_bytes(lib.kt_train_saved_size(moe, lora, TOKENS, TOP_K))
    scratch = native.aligned_bytes(lib.kt_train_scratch_size(moe, lora, TOKENS, TOP_K, pool))
    memory = pointer(saved), pointer(scratch)
    assert not lib.kt_train_forward(moe, lora, pool, call, *memory, scratch.nbytes)
    assert not lib.kt_train_backward(
        moe, lora, pool, call, memory[0], wanted, memory[1], scratch.nbytes
    )
    return found


@pytest.mark.parametrize("method", CASES)
def test_gradients_are_those_of_finite_differences(isa: str, method: str) -> None:
    activation = CASES[method][0]
    source = weights_of(3, HIDDEN, INNER, activation.gated)
    layer = pack_experts(
        FORMATS[method], source, list(range(EXPERTS)), HIDDEN, INNER, parts=PARTS,
        activation=activation,
    )  # fmt: skip
    ids = np.random.default_rng(5).integers(0, EXPERTS, (TOKENS, TOP_K))
    dy, values = drawn(22, TOKENS, HIDDEN), arguments(activation)
    found = gradients_of(layer, ids, dy, values)
    base = [dequantized(layer, expert) for expert in range(EXPERTS)]
    exact = {name: array.astype(np.float64) for name, array in values.items()}

    def slope(name: str, direction: Array) -> float:
        step = 1e-4 * direction / np.linalg.norm(direction)
        ahead, behind = (
            loss(method, base, ids, dy, {**exact, name: exact[name] + sign * step})
            for sign in (1, -1)
        )
        return (ahead - behind) / 2e-4 * float(np.linalg.norm(direction))

    for name, gradient in found.items():
        length = float(np.linalg.norm(gradient))
        assert length > 0
        assert slope(name, gradient / length) == pytest.approx(length, rel=BOUND), name
        direction = np.random.default_rng(len(name)).standard_normal(gradient.shape)
        along = float(np.sum(gradient * direction))
        assert slope(name, direction) == pytest.approx(along, abs=4 * BOUND * length), name
