"""Finds the tensors of a pruned output in its source, by the ids that the manifest records.

Written from the description of the record (docs/pruning.md), without the code that cuts: a name
has the new number of an expert, whose old one is at that place of the list; of tensors that differ
in one axis from the source's, those indices stay, and what is behind the experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ktconv.source import MoELayer, TensorRef


class Origin(NamedTuple):
    """A tensor of the source. Of the indices of `axis`, in `parts` equal parts, those of `kept`
    stay; None: the whole tensor."""

    tensor: TensorRef
    axis: int | None = None
    parts: int = 1
    kept: Sequence[int] = ()


class KeptNames:
    """Tensors of the source by names of the output. `record`: of the manifest; `layers`: of the
    whole model; `tensors`: those of its headers by name."""

    def __init__(
        self,
        record: Mapping[str, Any],
        layers: Sequence[MoELayer],
        tensors: Mapping[str, TensorRef],
    ) -> None:
        self._tensors = tensors
        self._kept: dict[str, tuple[int, Sequence[int]]] = {}
        for layer in layers:
            entry = record["layers"].get(str(layer.index))
            if entry is not None:
                self._kept[layer.source] = entry["experts"], entry["kept"]

    def old_number(self, layer: MoELayer, expert: int) -> int:
        """The number that an expert of the output has in the source."""
        entry = self._kept.get(layer.source)
        return expert if entry is None else int(entry[1][expert])

    def origin(self, name: str, shape: Sequence[int]) -> Origin | None:
        """The tensor of the source that one of the output, of this shape, should be; None where
        there is none that it can be."""
        where = self._source_of(name)
        if where is None:
            found = self._tensors.get(name)
            return None if found is None or tuple(found.shape) != tuple(shape) else Origin(found)
        experts, kept = self._kept[where]
        found = self._tensors.get(self._old_name(name, where, experts, kept))
        if found is None or len(found.shape) != len(shape):
            return None
        differ = [n for n, (a, b) in enumerate(zip(found.shape, shape, strict=True)) if a != b]
        if not differ:
            return Origin(found)
        if len(differ) > 1:
            return None
        size = found.shape[differ[0]]
        each = 1 if size < 2 * experts else size // experts
        count = size // each
        behind = range(experts, count)
        stay = [*kept, *behind]
        if size % each or shape[differ[0]] != each * len(stay):
            return None
        return Origin(found, differ[0], count, stay)

    def _source_of(self, name: str) -> str | None:
        """The experts whose layer a tensor is in: of the longest name that it has in common."""
        best, length = None, 0
        for source in self._kept:
            words = source.split(".")
            number = next((n for n, word in enumerate(words) if word.isdecimal()), None)
            start = ".".join(words[: 1 + (number or 0)]) + "."
            if name.startswith(start) and len(start) > length:
                best, length = source, len(start)
        return best

    @staticmethod
    def _old_name(name: str, source: str, experts: int, kept: Sequence[int]) -> str:
        if not name.startswith(f"{source}."):
            return name
        words = name[len(source) + 1 :].split(".")
        for place, word in enumerate(words[:2]):
            if word.isdecimal():
                new = int(word)
                old = kept[new] if new < len(kept) else new - len(kept) + experts
                return ".".join([source, *words[:place], str(old), *words[place + 1 :]])
        return name
