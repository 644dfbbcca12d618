"""The arguments of `KTMoEWrapper`, checked."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

from msgspec import Struct

from ktconv.compat.kt.methods import Method, method_named
from ktconv.errors import UsageError
from ktconv.native import Activation
from ktconv.source.config import MAX_SIZE
from ktconv.system.numbers import real, whole, wholes


class Settings(Struct, frozen=True):
    """Settings of the weights of a layer and of the threads that compute it."""

    layer_idx: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    threads: int
    parts: int
    numa_nodes: tuple[int, ...] | None
    method: Method
    weight_path: str
    activation: Activation | None  # None: as the weights say


def check_mode(mode: object) -> None:
    """UsageError for one that is unknown."""
    if mode not in ("inference", "sft"):
        raise UsageError(f"the mode {mode!r} is unknown", "use mode='inference' or 'sft'")


def settings(
    *,
    layer_idx: Any,
    num_experts: Any,
    num_experts_per_tok: Any,
    hidden_size: Any,
    moe_intermediate_size: Any,
    cpuinfer_threads: Any,
    threadpool_count: Any,
    numa_nodes: Any,
    method: Any,
    weight_path: Any,
    swiglu_limit: Any,
    swiglu_alpha: Any,
) -> Settings:
    """UsageError names the argument that cannot be used."""
    experts = whole("num_experts", num_experts, 1, MAX_SIZE)
    top_k = whole("num_experts_per_tok", num_experts_per_tok, 1)
    if top_k > experts:
        raise UsageError(
            f"num_experts_per_tok is {top_k}, more than the {experts} of num_experts",
            "give the model's own numbers",
        )
    parts = whole("threadpool_count", threadpool_count, 1)
    return Settings(
        whole("layer_idx", layer_idx, 0),
        experts,
        top_k,
        whole("hidden_size", hidden_size, 1),
        whole("moe_intermediate_size", moe_intermediate_size, 1),
        whole("cpuinfer_threads", cpuinfer_threads, 1),
        parts,
        _nodes(numa_nodes, parts),
        method_named(method),
        "" if weight_path is None else str(weight_path),
        _activation(_number("swiglu_limit", swiglu_limit), _number("swiglu_alpha", swiglu_alpha)),
    )


def _number(name: str, value: Any) -> float:
    found = real(name, value)
    if not isfinite(found) or found < 0:
        raise UsageError(f"{name} must be 0 (none) or more, not {value}")
    return found


def _nodes(numa_nodes: Sequence[Any] | None, parts: int) -> tuple[int, ...] | None:
    if numa_nodes is None:
        return None
    found = tuple(wholes("numa_nodes", numa_nodes))
    if len(found) != parts:
        raise UsageError(
            f"numa_nodes has {len(found)} numbers for threadpool_count {parts}",
            "give a NUMA node for each, or None",
        )
    return found


def _activation(limit: float, alpha: float) -> Activation | None:
    """Activation of ktconv.h's KT_SWIGLU: gate and up are cut at `limit`, and with an `alpha` the
    sigmoid is of alpha times the gate, and up has 1 added."""
    if not limit and not alpha:
        return None
    if not alpha:
        return Activation(limit=limit)
    return Activation(alpha=alpha, beta=1.0, limit=limit or inf)
