"""Numbers of experts by layer: tensors show them, and router and config.json must agree.

Layers may have different numbers. config.json then has a list with one for each layer, or the
largest number alone; a router with a row for each expert says that a layer with fewer is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ktconv.errors import CheckpointError
from ktconv.families.names import router_tensors
from ktconv.source.config import CONFIG_NAME, ModelConfig, Setting
from ktconv.source.types import MoELayer, TensorRef
from ktconv.system.units import counted, listed

# Of other dtypes, shapes need not count rows and columns.
_FLOATS = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2")
CONTRADICTION = "Check that config.json and the weights belong to one checkpoint."


class RouterRows(Struct, frozen=True):
    """The rows of a layer's router; `experts`: how many of them are experts with weights, None
    where the family may have rows for something else."""

    tensor: TensorRef
    rows: int
    experts: int | None

    def confirms(self, count: int) -> bool:
        """Whether a layer with this router can have `count` experts, and no other number."""
        return count == (self.rows if self.experts is None else self.experts)


class Counts:
    """Numbers of experts in each layer, by routers and by config.json.

    `sources`: the names under which the experts of each layer are. `others`: the tensors that are
    no experts, without which no router is looked at, as where two towers share their blocks.
    """

    def __init__(
        self, config: ModelConfig, sources: Iterable[str], others: Iterable[TensorRef]
    ) -> None:
        self.config = config
        matrices = {one.name: one for one in others if len(one.shape) == 2 and has_its_shape(one)}
        self._routers: dict[str, RouterRows] = {}
        for source in sources if matrices else ():
            names = router_tensors(source).weight
            if (name := next((one for one in names if one in matrices), None)) is not None:
                self._routers[source] = self._rows_of(matrices[name])

    def _rows_of(self, router: TensorRef) -> RouterRows:
        rows, beside = self._rows(router), self.config.rows_beside_experts
        return RouterRows(router, rows, None if beside is None else rows - beside)

    def _rows(self, router: TensorRef) -> int:
        height, width = router.shape
        widths = {setting.value for setting in self.config.widths}
        turned = self.config.turned_router
        if turned is None:
            turned = height in widths and width not in widths
        return width if turned else height

    def declared(self, index: int) -> Setting | None:
        """Number that config.json gives for decoder layer `index`, or for all layers."""
        for one in self.config.listed_experts:
            if (count := one.of_layer(index)) is not None:
                return Setting(one.key, count)
        return self.config.num_experts

    def expected(self, source: str, index: int, found: int) -> Setting | None:
        """The number of experts that the layer must have, of which `found` from 0 on are there;
        None where nothing says it, or a list, which `check` looks at. Where its router has as many
        rows as there are experts, the layer is whole, whatever config.json says: so does that."""
        declared, router = self.declared(index), self._routers.get(source)
        if router is not None and router.confirms(found):
            return Setting(router.tensor.name, found)
        return declared if declared is self.config.num_experts else None

    def rows_of(self, source: str, index: int) -> Setting | None:
        """The number of experts in a layer whose tensors have the rows of all of them."""
        router = self._routers.get(source)
        if router is not None and router.experts is not None and router.experts > 0:
            return Setting(router.tensor.name, router.experts)
        return self.declared(index)

    def check(self, layers: Sequence[MoELayer]) -> list[str]:
        """Notes about numbers of experts that are merely odd.

        Raises CheckpointError where a router is for another number than its layer has, and where
        config.json has one that no layer has.
        """
        unsure: dict[int, list[int]] = {}
        for layer in layers:
            if left := self._left_rows(layer):
                unsure.setdefault(left, []).append(layer.index)
        notes = [
            f"routers have {counted(left, 'row')} more than their layers have experts "
            f"({listed('layer', indices)}): what these are is not "
            "known"
            for left, indices in unsure.items()
        ]
        notes += self._check_number(layers)
        for layer in layers:
            self._check_lists(layer)
        return notes

    def _left_rows(self, layer: MoELayer) -> int:
        """Rows of the router besides those of the experts, where a family may have some."""
        router, count = self._routers.get(layer.source), len(layer.experts)
        if router is None or router.confirms(count):
            return 0
        beside = 0 if router.experts is None else router.rows - router.experts
        if count + beside in router.tensor.shape:  # which may be stored [in, out]
            return 0
        said = self.declared(layer.index)
        if router.experts is None and router.rows > count and said is not None:
            return router.rows - count
        more = f"; {CONFIG_NAME} has {said.key} {said.value}" if said else ""
        raise CheckpointError(
            f"{layer.source} has {counted(count, 'expert')}, but their router "
            f"{router.tensor.name} has the shape {list(router.tensor.shape)}{more}",
            "Download the checkpoint again if experts are missing; if experts were removed, remove "
            "their rows of the router, too; if the router has rows that are no experts, say in "
            f"{CONFIG_NAME} how many there are, as num_experts.",
        )

    def _check_lists(self, layer: MoELayer) -> None:
        """CheckpointError unless the sizes that config.json lists by layer are those of tensors."""
        if layer.is_mtp:
            return
        found = [("experts", len(layer.experts), one) for one in self.config.listed_experts]
        found += [
            ("intermediate size", layer.intermediate_size, one) for one in self.config.listed_sizes
        ]
        for what, size, setting in found:
            if not setting.allows(layer.index, size):
                raise CheckpointError(
                    f"{layer.source} has {what} {size}, but {CONFIG_NAME} has {setting.key} "
                    f"{list(setting.values)!r:.80}",
                    CONTRADICTION,
                )

    def _check_number(self, layers: Sequence[MoELayer]) -> list[str]:
        """CheckpointError unless config.json has the number of the layer with most experts."""
        counts = {layer.index: len(layer.experts) for layer in layers}
        widest, said = max(counts.values()), self.config.num_experts
        if said is not None and said.value != widest:
            several = len(set(counts.values())) > 1
            have = (
                f"have {in_words(counts)}" if several else f"have {counted(widest, 'expert')} each"
            )
            raise CheckpointError(
                f"{CONFIG_NAME}'s {said.key} is stale: it is {said.value}, but the MoE layers "
                f"{have}, and routers with as many rows",
                f"Set {said.key} to {widest} in {CONFIG_NAME}, or in a copy of it that you give "
                "with --config DIR: engines that read another number cannot load the model.",
            )
        if len(set(counts.values())) == 1:
            return []
        if said is None and not self.config.listed_experts:
            self._check_equal(layers)
        return [
            f"layers have different numbers of experts: {in_words(counts)}; no released engine "
            "loads such a model, ktconv's runtime does"
        ]

    def _check_equal(self, layers: Sequence[MoELayer]) -> None:
        """CheckpointError for layers of different sizes without a router that says so."""
        first = layers[0]
        for layer in layers:
            router = self._routers.get(layer.source)
            confirmed = router is not None and router.confirms(len(layer.experts))
            if len(layer.experts) != len(first.experts) and not confirmed:
                raise CheckpointError(
                    f"{layer.source} has {counted(len(layer.experts), 'expert')}, but "
                    f"{first.source} has "
                    f"{len(first.experts)}",
                    "Download the checkpoint again.",
                )


def in_words(counts: Mapping[int, int]) -> str:
    """Numbers of experts by layer: 6 (layer 0), 4 (layers 1-3)."""
    layers: dict[int, list[int]] = {}
    for index, count in sorted(counts.items()):
        layers.setdefault(count, []).append(index)
    return ", ".join(f"{count} ({listed('layer', indices)})" for count, indices in layers.items())


def has_its_shape(tensor: TensorRef) -> bool:
    """Whether the shape of a tensor is that of what it means, and not of packed numbers."""
    return tensor.dtype in _FLOATS or tensor.file.suffix == ".gguf"
