"""CUDA graphs that contain experts on the CPU, on a stand-in that is as strict as CUDA."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from functools import partial
from typing import Any
from weakref import ref

import pytest

from ktconv.errors import ResourceError, UsageError

from .conftest import (
    EXACT,
    EXPERTS,
    HIDDEN,
    TOP_K,
    Make,
    batch,
    error,
    expected,
    forward_by_addresses,
    stacks,
)

torch = pytest.importorskip("torch")

from helpers.far import FAR, far_device  # noqa: E402
from ktconv._native import ffi  # noqa: E402

from ktconv.compat.kt import KTMoEWrapper, streams  # noqa: E402
from ktconv.compat.kt.cpu_infer import CPUInfer  # noqa: E402
from ktconv.compat.kt.streams import wait_for  # noqa: E402
from ktconv.native import PythonTask  # noqa: E402
from ktconv.runtime import cuda, split_deferred  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with far_device(monkeypatch) as made:
        yield made


class Captured:
    """Layers, called one after the other on the same inputs, as a graph."""

    def __init__(self, device: Any, wrappers: list[KTMoEWrapper], tokens: int) -> None:
        self.device, self.stream = device, device.new_stream()
        self.inputs: Any = [one.to(FAR) for one in batch(tokens, 9)]
        with device.capture(self.stream) as self.graph:
            self.results = []
            for wrapper in wrappers:
                wrapper.submit_forward(*self.inputs)
                self.results.append(wrapper.sync_forward(self.inputs[0], 0))

    def replay(self, given: Any) -> list[Any]:
        """Results for other inputs, on the CPU."""
        with self.device.stream(self.stream):
            for own, one in zip(self.inputs, given, strict=True):
                own.copy_(one.to(FAR))
            self.graph.replay(self.stream)
            return [one.to("cpu") for one in self.results]


def test_a_graph_repeats_what_it_captured(make: Make, device: Any) -> None:
    """Replays with new inputs give the bits of calls, for several sizes and layers in any order."""
    wrappers = [make(stacks(n), layer_idx=n) for n in range(3)]
    graphs = {tokens: Captured(device, wrappers, tokens) for tokens in (1, 6)}
    for seed, tokens in enumerate((6, 1, 1, 6)):
        given = batch(tokens, seed)
        found = graphs[tokens].replay(given)
        for wrapper, y in zip(wrappers, found, strict=True):
            assert torch.equal(y, wrapper.forward(*given))
    assert device.waits == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_graph_of_other_dtypes(make: Make, device: Any, dtype: Any) -> None:
    wrapper, stream = make(), device.new_stream()
    given = batch(4)
    x, ids, weights = given.x.to(dtype).to(FAR), given.ids.int().to(FAR), given.weights.to(FAR)
    with device.capture(stream) as graph:
        y = wrapper.forward(x.reshape(2, 2, HIDDEN), ids, weights.bfloat16())
    graph.replay(stream)
    with device.stream(stream):
        found = y.to("cpu")
    near = wrapper.forward(given.x.to(dtype), given.ids, given.weights.bfloat16())
    assert found.dtype == dtype and torch.equal(found.reshape(4, HIDDEN), near)


def test_calls_under_way_at_once_have_memory_of_their_own(make: Make, device: Any) -> None:
    wrapper, stream = make(), device.new_stream()
    given = [batch(4, seed) for seed in range(3)]
    far: Any = [[one.to(FAR) for one in each] for each in given]
    with device.capture(stream) as graph:
        for one in far:
            wrapper.submit_forward(*one)
        results = [wrapper.sync_forward(one[0]) for one in far]
    graph.replay(stream)
    with device.stream(stream):
        found = [one.to("cpu") for one in results]
    for y, one in zip(found, given, strict=True):
        assert error(y, expected(stacks(), *one)) < EXACT


def test_a_stream_forked_within_a_capture(make: Make, device: Any) -> None:
    """SGLang computes the GPU's experts on the main stream meanwhile."""
    wrapper, main, side = make(), device.new_stream(), device.new_stream()
    given = batch(4)
    x, ids, weights = (one.to(FAR) for one in given)
    with device.capture(main) as graph:
        staged = x.clone()
        side.wait_stream(main)
        with device.stream(side):
            wrapper.submit_forward(staged, ids, weights, side.cuda_stream)
        own = x * 2
        with device.stream(side):
            y = wrapper.sync_forward(staged, side.cuda_stream)
        main.wait_stream(side)
        total = own.float() + y
    graph.replay(main)
    with device.stream(main):
        found = total.to("cpu")
    assert error(found, 2 * given.x.float() + expected(stacks(), *given)) < EXACT


def test_results_on_another_stream_than_the_call(make: Make, device: Any) -> None:
    wrapper, first, second = make(), device.new_stream(), device.new_stream()
    given = batch(4)
    with device.stream(first):
        far = [one.to(FAR) for one in given]
        wrapper.submit_forward(*far)
    with device.stream(second):
        found = wrapper.sync_forward(far[0]).to("cpu")
    assert error(found, expected(stacks(), *given)) < EXACT


def test_a_graph_sees_the_mask_of_each_replay(make: Make, device: Any) -> None:
    wrapper, given = make(), batch(5)
    captured = Captured(device, [wrapper], 5)
    for masked in ([1, 4], [0]):
        mask = torch.zeros(EXPERTS, dtype=torch.bool)
        mask[masked] = True
        wrapper.gpu_experts_mask = mask
        (found,) = captured.replay(given)
        assert error(found, expected(stacks(), *given, mask)) < EXACT


def test_deferred_experts_of_a_graph(make: Make, device: Any, tmp_path: Any) -> None:
    """Each token's experts of least weight are added by the layer after theirs."""
    wrappers = [
        make(stacks(n), layer_idx=n, path=tmp_path, max_deferred_experts_per_token=2)
        for n in range(3)
    ]
    captured = Captured(device, wrappers, 6)
    for seed in range(2):
        given, left = batch(6, seed), 0
        found = captured.replay(given)
        for n, y in enumerate(found):
            now, later = split_deferred(given.ids, given.weights, 1)
            own = stacks(n)
            kept = expected(own, given.x, given.ids if n == 2 else now, given.weights)
            assert error(y, kept + left) < EXACT
            left = expected(own, given.x, later, given.weights)


def test_what_is_deferred_reads_its_own_inputs(
    make: Make, device: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is computed long after the next layer's inputs are there: the queue naps."""
    launch = streams._launch_start

    def nap_first(task: Any, stream: int, graph: Any) -> None:
        if "deferred" in task.name:
            launch(PythonTask(task.queue, "a nap", lambda: time.sleep(0.05)), stream, graph)
        launch(task, stream, graph)

    monkeypatch.setattr(streams, "_launch_start", nap_first)
    wrappers = [
        make(stacks(n), layer_idx=n, path=tmp_path, max_deferred_experts_per_token=2)
        for n in range(4)
    ]
    stream, given = device.new_stream(), [batch(6, seed) for seed in range(4)]
    far: Any = [[one.to(FAR) for one in each] for each in given]
    with device.capture(stream) as graph:
        results = [wrapper.forward(*one) for wrapper, one in zip(wrappers, far, strict=True)]
    assert len(device.driver.ranges()) == 2  # which layers share in turn
    graph.replay(stream)
    left = 0
    with device.stream(stream):
        for n, (y, one) in enumerate(zip(results, given, strict=True)):
            now, later = split_deferred(one.ids, one.weights, 1)
            kept = expected(stacks(n), one.x, one.ids if n == 3 else now, one.weights)
            assert error(y.to("cpu"), kept + left) < EXACT, n
            left = expected(stacks(n), one.x, later, one.weights)


def test_what_a_graph_defers_stays_in_it(make: Make, device: Any, tmp_path: Any) -> None:
    own = [make(layer_idx=n, path=tmp_path, max_deferred_experts_per_token=1) for n in (0, 1)]
    far = [one.to(FAR) for one in batch(5)]
    own[0].forward(*far)
    with (
        device.capture(device.new_stream()),
        pytest.raises(UsageError, match="deferred experts before the CUDA graph began"),
    ):
        own[1].forward(*far)
    with device.capture(device.new_stream()):
        own[0].forward(*far)
    with pytest.raises(UsageError, match="cannot be added outside of it"):
        own[1].forward(*far)


def test_inputs_of_the_cpu_are_refused_in_a_graph(make: Make, device: Any) -> None:
    wrapper, given = make(), batch(3)
    with device.capture(device.new_stream()):
        with pytest.raises(UsageError, match="topk_ids is on cpu, which a CUDA graph"):
            wrapper.forward(given.x.to(FAR), given.ids, given.weights.to(FAR))
        wrapper.forward(*given)  # which no graph repeats


def test_a_graph_keeps_its_layers_and_its_memory(make: Make, device: Any) -> None:
    """Until it is gone: then a capture, or clear_buffer_cache, frees them."""
    wrapper, given = make(), batch(4)
    captured = Captured(device, [wrapper], 4)
    packed, near = ref(wrapper.layer.packed), wrapper.forward(*given)
    assert len(device.driver.ranges()) == 1
    del wrapper
    gc.collect()
    assert torch.equal(captured.replay(given)[0], near)
    KTMoEWrapper.clear_buffer_cache()
    assert packed() is not None and len(device.driver.ranges()) == 1
    captured.graph.destroy()
    with device.capture(device.new_stream()):
        KTMoEWrapper.clear_buffer_cache()
    gc.collect()
    assert packed() is None and device.driver.ranges() == []


def test_layers_of_a_graph_share_pinned_memory(make: Make, device: Any) -> None:
    Captured(device, [make(layer_idx=n) for n in range(3)], 4)
    (size,) = (size for _, size in device.driver.ranges())
    assert size == sum(-(-n // 64) * 64 for n in (8 * HIDDEN, 4 * TOP_K * 8, 4 * TOP_K * 4)) + (
        8 * HIDDEN
    )
    assert device.pinned == 0


def test_calls_end_with_their_stream(make: Make, device: Any) -> None:
    """Their memory and their task, once the stream has come to both host functions."""
    wrapper, far = make(), [one.to(FAR) for one in batch(4)]
    queue = wrapper.layer.pool.tasks
    for _ in range(3):
        wrapper.submit_forward(*far)
        assert queue.in_flight
        wrapper.sync_forward(far[0]).to("cpu")
        assert not queue.in_flight


def test_a_task_lives_until_its_stream_has_waited(make: Make, device: Any) -> None:
    """Though it is done, and other calls have begun, before somebody asks for the result."""
    first, other, given = make(), make(layer_idx=1), batch(4)
    far = [one.to(FAR) for one in given]
    first.submit_forward(*far)
    running: Any = first._submitted[0]
    task = ref(running._task)
    del running
    device.synchronize()
    first.layer.pool.tasks.drain()
    other.submit_forward(*far)
    y = first.sync_forward(far[0])
    assert task() is not None
    assert error(y.to("cpu"), expected(stacks(), *given)) < EXACT
    other.sync_forward(far[0]).to("cpu")
    first.layer.pool.tasks.in_flight  # noqa: B018
    assert task() is None


def test_a_graph_keeps_the_tasks_it_only_waits_for(device: Any) -> None:
    queue, stream, done = CPUInfer(1), device.new_stream(), list[int]()
    queue.submit_with_cuda_stream(stream.cuda_stream, partial(done.append, 1))
    task = ref(queue._on_streams[0])
    stream.synchronize()
    queue.sync()
    with device.capture(stream) as graph:
        queue.sync_with_cuda_stream(stream.cuda_stream)
    del queue
    gc.collect()
    assert task() is not None
    graph.replay(stream)
    stream.synchronize()
    assert done == [1]


def _nap(until: threading.Event) -> None:
    until.wait(60)


def test_what_was_submitted_outlives_its_queue_object() -> None:
    """`wrapper.cpu_infer.submit(task)` makes an object that is gone before the task runs."""
    begin, done = threading.Event(), list[int]()
    queue = CPUInfer(1)
    queue.submit(partial(_nap, begin))
    CPUInfer(queue.pool).submit(partial(done.append, 1))
    gc.collect()
    assert len(queue.pool.tasks.in_flight) == 2
    begin.set()
    queue.sync()
    CPUInfer(queue.pool).sync()
    assert done == [1] and not queue.pool.tasks.in_flight


def test_tasks_of_several_threads() -> None:
    """All are kept until they are done, and no longer."""
    pool, tasks, done = CPUInfer(1).pool, list[Any](), list[int]()

    def start() -> None:
        for _ in range(200):
            made = PythonTask(pool.tasks, "a task", partial(done.append, 1))
            tasks.append(ref(made))
            made.start()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(pool.tasks)
    assert len(done) == 800 and not pool.tasks.in_flight
    gc.collect()
    assert not any(one() for one in tasks)


# ---- failures


@pytest.mark.parametrize("graph", [False, True])
def test_a_failure_is_nan_and_an_error_of_the_next_call(
    make: Make, device: Any, graph: bool
) -> None:
    """The next call of the layer raises the error, once; other layers work on."""
    missing = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])
    wrapper, other, given = make(mapping=missing), make(layer_idx=1), batch(5)
    wrapper.layer.packed.layer._table[2].up = ffi.NULL
    ids = torch.full_like(given.ids, 2)
    if graph:
        (y,) = Captured(device, [wrapper], 5).replay((given.x, ids, given.weights))
    else:
        far = [one.to(FAR) for one in (given.x, ids, given.weights)]
        y = wrapper.forward(*far).to("cpu")
    assert y.isnan().all()
    far = [one.to(FAR) for one in given]
    with pytest.raises(UsageError, match="layer 0 failed on a CUDA stream: a token goes") as told:
        other.forward(*far)
    assert "mark such experts in gpu_experts_mask" in str(told.value.hint)
    found = other.forward(*far).to("cpu")
    assert error(found, expected(stacks(), *given)) < EXACT


def test_a_failure_is_told_though_its_task_is_done(make: Make, device: Any) -> None:
    """Also where other tasks have been started since."""
    wrapper, given = make(), batch(2)
    queue = wrapper.layer.pool.tasks
    wrapper.layer.packed.layer._table[0].down = ffi.NULL
    far = [given.x.to(FAR), torch.zeros_like(given.ids).to(FAR), given.weights.to(FAR)]
    wrapper.forward(*far).to("cpu")
    PythonTask(queue, "another", lambda: None).start()
    wait_for(queue)
    with pytest.raises(UsageError, match="layer 0 failed on a CUDA stream"):
        streams.raise_failure(queue)


def test_sync_of_the_queue_raises_a_failure(make: Make, device: Any) -> None:
    wrapper, given = make(), batch(2)
    wrapper.layer.packed.layer._table[0].down = ffi.NULL
    far = [given.x.to(FAR), torch.zeros_like(given.ids).to(FAR), given.weights.to(FAR)]
    wrapper.forward(*far).to("cpu")
    with pytest.raises(UsageError, match="layer 0 failed on a CUDA stream"):
        wrapper.cpu_infer.sync()
    wrapper.cpu_infer.sync()


def test_what_the_driver_refuses_is_named(make: Make, device: Any) -> None:
    device.driver.cuLaunchHostFunc = lambda *_: 900
    wrapper = make()
    with pytest.raises(ResourceError, match=r"cuLaunchHostFunc of the CUDA driver failed: .*900"):
        wrapper.forward(*(one.to(FAR) for one in batch(2)))
    wrapper.cpu_infer.sync()  # nothing is waited for that will never come


def test_nobody_waits_for_streams_that_have_failed(make: Make, device: Any) -> None:
    def query() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    wrapper, device.current.query = make(), query
    wrapper.submit_forward(*(one.to(FAR) for one in batch(2)))
    with pytest.raises(ResourceError, match=r"CUDA has failed: CUDA error: an illegal .*ered$"):
        wrapper.cpu_infer.sync()
    device.synchronize()
    wrapper.cpu_infer.sync()


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    cuda.driver.cache_clear()
    with pytest.raises(UsageError, match=r"the CUDA driver cannot be opened: libcuda\.so\.1"):
        cuda.driver()
    cuda.driver.cache_clear()


# ---- tasks with functions of Python


def test_experts_with_something_around_them(make: Make, device: Any) -> None:
    """Their work needs the interpreter, which the queue's thread asks for, no host function."""
    wrapper, given = make(num_experts_per_tok=1), batch(5, top_k=1)
    packed = wrapper.layer.packed
    object.__setattr__(packed, "weight_on_input", True)
    captured = Captured(device, [], 5)
    captured.inputs[1], captured.inputs[2] = given.ids.to(FAR), given.weights.to(FAR)
    with device.capture(captured.stream) as captured.graph:
        captured.results = [wrapper.forward(*captured.inputs)]
    near = wrapper.forward(*given)
    assert torch.equal(captured.replay(given)[0], near)
    wrapper.gpu_experts_mask[:] = True
    assert captured.replay(given)[0].count_nonzero() == 0


def test_cpu_infer_on_a_stream(device: Any) -> None:
    """Tasks by addresses: queued when the stream comes there, repeated by a graph, waited for."""
    queue, own, given = CPUInfer(2), stacks(3), batch(5)
    made = forward_by_addresses(queue, own, given)
    task, y = made.task, made.y
    stream = device.new_stream()
    queue.submit_with_cuda_stream(stream.cuda_stream, task)
    assert y.count_nonzero() == 0
    queue.sync_with_cuda_stream(stream.cuda_stream)
    stream.synchronize()
    reference = expected(own, given.x, given.ids, given.weights)
    assert error(y, reference) < EXACT
    with device.capture(stream) as graph:
        queue.submit_with_cuda_stream(stream.cuda_stream, task)
        queue.sync_with_cuda_stream(stream.cuda_stream)
    for factor in (2, 4):
        given.x.mul_(2)
        graph.replay(stream)
        stream.synchronize()
        assert error(y, expected(own, given.x, given.ids, given.weights)) < EXACT, factor


def test_tasks_that_may_stay_pending(device: Any) -> None:
    queue, stream, done = CPUInfer(1), device.new_stream(), list[int]()

    def fail() -> None:
        raise ZeroDivisionError("division by zero")

    for n in range(3):
        queue.submit_with_cuda_stream(stream.cuda_stream, partial(done.append, n))
    queue.sync_with_cuda_stream(stream.cuda_stream, 1)
    stream.synchronize()
    assert done[:2] == [0, 1]
    queue.sync()
    assert done == [0, 1, 2]
    queue.submit_with_cuda_stream(stream.cuda_stream, fail)
    stream.synchronize()
    with pytest.raises(UsageError, match="a task of CPUInfer failed on a CUDA stream: division"):
        queue.sync()


def test_the_stand_in_is_strict(make: Make, device: Any) -> None:
    """What CUDA refuses raises here."""
    far, stream = torch.ones(3).to(FAR), device.new_stream()
    driver = cuda.Cuda(device.driver)
    with device.capture(stream):
        with pytest.raises(RuntimeError, match="not permitted"):
            far.tolist()
        with pytest.raises(RuntimeError, match="not permitted"):
            stream.synchronize()
        with pytest.raises(RuntimeError, match="not permitted"):
            torch.empty(3, pin_memory=True)
        with pytest.raises(RuntimeError, match="pageable"):
            torch.empty(3).copy_(far, non_blocking=True)
        with pytest.raises(ResourceError):
            driver.call("cuMemHostAlloc", None, 8, 1)
        assert (far * 2).near.isnan().all()
    refused: list[str] = []

    def call_cuda() -> None:
        try:
            driver.launch(0, 0, 0)
        except ResourceError as error:
            refused.append(str(error))

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: call_cuda())
    driver.launch(0, ctypes.cast(function, ctypes.c_void_p).value or 0, 0)
    device.current.synchronize()
    assert len(refused) == 1
