"""Whole decoder layers of one token, in two calls of the C library: up to the experts, and these.

A layer is known by its modules, which are known themselves, and by what it answers to a trial: to
the bit what its own code makes of the same modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from ktconv import native
from ktconv.generate.outside.attention import Attending
from ktconv.generate.outside.cache import GrowingLayer
from ktconv.generate.outside.linears import is_bf16, replaced_forward
from ktconv.generate.outside.routers import KnownRouter
from ktconv.generate.outside.trial import answer_of
from ktconv.model.module import PackedExperts
from ktconv.runtime import workspace
from ktconv.system.pool import Pool

_CLOSE = 2**-6  # of an output of experts: weights of a router may differ in the last bit of bf16
_TRIED = 4  # tokens
_FAR = (1 << 24) - 1  # a position where attention that scales queries by positions does so

Watch = Callable[[float], None]  # called with the seconds that experts have taken


class Known(Struct, frozen=True):
    """Modules that the kernels know."""

    linears: Mapping[nn.Module, native.Linear]
    norms: Mapping[nn.Module, native.Norm]
    routers: Mapping[nn.Module, KnownRouter]
    attending: Attending


@contextmanager
def layers_on(model: Any, pool: Pool, known: Known, watch: Watch | None) -> Iterator[int]:
    """Decoder layers that consist of known modules compute one token on `pool` inside; how many."""
    with ExitStack() as stack:
        count = 0
        for module in list(model.modules()):
            made = _layer_of(module, pool, known, watch)
            if made is not None:
                stack.enter_context(replaced_forward(module, made))
                count += 1
        yield count


_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_NORMS = ("q_norm", "k_norm")


def _layer_of(
    module: Any, pool: Pool, known: Known, watch: Watch | None
) -> Callable[..., Any] | None:
    """The function of a layer that is known."""
    if set(dict(module.named_children())) != _CHILDREN or _has_own_arrays(module):
        return None
    attention = module.self_attn
    number = getattr(attention, "layer_idx", None)
    block = _attention_of(module, known)
    if block is None or not isinstance(number, int):
        return None
    forward = _Forward(module, number, block, pool, None, watch)
    if not _answers_alike(forward, known.attending):
        return None
    forward.routed = _routed_of(module.mlp, pool, known)
    return forward


def _attention_of(module: Any, known: Known) -> native.AttentionLayer | None:
    """The kernel of a layer's attention and norms; None where a part of them is not known."""
    attention = module.self_attn
    children, cols = dict(attention.named_children()), getattr(attention, "head_dim", None)
    scale = getattr(attention, "scaling", None)
    if not {*_PROJECTIONS, "o_proj"} <= set(children) <= {*_PROJECTIONS, *_NORMS, "o_proj"}:
        return None
    if _has_own_arrays(attention) or not isinstance(cols, int) or not isinstance(scale, float):
        return None
    norms = [known.norms.get(children[one]) if one in children else None for one in _NORMS]
    linears = [known.linears.get(children[one]) for one in (*_PROJECTIONS, "o_proj")]
    before, after = (
        known.norms.get(one) for one in (module.input_layernorm, module.post_attention_layernorm)
    )
    query, key, value, out = linears
    if not (before and after and query and key and value and out):
        return None
    if any(one in children and norm is None for one, norm in zip(_NORMS, norms, strict=True)):
        return None
    made = native.AttentionLayer(
        before,
        after,
        (norms[0], norms[1]),
        (query, key, value),
        out,
        children["k_proj"].out_features // cols,
        cols,
        scale,
    )
    return made if made.scratch_size(0) else None


def _has_own_arrays(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(own) or bool(module._forward_hooks) or bool(module._forward_pre_hooks)


class _Forward:
    """A layer's forward: on the kernels for one token whose keys and values have room."""

    def __init__(
        self,
        module: Any,
        number: int,
        block: native.AttentionLayer,
        pool: Pool,
        routed: native.RoutedLayer | None,
        watch: Watch | None,
    ) -> None:
        self.own, self.mlp, self.number = module.forward, module.mlp, number
        self.cols = module.self_attn.head_dim
        self.hidden = module.self_attn.q_proj.in_features
        self.routed, self.watch = routed, watch
        self._block, self._pool = block, pool

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = False,
        position_embeddings: Any = None,
        **more: Any,
    ) -> Any:
        kept = self._kept(hidden_states, attention_mask, past_key_values, position_embeddings)
        if kept is None:
            return self.own(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **more,
            )
        return self._computed(hidden_states, kept, position_embeddings)

    def _kept(self, x: Tensor, mask: Any, cache: Any, rotation: Any) -> GrowingLayer | None:
        """Keys and values of the layer; None where its own code is to compute."""
        if x.shape != (1, 1, self.hidden) or mask is not None or cache is None:
            return None
        if not is_bf16(x) or torch.is_grad_enabled() or type(rotation) is not tuple:
            return None
        alike = all(one.shape == (1, 1, self.cols) and is_bf16(one) for one in rotation)
        layer = cache.layers[self.number] if self.number < len(cache.layers) else None
        if not alike or type(layer) is not GrowingLayer or layer.memory[0].shape[0] != 1:
            return None
        if layer.dtype is not torch.bfloat16:
            return None
        if layer.count == layer.room:
            layer.reserve(2 * layer.room)
        return layer

    def _computed(self, x: Tensor, kept: GrowingLayer, rotation: tuple[Tensor, Tensor]) -> Tensor:
        tokens, pool = kept.count, self._pool
        h, normed = torch.empty_like(x), torch.empty_like(x)
        memory = workspace.take(pool, self._block.scratch_size(tokens))
        try:
            cosine, sine = rotation
            keys, values = kept.memory
            self._block.run(
                pool,
                x.data_ptr(),
                (cosine.data_ptr(), sine.data_ptr()),
                (keys.data_ptr(), values.data_ptr()),
                tokens,
                kept.room,
                h.data_ptr(),
                normed.data_ptr(),
                memory,
            )
        finally:
            workspace.give(pool, memory)
        kept.extend(tokens + 1)
        return self.with_experts(h, normed)

    def with_experts(self, h: Tensor, normed: Tensor) -> Tensor:
        """h and what the rest of the layer makes of `normed`."""
        if self.routed is None:
            found = self.mlp(normed)
            y: Tensor = h + found
            return y
        began = perf_counter()
        y = torch.empty_like(h)
        memory = workspace.take(self._pool, self.routed.scratch_size(self._pool))
        try:
            self.routed.run(self._pool, normed.data_ptr(), h.data_ptr(), y.data_ptr(), memory)
        finally:
            workspace.give(self._pool, memory)
        if self.watch is not None:
            self.watch(perf_counter() - began)
        return y


class _OneLayer:
    """A cache of transformers with one layer."""

    def __init__(self, number: int, heads: int, cols: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        keys, values = (
            torch.randn((1, heads, tokens, cols), generator=generator).bfloat16() for _ in range(2)
        )
        self.one = GrowingLayer(keys, values, tokens + 1)
        self.layers = [self.one] * (number + 1)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.one.update(keys, values)

    def get_seq_length(self, *_: Any) -> int:
        return self.one.count


def _answers_alike(forward: _Forward, attending: Attending) -> bool:
    """Whether a layer's own code and the kernels give the same for a random token after others, to
    the bit, and keep the same keys and values."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((1, 1, forward.hidden), generator=generator).bfloat16()
    angle = torch.rand((1, 1, forward.cols // 2), generator=generator).repeat(1, 1, 2)
    rotation = angle.cos().bfloat16(), angle.sin().bfloat16()
    heads = forward._block.key_heads
    caches = [_OneLayer(forward.number, heads, forward.cols, 5) for _ in range(2)]
    given = {
        "attention_mask": None,
        "position_ids": torch.tensor([[_FAR]]),
        "use_cache": True,
        "position_embeddings": rotation,
    }
    attending.scales = []
    try:
        theirs = answer_of(forward.own, x, past_key_values=caches[0], **given)
    finally:
        scales, attending.scales = attending.scales, None
    if len(scales) != 1 or not isinstance(theirs, Tensor):
        return False  # attention that is more than the kernels have
    with torch.inference_mode():
        ours = forward(x, past_key_values=caches[1], **given)
    both = zip(caches[0].one.memory, caches[1].one.memory, strict=True)
    return torch.equal(theirs, ours) and all(torch.equal(*one) for one in both)


def _routed_of(mlp: Any, pool: Pool, known: Known) -> native.RoutedLayer | None:
    """The kernels of a block of a router and experts, and nothing else."""
    children = dict(mlp.named_children())
    if set(children) != {"gate", "experts"} or _has_own_arrays(mlp):
        return None
    router, experts = known.routers.get(children["gate"]), children["experts"]
    if router is None or type(experts) is not PackedExperts or not experts.is_plain:
        return None
    layer = experts.experts.layer
    skip = experts.skip_address
    made = native.RoutedLayer(router.gate, router.router, layer, skip, router.rounded)
    return made if _routes_alike(mlp, made, pool) else None


def _routes_alike(mlp: Any, made: native.RoutedLayer, pool: Pool) -> bool:
    """Whether the block's own code and the kernels answer alike to most of some random tokens:
    where logits of a router are equal, either of two experts may be chosen."""
    generator = torch.Generator().manual_seed(2)
    memory, alike = native.aligned_bytes(made.scratch_size(pool)), 0
    for _ in range(_TRIED):
        x = torch.randn((1, 1, mlp.experts.experts.hidden), generator=generator).bfloat16()
        h, y = torch.zeros_like(x), torch.empty_like(x)
        made.run(pool, x.data_ptr(), h.data_ptr(), y.data_ptr(), memory)
        with torch.inference_mode():
            theirs = mlp(x)
        if not isinstance(theirs, Tensor) or theirs.shape != x.shape:
            return False
        alike += bool((y.float() - theirs.float()).norm() <= _CLOSE * theirs.float().norm())
    return alike > _TRIED // 2
