"""Headers of the tensors that belong to a layer's experts without being one: do their shapes fit?

Routers, their biases and scales, tables of experts by token, shared experts, projections to and
from the experts' width, norms. Only shapes are looked at, of tensors whose shape is that of what
they mean; what is stored packed, or under a name that no family has, is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ktconv.errors import CheckpointError
from ktconv.families.family import Family, RouterSpec
from ktconv.families.names import NamesBeside, names_beside
from ktconv.source.config import CONFIG_NAME, ModelConfig
from ktconv.source.counts import CONTRADICTION, has_its_shape
from ktconv.source.types import MoELayer, TensorRef
from ktconv.system.units import counted

_EMBEDDING = re.compile(r"emb[a-z_]*\.weight$|\.wte\.weight$")  # of a whole model
_INTEGERS = ("I64", "I32")
Shape = tuple[int, ...]


class _Expected(NamedTuple):
    """Shapes that a tensor may have, and the reason in words."""

    tensor: TensorRef
    shapes: tuple[Shape, ...]
    reason: str


class MoETensors:
    """The tensors of a checkpoint that are no routed experts, around those of `layers`."""

    def __init__(
        self,
        others: Iterable[TensorRef],
        layers: Iterable[MoELayer],
        config: ModelConfig,
        family: Family | None,
    ) -> None:
        self._by_name: Mapping[str, TensorRef] = {one.name: one for one in others}
        self._names: Mapping[str, NamesBeside] = {
            layer.source: names_beside(layer.source, family) for layer in layers
        }
        self._config, self._family = config, family

    def has_correction(self, layer: MoELayer) -> bool:
        """Whether there is a correction bias for the router of `layer`."""
        return self._first(self._names[layer.source].router.correction) is not None

    def check_routers(self, layers: Iterable[MoELayer]) -> Iterator[str]:
        """A note if no layer has a router under a name that a family has, unless these are the
        experts of a model alone. CheckpointError if some layers have one, and others none."""
        modules = {name.rpartition(".")[0] for name in self._by_name}
        found, without = list[int](), list[MoELayer]()
        for layer in layers:
            if not layer.is_mtp:  # whose router may be called otherwise
                own = self._router_modules(layer)
                place = next((at for at, name in enumerate(own) if name in modules), None)
                if place is None:
                    without.append(layer)
                else:
                    found.append(place)
        if found and without:
            name = self._router_modules(without[0])[found[0]]
            raise CheckpointError(
                f"{name}.weight is missing: layer {without[0].index} has no router, although "
                "other layers have one",
                "Download the checkpoint again.",
            )
        if not without or found:
            return
        layer = without[0]
        alike = self._like_a_router(layer)
        if alike or any(_EMBEDDING.search(name) for name in self._by_name):
            known = f"{self._router_modules(layer)[0]}.weight"
            yield (
                f"no layer has a router with a known name, such as {known}{alike}: nothing shows "
                "that these are all experts that a router chooses from"
            )

    def _like_a_router(self, layer: MoELayer) -> str:
        """Names in the layer's block of tensors with a row or column for each expert."""
        block, count = self._names[layer.source].block, len(layer.experts)
        names = [
            one.name
            for one in self._by_name.values()
            if one.name.startswith(f"{block}.")
            and sorted(one.shape) == sorted((count, layer.hidden_size))
        ]
        return f"; {names[0]} has the shape of one" if names else ""

    def check(self, layer: MoELayer, spec: RouterSpec | None) -> list[str]:
        """Notes about sizes that config.json gives otherwise. `spec`: the layer's router, if known.

        Raises CheckpointError naming a tensor that does not fit the experts of `layer`.
        """
        for tensor, shapes, reason in (
            *self._router(layer, spec),
            *self._around(layer),
            *self._shared(layer),
        ):
            if tensor.shape not in shapes:
                several = " or ".join(str(list(one)) for one in dict.fromkeys(shapes))
                raise CheckpointError(
                    f"{tensor.name} has shape {list(tensor.shape)}, expected {several}: {reason}",
                    f"{CONTRADICTION} If experts were removed, remove what all other tensors of "
                    "the layer have for them, too.",
                )
        return list(self._widths_of_shared(layer))

    # ---- routers ----

    def _router(self, layer: MoELayer, spec: RouterSpec | None) -> Iterator[_Expected]:
        names, count = self._names[layer.source].router, len(layer.experts)
        choosable = count + (spec.identity_experts if spec else 0)
        rows = choosable + (spec.sinks if spec else 0)
        gate = self._first(names.weight)
        if spec is None and gate is not None and len(gate.shape) == 2:
            choosable = rows = gate.shape[0]  # whose number `Counts` has looked at
        reason = f"layer {layer.index} has {counted(count, 'expert')}"
        if rows != count:
            reason += f", and its router {rows} rows"
        if gate is not None and spec is not None and len(gate.shape) == 2:
            pairs = ((rows, width) for width in self._all_widths(layer))
            turned = self._family is not None and self._family.router_is_transposed
            fitting = tuple(one[::-1] if turned else one for one in pairs)
            yield _Expected(gate, fitting, f"{reason} of hidden size {layer.hidden_size}")
        towers = self._family.correction_rows if self._family else 1
        vectors: dict[tuple[str, ...], tuple[Shape, ...]] = {
            names.bias: ((rows,),),
            names.correction: ((choosable,), (1, choosable), (towers, choosable)),
        }
        if spec is not None and spec.expert_scale:
            vectors[names.expert_scale] = ((choosable,),)
        if spec is not None and spec.stored_scale:
            vectors[names.scale] = ((1,), ())
        for some, shapes in vectors.items():
            if (tensor := self._first(some)) is not None:
                yield _Expected(tensor, shapes, reason)
        scaled = spec is not None and spec.input_norm is not None
        if scaled and (tensor := self._first(names.input_scale)) is not None:
            yield self._vector(layer, tensor)
        yield from self._table(names.table, spec)

    def _table(self, names: Iterable[str], spec: RouterSpec | None) -> Iterator[_Expected]:
        """Expected shape of the table of experts by token: a row per token of the vocabulary."""
        found = (self._by_name[name] for name in names if name in self._by_name)
        tensor = next(found, None)
        if tensor is None or spec is None or not spec.by_token or not spec.top_k:
            return
        least = self._config.vocabulary or 0
        height = tensor.shape[0] if tensor.shape else 0
        rows = max(least, height)
        if tensor.dtype not in _INTEGERS:
            raise CheckpointError(
                f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, not a table of integers",
                CONTRADICTION,
            )
        yield _Expected(
            tensor,
            ((rows, spec.top_k),),
            f"a token goes to {counted(spec.top_k, 'expert')}, and the vocabulary has "
            f"{counted(least or rows, 'token')}",
        )

    # ---- norms and projections ----

    def _around(self, layer: MoELayer) -> Iterator[_Expected]:
        row, names = self._family, self._names[layer.source]
        if row is None:
            return
        norm = self._first(names.norm[:1])
        if norm is not None:
            yield self._vector(layer, norm)
        for name in row.latent:
            tensor = self._first((f"{names.block}.{name}.weight",))
            if tensor is not None and len(tensor.shape) == 2:
                own = layer.hidden_size
                pairs = ((width, own) for width in self._all_widths(layer))
                shapes = tuple(one for pair in pairs for one in (pair, pair[::-1]))
                yield _Expected(tensor, shapes, f"experts have the hidden size {own}")
        after = self._first(names.post_norm) if row.post_norm else None
        if after is not None:
            yield _Expected(
                after, ((layer.hidden_size,),), f"experts have the hidden size {layer.hidden_size}"
            )

    def _vector(self, layer: MoELayer, tensor: TensorRef) -> _Expected:
        widths = self._all_widths(layer)
        return _Expected(
            tensor, tuple((one,) for one in widths), f"hidden states have {widths[-1]} elements"
        )

    def _all_widths(self, layer: MoELayer) -> tuple[int, ...]:
        """Widths of hidden states, of the experts and of the model."""
        known = (setting.value for setting in self._config.widths)
        return tuple(dict.fromkeys((layer.hidden_size, *known)))

    # ---- shared experts ----

    def _shared(self, layer: MoELayer) -> Iterator[_Expected]:
        for up, others, gating in self._shared_experts(layer):
            widths = self._all_widths(layer)
            inner = next((size for size in up.shape if size not in widths), up.shape[0])
            shapes = tuple((inner, width) for width in widths)
            both = (*shapes, *(one[::-1] for one in shapes))
            reason = f"of a shared expert next to experts of hidden size {layer.hidden_size}"
            yield _Expected(up, both, reason)
            gate, down = others
            same = f"{up.name} has {list(up.shape)}"
            if gate is not None:
                yield _Expected(gate, (up.shape,), same)
            yield _Expected(down, (up.shape[::-1],), same)
            if gating is not None:
                rows = tuple(one for width in widths for one in ((1, width), (width,)))
                yield _Expected(gating, rows, reason)

    def _shared_experts(
        self, layer: MoELayer
    ) -> Iterator[tuple[TensorRef, tuple[TensorRef | None, TensorRef], TensorRef | None]]:
        """Up, gate and down, and what scales the output, of the layer's shared expert."""
        for names in self._names[layer.source].shared:
            gate, up, down = map(self._matrix, (names.gate, names.up, names.down))
            if up is not None and down is not None:
                yield up, (gate, down), self._first((names.gating,))
                return

    def _widths_of_shared(self, layer: MoELayer) -> Iterator[str]:
        expected = self._config.shared_sizes
        for up, (_, down), _ in self._shared_experts(layer):
            inner = down.shape[1] if up.shape[1] in self._all_widths(layer) else down.shape[0]
            if expected and inner not in expected:
                words = " or ".join(map(str, expected))
                yield f"shared experts have the intermediate size {inner}, not {words} as by " + (
                    CONFIG_NAME
                )

    # ---- finding ----

    def _router_modules(self, layer: MoELayer) -> list[str]:
        """Names that the router of a layer, or its table of experts by token, may have."""
        names = self._names[layer.source].router
        return [name.rpartition(".")[0] for name in (*names.weight, *names.table)]

    def _first(self, names: Iterable[str]) -> TensorRef | None:
        found = (self._by_name[name] for name in names if name in self._by_name)
        return next((one for one in found if has_its_shape(one)), None)

    def _matrix(self, name: str) -> TensorRef | None:
        found = self._first((name,))
        return found if found is not None and len(found.shape) == 2 else None
