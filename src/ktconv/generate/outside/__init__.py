"""Single tokens outside a model's experts, computed on the C library's kernels.

Modules and weights stay the model's own. `on_kernels` gives those that the kernels know another
`forward` for a while, which computes one token, or few, and leaves everything else to the model's
code. Norms, rotary embeddings, routers and layers are known by what they answer to a trial.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ktconv import native
from ktconv.generate.outside.attention import attention_on, rotation_on
from ktconv.generate.outside.layers import Known, Watch, layers_on
from ktconv.generate.outside.linears import linears_on
from ktconv.generate.outside.norms import norms_on
from ktconv.generate.outside.routers import routers_on
from ktconv.system.pool import Pool

__all__ = ["Watch", "on_kernels"]


@contextmanager
def on_kernels(model: Any, pool: Pool, watch: Watch | None = None) -> Iterator[bool]:
    """Inside, the model computes single tokens outside its experts on `pool`; whether all its
    linear layers do, so that PyTorch needs no threads of its own. `watch` is told the seconds of
    calls of experts that go by the experts' own module."""
    if not native.dense_is_fast():
        yield False
        return
    with ExitStack() as stack:
        linears = stack.enter_context(linears_on(model, pool))
        norms = stack.enter_context(norms_on(model))
        stack.enter_context(rotation_on(model))
        attending = stack.enter_context(attention_on(pool))
        routers = stack.enter_context(routers_on(model, pool))
        known = Known(linears, norms, routers, attending)
        stack.enter_context(layers_on(model, pool, known, watch))
        yield bool(linears) and all(
            one in linears for one in model.modules() if isinstance(one, nn.Linear)
        )
