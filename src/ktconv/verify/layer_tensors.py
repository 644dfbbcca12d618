"""Finds router, norm and shared expert of a layer by headers.

A tensor that is missing or has a wrong shape is a fault of the checkpoint, found before anything
is read. Level layers then runs without it, so that kernels are checked all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ktconv.errors import CheckpointError
from ktconv.families.config import (
    USUAL_TOP_K,
)
from ktconv.families.family import Projection, RouterSpec
from ktconv.families.names import (
    is_gguf,
    router_tensors,
    shared_expert_tensors,
)
from ktconv.families.routers import (
    FoundRouter,
    UnknownRouter,
    check_experts,
)
from ktconv.families.routing import PARTS, wanted
from ktconv.source import MoELayer, TensorRef
from ktconv.source.reading.tensors import SourceTensors, find_norm
from ktconv.source.settings import ModelSettings

WEIGHTS = ("bias", "correction")  # which may be encoded as weights are


class Router(Struct, frozen=True):
    """A router that can be run. `weight` is [E, width], or [width, E] where it is `transposed`;
    `width` differs from that of the experts' inputs where those are latent. `stored`: what else
    its spec has, by the fields of `routing.Stored`."""

    spec: RouterSpec
    weight: TensorRef
    width: int
    transposed: bool
    plain: bool  # not encoded; a scale beside it is of its input, not of its weights
    stored: Mapping[str, TensorRef]


class SharedTensors(Struct, frozen=True):
    """A shared expert, with a gate where experts have one; `gating` scales its output."""

    gate: TensorRef | None
    up: TensorRef
    down: TensorRef
    gating: TensorRef | None


class Fault(Struct, frozen=True):
    """A tensor of the checkpoint that is missing or wrong."""

    check: str  # router, norm or shared expert
    message: str
    tensor: str


class LayerTensors:
    """The tensors of one layer; None for what is not there or cannot be used.

    Raises CheckpointError where config.json contradicts itself, or there is no router at all.
    """

    def __init__(self, tensors: SourceTensors, config: ModelSettings, layer: MoELayer) -> None:
        self._tensors, self._config, self._layer = tensors, config, layer
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self.router = self._router()
        self.norm = self._norm()
        self.shared = self._shared()

    # ---- router ----

    def _router(self) -> Router | None:
        names = router_tensors(self._layer.source)
        corrected = self._tensors.find(names.correction) is not None
        try:
            found = self._config.find_router(self._layer.index, corrected)
        except UnknownRouter as error:
            self.notes.append(f"experts are chosen at random, because {error}")
            return None
        self._note_inferred(found)
        spec, experts = found.spec, len(self._layer.experts)
        check_experts(spec, experts)
        if spec.expert_scale and is_gguf(self._layer.source):  # its down matrices have that scale
            spec = replace(spec, expert_scale=False)
        plain = spec.input_norm is not None
        weight = (self._tensors.find_plain if plain else self._tensors.find)(names.weight)
        if weight is None:
            raise CheckpointError(
                f"layer {self._layer.index} has no router: none of "
                f"{', '.join(names.weight)} exists",
                "run --level weights",
            )
        choosable = experts + spec.identity_experts
        rows, row = choosable + spec.sinks, self._config.family
        transposed = row is not None and row.router_is_transposed
        shape, width = self._shape_of_gate(weight, rows, transposed)
        usable = self._fits("router", weight, shape, plain=plain)
        sizes: Mapping[str, tuple[int, ...]] = {
            "bias": (rows,), "correction": (choosable,), "input_scale": (width,), "scale": (1,),
            "expert_scale": (choosable,),
        }  # fmt: skip
        stored = {}
        for field, needed in wanted(spec).items():
            tensor, fits = self._part(field, getattr(names, field), needed, weight, sizes)
            usable = usable and fits
            if tensor is not None:
                stored[field] = tensor
        return Router(spec, weight, width, transposed, plain, stored) if usable else None

    def _note_inferred(self, found: FoundRouter) -> None:
        if found.inferred:
            kind = self._config.model_type or "a model without model_type"
            bias = "with" if found.spec.correction else "without"
            self.notes.append(
                f"the router of {kind} is not known, and inferred from {found.inferred}: "
                f"{found.spec.scoring} scores {bias} a correction bias"
            )

    def _shape_of_gate(
        self, weight: TensorRef, rows: int, transposed: bool
    ) -> tuple[tuple[int, int], int]:
        """Expected shape of the router's weight, and its columns: the experts' inputs, or where
        those are latent the hidden states."""
        shapes = [((width, rows) if transposed else (rows, width), width) for width in self._widths]
        return next((one for one in shapes if one[0] == weight.shape), shapes[0])

    def _part(
        self,
        field: str,
        names: Sequence[str],
        needed: bool,
        router: TensorRef,
        sizes: Mapping[str, tuple[int, ...]],
    ) -> tuple[TensorRef | None, bool]:
        """A tensor of the router, if its spec has it, and whether the router can be run with it."""
        what = PARTS[field]
        find = self._tensors.find if field in WEIGHTS else self._tensors.find_plain
        tensor = find(names)
        if not needed:
            if tensor is not None:
                self.notes.append(
                    f"the {what} of routers is not used: {self._config.model_type} has none"
                )
            return None, True
        if tensor is None:
            message = f"the router {router.name} has no {what}: none of {', '.join(names)} exists."
            self.faults.append(Fault("router", message, router.name))
            return None, False
        if field == "table":
            return tensor, self._is_table(tensor)
        shape = sizes[field]
        row = self._config.family
        towers = row.correction_rows if row is not None else 1
        if field == "correction" and tensor.shape in ((1, *shape), (towers, *shape)):  # as in ERNIE
            return tensor, True
        return tensor, self._fits("router", tensor, shape, plain=field not in WEIGHTS)

    def _is_table(self, tensor: TensorRef) -> bool:
        """Whether it is a table of integers with a row for each token."""
        if len(tensor.shape) == 2 and tensor.dtype in ("I64", "I32"):
            return True
        message = f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, not a table of integers."
        self.faults.append(Fault("router", message, tensor.name))
        return False

    # ---- norm and shared expert ----

    def _norm(self) -> TensorRef | None:
        tensor = find_norm(self._tensors, self._config, self._layer)
        if tensor is None:
            return None
        fitting = ((width,) for width in self._widths if (width,) == tensor.shape)
        shape = next(fitting, (self._layer.hidden_size,))
        return tensor if self._fits("norm", tensor, shape) else None

    @property
    def _widths(self) -> tuple[int, ...]:
        """Widths of the experts' inputs, and of the hidden states where the inputs are latent."""
        hidden = self._config.hidden_size
        return (self._layer.hidden_size, *((hidden,) if type(hidden) is int else ()))

    def _shared(self) -> SharedTensors | None:
        projections, missing = self._layer.projections, ""
        for names in shared_expert_tensors(self._layer.source):
            wanted = {"gate": names.gate, "up": names.up, "down": names.down}
            found = {proj: self._tensors.find([wanted[proj]]) for proj in projections}
            there = {proj: tensor for proj, tensor in found.items() if tensor is not None}
            if len(there) == len(projections):
                return self._whole_shared(there, self._tensors.find([names.gating]))
            if len(there) == len(projections) - 1:  # else there is none, or under other names
                missing = missing or next(wanted[one] for one in projections if one not in there)
        if missing:
            message = f"the shared expert of layer {self._layer.index} has no {missing}."
            self.faults.append(Fault("shared expert", message, missing))
        return None

    def _whole_shared(
        self, found: Mapping[Projection, TensorRef], gating: TensorRef | None
    ) -> SharedTensors | None:
        gate, up, down = found.get("gate"), found["up"], found["down"]
        hidden, inner = self._layer.hidden_size, up.shape[0] if up.shape else 0
        wide = self._widths[-1]
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

    def _fits(
        self, check: str, tensor: TensorRef, shape: tuple[int, ...], *, plain: bool = False
    ) -> bool:
        """Whether a tensor can be used. A wrong shape is a fault, an unknown encoding a note."""
        if tensor.shape != shape:
            message = f"{tensor.name} has shape {list(tensor.shape)}, not {list(shape)}."
            self.faults.append(Fault(check, message, tensor.name))
            return False
        try:
            if plain:
                self._tensors.check_plain(tensor)
            else:
                self._tensors.matrix(tensor)
        except CheckpointError as error:
            self.notes.append(f"the {check} is left out, because {error}")
            return False
        return True


def top_k_of_layer(config: ModelSettings, layer: MoELayer) -> int:
    """Experts per token, whether or not the router can be run."""
    try:
        return config.router(layer.index).top_k
    except CheckpointError:
        return min(config.top_k(layer.index) or USUAL_TOP_K, len(layer.experts))
