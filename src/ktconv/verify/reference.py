"""A layer's routed experts in float32, on the packed and on the source's weights.

Threads compute one expert each, from a few rows of its matrices at a time, so that memory depends
neither on the size nor on the number of experts. Sums are formed in the order of the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from ktconv.checkpoint import MoELayer
from ktconv.moe.experts import in_blocks
from ktconv.system.arrays import F32
from ktconv.verify.hidden_states import Inputs
from ktconv.verify.runner import in_order


class Outputs(NamedTuple):
    """Outputs [M, H] of an expert. `rounded`: on the packed weights, with activations rounded as
    our kernels round them; the same as `packed` where none of our kernels runs."""

    packed: F32
    rounded: F32
    source: F32


class LayerReference:
    """Sums of the outputs that `compute` returns for each expert's tokens x [M, H]."""

    def __init__(self, x: F32, compute: Callable[[int, F32], Outputs], threads: int) -> None:
        self._x, self._compute, self._threads = x, compute, threads
        self.packed, self.source = np.zeros_like(x), np.zeros_like(x)
        self.errors: dict[int, float] = {}

    def add(self, inputs: Inputs) -> F32:
        """Adds the outputs for these inputs. Returns their own sum with rounded activations."""
        together = np.zeros_like(self._x)

        def outputs(expert: int) -> Outputs:
            token, _ = np.nonzero(inputs.ids == expert)
            with np.errstate(all="ignore"):  # is set per thread
                return Outputs(*in_blocks(partial(self._compute, expert), self._x[token]))

        experts = inputs.experts
        # OpenBLAS's threads spin while they wait for one another, in every product.
        with threadpool_limits(limits=1, user_api="blas"):
            results = in_order(outputs, experts, self._threads, self._threads + 1)
            for expert, found in zip(experts, results, strict=True):
                token, slot = np.nonzero(inputs.ids == expert)
                weight = inputs.weights[token, slot, None]
                self.errors[expert] = relative(found.packed, found.source)
                np.add.at(together, token, weight * found.rounded)
                np.add.at(self.packed, token, weight * found.packed)
                np.add.at(self.source, token, weight * found.source)
        return together

    def facts(
        self,
        layer: MoELayer,
        inputs: Inputs,
        kernel_error: dict[str, float],
        y: F32,
        shared: F32 | None,
    ) -> dict[str, Any]:
        """The layer's row of the report; y is the layer's output after conversion."""
        worst = max(self.errors, key=lambda expert: self.errors[expert])
        return {
            "layer": layer.index,
            "kernel_error": kernel_error,
            "quantization_error": relative(y, self.source),
            "quantization_error_with_shared": None
            if shared is None
            else relative(y + shared, self.source + shared),
            "weights_error": relative(self.packed, self.source),
            "worst_expert": {"expert": worst, "error": self.errors[worst]},
            "experts_run": len(self.errors),
            "routing": inputs.routing,
            "router_agreement": inputs.router_agreement,
        }


def relative(got: F32, expected: F32) -> float:
    """Norm of the difference over the norm; 0 where both are 0."""
    off, norm = float(np.linalg.norm(got - expected)), float(np.linalg.norm(expected))
    return off / norm if norm else (0.0 if off == 0 else float("inf"))
