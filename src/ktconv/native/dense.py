"""Linear layers, norms and attention of one token, or of few; see ktconv_run.h.

Arrays are given by their addresses, bf16 in the order of their shapes: whoever calls has checked
them and keeps their memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, check
from ktconv.native.moe import Layer
from ktconv.native.pool import Pool, open_pool
from ktconv.native.routing import Router, router_struct

NORM_KINDS = {
    "rounded": lib.KT_NORM_ROUNDED,
    "once": lib.KT_NORM_ONCE,
    "plus one": lib.KT_NORM_PLUS_ONE,
}
_POINTER = ffi.typeof("void *")
_cast = ffi.cast


def dense_is_fast() -> bool:
    """Whether the level in use has code of its own for what is here."""
    return bool(lib.kt_dense_is_fast())


class Linear:
    """A linear layer: weight [rows, cols] and bias [rows], 0 for none, at these addresses."""

    __slots__ = ("_c",)

    def __init__(self, rows: int, cols: int, weight: int, bias: int = 0) -> None:
        self._c = ffi.new("kt_linear *")
        self._c.rows, self._c.cols = rows, cols
        self._c.weight, self._c.bias = _cast(_POINTER, weight), _cast(_POINTER, bias)

    def run(self, pool: Pool, tokens: int, x: int, y: int) -> None:
        """y [tokens, rows] of x [tokens, cols]. ValueError for what the C library refuses."""
        status = lib.kt_linear_forward(
            self._c, open_pool(pool), tokens, _cast(_POINTER, x), _cast(_POINTER, y)
        )
        check(status)


class Norm:
    """A norm by the root of the mean of squares, with weights [cols] at an address; `kind` is one
    of NORM_KINDS."""

    __slots__ = ("_c",)

    def __init__(self, cols: int, weight: int, epsilon: float, kind: str) -> None:
        self._c = ffi.new("kt_norm *")
        self._c.cols, self._c.weight = cols, _cast(_POINTER, weight)
        self._c.epsilon, self._c.kind = epsilon, NORM_KINDS[kind]

    def run(self, rows: int, x: int, y: int) -> None:
        """y [rows, cols] of x. ValueError for what the C library refuses."""
        status = lib.kt_rms_norm(self._c, rows, _cast(_POINTER, x), _cast(_POINTER, y))
        check(status)


def rotate(heads: int, cols: int, x: int, cosine: int, sine: int, y: int) -> None:
    """Rotary embedding y [heads, cols] of x, by cosine and sine [cols]. ValueError for what the C
    library refuses."""
    status = lib.kt_rotate(
        heads,
        cols,
        _cast(_POINTER, x),
        _cast(_POINTER, cosine),
        _cast(_POINTER, sine),
        _cast(_POINTER, y),
    )
    check(status)


class Attention:
    """Attention of one token, by heads of `cols` numbers, of `value_cols` in values."""

    __slots__ = ("_c",)

    def __init__(
        self, heads: int, key_heads: int, cols: int, value_cols: int, scale: float
    ) -> None:
        self._c: Any = ffi.new("kt_attention *")
        c = self._c
        c.heads, c.key_heads, c.cols, c.value_cols = heads, key_heads, cols, value_cols
        c.scale = scale

    def scratch_size(self, tokens: int) -> int:
        """Bytes of scratch for `tokens` tokens; 0 for sizes that cannot be."""
        self._c.tokens = tokens
        return int(lib.kt_attention_scratch_size(self._c))

    def run(
        self,
        pool: Pool,
        queries: int,
        keys: tuple[int, int, int],
        values: tuple[int, int, int],
        y: int,
        scratch: Array,
    ) -> None:
        """y [heads, value_cols] of queries [heads, cols], for the number of tokens that
        `scratch_size` was asked for last. Keys and values: address, and elements from a head and
        from a token to the next. One thread at a time. ValueError for what the C library
        refuses."""
        c = self._c
        c.queries, c.y = _cast(_POINTER, queries), _cast(_POINTER, y)
        c.keys, c.key_head, c.key_token = _cast(_POINTER, keys[0]), keys[1], keys[2]
        c.values, c.value_head, c.value_token = _cast(_POINTER, values[0]), values[1], values[2]
        status = lib.kt_attend(c, open_pool(pool), ffi.from_buffer(scratch), scratch.nbytes)
        check(status)


class AttentionLayer:
    """A decoder layer up to its experts, for one token: its norms, linear layers of query, key and
    value, and of what attention gives."""

    __slots__ = ("_c",)

    def __init__(
        self,
        before: Norm,
        after: Norm,
        head_norms: tuple[Norm | None, Norm | None],
        projections: tuple[Linear, Linear, Linear],
        out: Linear,
        key_heads: int,
        cols: int,
        scale: float,
    ) -> None:
        self._c: Any = ffi.new("kt_attention_layer *")
        c = self._c
        c.before, c.after, c.out = before._c[0], after._c[0], out._c[0]
        for name, norm in zip(("query_norm", "key_norm"), head_norms, strict=True):
            if norm is not None:  # else it has no weight
                setattr(c, name, norm._c[0])
        for index, one in enumerate(projections):
            c.projection[index] = one._c[0]
        c.key_heads, c.cols, c.scale = key_heads, cols, scale

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return int(self._c.key_heads)

    def scratch_size(self, tokens: int) -> int:
        """Bytes of scratch where `tokens` tokens are there; 0 for sizes that cannot be."""
        return int(lib.kt_attention_layer_scratch_size(self._c, tokens))

    def run(
        self,
        pool: Pool,
        x: int,
        rotation: tuple[int, int],
        cache: tuple[int, int],
        tokens: int,
        room: int,
        h: int,
        normed: int,
        scratch: Array,
    ) -> None:
        """h and normed [hidden] of x, by cosine and sine `rotation`; `cache`: keys and values
        [key_heads, room, cols], of which `tokens` are there. ValueError for what the C library
        refuses."""
        made = _STEP.pack(x, *rotation, *cache, tokens, room, h, normed)
        status = lib.kt_attention_layer_run(
            self._c,
            open_pool(pool),
            ffi.from_buffer(_STEP_POINTER, made),
            ffi.from_buffer(scratch),
            scratch.nbytes,
        )
        check(status)


# Bytes of a kt_attention_step, as ktconv.native.moe makes those of a call.
_STEP = struct.Struct("5P2q2P")
_STEP_POINTER = ffi.typeof("kt_attention_step *")
assert _STEP.size == ffi.sizeof("kt_attention_step")


class RoutedLayer:
    """Router and experts of one token: `gate` gives the router's logits, `skip` is the address of
    bool [E], or 0; `rounded`: weights are rounded to bf16."""

    __slots__ = ("_c", "_keep", "_layer", "top_k")

    def __init__(
        self, gate: Linear, router: Router, layer: Layer, skip: int, rounded: bool
    ) -> None:
        self._c: Any = ffi.new("kt_routed_layer *")
        self._keep, self._layer, self.top_k = gate, layer, router.top_k
        self._c.gate = gate._c[0]
        self._c.router = router_struct(router, layer.experts)[0]
        self._c.moe, self._c.rounded = layer.c, rounded
        self._c.skip = _cast("uint8_t *", skip)

    def scratch_size(self, pool: Pool) -> int:
        """Bytes of scratch."""
        return self._layer.scratch_size(1, self.top_k, pool)

    def run(self, pool: Pool, normed: int, h: int, y: int, scratch: Array) -> None:
        """y = h + experts of normed, all [hidden]. ValueError for what the C library refuses."""
        status = lib.kt_routed_layer_run(
            self._c,
            open_pool(pool),
            _cast(_POINTER, normed),
            _cast(_POINTER, h),
            _cast(_POINTER, y),
            ffi.from_buffer(scratch),
            scratch.nbytes,
        )
        check(status)


class DecoderLayers:
    """Decoder layers one behind the other, for one token, each in two parts. One thread at a
    time."""

    __slots__ = ("_c", "_expert_ns", "_keep")

    def __init__(self, layers: Sequence[tuple[AttentionLayer, RoutedLayer]]) -> None:
        self._keep, self._expert_ns = layers, ffi.new("int64_t *")
        self._c: Any = ffi.new("kt_decoder_layer[]", len(layers))
        for into, (attention, routed) in zip(self._c, layers, strict=True):
            into.attention, into.routed = attention._c, routed._c

    def scratch_size(self, first: int, count: int, tokens: int, pool: Pool) -> int:
        """Bytes of scratch of `count` layers, where up to `tokens` tokens are there; 0 for sizes
        that cannot be."""
        size = lib.kt_decoder_layers_scratch_size(self._c + first, count, tokens, open_pool(pool))
        return int(size)

    def run(self, pool: Pool, first: int, steps: Sequence[bytes], y: int, scratch: Array) -> float:
        """Seconds of the experts of layers from `first` on, as many as `steps`, each made by
        `decoder_step`. y [layers, hidden] are their outputs, each the input of the next: of the
        steps only the first has one. ValueError for what the C library refuses."""
        status = lib.kt_decoder_layers_run(
            self._c + first,
            len(steps),
            open_pool(pool),
            ffi.from_buffer(_STEP_POINTER, b"".join(steps)),
            _cast(_POINTER, y),
            self._expert_ns,
            ffi.from_buffer(scratch),
            scratch.nbytes,
        )
        check(status)
        return int(self._expert_ns[0]) / 1e9


# A layer's part of a call: x, cosine and sine, keys and values, which have so many tokens, and room
# for as many; two arrays [hidden] that are used.
decoder_step = _STEP.pack


def bytes_at(address: int, size: int) -> Any:
    """Memory at an address, which compares by its bytes and can be assigned."""
    return ffi.buffer(_cast(_POINTER, address), size)
