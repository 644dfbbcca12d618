"""Calls in the background: order, errors, waiting, pools that close, processes that fork or end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconv.errors import UsageError
from ktconv.runtime import Handle, MoELayer, Pool

from .conftest import EXPERTS, batch

pytestmark = [pytest.mark.slow, pytest.mark.process]

Make = Callable[..., MoELayer]
LINUX = sys.platform == "linux"


class Gate:
    """Work that keeps the queue of a pool busy until it is opened."""

    def __init__(self, pool: Pool) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        pool.submit(self._wait)
        assert self.reached.wait(30)

    def _wait(self) -> None:
        self.reached.set()
        assert self.open.wait(30)


def on(pool: Pool, layer: MoELayer) -> MoELayer:
    """The same weights on another pool."""
    return MoELayer(layer._packed, pool)


def test_many_in_flight(make_layer: Make) -> None:
    layer = make_layer()
    batches = [batch(1 + seed % 7, seed) for seed in range(60)]
    handles = [layer.submit(*one) for one in batches]
    for one, handle in reversed(list(zip(batches, handles, strict=True))):
        y = handle.wait()
        assert np.array_equal(y, layer(*one)) and handle.done
        assert handle.wait() is y


def test_who_asks_again_and_again_does_not_hold_up_the_call(make_layer: Make) -> None:
    """Python takes the interpreter from a thread that does not give it up after the interval."""
    layer, one = make_layer(), batch()
    layer.submit(*one).wait()
    before, asked = sys.getswitchinterval(), 0
    sys.setswitchinterval(30.0)
    try:
        start = time.monotonic()
        handle = layer.submit(*one)
        while not handle.done and time.monotonic() < start + 20:
            asked += 1
        assert handle.done and time.monotonic() < start + 20, asked
    finally:
        sys.setswitchinterval(before)
    assert np.array_equal(handle.wait(), layer(*one))


def test_they_are_computed_in_order(make_layer: Make) -> None:
    """Each adds to what the one before has written, and doubles it."""
    layer, (x, ids, weights) = make_layer(), batch()
    total = np.zeros_like(x)
    with Pool(2) as pool:
        queued, gate = on(pool, layer), Gate(pool)
        handles = [queued.submit(x, ids, weights, add_to=total, out=total) for _ in range(20)]
        assert not any(handle.done for handle in handles) and not total.any()
        gate.open.set()
        assert all(handle.wait() is total for handle in handles)
    expected = np.zeros_like(x)
    for _ in range(20):
        expected = layer(x, ids, weights, add_to=expected)
    assert np.array_equal(total, expected)


def test_a_call_does_not_wait_for_submitted_ones(make_layer: Make) -> None:
    layer, one = make_layer(), batch()
    with Pool(1) as pool:
        queued, gate = on(pool, layer), Gate(pool)
        handle = queued.submit(*one)
        assert np.array_equal(queued(*one), layer(*one)) and not handle.done
        gate.open.set()
        assert np.array_equal(handle.wait(), layer(*one))


def test_errors_travel_to_each_who_waits(make_layer: Make) -> None:
    layer, (x, ids, weights) = make_layer(here=[0, None, 2, 3, 4, 5]), batch(9)
    out = np.full_like(x, 7)
    handle = layer.submit(x, ids, weights, out=out)
    good = layer.submit(x, np.full_like(ids, 2), weights)
    for _ in range(2):
        with pytest.raises(UsageError, match="no weights here") as refusal:
            handle.wait()
        assert "skip" in str(refusal.value.hint)
    assert handle.done and (out == 7).all()
    assert good.wait().any()  # the queue goes on


def test_other_threads_may_wait(make_layer: Make) -> None:
    layer, one = make_layer(), batch()
    with Pool(2) as pool, ThreadPoolExecutor(6) as others:
        gate = Gate(pool)
        handle = on(pool, layer).submit(*one)
        found = [others.submit(handle.wait) for _ in range(6)]
        assert not any(future.done() for future in found)
        gate.open.set()
        assert len({id(future.result(30)) for future in found}) == 1
    assert np.array_equal(handle.wait(), layer(*one))


def test_masks_are_read_when_the_call_is_computed(make_layer: Make) -> None:
    layer, (x, ids, weights) = make_layer(), batch()
    skip = np.zeros(EXPERTS, bool)
    with Pool(2) as pool:
        gate = Gate(pool)
        handle = on(pool, layer).submit(x, ids, weights, skip=skip)
        skip[2] = True
        gate.open.set()
        assert np.array_equal(handle.wait(), layer(x, ids, weights, skip=skip))


# ---- memory ----------------------------------------------------------------------------


def test_a_call_keeps_what_it_needs(make_layer: Make) -> None:
    """Layer, pool and arrays live as long as the call, and no longer."""
    expected = make_layer()(*batch())
    pool = Pool(2)
    layer, gate = on(pool, make_layer()), Gate(pool)
    handle = layer.submit(*(array.copy() for array in batch()))
    gone = weakref.ref(pool), weakref.ref(layer._packed)
    let_go = gate.open.set
    del pool, layer, gate
    gc.collect()
    assert all(reference() is not None for reference in gone)
    let_go()
    assert np.array_equal(handle.wait(), expected)
    Handle.wait(make_layer().submit(*batch()))
    for _ in range(1000):  # the queue's thread lets go a moment after the result is there
        if not any(reference() for reference in gone):
            break
        threading.Event().wait(0.01)
    assert not any(reference() for reference in gone)


def test_a_handle_that_nobody_waits_for(make_layer: Make) -> None:
    layer, (x, ids, weights) = make_layer(), batch()
    out = np.zeros_like(x)
    layer.submit(x, ids, weights, out=out)
    layer.submit(x, ids, weights).wait()  # behind it
    assert np.array_equal(out, layer(x, ids, weights))


@pytest.mark.skipif(not LINUX, reason="counts threads in /proc")
def test_no_thread_is_left_behind(make_layer: Make) -> None:
    layer, one = make_layer(), batch(1)

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    gc.collect()
    before = threads()
    for _ in range(50):
        with Pool(2) as pool:
            on(pool, layer).submit(*one)
    assert threads() <= before  # those of earlier tests may end meanwhile


# ---- pools that close ------------------------------------------------------------------


def test_closing_waits_for_what_was_submitted(make_layer: Make) -> None:
    layer, one = make_layer(), batch()
    pool = Pool(2)
    queued, gate = on(pool, layer), Gate(pool)
    handles = [queued.submit(*one) for _ in range(9)]
    closing = threading.Thread(target=pool.close)
    closing.start()
    gate.open.set()
    closing.join()
    assert all(handle.done for handle in handles)
    assert all(np.array_equal(handle.wait(), layer(*one)) for handle in handles)


def test_a_closed_pool_is_refused(make_layer: Make) -> None:
    layer, one = make_layer(), batch()
    for used in (False, True):
        pool = Pool(2)
        closed = on(pool, layer)
        if used:
            closed.submit(*one).wait()
        pool.close()
        pool.close()
        for use in (
            lambda it: it(*one),
            lambda it: it.submit(*one).wait(),
            lambda it: it.plan_bytes(1, 1),
            lambda it: it.touch(),
        ):
            with pytest.raises(UsageError, match="the pool is closed"):
                use(closed)
    assert layer(*one).any()


def test_closing_while_others_call(make_layer: Make) -> None:
    """Calls are computed or refused; never anything else."""
    layer, one = make_layer(), batch(3)
    expected = layer(*one)
    for _ in range(20):
        pool = Pool(2)
        used, started = on(pool, layer), threading.Barrier(4)

        def call(used: MoELayer = used, started: threading.Barrier = started) -> int:
            started.wait()
            for count in range(10_000):
                try:
                    found = used.submit(*one).wait() if count % 2 else used(*one)
                except UsageError as error:
                    assert str(error) == "the pool is closed"
                    return count
                assert np.array_equal(found, expected)
            return -1

        with ThreadPoolExecutor(3) as others:
            calls = [others.submit(call) for _ in range(3)]
            started.wait()
            pool.close()
            assert all(future.result(60) >= 0 for future in calls)


# ---- other processes -------------------------------------------------------------------

PROGRAM = """
import os, sys, threading
import numpy as np
from ktconv.errors import UsageError
from ktconv.runtime import MoELayer, Pool

E, I, H = 4, 64, 64
rng = np.random.default_rng(0)
shapes = (E, I, H), (E, I, H), (E, H, I)
from ktconv.runtime.layers import pack_online
packed = pack_online(*(rng.standard_normal(s, np.float32) for s in shapes), "int8")
x = rng.standard_normal((3, H), np.float32)
ids, weights = np.array([[0, 1], [2, 3], [1, 3]]), np.ones((3, 2), np.float32)
layer, own = MoELayer(packed), MoELayer(packed, Pool(2))
expected = layer(x, ids, weights)
"""

FORK = """
import warnings
warnings.simplefilter("ignore")
reached, opened = threading.Event(), threading.Event()
held = [layer.submit(x, ids, weights) for _ in range(5)]
for pool in (layer.pool, own.pool):
    pool.submit(lambda: (reached.set(), opened.wait()))
reached.wait()
held += [layer.submit(x, ids, weights), own.submit(x, ids, weights)]
shared = layer.pool

def refused(use, says):
    try:
        use()
    except UsageError as error:
        return says in str(error)

child = os.fork()
if not child:
    same = [np.array_equal(layer(x, ids, weights), expected) for _ in range(3)]
    same += [np.array_equal(layer.submit(x, ids, weights).wait(), expected) for _ in range(3)]
    same.append(layer.pool is not shared)
    same += [refused(handle.wait, "submitted by the parent") for handle in held]
    same.append(refused(lambda: own(x, ids, weights), "another process"))
    same.append(refused(own.submit(x, ids, weights).wait, "belongs to the parent"))
    own.pool.close()
    print("child", all(same), flush=True)
    sys.exit()
code = os.waitpid(child, 0)[1]
opened.set()
same = [np.array_equal(handle.wait(), expected) for handle in held]
same += [np.array_equal(one(x, ids, weights), expected) for one in (layer, own)]
print("parent", all(same) and code == 0 and layer.pool is shared)
"""

EXIT = """
import atexit
out = np.memmap(sys.argv[1], np.float32, "r+", shape=(200, 3, H))

@atexit.register
def late():
    try:
        layer.submit(x, ids, weights).wait()
    except UsageError as error:
        print(error)
    print(np.array_equal(layer(x, ids, weights), expected))

for place in out:
    layer.submit(x, ids, weights, out=place)
np.save(sys.argv[2], expected)
"""


def run(program: str, *words: object) -> str:
    command = [sys.executable, "-c", PROGRAM + program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(not LINUX, reason="forks")
def test_parent_and_child_go_on_after_a_fork() -> None:
    """With a busy queue, calls behind it and a closed pool."""
    assert run(FORK) == "child True\nparent True\n"


def test_the_interpreter_ends_with_calls_in_flight(tmp_path: Path) -> None:
    """They are finished, and no new ones can be submitted."""
    out: Any = np.zeros((200, 3, 64), np.float32)
    out.tofile(tmp_path / "out")
    said = run(EXIT, tmp_path / "out", tmp_path / "expected.npy").splitlines()
    assert said[0].startswith("the call cannot be submitted: ") and said[1:] == ["True"]
    found = np.fromfile(tmp_path / "out", np.float32).reshape(out.shape)
    assert (found == np.load(tmp_path / "expected.npy")).all()
