"""Whole decoder layers of one token, all that follow one another in one call of the C library.

A layer is known by its modules, which are known themselves, and by what it answers to a trial: to
the bit what its own code makes of the same modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from ktconv import native
from ktconv.generate.outside.attention import Attending
from ktconv.generate.outside.cache import CACHE, GrowingLayer, growing
from ktconv.generate.outside.linears import is_bf16, replaced_forward
from ktconv.generate.outside.routers import KnownRouter
from ktconv.generate.outside.together import Member, Together, Visited
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
        found = []
        for module in list(model.modules()):
            made = _layer_of(module, pool, known)
            if made is not None:
                stack.enter_context(replaced_forward(module, made))
                found.append(made)
        for run in _runs(found):
            stack.enter_context(_joined(model, run, pool, watch))
        yield len(found)


def _runs(found: Sequence[_Forward]) -> list[list[_Forward]]:
    """Layers on kernels alone that follow one another, in the order of a model's modules."""
    runs: list[list[_Forward]] = []
    before = None
    for one in found:
        if one.member is not None:
            if before is None or not one.follows(before):
                runs.append([])
            runs[-1].append(one)
        before = one
    return runs


@contextmanager
def _joined(model: Any, run: Sequence[_Forward], pool: Pool, watch: Watch | None) -> Iterator[None]:
    """Layers of a run know one another, and so does the list of the model that ends with them."""
    members = [one.member for one in run if one.member is not None]
    together = Together(members, pool, watch)
    for place, one in enumerate(run):
        one.place = together, place
    with ExitStack() as stack:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.ModuleList and together.are_last([*child]):
                    stack.enter_context(_visited(parent, name, child, together))
        yield


@contextmanager
def _visited(parent: Any, name: str, layers: nn.ModuleList, together: Together) -> Iterator[None]:
    """Inside, `parent` has a list of these layers that ends passes early; changes of it stay."""
    other = Visited(layers, together)
    setattr(parent, name, other)
    try:
        yield
    finally:
        layers._modules = other._modules
        setattr(parent, name, layers)


_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_NORMS = ("q_norm", "k_norm")


def _layer_of(module: Any, pool: Pool, known: Known) -> _Forward | None:
    """The function of a layer that is known."""
    if set(dict(module.named_children())) != _CHILDREN or _has_arrays(module):
        return None
    attention = module.self_attn
    number = getattr(attention, "layer_idx", None)
    block = _attention_of(module, known)
    if block is None or not isinstance(number, int):
        return None
    forward = _Forward(module, number, block, pool)
    if not _answers_alike(forward, known.attending):
        return None
    routed = _routed_of(module.mlp, pool, known)
    if routed is not None:
        forward.member = Member(module, forward, number, block, routed, module.mlp.experts)
    return forward


def _attention_of(module: Any, known: Known) -> native.AttentionLayer | None:
    """The kernel of a layer's attention and norms; None where a part of them is not known."""
    attention = module.self_attn
    children, cols = dict(attention.named_children()), getattr(attention, "head_dim", None)
    scale = getattr(attention, "scaling", None)
    if not {*_PROJECTIONS, "o_proj"} <= set(children) <= {*_PROJECTIONS, *_NORMS, "o_proj"}:
        return None
    if _has_more(attention) or not isinstance(cols, int) or not isinstance(scale, float):
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


def _has_arrays(module: nn.Module) -> bool:
    return bool([*module.parameters(recurse=False), *module.buffers(recurse=False)])


def _has_more(module: nn.Module) -> bool:
    """Whether a module that is not called has arrays of its own, or hooks."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or _has_arrays(module)


class _Forward:
    """The forward of a layer: on the kernels for one token whose keys and values have room."""

    def __init__(self, module: Any, number: int, block: native.AttentionLayer, pool: Pool) -> None:
        self.own, self.mlp, self.number = module.forward, module.mlp, number
        self.cols = module.self_attn.head_dim
        self.hidden = module.self_attn.q_proj.in_features
        self.member: Member | None = None  # of a layer whose experts are on kernels too,
        self.place: tuple[Together, int] | None = None  # among those around it
        self._block, self._pool = block, pool

    def follows(self, other: _Forward) -> bool:
        """Whether a model that calls its layers in turn calls this one next, for the same sizes."""
        alike = self.hidden == other.hidden and self.cols == other.cols
        return alike and other.member is not None and self.number == other.number + 1

    def __call__(self, hidden_states: Tensor, *more: Any, **named: Any) -> Any:
        if more:
            return self.own(hidden_states, *more, **named)
        cache: Any = named.get(CACHE)
        rotation: Any = named.get("position_embeddings")
        given = hidden_states, named.get("attention_mask"), cache, rotation
        if self.place is not None:
            together, place = self.place
            y = together.handed(place, *given)
            if y is not None:
                return y
        kept = self._kept(*given)
        if kept is None:
            return self.own(hidden_states, **named)
        if self.place is not None and self.member is not None and self.member.experts.is_plain:
            together, place = self.place
            return together.computed(place, hidden_states, kept, cache, rotation)
        return self._computed(hidden_states, kept, rotation)

    def _kept(self, x: Tensor, mask: Any, cache: Any, rotation: Any) -> GrowingLayer | None:
        """Keys and values of the layer; None where its own code is to compute."""
        if x.shape != (1, 1, self.hidden) or mask is not None or cache is None:
            return None
        if not is_bf16(x) or torch.is_grad_enabled() or type(rotation) is not tuple:
            return None
        alike = all(one.shape == (1, 1, self.cols) and is_bf16(one) for one in rotation)
        return growing(cache, self.number) if alike else None

    def _computed(self, x: Tensor, kept: GrowingLayer, rotation: tuple[Tensor, Tensor]) -> Tensor:
        tokens, pool = kept.count, self._pool
        h, normed = torch.empty_like(x), torch.empty_like(x)
        memory = workspace.take(pool, self._block.scratch_size(tokens))
        try:
            cosine, sine = rotation
            self._block.run(
                pool,
                x.data_ptr(),
                (cosine.data_ptr(), sine.data_ptr()),
                kept.places,
                tokens,
                kept.room,
                h.data_ptr(),
                normed.data_ptr(),
                memory,
            )
        finally:
            workspace.give(pool, memory)
        kept.count = tokens + 1
        y: Tensor = h + self.mlp(normed)
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
        theirs = answer_of(forward.own, x, **{CACHE: caches[0]}, **given)
    finally:
        scales, attending.scales = attending.scales, None
    if len(scales) != 1 or not isinstance(theirs, Tensor):
        return False  # attention that is more than the kernels have
    ours = answer_of(forward, x, **{CACHE: caches[1]}, **given)
    if not isinstance(ours, Tensor):
        return False  # a block of experts that gives more than its output
    both = zip(caches[0].one.memory, caches[1].one.memory, strict=True)
    return torch.equal(theirs, ours) and all(torch.equal(*one) for one in both)


def _routed_of(mlp: Any, pool: Pool, known: Known) -> native.RoutedLayer | None:
    """The kernels of a block of a router and experts, and nothing else."""
    children = dict(mlp.named_children())
    if set(children) != {"gate", "experts"} or _has_more(mlp):
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
