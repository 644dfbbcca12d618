"""Elements: ways to store the numbers of a weight, by the names of native.DTYPES."""

from __future__ import annotations

from msgspec import Struct


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
# Blocks of ggml: so many bytes for 32, 64 or 256 columns with their own scales. Tensors have the
# shape of their elements.
BLOCKS = {
    name: Element(name, nbytes, unit_cols=cols, items=cols)
    for name, nbytes, cols in (
        ("Q4_0", 18, 32), ("Q4_1", 20, 32), ("Q5_0", 22, 32), ("Q5_1", 24, 32), ("Q8_0", 34, 32),
        ("Q2_K", 84, 256), ("Q3_K", 110, 256), ("Q4_K", 144, 256), ("Q5_K", 176, 256),
        ("Q6_K", 210, 256), ("IQ4_NL", 18, 32), ("IQ4_XS", 136, 256), ("MXFP4", 17, 32),
        ("NVFP4", 36, 64), ("TQ1_0", 54, 256), ("TQ2_0", 66, 256),
    )
}  # fmt: skip
# Blocks of 256 columns whose numbers are in tables, which only the package gguf has.
GRID_BLOCKS = {
    name: Element(name, nbytes, unit_cols=256, items=256, by_package=True)
    for name, nbytes in (
        ("IQ2_XXS", 66), ("IQ2_XS", 74), ("IQ2_S", 82), ("IQ3_XXS", 98), ("IQ3_S", 110),
        ("IQ1_S", 50), ("IQ1_M", 56),
    )
}  # fmt: skip
ELEMENTS = (  # those that the C library decodes
    BF16, F16, F32, F8_E4M3, F4_E2M1, F4_E0M3, I8, I4, U4_AWQ, *STREAMS.values(),
    *BLOCKS.values(),
)  # fmt: skip
