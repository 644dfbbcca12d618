"""Bytes of files as memory, without a copy."""

from __future__ import annotations

from functools import partial

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array

MAPPED_FROM = 128 << 10  # bytes; fewer are copied in less time than they are mapped


class Mapped:
    """Bytes of a file. `data`, uint8, can be used as long as somebody has it."""

    __slots__ = ("_mapping", "data")

    def __init__(self, mapping: object, data: Array) -> None:
        self._mapping, self.data = mapping, data

    @property
    def lost(self) -> bool:
        """Whether bytes that were used could not be read, and were zeros."""
        return bool(lib.kt_file_lost(self._mapping))


def map_file(descriptor: int, nbytes: int, offset: int) -> Mapped | None:
    """Map `nbytes` from `offset` on of an open file, where they are worth it; None: they must be
    read, which also tells what is wrong with them."""
    if nbytes < MAPPED_FROM:
        return None
    mapping = ffi.new("kt_mapped *")
    if lib.kt_file_map(descriptor, offset, nbytes, mapping) != lib.KT_OK:
        return None
    memory = ffi.gc(ffi.cast("char *", mapping.data), partial(_unmap, mapping))
    data = np.frombuffer(ffi.buffer(memory, nbytes), np.uint8)
    data.flags.writeable = False
    return Mapped(mapping, data)


def _unmap(mapping: object, _memory: object) -> None:
    lib.kt_file_unmap(mapping)
