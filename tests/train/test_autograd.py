"""LoRAExperts in graphs of autograd: waiting forwards, saved memory, checkpointing, compilers."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
from helpers.training import MATRICES, batch, called, gradients, lora_experts, same  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ktconv.errors import UsageError  # noqa: E402
from ktconv.runtime import MoELayer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def test_only_what_is_needed_is_computed(module: Any) -> None:
    given = batch(module)
    whole = gradients(module, given)
    module.gate_a.requires_grad_(False)
    module.zero_grad()
    module(*given[:3]).backward(given.dy)
    assert module.gate_a.grad is None and torch.equal(module.gate_b.grad, whole["gate_b"])
    module.requires_grad_(False)
    x = given.x.clone().requires_grad_()
    module(x, *given[1:3]).backward(given.dy)
    assert torch.equal(x.grad, whole["x"])
    weights = given.weights.clone().requires_grad_()  # of a router below inputs that are frozen
    module(given.x, given.ids, weights).backward(given.dy)
    assert torch.equal(weights.grad, whole["weights"])
    assert not module(*given[:3]).requires_grad


def test_any_number_of_forwards_may_wait(module: Any) -> None:
    """In any order of their backwards, with different tokens."""
    batches = [batch(module, tokens, seed=tokens) for tokens in (3, 9, 4)]
    alone = [gradients(module, one) for one in batches]
    waiting = [called(module, one) for one in batches]
    for which in (1, 2, 0):
        module.zero_grad()
        x, weights, y = waiting[which]
        y.backward(batches[which].dy)
        assert torch.equal(x.grad, alone[which]["x"])
        assert torch.equal(weights.grad, alone[which]["weights"])
        assert torch.equal(module.down_b.grad, alone[which]["down_b"])


def test_threads_may_use_one_module(module: Any) -> None:
    """Each with forwards and backwards of its own."""
    batches = [batch(module, 20, seed=seed) for seed in range(4)]
    alone = [gradients(module, one) for one in batches]

    def work(which: int) -> bool:
        for _ in range(5):
            x, weights, y = called(module, batches[which])
            found = torch.autograd.grad(y, (x, weights, module.up_b), batches[which].dy)
            expected = (alone[which][name] for name in ("x", "weights", "up_b"))
            if not all(map(torch.equal, found, expected)):
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_two_losses_share_a_forward(module: Any) -> None:
    given = batch(module)
    once = gradients(module, given)
    x, _, y = called(module, given)
    module.zero_grad()
    for _ in range(2):
        y.backward(given.dy, retain_graph=True)
    assert torch.equal(x.grad, 2 * once["x"])
    assert torch.equal(module.up_a.grad, 2 * once["up_a"])


def test_a_second_backward_is_refused(module: Any) -> None:
    given = batch(module)
    _, _, y = called(module, given)
    y.backward(given.dy)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(given.dy)


@pytest.mark.parametrize("what", ["x", "ids", "weights", "up_b"])
def test_changes_before_the_backward_are_refused(module: Any, what: str) -> None:
    """An optimizer's step, for example; gradients would be of another forward."""
    given = batch(module)
    y = module(*given[:3])
    with torch.no_grad():
        {**given._asdict(), "up_b": module.up_b}[what].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(given.dy)


def test_gradients_of_gradients_are_refused(module: Any) -> None:
    """Not left out of a penalty without a word."""
    x, _, y = called(module, batch(module))
    with pytest.raises(UsageError, match="no gradients of gradients"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_gradients_that_do_not_fit(module: Any) -> None:
    given = batch(module)
    _, _, y = called(module, given)
    with pytest.raises(RuntimeError, match="shape"):
        y.backward(given.dy[:2])
    with pytest.raises(RuntimeError):  # without a forward that could have one
        module(*given[:3]).detach().backward(given.dy)


def test_nothing_is_kept_without_gradients(module: Any) -> None:
    """The same bits, and no graph."""
    given, kept = batch(module), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda o: o):
        y = module(*given[:3])
        assert len(kept) == 3 + 1 + 6 and kept[3].dtype == torch.uint8
        del kept[:]
        with torch.no_grad():
            assert torch.equal(module(*given[:3]), y)
        with torch.inference_mode():
            assert torch.equal(module(*(one.clone() for one in given[:3])), y)
        assert not kept


def test_what_is_kept_is_freed_with_the_graph(module: Any) -> None:
    kept: list[Any] = []

    def pack(tensor: Any) -> Any:
        if tensor.dtype == torch.uint8:
            kept.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    given = batch(module)
    gc.collect()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        dropped, used = module(*given[:3]), module(*given[:3])
    assert [ref() is not None for ref in kept] == [True, True]
    del dropped
    gc.collect()
    assert [ref() is not None for ref in kept] == [False, True]
    used.backward(given.dy)
    gc.collect()
    assert kept[1]() is None and used.shape == given.x.shape


def test_saved_memory_may_be_elsewhere_meanwhile(module: Any) -> None:
    """As hooks that keep it on disk bring it back: anywhere in memory."""
    given = batch(module)
    straight = gradients(module, given)

    def unpack(values: Any) -> Any:
        room = torch.empty(values.nbytes + 8, dtype=torch.uint8)[8:]
        return room.view(values.dtype).view(values.shape).copy_(values)

    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.detach().clone(), unpack):
        assert same(gradients(module, given), straight)
    with torch.autograd.graph.save_on_cpu():
        assert same(gradients(module, given), straight)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing(layer: MoELayer, reentrant: bool, dropout: float) -> None:
    """Computing again gives the same gradients, also with the same elements dropped."""
    module = lora_experts(layer, dropout=dropout)
    given = batch(module)
    torch.manual_seed(3)
    straight = gradients(module, given)
    torch.manual_seed(3)
    module.zero_grad()
    x, weights = given.x.clone().requires_grad_(), given.weights.clone().requires_grad_()
    y = checkpoint(module, x, given.ids, weights, use_reentrant=reentrant)
    torch.rand(5)  # of another part of a model
    y.backward(given.dy)
    assert torch.equal(y, straight["y"]) and torch.equal(x.grad, straight["x"])
    assert torch.equal(weights.grad, straight["weights"])
    assert all(torch.equal(getattr(module, name).grad, straight[name]) for name in MATRICES)


def test_autocast_changes_nothing(module: Any) -> None:
    given = batch(module, dtype=torch.float32)
    straight = gradients(module, given)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(gradients(module, given), straight)


def test_compiled_code_calls_it(module: Any) -> None:
    given, graphs = batch(module, dtype=torch.float32), []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def around(x: Any) -> Any:
        return module(torch.relu(x) * 2, given.ids, given.weights) * 3

    x = given.x.clone().requires_grad_()
    around(x).backward(given.dy)
    straight, x.grad = x.grad, None
    try:
        torch.compile(around, backend=backend)(x).backward(given.dy)
    finally:
        torch.compiler.reset()
    assert graphs and torch.equal(x.grad, straight)


def test_gradients_of_bf16_matrices_are_rounded_once(layer: MoELayer) -> None:
    """Those of the same numbers in fp32, with several blocks of an expert and without tokens."""
    halves, floats = (lora_experts(layer, dtype=one) for one in (torch.bfloat16, torch.float32))
    floats.load_state_dict(halves.state_dict())
    for tokens in (7, 500, 0):
        given = batch(halves, tokens)
        found, exact = gradients(halves, given), gradients(floats, given)
        for name, one in found.items():
            assert torch.equal(one, exact[name].to(one.dtype)), name
