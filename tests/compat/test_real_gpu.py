"""CUDA graphs with experts on the CPU, on a GPU: what the stand-in of `test_graphs.py` plays."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from ktconv.errors import UsageError

from .conftest import (
    EXACT,
    EXPERTS,
    Make,
    batch,
    error,
    expected,
    forward_by_addresses,
    stacks,
)

torch = pytest.importorskip("torch")

from ktconv._native import ffi  # noqa: E402

from ktconv.compat.kt import KTMoEWrapper, streams  # noqa: E402
from ktconv.compat.kt.cpu_infer import CPUInfer  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def far(given: Any) -> Any:
    return [one.cuda() for one in given]


def handle() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


class Captured:
    """Layers, called one after the other on the same inputs, as a graph."""

    def __init__(self, wrappers: list[KTMoEWrapper], tokens: int, twice: bool = False) -> None:
        self.inputs: Any = far(batch(tokens, 9))
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.results = []
            for wrapper in wrappers:
                x, ids, weights = self.inputs
                wrapper.submit_forward(x, ids, weights, handle())
                self.results.append(wrapper.sync_forward(self.inputs[0], handle()))

    def replay(self, given: Any) -> list[Any]:
        for own, one in zip(self.inputs, given, strict=True):
            own.copy_(one.cuda())
        self.graph.replay()
        return [one.cpu() for one in self.results]


def test_a_graph_repeats_what_it_captured(make: Make) -> None:
    wrappers = [make(stacks(n), layer_idx=n) for n in range(3)]
    graphs = {tokens: Captured(wrappers, tokens) for tokens in (1, 6, 64)}
    for seed in range(200):
        tokens = (1, 6, 64, 6)[seed % 4]
        given = batch(tokens, seed)
        found = graphs[tokens].replay(given)
        for wrapper, y in zip(wrappers, found, strict=True):
            assert torch.equal(y, wrapper.forward(*given))
            assert torch.equal(y, wrapper.forward(*far(given)).cpu())


def test_calls_without_a_graph_keep_their_order(make: Make) -> None:
    """Many calls under way, whose inputs change by work on the stream."""
    wrapper, given = make(), batch(6)
    x, ids, weights = far(given)
    results = []
    for n in range(200):
        results.append(wrapper.forward(x, ids, weights))
        if n % 2:
            x.mul_(-1)
    torch.cuda.synchronize()
    near = [wrapper.forward(sign * given.x, *given[1:]) for sign in (1, -1)]
    for n, y in enumerate(results):
        assert torch.equal(y.cpu(), near[n // 2 % 2])


def test_a_stream_forked_within_a_capture(make: Make) -> None:
    wrapper, side, given = make(), torch.cuda.Stream(), batch(4)
    x, ids, weights = far(given)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        main, staged = torch.cuda.current_stream(), x.clone()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            wrapper.submit_forward(staged, ids, weights, handle())
        own = x * 2
        with torch.cuda.stream(side):
            y = wrapper.sync_forward(staged, handle())
        main.wait_stream(side)
        total = own.float() + y
    for factor in (1, 3):
        x.copy_(factor * given.x.cuda())
        graph.replay()
        reference = expected(stacks(), factor * given.x, *given[1:])
        assert error(total.cpu(), 2 * factor * given.x.float() + reference) < EXACT


def test_two_streams_at_once(make: Make) -> None:
    wrappers = [make(stacks(n), layer_idx=n) for n in range(2)]
    own = [Captured([wrapper], 6) for wrapper in wrappers]
    queues = [torch.cuda.Stream() for _ in wrappers]
    for seed in range(50):
        given = [batch(6, 2 * seed + n) for n in range(2)]
        for captured, one in zip(own, given, strict=True):
            for to, values in zip(captured.inputs, one, strict=True):
                to.copy_(values.cuda())
        torch.cuda.synchronize()
        for captured, queue in zip(own, queues, strict=True):
            with torch.cuda.stream(queue):
                captured.graph.replay()
        torch.cuda.synchronize()
        for wrapper, captured, one in zip(wrappers, own, given, strict=True):
            assert torch.equal(captured.results[0].cpu(), wrapper.forward(*one))


def test_a_graph_sees_the_mask_of_each_replay(make: Make) -> None:
    wrapper, given = make(), batch(5)
    captured = Captured([wrapper], 5)
    for masked in ([1, 4], [0]):
        mask = torch.zeros(EXPERTS, dtype=torch.bool)
        mask[masked] = True
        wrapper.gpu_experts_mask = mask
        (found,) = captured.replay(given)
        assert error(found, expected(stacks(), *given, mask)) < EXACT


def test_deferred_experts_of_a_graph(make: Make, tmp_path: Any) -> None:
    wrappers = [
        make(stacks(n), layer_idx=n, path=tmp_path, max_deferred_experts_per_token=2)
        for n in range(3)
    ]
    captured = Captured(wrappers, 6)
    for seed in range(3):
        given = batch(6, seed)
        found = captured.replay(given)
        eager = [wrapper.forward(*far(given)).cpu() for wrapper in wrappers]
        near = [wrapper.forward(*given) for wrapper in wrappers]
        assert all(map(torch.equal, found, near)) and all(map(torch.equal, eager, near))


def test_a_failure_is_nan_and_an_error_of_the_next_call(make: Make) -> None:
    wrapper, given = make(), batch(5)
    wrapper.layer.packed.layer._table[2].up = ffi.NULL
    ids = torch.full_like(given.ids, 2)
    captured = Captured([wrapper], 5)
    assert captured.replay((given.x, ids, given.weights))[0].isnan().all()
    with pytest.raises(UsageError, match="layer 0 failed on a CUDA stream: a token goes"):
        wrapper.forward(*far(given))


def test_memory_ends_with_the_graph(make: Make) -> None:
    gc.collect()
    streams.forget_graphs()
    captured, before = Captured([make()], 4), set(streams._graphs)
    captured.replay(batch(4))
    streams.forget_graphs()
    assert set(streams._graphs) == before
    del captured
    gc.collect()
    torch.cuda.synchronize()
    streams.forget_graphs()
    assert len(streams._graphs) == len(before) - 1


def test_cpu_infer_on_a_stream() -> None:
    queue, own, given = CPUInfer(2), stacks(3), batch(5)
    made = forward_by_addresses(queue, own, given)
    task, y = made.task, made.y
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queue.submit_with_cuda_stream(handle(), task)
        queue.sync_with_cuda_stream(handle())
    for _ in range(3):
        given.x.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        assert error(y, expected(own, given.x, given.ids, given.weights)) < EXACT
