"""Single tokens outside a model's experts, computed on the C library's kernels.

Modules and weights stay the model's own. `on_kernels` gives those that the kernels know another
`forward` for a while, which computes one token, or few, and leaves everything else to the model's
code. Norms, rotary embeddings, routers and layers are known by what they answer to a trial.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from msgspec import Struct
from torch import nn

from ktconv import native
from ktconv.generate.outside.attention import attention_on, rotation_on
from ktconv.generate.outside.layers import Known, Watch, layers_on
from ktconv.generate.outside.linears import linears_on
from ktconv.generate.outside.norms import norms_on
from ktconv.generate.outside.routers import routers_on
from ktconv.system.pool import Pool

__all__ = ["OnKernels", "Watch", "on_kernels"]


class OnKernels(Struct, frozen=True):
    """Numbers of a model's modules whose single tokens the kernels compute. `all_linear`: these are
    all its linear layers, so that PyTorch needs no threads of its own."""

    linear_layers: int = 0
    norms: int = 0
    routers: int = 0
    decoder_layers: int = 0  # as a whole, their modules with them
    all_linear: bool = False


@contextmanager
def on_kernels(model: Any, pool: Pool, watch: Watch | None = None) -> Iterator[OnKernels]:
    """Inside, the model computes single tokens outside its experts on `pool`; which of its modules
    do. `watch` is called with the seconds of each call of experts that a whole decoder layer makes,
    which hooks of the experts' module do not see."""
    if not native.dense_is_fast():
        yield OnKernels()
        return
    with ExitStack() as stack:
        linears = stack.enter_context(linears_on(model, pool))
        norms = stack.enter_context(norms_on(model))
        stack.enter_context(rotation_on(model))
        attending = stack.enter_context(attention_on(pool))
        routers = stack.enter_context(routers_on(model, pool))
        known = Known(linears, norms, routers, attending)
        stack.enter_context(_without_router_logits(model))
        whole = stack.enter_context(layers_on(model, pool, known, watch))
        every = all(one in linears for one in model.modules() if isinstance(one, nn.Linear))
        all_linear = bool(linears) and every
        yield OnKernels(len(linears), len(norms), len(routers), whole, all_linear)


@contextmanager
def _without_router_logits(model: nn.Module) -> Iterator[None]:
    """Inside, no setting of the model asks for the answers of its routers, for a loss: a decoder
    layer that is computed as a whole calls no router's module."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        configs[id(config)] = config
    asking = [one for one in configs.values() if getattr(one, "output_router_logits", False)]
    for one in asking:
        one.output_router_logits = False
    try:
        yield
    finally:
        for one in asking:
            one.output_router_logits = True
