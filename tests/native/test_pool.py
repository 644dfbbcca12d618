"""The thread pool: pool_check.c, and what a process sees of it."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.amx import compiler
from helpers.paths import ROOT

from ktconv import native
from ktconv.errors import ResourceError, UsageError
from ktconv.system import machine
from ktconv.system import pool as pools
from ktconv.system.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.process]

POOL = sorted((ROOT / "native/src/pool").glob("*.c"))
SOURCES = [ROOT / "native/test/pool_check.c", *POOL]
FLAGS = ["-std=c11", "-g", "-O1", "-pthread", f"-I{ROOT / 'native/include'}"]
LINUX = sys.platform == "linux"


def threads_now() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def run_times(threads: set[Path]) -> list[tuple[str, str]]:
    """State and nanoseconds on a CPU of each thread, by /proc/self/task/ID."""
    return [
        ((thread / "stat").read_text().rpartition(")")[2].split()[0],
         (thread / "schedstat").read_text().split()[0])
        for thread in sorted(threads)
    ]  # fmt: skip


def asleep(threads: set[Path]) -> bool:
    """Whether they sleep, and none gets up within 0.2 seconds."""
    before = run_times(threads)
    time.sleep(0.2)
    return run_times(threads) == before and {state for state, _ in before} == {"S"}


# --- without Python


@pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
def test_pool_check(portable: bool, tmp_path: Path) -> None:
    """Portable: how threads sleep where there is no futex. `make asan tsan` runs both under
    sanitizers."""
    if compiler() is None:
        pytest.skip("no C compiler")
    program = str(tmp_path / "pool_check")
    flags = [*FLAGS, "-U__linux__"] if portable else FLAGS
    subprocess.run(["cc", *flags, *map(str, SOURCES), "-lm", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "pool: 0 failures" in done.stdout


def test_a_crowd(tmp_path: Path) -> None:
    """Many more threads than CPUs do all work once: jobs, barriers, shares."""
    if compiler() is None:
        pytest.skip("no C compiler")
    program = str(tmp_path / "pool_crowd")
    crowd = str(ROOT / "native/test/pool_crowd.c")
    subprocess.run(["cc", *FLAGS, crowd, *map(str, POOL), "-o", program], check=True)
    counts = ["1", "9", "64", "256"]
    done = subprocess.run([program, *counts], capture_output=True, text=True)
    assert done.returncode == 0 and "crowd: 0 failures" in done.stdout, done.stdout + done.stderr
    assert re.findall(r"^(\d+) threads: start ", done.stdout, re.MULTILINE) == [
        "1",
        "9",
        "64",
        "256",
    ]
    assert subprocess.run([program, "none"], capture_output=True).returncode == 2


# --- as the process sees it


@pytest.mark.skipif(not LINUX, reason="counts threads in /proc")
def test_no_thread_is_left_behind() -> None:
    gc.collect()
    before = threads_now()
    for number in range(1000):
        with Pool(1 + number % 4) as pool:
            if number % 3:
                pool.empty(2)
    Pool(3)
    gc.collect()
    assert threads_now() == before


@pytest.mark.skipif(not LINUX, reason="counts threads in /proc")
def test_the_caller_is_one_of_the_threads() -> None:
    before = threads_now()
    with Pool(3) as pool:
        assert pool.threads == 3
        assert threads_now() == before + 2


@pytest.mark.skipif(not LINUX, reason="looks at threads in /proc")
def test_idle_threads_cost_nothing() -> None:
    others = {*Path("/proc/self/task").iterdir()}
    with Pool(4) as pool:
        pool.empty(100)
        workers = {*Path("/proc/self/task").iterdir()} - others
        assert len(workers) == 3
        assert any(asleep(workers) for _ in range(100))  # as soon as each has had a CPU


def test_more_threads_than_cpus() -> None:
    """Far from the milliseconds per job that waiting for each other's time slices costs. CPU time,
    which other programs do not add to."""
    with Pool(4 * machine.usable_cpus()) as pool:
        pool.empty(10)
        before = time.process_time()
        pool.empty(2000)
        assert time.process_time() - before < 4


def test_pools_beside_one_another() -> None:
    """As many busy pools as a server with several models has."""
    with Pool(2) as first, Pool(2) as second:
        others = [
            threading.Thread(target=pool.empty, args=(2000,)) for pool in (first, second, first)
        ]
        for other in others:
            other.start()
        first.empty(2000)
        for other in others:
            other.join()


def test_other_python_threads_run_meanwhile() -> None:
    with Pool(2) as pool:
        worker = threading.Thread(target=pool.empty, args=(5000,))
        worker.start()
        steps = 0
        while worker.is_alive():
            steps += 1
        worker.join()
    assert steps > 1


def in_child(pool: Pool) -> int:
    """What goes wrong in a forked child, 0 if nothing."""
    try:
        pool.empty(1)
        return 1
    except ValueError:
        pool.close()
    Pool.shared().empty(10)
    with Pool(3) as own:
        own.empty(10)
    return 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_process_does_not_hang() -> None:
    shared = Pool.shared()
    shared.empty(1)
    with Pool(3) as pool:
        pool.empty(10)
        child = os.fork()
        if child == 0:
            try:
                code = in_child(pool)
            except BaseException:
                code = 2
            os._exit(code)
        try:
            done = os.waitpid(child, 0)
        except BaseException:  # pytest's timeout
            os.kill(child, 9)
            raise
        assert done == (child, 0)
        pool.empty(10)
    assert Pool.shared() is shared


def test_shared() -> None:
    assert Pool.shared() is Pool.shared()
    assert Pool.shared().threads == machine.usable_cores()
    one, node = Pool.shared(1), Pool.shared(1, [machine.topology()[0].node])
    assert one is Pool.shared(1) and one is not Pool.shared()
    assert node is Pool.shared(1, (machine.topology()[0].node,)) and node is not one
    assert {one, node, Pool.shared()} <= set(Pool.all_shared())


def test_shared_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set of nodes has a pool of its own, in whatever order it is asked for."""
    number = machine.topology()[0].number
    cpus = [machine.Cpu(number, node, number) for node in (0, 1)]
    monkeypatch.setattr(machine, "topology", lambda: cpus)
    monkeypatch.setattr(pools, "_shared", pools._Shared())
    both, first, second = (Pool.shared(2, nodes) for nodes in ([0, 1], [0], [1]))
    assert [list(pool.os_nodes) for pool in (both, first, second)] == [[0, 1], [0], [1]]
    assert Pool.shared(2, (1, 0, 1)) is both
    for pool in Pool.all_shared():
        pool.close()


def test_a_closed_pool() -> None:
    pool = Pool(2)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="not valid"):
        pool.empty(1)


@pytest.mark.parametrize("threads", [0, -3, 4097, 10**9])
def test_absurd_threads(threads: int) -> None:
    with pytest.raises(UsageError, match=f"{threads:,} threads"):
        Pool(threads)


LIMITED = """
import resource
from ktconv.errors import ResourceError
from ktconv.system.pool import Pool
resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))
try:
    Pool(4000)
except ResourceError as error:
    print(error)
with Pool(2) as pool:
    pool.empty(1)
"""


@pytest.mark.skipif(not LINUX, reason="limits the address space")
def test_threads_that_the_system_refuses() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4,000 threads cannot be started" in done.stdout
    assert ResourceError.exit_code == 3


def test_bind_keeps_the_bytes() -> None:
    data = np.arange(1 << 20, dtype=np.uint8)
    for node in (0, 1, 1000):
        native.bind_memory(data, node)
    assert (data == np.arange(1 << 20, dtype=np.uint8)).all()
    with pytest.raises(ValueError, match="not valid"):
        native.bind_memory(data, -1)
    with Pool(2) as pool:
        pool.bind(data, 0)
