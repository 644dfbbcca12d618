"""Blocks of ggml with the numbers of a weight format: a scale, and a code for each of 32 columns.

Codes are bytes, or nibbles: then half a block's columns are in the low ones of its bytes, the
others in the high ones.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from ktconv.source.elements import BLOCKS, Element
from ktconv.system.arrays import F32, U8

COLS = 32


class CodedBlock(Struct, frozen=True):
    """A type of ggml: the bytes of a block's scale, which come first."""

    element: Element
    codes: str  # the kt_format whose plain codes its codes are
    scale: str  # what NumPy calls the scale; u1: 2^(byte - 127)
    flipped: int | None = None  # of codes that are bytes: what they are XORed with; None: nibbles

    def plain_codes(self, blocks: U8) -> U8:
        """[rows, cols], or two columns in a byte, [rows, cols / 2], of blocks [rows, cols / 32,
        bytes]."""
        nibbles = blocks[..., np.dtype(self.scale).itemsize :]
        if self.flipped is not None:
            codes: U8 = (nibbles ^ np.uint8(self.flipped)).reshape(len(blocks), -1)
            return codes
        low, high = nibbles & np.uint8(15), nibbles >> np.uint8(4)
        halves = [half[..., ::2] | half[..., 1::2] << np.uint8(4) for half in (low, high)]
        plain: U8 = np.concatenate(halves, axis=2).reshape(len(blocks), -1)
        return plain

    def scales(self, blocks: U8) -> F32:
        """[rows, cols / 32]."""
        size = np.dtype(self.scale).itemsize
        stored = np.ascontiguousarray(blocks[..., :size]).view(self.scale)[..., 0]
        values: F32 = stored.astype(np.float32)
        if self.scale == "u1":
            values = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
        return values


CODED_BLOCKS = {
    one.element.name: one
    for one in (
        CodedBlock(BLOCKS["MXFP4"], "mxfp4", "u1"),
        CodedBlock(BLOCKS["Q4_0"], "gint4", "<f2"),
        CodedBlock(BLOCKS["Q8_0"], "gint8", "<f2", 0x80),  # two's complement
    )
}
