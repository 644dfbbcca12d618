"""LoRA of packed experts at inference; see kt_adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, aligned_bytes, check, expect_rows

PAIRS = ("gate", "up", "down")  # of an expert, in the order of the C library


class LoraPair(NamedTuple):
    """A and B of one matrix of an expert, packed by `pack_lora`: the matrix counts as itself and
    scale * B A."""

    a: Array
    b: Array
    rank: int
    scale: float


ExpertPairs = tuple[LoraPair | None, LoraPair | None, LoraPair | None]  # in the order of PAIRS


def pack_lora(matrix: Array) -> Array:
    """A plain matrix, float32 or the bits of bf16, as kernels read it: its numbers in bf16."""
    dtype = lib.KT_BF16 if matrix.dtype == np.uint16 else lib.KT_F32
    expect_rows("matrix", matrix, matrix.dtype.type, matrix.shape)
    packed = aligned_bytes(int(lib.kt_lora_packed_size(*matrix.shape)))
    check(lib.kt_lora_pack(dtype, ffi.from_buffer(matrix), *matrix.shape, ffi.from_buffer(packed)))
    return packed


def lora_bytes(rows: int, cols: int) -> int:
    """Size of a packed matrix."""
    return int(lib.kt_lora_packed_size(rows, cols))


class AdapterTable:
    """Adapters of the experts of a layer, in the order of their numbers; keeps their memory alive.

    Each has, for each expert, LoRA of its matrices, or None for an expert without. Pairs must have
    been packed from matrices of the layer's sizes: A [rank, inputs], B [outputs, rank].
    """

    def __init__(self, adapters: Sequence[Sequence[ExpertPairs | None]]) -> None:
        count, experts = len(adapters), len(adapters[0])
        self.count, self._keep = count, adapters
        self._pairs = ffi.new("kt_lora_pair[]", count * experts * len(PAIRS))
        self.rank = 1
        for number, adapter in enumerate(adapters):
            for expert, pairs in enumerate(adapter):
                for index, pair in enumerate(pairs or ()):
                    if pair is not None:
                        self._set((number * experts + expert) * len(PAIRS) + index, pair)

    def _set(self, at: int, pair: LoraPair) -> None:
        entry = self._pairs[at]
        entry.a, entry.b = ffi.from_buffer(pair.a), ffi.from_buffer(pair.b)
        entry.rank, entry.scale = pair.rank, pair.scale
        self.rank = max(self.rank, pair.rank)


class ChosenAdapters:
    """The adapters of one call: `number` for all tokens, or the number of each at address
    `of_token`, int32; -1 for none."""

    __slots__ = ("_table", "c")

    def __init__(self, table: AdapterTable, number: int = -1, of_token: int = 0) -> None:
        self._table = table
        self.c = ffi.new("kt_adapters *")
        self.c.count, self.c.rank, self.c.pair = table.count, table.rank, table._pairs
        self.c.all, self.c.of_token = number, ffi.cast("int32_t *", of_token)

    @property
    def of_token(self) -> int:
        """The address of numbers, 0 where all tokens have the same."""
        return int(ffi.cast("uintptr_t", self.c.of_token))

    def of_rows(self, of_token: int) -> ChosenAdapters:
        """Choose the same adapters for other tokens; where each token has its own, their numbers
        are at the address `of_token`."""
        return ChosenAdapters(self._table, self.c.all, of_token if self.c.of_token else 0)
