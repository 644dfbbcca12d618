"""Where the code of element (n, k) lies in a packed payload (SPEC 4.2).

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

import numpy as np
from numpy.typing import NDArray

from .table import Format

_HALF_ROWS = 16
_HALF_BYTES = 1024
_HALF_COLS = 64  # columns that one nibble plane (INT4) or byte plane (INT8) holds
_GROUP_COLS = 4
_GROUP_BYTES = 64

Index = NDArray[np.int64]


def offsets(fmt: Format, n: Index, k: Index, rows: int, cols: int) -> tuple[Index, Index]:
    """Byte offset and plane of elements (n, k) of a [rows, cols] matrix.

    n and k broadcast.  Plane 0 is the low nibble (all of INT8), plane 1 the high one.
    """
    nb = n // fmt.n_block * fmt.n_block
    ns = np.minimum(fmt.n_block, rows - nb)
    kb = k // fmt.k_block * fmt.k_block
    ks = np.minimum(fmt.k_block, cols - kb)
    n1 = (n - nb) // fmt.n_step * fmt.n_step
    r = (n - nb) % fmt.n_step
    k1 = (k - kb) // fmt.k_tile * fmt.k_tile
    c = (k - kb) % fmt.k_tile
    plane, c2 = c // _HALF_COLS, c % _HALF_COLS

    tile = (nb * cols + kb * ns + n1 * ks + k1 * fmt.n_step) * fmt.bits // 8
    half = r // _HALF_ROWS * _HALF_BYTES
    group = c2 // _GROUP_COLS * _GROUP_BYTES
    within = r % _HALF_ROWS * _GROUP_COLS + c2 % _GROUP_COLS
    byte = tile + half + group + within
    return byte, np.broadcast_to(plane, byte.shape)


def _all_offsets(fmt: Format, rows: int, cols: int) -> tuple[Index, Index]:
    """`offsets` of every element, both [rows, cols]."""
    reason = fmt.check_matrix(rows, cols)
    if reason is not None:
        raise ValueError(reason)
    n = np.arange(rows, dtype=np.int64)[:, None]
    k = np.arange(cols, dtype=np.int64)[None, :]
    return offsets(fmt, n, k, rows, cols)


def pack_codes(fmt: Format, codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Payload uint8 [weight_nbytes] of codes int8 [N, K].

    INT4 codes must lie in -8..7; they are stored as two's complement nibbles.
    """
    if codes.dtype != np.int8 or codes.ndim != 2:
        raise TypeError(f"expected 2-D int8 codes, got {codes.ndim}-D {codes.dtype}")
    low, high = -(1 << (fmt.bits - 1)), (1 << (fmt.bits - 1)) - 1
    if ((codes < low) | (codes > high)).any():
        raise ValueError(f"{fmt.name} codes must lie in {low}..{high}")
    rows, cols = codes.shape
    byte, plane = _all_offsets(fmt, rows, cols)
    packed = np.zeros(fmt.weight_nbytes(rows, cols), np.uint8)
    fields = codes.view(np.uint8) & np.uint8((1 << fmt.bits) - 1)
    for p in range(8 // fmt.bits):
        here = plane == p
        packed[byte[here]] |= fields[here] << np.uint8(fmt.bits * p)
    return packed


def unpack_codes(fmt: Format, packed: NDArray[np.uint8], rows: int, cols: int) -> NDArray[np.int8]:
    """Codes int8 [rows, cols] of a payload; the inverse of `pack_codes`."""
    if packed.dtype != np.uint8 or packed.shape != (fmt.weight_nbytes(rows, cols),):
        raise ValueError(f"payload is {packed.dtype} {packed.shape}, not {rows} x {cols} codes")
    byte, plane = _all_offsets(fmt, rows, cols)
    fields = packed[byte] >> (fmt.bits * plane).astype(np.uint8)
    unused = np.uint8(8 - fmt.bits)
    codes: NDArray[np.int8] = (fields << unused).view(np.int8) >> unused.astype(np.int8)
    return codes
