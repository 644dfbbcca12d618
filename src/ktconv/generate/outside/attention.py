"""Attention and rotary embeddings of one token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ktconv import native
from ktconv.generate.outside.linears import is_bf16
from ktconv.generate.outside.trial import answer_of
from ktconv.model.load import replaced
from ktconv.runtime import workspace
from ktconv.system.pool import Pool

_USUAL = "sdpa"  # the attention that models of transformers have by default
_ROTATION = "apply_rotary_pos_emb"


@contextmanager
def attention_on(pool: Pool) -> Iterator[Attending]:
    """Models of transformers compute the attention of one token on `pool` inside."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as known

    usual = known[_USUAL]
    known[_USUAL] = found = Attending(usual, pool)
    try:
        yield found
    finally:
        if usual is type(known)._global_mapping.get(_USUAL):
            del known[_USUAL]  # type: ignore[no-untyped-call]
        else:
            known[_USUAL] = usual


class Attending:
    """An attention function of transformers. `scales` are those of calls that the kernels have
    computed; they are not kept unless it is a list."""

    def __init__(self, usual: Callable[..., Any], pool: Pool) -> None:
        self._usual, self._pool = usual, pool
        self._made: dict[tuple[int, int, int, int, float], native.Attention] = {}
        self.scales: list[float] | None = None

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one token on the kernels, and leave the rest to transformers' own function."""
        _, heads, tokens, cols = query.shape
        scale = cols**-0.5 if scaling is None else scaling
        simple = tokens == 1 and attention_mask is None and not dropout and is_bf16(query)
        if not simple or not scale > 0 or not _is_plain(query, key, value, more):
            found: tuple[Tensor, Tensor | None] = self._usual(
                module, query, key, value, attention_mask, dropout, scaling, **more
            )
            return found
        if self.scales is not None:
            self.scales.append(scale)
        sizes = heads, key.shape[1], cols, value.shape[3], scale
        one = self._made.get(sizes)
        if one is None:
            one = self._made[sizes] = native.Attention(*sizes)
        y = query.new_empty((1, 1, heads, value.shape[3]))
        memory = workspace.take(self._pool, one.scratch_size(key.shape[2]))
        try:
            places = _place(key), _place(value)
            one.run(self._pool, query.data_ptr(), *places, y.data_ptr(), memory)
        finally:
            workspace.give(self._pool, memory)
        return y, None


# Arguments of transformers' attention that change nothing for one token without a mask.
_WITHOUT_EFFECT = {"sliding_window", "is_causal", "position_ids", "use_cache", "cache_position"}


def _is_plain(query: Tensor, key: Tensor, value: Tensor, more: dict[str, Any]) -> bool:
    """Whether this is attention of one token to all keys, without additions."""
    if any(v is not None and v is not False for k, v in more.items() if k not in _WITHOUT_EFFECT):
        return False
    if query.shape[0] != 1 or query.shape[1] % key.shape[1] or torch.is_grad_enabled():
        return False
    if key.shape[2] != value.shape[2] or key.shape[3] != query.shape[3]:
        return False
    alike = key.dtype is value.dtype is torch.bfloat16 and key.stride(3) == value.stride(3) == 1
    return alike and key.shape[3] <= 1024 and value.shape[3] <= 1024


def _place(of_heads: Tensor) -> tuple[int, int, int]:
    """Address and strides of keys or values [1, heads, tokens, cols]."""
    _, head, token, _ = of_heads.stride()
    return of_heads.data_ptr(), head, token


@contextmanager
def rotation_on(model: Any) -> Iterator[None]:
    """Functions of the model's code that rotate halves of heads do so on the kernels for one token
    inside."""
    modules = {type(one).__module__ for one in model.modules()}
    with ExitStack() as stack:
        for name in sorted(modules):
            code = sys.modules.get(name)
            own = getattr(code, _ROTATION, None)
            if own is not None and _rotates_halves(own):
                stack.enter_context(replaced(code, _ROTATION, _rotation(own)))
        yield


def _rotates_halves(own: Callable[..., Any]) -> bool:
    """Whether a function's answers are those of the kernel, to the bit."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn((1, n, 1, 16), generator=generator).bfloat16() for n in (4, 2))
    cosine, sine = (torch.randn((1, 1, 16), generator=generator).bfloat16() for _ in range(2))
    theirs = answer_of(own, q, k, cosine, sine)
    if not isinstance(theirs, tuple) or len(theirs) != 2:
        return False
    both = zip(theirs, (q, k), strict=True)
    return all(torch.equal(found, _rotated(x, cosine, sine)) for found, x in both)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    native.rotate(
        x.shape[1], x.shape[3], x.data_ptr(), cosine.data_ptr(), sine.data_ptr(), y.data_ptr()
    )
    return y


def _rotation(own: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any
    ) -> Any:
        one = not more and not named and cos.shape == sin.shape == (1, 1, q.shape[-1])
        if not one or torch.is_grad_enabled() or not all(map(_is_one_token, (q, k))):
            return own(q, k, cos, sin, *more, **named)
        if q.shape[-1] != k.shape[-1] or not (is_bf16(cos) and is_bf16(sin)):
            return own(q, k, cos, sin)
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    return apply_rotary_pos_emb


def _is_one_token(x: Tensor) -> bool:
    """[1, heads, 1, cols], whose memory has the order of its shape."""
    return x.dim() == 4 and x.shape[0] == x.shape[2] == 1 and is_bf16(x)
