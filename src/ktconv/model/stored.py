"""Ways in which modules of transformers store the experts of a layer, and are called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from msgspec import Struct
from torch import Tensor, nn

from ktconv.families.family import Projection
from ktconv.model.own import Call, ExpertParameter, OwnExperts

_CALLS: Mapping[int, Call] = {3: "routed", 1: "sorted"}  # by number of arguments
_PAIR: tuple[tuple[Projection, ...], ...] = (("gate", "up"), ("down",))


class _Way(Struct, frozen=True):
    """Parameters, and which matrices of all experts each of them contains. `flat`: [E * I, H], also
    that of down; else they have three dimensions. `call`: None if the arguments tell."""

    parameters: tuple[str, ...]
    matrices: tuple[tuple[Projection, ...], ...] = _PAIR
    flat: bool = False
    call: Call | None = None


_WAYS = (
    _Way(("gate_up_proj", "down_proj")),
    _Way(("up_proj", "down_proj"), (("up",), ("down",))),
    _Way(("fc1.weight", "fc2.weight"), call="logits"),
    _Way(("input_linear.weight", "output_linear.weight"), call="block"),
    _Way(("mlp.w1", "mlp.v1", "mlp.w2"), (("gate",), ("up",), ("down",)), flat=True),
)


class StoredExperts(OwnExperts):
    """The experts that a module has as parameters."""

    def __init__(self, module: nn.Module, way: _Way, tensors: tuple[Tensor, ...]) -> None:
        self.module, self.tensors, self._way = module, tensors, way
        self.transposed = not way.flat and _is_transposed(module, tensors)
        if way.flat:
            self.count = int(module.num_experts)  # type: ignore[arg-type]
            self.hidden = tensors[-1].shape[1]
            self.intermediate = tensors[-1].shape[0] // self.count
        else:
            self.count, rows, cols = tensors[-1].shape
            self.hidden, self.intermediate = (cols, rows) if self.transposed else (rows, cols)

    @property
    def gated(self) -> bool:
        return self._way.matrices[0] != ("up",)

    @property
    def biased(self) -> bool:
        return bool(getattr(self.module, "has_bias", False))

    @property
    def alternating(self) -> bool:
        """Whether every second output of the parameter with gate and up is of the gate."""
        return not getattr(self.module, "is_concatenated", True)

    @property
    def weights(self) -> Iterator[Tensor]:
        yield from self.tensors
        if self.biased:
            for name in self._way.parameters:
                yield getattr(self.module, bias_name(name))

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters with the matrices of all experts."""
        return self._way.parameters

    @property
    def parameters(self) -> Iterator[tuple[str, Tensor, tuple[Projection, ...]]]:
        """Name, tensor and matrices of each parameter; none where the experts are in one axis with
        the rows."""
        if not self._way.flat:
            yield from zip(self._way.parameters, self.tensors, self._way.matrices, strict=True)

    @property
    def parameters_of_all(self) -> tuple[ExpertParameter, ...]:
        found = []
        for path, tensor, projections in self.parameters:
            place, _, name = path.rpartition(".")
            marked = bool(getattr(self.module.get_submodule(place), "is_transposed", False))
            found.append(
                ExpertParameter(
                    place,
                    name,
                    len(tensor),
                    projections,
                    self.alternating,
                    self.transposed,
                    marked,
                )
            )
        order = [name for name, _ in self.module.named_parameters()]
        return tuple(sorted(found, key=lambda one: _place_in(order, one)))

    @property
    def identities(self) -> int:
        return int(getattr(self.module, "zero_expert_num", 0) or 0)

    @property
    def norm(self) -> nn.Module | None:
        found: nn.Module | None = getattr(self.module, "post_expert_norm", None)
        return found

    @property
    def call(self) -> Call | None:
        if self._way.call == "block" and not hasattr(self.module, "bias"):
            return None  # of transformers 4
        return self._way.call or _CALLS.get(len(inspect.signature(self.module.forward).parameters))

    def matrices(self, expert: int) -> dict[Projection, Tensor]:
        """Views of the parameters."""
        found: dict[Projection, Tensor] = {}
        for tensor, projections in zip(self.tensors, self._way.matrices, strict=True):
            whole = self._of(tensor.data, expert, projections)
            parts = zip(projections, self._parted(whole, len(projections)), strict=True)
            found |= dict(parts)
        return found

    def biases(self, expert: int) -> dict[Projection, Tensor]:
        """Views of the parameters."""
        found: dict[Projection, Tensor] = {}
        if self.biased:
            for name, projections in zip(self._way.parameters, self._way.matrices, strict=True):
                whole = getattr(self.module, bias_name(name)).data[expert]
                parts = self._parted(whole, len(projections))
                found |= dict(zip(projections, parts, strict=True))
        return found

    def _of(self, tensor: Tensor, expert: int, projections: tuple[Projection, ...]) -> Tensor:
        """[outputs, inputs] of an expert."""
        if self._way.flat:
            own = tensor[expert * self.intermediate : (expert + 1) * self.intermediate]
            return own.T if projections == ("down",) else own
        return tensor[expert].T if self.transposed else tensor[expert]

    def _parted(self, matrix: Tensor, count: int) -> list[Tensor]:
        """Matrices whose outputs follow each other in one, or alternate."""
        if self.alternating:
            return [matrix[part::count] for part in range(count)]
        return list(matrix.chunk(count))


def _place_in(order: Sequence[str], parameter: ExpertParameter) -> int:
    """Position of a parameter among those of a module; last if it has another name."""
    path = ".".join(filter(None, (parameter.module, parameter.name)))
    return order.index(path) if path in order else len(order)


def bias_name(parameter: str) -> str:
    """The parameter with the biases [E, outputs] that belong to one with matrices."""
    return f"{parameter}_bias"


def stored_in(module: nn.Module) -> StoredExperts | None:
    """The experts that are parameters of a module itself; None if it has none, or in a way that is
    not known."""
    for way in _WAYS:
        tensors = _tensors(module, way)
        if tensors is not None:
            return StoredExperts(module, way, tensors)
    return None


def _tensors(module: nn.Module, way: _Way) -> tuple[Tensor, ...] | None:
    """The parameters of this way, if all are there, and in shapes that fit each other."""
    try:
        found = attrgetter(*way.parameters)(module)
    except AttributeError:
        return None
    dimensions = 2 if way.flat else 3
    if not all(isinstance(one, Tensor) and one.ndim == dimensions for one in found):
        return None
    *firsts, down = found
    if way.flat:
        fits = len({one.shape for one in found}) == 1 and hasattr(module, "num_experts")
    else:
        outputs = len(way.matrices[0])
        (first,) = firsts
        shapes = (outputs * down.shape[2], down.shape[1]), (down.shape[2], outputs * down.shape[1])
        fits = tuple(first.shape[1:]) in shapes
    shared = way.matrices[0] == ("up",) and hasattr(module, "gate_proj")  # Inkling's shared experts
    return tuple(found) if fits and not shared else None


def _is_transposed(module: nn.Module, tensors: tuple[Tensor, ...]) -> bool:
    """Whether matrices are [in, out]: shapes say so where gate and up are in one parameter."""
    first, down = (tuple(tensor.shape[1:]) for tensor in tensors)
    if first == down[::-1]:
        return bool(getattr(module, "is_transposed", False))
    return first == (down[1], 2 * down[0])
