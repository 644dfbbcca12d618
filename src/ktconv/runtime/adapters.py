"""LoRA of a layer's experts next to its packed weights: one adapter, or several by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ktconv.errors import UsageError
from ktconv.native import AdapterTable, ChosenAdapters, ExpertPairs, LoraPair, pack_lora
from ktconv.runtime.arrays import kind_of, operand
from ktconv.system.arrays import Array

DEFAULT = "default"  # the name of an adapter that was given without one
OWN = ""  # in the place of a name: the adapter that the layer uses by itself


class LayerAdapter(NamedTuple):
    """LoRA of the experts of one layer, in the kernels' order.

    `experts`: of each expert of the model, by its number, gate, up and down; None for a matrix
    without. `others`: modules other than experts that the adapter has LoRA of, which are no
    part of the layer.
    """

    experts: Sequence[ExpertPairs | None]
    others: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The largest of any matrix; 0 where there is none."""
        return max((pair.rank for pair in self._pairs), default=0)

    @property
    def nbytes(self) -> int:
        """Memory of its matrices."""
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self._pairs)

    @property
    def _pairs(self) -> Iterable[LoraPair]:
        return (pair for expert in self.experts if expert for pair in expert if pair)


def packed_pair(a: Array, b: Array, scale: float) -> LoraPair:
    """LoRA of one matrix [outputs, inputs] from A [rank, inputs] and B [outputs, rank], float32 or
    the bits of bf16."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return LoraPair(pack_lora(a), pack_lora(b), len(a), float(scale))


class LayerAdapters:
    """The adapters of a layer, in the order of their numbers; never changed, but replaced.

    `slots` [E]: the expert of each slot, -1 for none. `own`: the name of the one that calls use
    which name none.
    """

    def __init__(
        self, slots: Array, adapters: Mapping[str, LayerAdapter], own: str | None = None
    ) -> None:
        self._slots, self.adapters, self.own = slots, dict(adapters), own
        self.names = tuple(self.adapters)
        self._table = None
        if self.adapters:
            self._table = AdapterTable(
                [_by_slot(slots, one.experts) for one in self.adapters.values()]
            )

    @property
    def largest(self) -> ChosenAdapters | None:
        """Adapters of a call that takes as much memory as any; None where there are none."""
        return None if self._table is None else ChosenAdapters(self._table)

    def __deepcopy__(self, memo: object) -> LayerAdapters:
        """Itself: nothing changes it, so copies of a layer share its matrices."""
        return self

    def with_adapter(self, name: str, adapter: LayerAdapter, *, own: bool = False) -> LayerAdapters:
        """These and one more, which has the next number, and is the one that calls use which name
        none if `own`. UsageError for a name that is taken or empty."""
        if not isinstance(name, str) or not name:
            raise UsageError(f"the name of an adapter must be a word, not {name!r:.60}")
        if name in self.adapters:
            raise UsageError(
                f"the layer has an adapter {name!r:.60} already",
                "remove it first, or give another name",
            )
        return LayerAdapters(
            self._slots, {**self.adapters, name: adapter}, name if own else self.own
        )

    def without(self, name: str) -> LayerAdapters:
        """The others, whose numbers begin at 0 again. UsageError for a name that is not there."""
        self._expect(name)
        rest = {one: found for one, found in self.adapters.items() if one != name}
        return LayerAdapters(self._slots, rest, None if self.own == name else self.own)

    def chosen(
        self, adapter: str | None, adapter_ids: Any, shape: tuple[int, ...]
    ) -> tuple[ChosenAdapters | None, Any]:
        """The adapters of a call of tokens of this shape, None for none; and the array that has
        their numbers, which must stay alive. UsageError for a name, a number or an array that does
        not fit."""
        if adapter_ids is None:
            name = self.own if adapter == OWN else adapter
            if name is None:
                return None, None
            self._expect(name)
            assert self._table is not None
            return ChosenAdapters(self._table, self.names.index(name)), None
        if adapter not in (OWN, None):
            raise UsageError("give adapter or adapter_ids, not both")
        return self._of_tokens(adapter_ids, shape)

    def _of_tokens(
        self, adapter_ids: Any, shape: tuple[int, ...]
    ) -> tuple[ChosenAdapters | None, Any]:
        integers = ("int8", "uint8", "int16", "int64")
        wide = kind_of("adapter_ids", adapter_ids).names.get(adapter_ids.dtype) == "int64"
        dtypes = ("int64",) if wide else ("int32",)  # not cut before it was looked at
        found = operand("adapter_ids", adapter_ids, shape, dtypes, integers)
        numbers = kind_of("adapter_ids", found.owner).numpy(found.owner)
        if not numbers.size:
            return None, None
        least, most = int(numbers.min()), int(numbers.max())
        if least < -1 or most >= len(self.names):
            there = ", ".join(f"{n} {name}" for n, name in enumerate(self.names)) or "none"
            raise UsageError(
                f"adapter_ids contains {least if least < -1 else most}, which is no adapter of the "
                "layer",
                f"its adapters are: {there}; -1 is none",
            )
        if self._table is None or most < 0:
            return None, None
        given = found.owner if not wide else np.ascontiguousarray(numbers, np.int32)
        address = found.address if not wide else given.ctypes.data
        return ChosenAdapters(self._table, of_token=address), given

    def _expect(self, name: str) -> None:
        if name not in self.adapters:
            there = ", ".join(self.names)
            raise UsageError(
                f"the layer has no adapter {name!r:.60}",
                f"it has {there}" if there else "load it with adapters={name: directory}",
            )


def _by_slot(slots: Array, experts: Sequence[ExpertPairs | None]) -> list[ExpertPairs | None]:
    return [experts[e] if 0 <= e < len(experts) else None for e in slots.tolist()]
