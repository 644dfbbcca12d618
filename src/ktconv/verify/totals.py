"""Results of checks, added up for the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from ktconv.conversion.records import is_lost
from ktconv.formats import BACKWARD
from ktconv.system.text import first_few
from ktconv.system.units import counted
from ktconv.targets.packed.matrix_check import ErrorStats

WORST_KEPT = 20
WARNED = 5  # matrices that a warning names


class ItemResult(Struct, frozen=True):
    """The result of one check."""

    nbytes: int
    checksums: int = 0
    copied: int = 0
    layer: int | None = None
    expert: int = 0
    proj: str = ""
    sums: ErrorStats | None = None


class Totals(Struct):
    """Sums over all results; for one thread."""

    bytes_checked: int = 0
    checksums: int = 0
    copied_tensors: int = 0
    matrices: int = 0
    backward_matrices: int = 0
    backward: ErrorStats = field(default_factory=ErrorStats)  # of those
    sums: ErrorStats = field(default_factory=ErrorStats)
    by_expert: dict[tuple[int, int], ErrorStats] = field(default_factory=dict)
    by_layer: dict[int, ErrorStats] = field(default_factory=dict)
    worst: list[dict[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # that became nearly all zeros
    uncompared: list[str] = field(default_factory=list)  # whose cosine is not a number

    def add(self, done: ItemResult) -> None:
        self.bytes_checked += done.nbytes
        self.checksums += done.checksums
        self.copied_tensors += done.copied
        if done.sums is None or done.layer is None:
            return
        if done.proj in BACKWARD:
            self.backward_matrices += 1
            self.backward.add(done.sums)
            return
        self.matrices += 1
        self.sums.add(done.sums)
        self.by_layer.setdefault(done.layer, ErrorStats()).add(done.sums)
        self.by_expert.setdefault((done.layer, done.expert), ErrorStats()).add(done.sums)
        about = {"layer": done.layer, "expert": done.expert, "projection": done.proj}
        errors = done.sums.as_dict()
        self._name_odd(done, errors)
        self.worst.append(about | errors)
        if len(self.worst) > 10 * WORST_KEPT:
            self._keep_worst()

    def _name_odd(self, done: ItemResult, errors: Mapping[str, float]) -> None:
        where = f"layer {done.layer}, expert {done.expert}, {done.proj}"
        if is_lost(errors):
            self.lost.append(where)
        if not math.isfinite(errors["cosine"]):
            self.uncompared.append(where)

    def warnings(self) -> Iterator[str]:
        """Sentences that name matrices which no error alone shows."""
        for names, words in (
            (self.lost, "nearly all zeros here, although the source's weights are not"),
            (self.uncompared, "compared with a cosine that is not a number"),
        ):
            if names:
                count = counted(len(names), "matrix", "are")
                yield f"{count} {words}: {first_few(names, WARNED, '; ')}"

    def _keep_worst(self) -> None:
        self.worst.sort(key=lambda one: (-one["relative_rms_error"], one["layer"], one["expert"]))
        del self.worst[WORST_KEPT:]

    def as_dict(self, bound: float | None, experts: Mapping[int, int]) -> dict[str, Any]:
        """`bound`: the largest allowed error in steps; `experts`: number of experts by layer."""
        self._keep_worst()
        return {
            "matrices": self.matrices,
            "elements": self.sums.elements,
            **self.sums.as_dict(),
            "bound_steps": bound,
            "layers": [self._layer(layer, experts[layer]) for layer in sorted(self.by_layer)],
            "worst": self.worst,
            **self._backward(),
        }

    def _backward(self) -> dict[str, Any]:
        """Facts of outputs that have matrices of backward passes."""
        if not self.backward_matrices:
            return {}
        return {"backward": {"matrices": self.backward_matrices, **self.backward.as_dict()}}

    def _layer(self, layer: int, count: int) -> dict[str, Any]:
        errors = [self.by_expert.get((layer, expert)) for expert in range(count)]
        return {
            "layer": layer,
            **self.by_layer[layer].as_dict(),
            "experts": [one.as_dict()["relative_rms_error"] if one else None for one in errors],
        }
