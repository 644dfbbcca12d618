"""Elements: ways to store the numbers of a weight, by the names of native.DTYPES."""

from __future__ import annotations

from msgspec import Struct

from ktconv.source.gguf.types import TYPES


class Element(Struct, frozen=True, cache_hash=True):
    """A stored unit: `unit_bytes` bytes with `unit_rows` x `unit_cols` adjacent numbers of a
    matrix [out, in], and how many `items` of the tensor's dtype those bytes are."""

    name: str  # of the decoder in the C library, or of ggml's type
    unit_bytes: int
    unit_rows: int = 1
    unit_cols: int = 1
    items: int = 1
    integer_zero: int | None = None  # of integers: the number that means 0 where nothing else says
    by_package: bool = False  # decoded by the package gguf, not by the C library

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of a matrix of whole units."""
        return rows // self.unit_rows * (cols // self.unit_cols) * self.unit_bytes


BF16 = Element("BF16", 2)
F16 = Element("F16", 2)
F32 = Element("F32", 4)
F8_E4M3 = Element("F8_E4M3", 1)
F4_E2M1 = Element("F4_E2M1", 1, unit_cols=2)
F4_E0M3 = Element("F4_E0M3", 1, unit_cols=2)
F6_E2M3 = Element("F6_E2M3", 3, unit_cols=4, items=3)
I8 = Element("I8", 1, integer_zero=0)
I4 = Element("I4", 1, unit_cols=2, integer_zero=0)
U4_AWQ = Element("U4_AWQ", 4, unit_rows=8, integer_zero=8)
# Unsigned numbers of so many bits in 32-bit words, from the lowest bits on; those of widths that
# do not divide 32 continue in the next word.
STREAMS = {
    bits: Element(
        f"U{bits}", 4 * words, unit_cols=32 * words // bits, items=words, integer_zero=1 << bits - 1
    )
    for bits, words in ((2, 1), (3, 3), (4, 1), (5, 5), (6, 3), (7, 7), (8, 1))
}
U4 = STREAMS[4]
_BY_PACKAGE = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")
_GGML = [
    Element(
        kind.name,
        kind.nbytes,
        unit_cols=kind.elements,
        items=kind.elements,
        by_package=kind.name in _BY_PACKAGE,
    )
    for kind in TYPES.values()
    if kind.elements > 1
]
# Blocks of ggml: so many bytes for 32 to 256 columns with their own scales. Tensors have the
# shape of their elements.
BLOCKS = {one.name: one for one in _GGML if not one.by_package}
# Blocks whose numbers are in tables, which only the package gguf has.
GRID_BLOCKS = {one.name: one for one in _GGML if one.by_package}
