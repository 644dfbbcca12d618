"""LoRA forward and backward of MoE layers; see kt_train_forward and kt_train_backward.

Arrays are addresses here, 0 for one that is not there; callers keep them alive.
"""

from __future__ import annotations

from collections.abc import Mapping

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, check
from ktconv.native.moe import VALUE_DTYPES, Call, Layer
from ktconv.native.pool import Pool, open_pool

MAX_RANK: int = lib.KT_MAX_RANK
LORA_MATRICES = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


class Lora:
    """struct kt_lora: addresses by the names of LORA_MATRICES, all of one dtype, bf16 or fp32."""

    def __init__(
        self,
        rank: int,
        matrices: Mapping[str, int],
        dtype: str,
        scale: float,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.c = ffi.new("kt_lora *")
        self.c.rank, self.c.dtype = rank, VALUE_DTYPES[dtype]
        self.c.scale, self.c.dropout, self.c.seed = scale, dropout, seed
        for name, address in matrices.items():
            setattr(self.c, name, ffi.cast("void *", address))


class Gradients:
    """struct kt_moe_gradients: addresses by the names of its pointers, dtypes of dy, dx and the
    gradients of LoRA matrices (bf16 only where the matrices are)."""

    def __init__(
        self, arrays: Mapping[str, int], dy_dtype: str, dx_dtype: str, lora_dtype: str = "fp32"
    ) -> None:
        self.c = ffi.new("kt_moe_gradients *")
        for name, address in arrays.items():
            kind = "void *" if name in ("dy", "dx", *LORA_MATRICES) else "float *"
            setattr(self.c, name, ffi.cast(kind, address))
        self.c.dy_dtype, self.c.dx_dtype = VALUE_DTYPES[dy_dtype], VALUE_DTYPES[dx_dtype]
        self.c.lora_bf16 = lora_dtype == "bf16"


class Training:
    """A layer with LoRA, or None for packed weights alone, on a pool."""

    def __init__(self, layer: Layer, lora: Lora | None, pool: Pool) -> None:
        self._layer, self._lora, self._pool = layer, lora, pool
        self._c = layer.c, ffi.NULL if lora is None else lora.c

    def saved_size(self, tokens: int, top_k: int) -> int:
        """Bytes that a forward leaves for the backward, at a multiple of 64."""
        return _possible(int(lib.kt_train_saved_size(*self._c, tokens, top_k)), tokens, top_k)

    def scratch_size(self, tokens: int, top_k: int) -> int:
        """Bytes of memory that a forward or a backward needs."""
        pool = open_pool(self._pool)
        size = int(lib.kt_train_scratch_size(*self._c, tokens, top_k, pool))
        return _possible(size, tokens, top_k)

    def forward(self, call: Call, saved: int, scratch: Array) -> None:
        """Computes y of `call`; `saved` is the address of saved_size() bytes, or 0."""
        pool, memory = open_pool(self._pool), ffi.from_buffer(scratch)
        kept = ffi.cast("void *", saved)
        check(lib.kt_train_forward(*self._c, pool, call.c, kept, memory, scratch.nbytes))

    def backward(self, call: Call, saved: int, gradients: Gradients, scratch: Array) -> None:
        """Computes `gradients` of the forward of `call` that has left `saved`."""
        pool, memory = open_pool(self._pool), ffi.from_buffer(scratch)
        kept = ffi.cast("void *", saved)
        check(
            lib.kt_train_backward(*self._c, pool, call.c, kept, gradients.c, memory, scratch.nbytes)
        )


def _possible(size: int, tokens: int, top_k: int) -> int:
    if not size:
        raise ValueError(f"{tokens} tokens with {top_k} experts each cannot be computed")
    return size
