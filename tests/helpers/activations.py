"""What experts compute between their products, from the formulas of their models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def sigmoid(x: F64) -> F64:
    return 1 / (1 + np.exp(-np.clip(x, -700, 700)))


def silu(gate: F64, up: F64) -> F64:
    return gate * sigmoid(gate) * up


def gelu_tanh(gate: F64, up: F64) -> F64:
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + np.tanh(inner)) * up


def clamp(gate: F64, up: F64, limit: float = 10.0) -> F64:
    return silu(np.minimum(gate, limit), np.clip(up, -limit, limit))


def clamp_after(gate: F64, up: F64, limit: float) -> F64:
    """Of Step, in the layers that have a limit."""
    if not limit:
        return silu(gate, up)
    return np.minimum(gate * sigmoid(gate), limit) * np.clip(up, -limit, limit)


def oai(gate: F64, up: F64, alpha: float = 1.702, limit: float = 7.0) -> F64:
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(alpha * gate) * (up + 1)


def soft(gate_cap: float, up_cap: float) -> Callable[[F64, F64], F64]:
    """Of Kimi-K3 and Inkling-2."""

    def capped(gate: F64, up: F64) -> F64:
        return gate_cap * np.tanh(gate / gate_cap) * sigmoid(gate) * up_cap * np.tanh(up / up_cap)

    return capped


_erf = np.vectorize(math.erf, otypes=[np.float64])

_FORMULAS: Mapping[str, Callable[[F64, F64], F64]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "relu2": lambda _, up: np.maximum(up, 0) ** 2,
    "relu": lambda _, up: np.maximum(up, 0),
    "ungated gelu": lambda _, up: up * (1 + _erf(up / math.sqrt(2))) / 2,
    "ungated gelu_tanh": lambda _, up: gelu_tanh(up, np.ones_like(up)),
    "clamp": clamp,
    "oai": oai,
    "situ": soft(4.0, 25.0),
    "softcap": soft(4.0, 25.0),
}


def computed(activation: str, gate: F64, up: F64, config: Mapping[str, Any], layer: int) -> F64:
    """[M, I] of the outputs of gate and up; `config` is the section of the text model."""
    if activation == "stepclamp":
        return clamp_after(gate, up, config["swiglu_limits"][layer])
    return _FORMULAS[activation](gate, up)
