"""Arrays as C reads them, and the status of a call as an exception."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconv._native import ffi, lib
from ktconv.errors import CheckpointError

Array = npt.NDArray[Any]

_ADDRESS = ffi.typeof("uintptr_t")


class NonFiniteError(CheckpointError):
    """A NaN or Inf at (row, col) of a source matrix."""

    def __init__(self, row: int, col: int, matrix: int = 0) -> None:
        super().__init__(f"the matrix contains a NaN or an infinity at row {row}, column {col}")
        self.row, self.col = row, col
        self.matrix = matrix  # its index, of several


class NoWeightsError(ValueError):
    """A token goes to an expert whose weights are not here."""


class ScratchError(ValueError):
    """Less scratch than a call needs."""


def aligned_bytes(size: int) -> Array:
    """uint8 memory that starts at a cache line."""
    memory = np.empty(size + 63, np.uint8)
    start = -address_of(memory) % 64
    return memory[start : start + size]


def expect_bytes(what: str, array: Array, nbytes: int) -> None:
    if array.nbytes != nbytes or not array.flags.c_contiguous:
        raise ValueError(f"{what} must be {nbytes} contiguous bytes, got {array.nbytes}")


def expect_rows(what: str, array: Array, dtype: Any, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{what} must be contiguous {np.dtype(dtype).name} {list(shape)}, "
            f"got {array.dtype.name} {list(array.shape)}"
        )


def expect_aligned(what: str, array: Array, size: int) -> None:
    if array.ctypes.data % size:
        raise ValueError(f"{what} must be aligned to {size} bytes")


def address_of(array: Array) -> int:
    """Address of the first element of a contiguous array."""
    return int(ffi.cast(_ADDRESS, ffi.from_buffer(array)))


def array_at(address: int, dtype: Any, shape: tuple[int, ...]) -> Array:
    """A view of memory that its owner must keep alive."""
    found = np.dtype(dtype)
    memory = ffi.buffer(ffi.cast("char *", address), math.prod(shape) * found.itemsize)
    return np.frombuffer(memory, found).reshape(shape)


def byte_pointer(array: Array, writable: bool = False) -> Any:
    return ffi.cast("uint8_t *", ffi.from_buffer(array, require_writable=writable))


def aligned_to(array: Array, size: int) -> Array:
    """`array` itself, or a copy at a multiple of `size` bytes: files do not align tensors."""
    return array if address_of(array) % size == 0 else array.copy()


def words(status: int) -> str:
    return str(ffi.string(lib.kt_strerror(status)).decode())


def check(status: int, bad: Any = None, matrix: int = 0) -> None:
    if status == lib.KT_OK:
        return
    if status == lib.KT_ERR_NONFINITE and bad is not None:  # kt_pack does not say where
        raise NonFiniteError(int(bad.row), int(bad.col), matrix)
    raise _KINDS.get(status, ValueError)(words(status))


_KINDS = {lib.KT_ERR_EXPERT: NoWeightsError, lib.KT_ERR_SCRATCH: ScratchError}
