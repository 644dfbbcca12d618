"""Memory that the weights of a layer are in now, asked of the system."""

from __future__ import annotations

from msgspec import Struct

from ktconv import native
from ktconv.runtime.memory.needs import readers
from ktconv.system import machine
from ktconv.system.blocks import huge_bytes
from ktconv.system.pool import Pool
from ktconv.system.units import counted, format_size

_MOST_NODES = 1024


class Residence(Struct, frozen=True):
    """Memory of a layer's weights."""

    kind: str  # "map", "copy" or "shared"
    nbytes: int  # of codes and scales
    huge_bytes: int  # ... that lie on huge pages
    reserved_bytes: int  # ... of which on reserved ones, the rest on transparent ones
    pages: int  # of weights, in memory of a machine with several nodes; else 0
    local: int | None  # ... read by threads of the node that they lie on; None: it is not known
    note: str  # a sentence where something was not possible, else empty

    @property
    def local_share(self) -> float | None:
        """Share of pages on the node whose threads read them; 1 with a single node. A page that
        threads of several nodes read counts by the share of them on its node."""
        if self.local is None:
            return None
        return self.local / self.pages if self.pages else 1.0

    @property
    def _kind_of_huge(self) -> str:
        if not self.reserved_bytes:
            return ""
        some = "" if self.reserved_bytes == self.huge_bytes else "partly "
        return f"{some}reserved "

    def __str__(self) -> str:
        kinds = {"map": "mapped from files", "copy": "copied", "shared": "shared by processes"}
        words = [
            f"{format_size(self.nbytes)} {kinds[self.kind]}",
            f"{format_size(self.huge_bytes)} on {self._kind_of_huge}huge pages",
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
    huge = huge_bytes(every)
    pages, local = 0, 0.0
    known: int | None = 0  # pages that are local
    if pool.placed or machine.numa_nodes() > 1:
        for ranges, nodes in zip(parts, readers(layer.parts, pool), strict=True):
            found = native.pages_by_node(ranges, _MOST_NODES)
            if found is None:
                pages, known = sum(one.nbytes for one in parts) // native.PAGE, None
                break
            # Those not yet read come to whoever reads them: a part of one node was read there.
            pages += sum(found[0]) + (found[1] if len(nodes) == 1 else 0)
            local += sum(found[0][node] * share for node, share in nodes.items())
        known = None if known is None or not pages else round(local)
    return Residence(kind, every.nbytes, huge.all, huge.reserved, pages, known, note)
