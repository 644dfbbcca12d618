"""Memory that the weights of a layer are in now, asked of the system."""

from __future__ import annotations

from dataclasses import dataclass

from ktconv import native
from ktconv.runtime.memory.needs import part_nodes
from ktconv.system.blocks import huge_bytes
from ktconv.system.pool import Pool
from ktconv.system.units import counted, format_size

_MOST_NODES = 1024


@dataclass(frozen=True, slots=True)
class Residence:
    """Memory of a layer's weights."""

    kind: str  # "map", "copy" or "shared"
    nbytes: int  # of codes and scales
    huge_bytes: int  # ... that lie on huge pages
    pages: int  # of parts that threads of one node compute
    local: int | None  # ... that lie on that node; None: the system does not say
    note: str  # a sentence where something was not possible, else empty

    @property
    def local_share(self) -> float | None:
        """Share of pages on the node whose threads read them; 1 with a single node."""
        if not self.pages:
            return 1.0
        return None if self.local is None else self.local / self.pages

    def __str__(self) -> str:
        kinds = {"map": "mapped from files", "copy": "copied", "shared": "shared by processes"}
        words = [
            f"{format_size(self.nbytes)} {kinds[self.kind]}",
            f"{format_size(self.huge_bytes)} on huge pages",
        ]
        if self.pages:
            share = self.local_share
            told = "not told by the system" if share is None else f"{share:.1%}"
            words.append(f"{told} of {counted(self.pages, 'page')} on the node that computes them")
        return ", ".join([*words, *([self.note] if self.note else [])])


def residence_of(layer: native.Layer, pool: Pool, kind: str, note: str = "") -> Residence:
    """Asks the system, page by page."""
    parts = [native.Ranges(layer.arrays(part)) for part in range(layer.parts)]
    every = native.Ranges(array for part in range(layer.parts) for array in layer.arrays(part))
    pages, local = 0, 0
    for ranges, node in zip(parts, part_nodes(layer.parts, pool), strict=True):
        if node is None:
            continue
        found = native.pages_by_node(ranges, _MOST_NODES)
        if found is None:
            whole = sum(ranges.nbytes for ranges in parts) // native.PAGE
            return Residence(kind, every.nbytes, huge_bytes(every), whole, None, note)
        pages += sum(found[0]) + found[1]
        local += found[0][node]
    return Residence(kind, every.nbytes, huge_bytes(every), pages, local, note)
