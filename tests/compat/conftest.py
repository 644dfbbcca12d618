"""Wrappers with weights from tensors, and what they must compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from ktconv.compat.kt import KTMoEWrapper
    from ktconv.compat.kt.cpu_infer import CPUInfer

with suppress(ImportError):  # modules skip themselves; a conftest that did would end the whole run
    import torch

EXPERTS, TOP_K, HIDDEN, INNER = 8, 3, 256, 128
EXACT = 0.006  # of BF16: the kernels round activations and the output to bf16, 2^-9 each

Make = Callable[..., "KTMoEWrapper"]


class Stacks(NamedTuple):
    """Gate, up [E, I, H] and down [E, H, I] in bf16."""

    gate: Any
    up: Any
    down: Any


class Batch(NamedTuple):
    """x [T, H] in bf16, ids without repetition [T, K], weights [T, K]."""

    x: Any
    ids: Any
    weights: Any


def stacks(seed: int = 0, experts: int = EXPERTS, hidden: int = HIDDEN) -> Stacks:
    made = torch.Generator().manual_seed(seed)
    wide, tall = (experts, INNER, hidden), (experts, hidden, INNER)
    return Stacks(
        *((torch.randn(shape, generator=made) / 10).bfloat16() for shape in (wide, wide, tall))
    )


def batch(tokens: int = 5, seed: int = 0, top_k: int = TOP_K, hidden: int = HIDDEN) -> Batch:
    made = torch.Generator().manual_seed(1000 * seed + tokens)
    return Batch(
        torch.randn(tokens, hidden, generator=made).bfloat16(),
        torch.rand(tokens, EXPERTS, generator=made).argsort(dim=1)[:, :top_k].contiguous(),
        torch.rand(tokens, top_k, generator=made),
    )


class ByAddresses(NamedTuple):
    """A task of CPUInfer, and y [T, H], zeros until it has run; `used` is what it reads."""

    task: Callable[[], None]
    y: Any
    used: object


def forward_by_addresses(queue: CPUInfer, own: Stacks, given: Batch) -> ByAddresses:
    """The forward of a layer of these weights, by the addresses of its tensors."""
    from ktconv.compat.kt import moe

    config = moe.MOEConfig(EXPERTS, TOP_K, HIDDEN, own.up.shape[1])
    config.pool = queue.backend_
    for name, stack in zip(("gate", "up", "down"), own, strict=True):
        setattr(config, f"{name}_proj", stack.data_ptr())
    layer = moe.CLASSES["AMXBF16_MOE"](config)
    layer.load_weights()
    tokens = len(given.x)
    size, y = torch.tensor([tokens], dtype=torch.int32), torch.zeros_like(given.x)
    ids, weights, x, out = (one.data_ptr() for one in (given.ids, given.weights, given.x, y))
    task = layer.forward_task(size.data_ptr(), TOP_K, ids, weights, x, out)
    return ByAddresses(task, y, (own, given, size))


def expected(own: Stacks, x: Any, ids: Any, weights: Any, skip: Any = None) -> Any:
    """fp32 [T, H]: slots of no expert, or of one in `skip`, add nothing."""
    x, y = x.float(), torch.zeros(x.shape)
    for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])):
        expert = int(ids[token, slot])
        if not 0 <= expert < len(own.up) or (skip is not None and skip[expert]):
            continue
        gate, up, down = (stack[expert].float() for stack in own)
        inner = torch.nn.functional.silu(gate @ x[token]) * (up @ x[token])
        y[token] += weights[token, slot].float() * (down @ inner)
    return y


def error(found: Any, reference: Any) -> float:
    """The norm of the difference over that of the reference."""
    return float((found.float() - reference).norm() / reference.norm())


@pytest.fixture
def make() -> Make:
    """make(stacks(3), method="BF16", mapping=None, ...): a wrapper with weights, make(None) one
    without. Other arguments are the constructor's."""
    from ktconv.compat.kt import KTMoEWrapper

    usual = stacks()

    def made(
        own: Stacks | None = usual, mapping: Any = None, path: Any = "", **more: Any
    ) -> KTMoEWrapper:
        arguments: dict[str, Any] = {
            "layer_idx": 0, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
            "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "gpu_experts_mask": None,
            "cpuinfer_threads": 2, "threadpool_count": 1, "weight_path": path,
            "chunked_prefill_size": 64, "method": "BF16",
        }  # fmt: skip
        wrapper = KTMoEWrapper(**arguments | more)
        if own is not None:
            wrapper.load_weights_from_tensors(*own, mapping)
        return wrapper

    return made
