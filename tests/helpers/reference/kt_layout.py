"""The place of the code of element (n, k) in a packed payload (SPEC 4.2).

Rows are cut into blocks of NB, each row block into column blocks of KB, each of
those into strips of 32 rows, each strip into tiles of 32 rows by KT columns.  A
tile is 2048 bytes, two halves of 16 rows.  In a half, 4 consecutive columns of 16
rows make one group of 64 bytes:

    group 0            group 1            ...  group 15
    row 0: cols 0-3    row 0: cols 4-7         row 0: cols 60-63
    row 1: cols 0-3    row 1: cols 4-7         row 1: cols 60-63
    ...                ...                     ...
    row 15: cols 0-3   row 15: cols 4-7        row 15: cols 60-63

INT4 keeps columns 0-63 of a tile in the low nibbles and 64-127 in the high ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ktconv.formats import Format
from ktconv.system.arrays import I8, I64, U8

_HALF_ROWS = 16
_HALF_BYTES = 1024
_HALF_COLS = 64  # columns of one nibble plane (INT4) or byte plane (INT8)
_GROUP_COLS = 4
_GROUP_BYTES = 64
_STRIP = 32


class Tiling(NamedTuple):
    """A row of SPEC 4.1."""

    bits: int
    k_tile: int  # KT: columns per tile
    n_block: int  # NB: rows per row block
    k_block: int  # KB: columns per column block


TILINGS = {"int8": Tiling(8, 64, 64, 3584), "int4": Tiling(4, 128, 128, 3584)}


def offsets(fmt: Format, n: I64, k: I64, rows: int, cols: int) -> tuple[I64, I64]:
    """Byte offset and plane of elements (n, k) of a [rows, cols] matrix.

    n and k broadcast.  Plane 0 is the low nibble (all of INT8), plane 1 the high one.
    """
    bits, k_tile, n_block, k_block = TILINGS[fmt.code]
    nb = n // n_block * n_block
    ns = np.minimum(n_block, rows - nb)
    kb = k // k_block * k_block
    ks = np.minimum(k_block, cols - kb)
    n1 = (n - nb) // _STRIP * _STRIP
    r = (n - nb) % _STRIP
    k1 = (k - kb) // k_tile * k_tile
    c = (k - kb) % k_tile
    plane, c2 = c // _HALF_COLS, c % _HALF_COLS

    tile = (nb * cols + kb * ns + n1 * ks + k1 * _STRIP) * bits // 8
    half = r // _HALF_ROWS * _HALF_BYTES
    group = c2 // _GROUP_COLS * _GROUP_BYTES
    within = r % _HALF_ROWS * _GROUP_COLS + c2 % _GROUP_COLS
    byte = tile + half + group + within
    return byte, np.broadcast_to(plane, byte.shape)


def _all_offsets(fmt: Format, rows: int, cols: int) -> tuple[I64, I64]:
    """`offsets` of every element, both [rows, cols]."""
    reason = fmt.check_matrix(rows, cols)
    if reason is not None:
        raise ValueError(reason)
    n = np.arange(rows, dtype=np.int64)[:, None]
    k = np.arange(cols, dtype=np.int64)[None, :]
    return offsets(fmt, n, k, rows, cols)


def pack_codes(fmt: Format, codes: I8) -> U8:
    """Payload uint8 [N * K * bits / 8] of codes int8 [N, K].

    INT4 codes must be -8..7; they are stored as two's complement nibbles.
    """
    if codes.dtype != np.int8 or codes.ndim != 2:
        raise TypeError(f"expected 2-D int8 codes, got {codes.ndim}-D {codes.dtype}")
    bits = TILINGS[fmt.code].bits
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if ((codes < low) | (codes > high)).any():
        raise ValueError(f"{fmt.name} codes must lie in {low}..{high}")
    rows, cols = codes.shape
    byte, plane = _all_offsets(fmt, rows, cols)
    packed = np.zeros(rows * cols * bits // 8, np.uint8)
    fields = codes.view(np.uint8) & np.uint8((1 << bits) - 1)
    for p in range(8 // bits):
        here = plane == p
        packed[byte[here]] |= fields[here] << np.uint8(bits * p)
    return packed


def unpack_codes(fmt: Format, packed: U8, rows: int, cols: int) -> I8:
    """Codes int8 [rows, cols] of a payload; the inverse of `pack_codes`."""
    bits = TILINGS[fmt.code].bits
    if packed.dtype != np.uint8 or packed.shape != (rows * cols * bits // 8,):
        raise ValueError(f"payload is {packed.dtype} {packed.shape}, not {rows} x {cols} codes")
    byte, plane = _all_offsets(fmt, rows, cols)
    fields = packed[byte] >> (bits * plane).astype(np.uint8)
    unused = np.uint8(8 - bits)
    codes: I8 = (fields << unused).view(np.int8) >> unused.astype(np.int8)
    return codes
