"""The methods of quantize-cpu that write GGUF files: names, types of ggml, and words."""

from __future__ import annotations

from msgspec import Struct


class BlockFormat(Struct, frozen=True):
    """A type of ggml's blocks that experts are encoded in; `native.stored_unit` has its sizes."""

    method: str  # of quantize-cpu
    type: str  # as ggml and `native.DTYPES` call it
    bits: int  # of a code
    file_type: int  # general.file_type of GGUF files that have mostly this type
    words: str


_ROWS = (
    BlockFormat("gguf-q4_0", "Q4_0", 4, 2, "GGUF, 4 bits in blocks of 32"),
    BlockFormat("gguf-q8_0", "Q8_0", 8, 7, "GGUF, 8 bits in blocks of 32"),
    BlockFormat("gguf-q4_k", "Q4_K", 4, 14, "GGUF, 4 bits and minima in blocks of 256"),
    BlockFormat("gguf-q5_k", "Q5_K", 5, 16, "GGUF, 5 bits and minima in blocks of 256"),
    BlockFormat("gguf-q6_k", "Q6_K", 6, 18, "GGUF, 6 bits in blocks of 256"),
    BlockFormat("gguf-iq4_nl", "IQ4_NL", 4, 25, "GGUF, 4 bits of a codebook in blocks of 32"),
    BlockFormat("gguf-mxfp4", "MXFP4", 4, 38, "GGUF, FP4 in blocks of 32"),
)
GGUF_FORMATS = {row.method: row for row in _ROWS}
