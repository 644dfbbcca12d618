"""Finds router, norm and shared expert of a layer by headers.

A tensor that is missing or has a wrong shape is a fault of the checkpoint, found before anything
is read. Level layers then runs without it, so that kernels are checked all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktconv.checkpoint import MoELayer, TensorRef
from ktconv.errors import CheckpointError
from ktconv.families.config import USUAL_TOP_K, text_section, top_k_of, value_of
from ktconv.families.family import Projection, RouterSpec
from ktconv.families.names import norm_tensors, router_tensors, shared_expert_tensors
from ktconv.families.routers import UnknownRouter, check_experts, router_of
from ktconv.reading.tensors import SourceTensors


@dataclass(frozen=True, slots=True)
class Router:
    """A router that can be run; bias and correction are None unless `spec` has them."""

    spec: RouterSpec
    weight: TensorRef
    bias: TensorRef | None
    correction: TensorRef | None


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """A shared expert, with a gate where experts have one; `gating` scales its output."""

    gate: TensorRef | None
    up: TensorRef
    down: TensorRef
    gating: TensorRef | None


@dataclass(frozen=True, slots=True)
class Fault:
    """A tensor of the checkpoint that is missing or wrong."""

    check: str  # router, norm or shared expert
    message: str
    tensor: str


class LayerTensors:
    """The tensors of one layer; None for what is not there or cannot be used.

    Raises CheckpointError where config.json contradicts itself, or there is no router at all.
    """

    def __init__(self, tensors: SourceTensors, config: Mapping[str, Any], layer: MoELayer) -> None:
        self._tensors, self._config, self._layer = tensors, config, layer
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self.router = self._router()
        self.norm = self._norm()
        self.shared = self._shared()

    # ---- router ----

    def _router(self) -> Router | None:
        try:
            spec = router_of(self._config, self._layer.index)
        except UnknownRouter as error:
            self.notes.append(f"experts are chosen at random, because {error}")
            return None
        experts, names = len(self._layer.experts), router_tensors(self._layer.source)
        check_experts(spec, experts)
        weight = self._tensors.find(names.weight)
        if weight is None:
            raise CheckpointError(
                f"layer {self._layer.index} has no router: none of "
                f"{', '.join(names.weight)} exists",
                "run --level weights",
            )
        usable = self._fits("router", weight, (experts, self._layer.hidden_size))
        bias, has_bias = self._vector("bias", names.bias, spec.bias, weight)
        correction, has_correction = self._vector(
            "correction bias", names.correction, spec.correction, weight
        )
        usable = usable and has_bias and has_correction
        return Router(spec, weight, bias, correction) if usable else None

    def _vector(
        self, what: str, names: Sequence[str], wanted: bool, router: TensorRef
    ) -> tuple[TensorRef | None, bool]:
        """A vector of the router, if `spec` has it, and whether the router can be run with it."""
        tensor = self._tensors.find(names)
        if not wanted:
            if tensor is not None:
                self.notes.append(
                    f"the {what} of routers is not used: {self._config.get('model_type')} has none"
                )
            return None, True
        if tensor is None:
            message = f"the router {router.name} has no {what}: none of {', '.join(names)} exists."
            self.faults.append(Fault("router", message, router.name))
            return None, False
        count = len(self._layer.experts)
        if tensor.shape == (1, count):  # as in ERNIE
            return tensor, True
        return tensor, self._fits("router", tensor, (count,))

    # ---- norm and shared expert ----

    def _norm(self) -> TensorRef | None:
        tensor = self._tensors.find(norm_tensors(self._layer.source))
        fits = tensor and self._fits("norm", tensor, (self._layer.hidden_size,))
        return tensor if fits else None

    def _shared(self) -> SharedTensors | None:
        projections = self._layer.projections
        for names in shared_expert_tensors(self._layer.source):
            wanted = {"gate": names.gate, "up": names.up, "down": names.down}
            found = {proj: self._tensors.find([wanted[proj]]) for proj in projections}
            there = {proj: tensor for proj, tensor in found.items() if tensor is not None}
            if len(there) == len(projections):
                return self._whole_shared(there, self._tensors.find([names.gating]))
            if len(there) == len(projections) - 1:  # else there is none, or under other names
                missing = next(wanted[proj] for proj in projections if proj not in there)
                message = f"the shared expert of layer {self._layer.index} has no {missing}."
                self.faults.append(Fault("shared expert", message, missing))
                return None
        return None

    def _whole_shared(
        self, found: Mapping[Projection, TensorRef], gating: TensorRef | None
    ) -> SharedTensors | None:
        gate, up, down = found.get("gate"), found["up"], found["down"]
        hidden, inner = self._layer.hidden_size, up.shape[0] if up.shape else 0
        wide = value_of(text_section(self._config), "hidden size")
        if hidden != wide and (up.shape, down.shape) == ((inner, wide), (wide, inner)):
            self.notes.append(
                "shared experts are left out, because their inputs are the hidden states, and "
                "those of the other experts are narrower"
            )
            return None
        shapes: list[tuple[TensorRef, tuple[int, ...]]]
        shapes = [] if gate is None else [(gate, (inner, hidden))]
        shapes += [(up, (inner, hidden)), (down, (hidden, inner))]
        if gating is not None:  # a vector in GGUF files
            shapes.append((gating, (hidden,) if len(gating.shape) == 1 else (1, hidden)))
        fit = [self._fits("shared expert", tensor, shape) for tensor, shape in shapes]
        return SharedTensors(gate, up, down, gating) if all(fit) else None

    def _fits(self, check: str, tensor: TensorRef, shape: tuple[int, ...]) -> bool:
        """Whether a tensor can be used. A wrong shape is a fault, an unknown encoding a note."""
        if tensor.shape != shape:
            message = f"{tensor.name} has shape {list(tensor.shape)}, not {list(shape)}."
            self.faults.append(Fault(check, message, tensor.name))
            return False
        try:
            self._tensors.matrix(tensor)
        except CheckpointError as error:
            self.notes.append(f"the {check} is left out, because {error}")
            return False
        return True


def top_k_of_layer(config: Mapping[str, Any], layer: MoELayer) -> int:
    """Experts per token, whether or not the router can be run."""
    try:
        return router_of(config, layer.index).top_k
    except CheckpointError:
        return min(top_k_of(config, layer.index) or USUAL_TOP_K, len(layer.experts))


def by_note(found: Mapping[int, LayerTensors]) -> Iterator[tuple[str, list[int]]]:
    """Each different note with the layers that it applies to."""
    layers: dict[str, list[int]] = {}
    for index, one in found.items():
        for note in one.notes:
            layers.setdefault(note, []).append(index)
    yield from layers.items()
