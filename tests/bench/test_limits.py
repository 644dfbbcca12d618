"""Limits: they can be measured on every level; nothing here asserts how large they are."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from typing import Any

import numpy as np
import pytest
from bench.reports import LIMITS
from ktconv._native import ffi, lib

from ktconv import native
from ktconv.bench import limits as module
from ktconv.bench.limits import Limits, Meter, NodeReads, own_seconds, settle
from ktconv.system import machine
from ktconv.system.machine import Cpu
from ktconv.system.nodes import Node
from ktconv.system.pool import Pool

MIB = 1 << 20


@pytest.mark.parametrize("threads", [1, 2])
def test_a_meter_measures_on_every_level(isa: str, threads: int) -> None:
    meter = Meter(4 * MIB, dot_seconds=(1e-4, 1e-4))
    with Pool(threads) as pool:
        first, again = meter.measure(pool), meter.again(pool)
    for limits in (first, again):
        assert (limits.threads, limits.isa) == (threads, isa)
        figures = (limits.read_gb_s, limits.int8_gops, limits.bf16_gflops)
        assert all(math.isfinite(figure) and figure > 0 for figure in figures)
    assert meter.found == {(isa, threads): first.best(again)}


def test_memory_is_filled_in_pieces_between_which_an_interrupt_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New pages cost the system up to 10 s per GiB, and a call cannot be interrupted."""
    filled: list[int] = []

    class Recording(np.ndarray[Any, Any]):
        def __setitem__(self, where: Any, value: Any) -> None:
            filled.append(self[where].nbytes)
            super().__setitem__(where, value)

    memory = np.zeros(5 * MIB + 8, np.uint8)
    monkeypatch.setattr(native, "aligned_bytes", lambda size: memory[:size].view(Recording))
    monkeypatch.setattr("ktconv.bench.limits._PIECE", 2 * MIB)
    Meter(5 * MIB + 8)
    assert filled == [2 * MIB, 2 * MIB, MIB + 8]
    assert (memory.view(np.uint64) == 0x9E3779B97F4A7C15).all()


def test_a_clock_of_large_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading can be over before it goes on."""
    meter = Meter(4 * MIB, dot_seconds=(0.0, 0.0))
    monkeypatch.setattr(module, "settle", lambda: None)
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0)
    with Pool(1) as pool:
        limits = meter.again(pool)
    assert math.isfinite(limits.read_gb_s) and math.isfinite(limits.int8_gops)


def test_best_and_drift() -> None:
    other = Limits(2, "avx512", read_gb_s=5.0, int8_gops=600.0, bf16_gflops=200.0)
    assert LIMITS.best(other) == Limits(2, "avx512", 10.0, 600.0, 200.0)
    assert LIMITS.drift(other, "int8") == other.drift(LIMITS, "int8") == 2.0
    assert LIMITS.peak("int8") == 500.0 and LIMITS.peak("bf16") == 200.0


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("mib", [1, 3, 7])
def test_reading_in_any_number_of_streams(isa: str, streams: int, mib: int) -> None:
    """Also more threads than pieces. That all bytes are read is native/test's to prove."""
    memory = native.aligned_bytes(mib * MIB)
    memory[:] = 1
    with Pool(4) as pool:
        native.limit_read(pool, memory, streams)


def test_what_cannot_be_measured_is_refused() -> None:
    memory = np.zeros(2 * MIB, np.uint8)
    with Pool(1) as pool:
        for size, streams in ((MIB + 1, 1), (0, 1), (MIB, 0), (MIB, 17), (MIB, -1)):
            status = lib.kt_limit_read(pool.c, ffi.from_buffer(memory), size, streams)
            assert status == lib.KT_ERR_ARGUMENT
        assert lib.kt_limit_read(pool.c, ffi.NULL, MIB, 1) == lib.KT_ERR_ARGUMENT
        assert lib.kt_limit_read(ffi.NULL, ffi.from_buffer(memory), MIB, 1) == lib.KT_ERR_ARGUMENT
        for unit, rounds in ((-1, 1), (2, 1), (0, -1)):
            assert lib.kt_limit_dot(pool.c, unit, rounds) == lib.KT_ERR_ARGUMENT
        assert lib.kt_limit_dot(ffi.NULL, 0, 1) == lib.KT_ERR_ARGUMENT
        assert lib.kt_limit_dot(pool.c, 0, 0) == lib.KT_OK


def test_a_round_has_as_many_operations_everywhere() -> None:
    """So the loops of all levels must divide it: 4 AMX products have the most."""
    assert native.limit_ops() % (2 * 4 * 16 * 16 * 64) == 0


def test_limits_wait_for_threads_that_still_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a BLAS do for a while after a product."""
    readings = [0.0, 1e6, 1e6, 2e6, 2e6, 2e6, 3e6]  # before and after: busy twice, then idle
    monkeypatch.setattr("ktconv.bench.limits.own_seconds", lambda: readings.pop(0))
    settle(math.inf)
    assert readings == [3e6]


def test_time_of_other_threads_counts() -> None:
    def compute() -> None:
        data = bytes(1 << 20)
        while time.thread_time() < 0.1:
            hashlib.sha256(data)

    before, thread = own_seconds(), threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert own_seconds() - before > 0.09


class Moves:
    """A machine with nodes 0, 1 and 2, of which the last has no CPUs, whose memory is bookkeeping:
    reading a MiB takes a thread 1 s from its own node, 2 from another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: int = -1) -> None:
        self.refused = refused
        self.now, self.node = 0.0, np.zeros(0, np.int64)
        cpu = machine.topology()[0].number
        made = [Cpu(cpu, 0, 0), Cpu(cpu, 0, 1), Cpu(cpu, 1, 2), Cpu(cpu, 1, 3)]
        known = [Node(n, [], 1 << 40, 1 << 40, {}, 0, 0) for n in range(3)]
        for target, name, value in (
            (machine, "topology", lambda: made),
            (machine, "allowed_memory", set),
            (module, "nodes", lambda: known),
            (module, "settle", lambda: None),
            (module, "_dot_rate", lambda *_: 1.0),
            (time, "perf_counter", lambda: self.now),
            (native, "bind_memory", self.bind),
            (native, "pages_by_node", self.count),
            (native, "limit_read", self.read),
        ):
            monkeypatch.setattr(target, name, value)
        self.meter = Meter(8 * MIB)
        self.start = native.address_of(self.meter._memory)
        self.node = np.zeros(8, np.int64)  # of each MiB

    def bind(self, memory: Any, node: int) -> bool:
        first = (native.address_of(memory) - self.start) // MIB
        if node != self.refused:
            self.node[first : first + memory.nbytes // MIB] = node
        return node != self.refused

    def count(self, ranges: native.Ranges, count: int) -> tuple[list[int], int]:
        assert ranges.nbytes == 8 * MIB
        return [int((self.node == n).sum()) for n in range(count)], int((self.node >= count).sum())

    def read(self, pool: Pool, memory: Any, streams: int) -> None:
        place = [
            node for node, n in zip(pool.os_nodes, pool.threads_of, strict=True) for _ in range(n)
        ]
        cut = [8 * t // pool.threads for t in range(pool.threads + 1)]
        self.now += max(
            sum(1.0 if self.node[piece] == place[t] else 2.0 for piece in range(cut[t], cut[t + 1]))
            for t in range(pool.threads)
        )


def test_reads_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves(monkeypatch)
    found = moves.meter.between_nodes(16)
    local, remote = 8 * MIB / 4e9, 8 * MIB / 8e9  # two threads of each node, 4 MiB each
    assert found == NodeReads(
        {"0": 2, "1": 2},
        {
            "0": {"0": local, "1": remote, "2": remote},
            "1": {"0": remote, "1": local, "2": remote},
        },
    )
    assert found.remote_share == 0.5
    assert moves.node.tolist() == [0] * 8  # not where there are no CPUs
    one = moves.meter.between_nodes(1)
    assert one is not None and one.threads == {"0": 1, "1": 1}
    assert one.read_gb_s["1"]["1"] == pytest.approx(local / 2)


def test_memory_that_cannot_be_moved_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Moves(monkeypatch, refused=1).meter.between_nodes(2)
    assert found is not None
    assert [rates["1"] for rates in found.read_gb_s.values()] == [None, None]
    assert found.read_gb_s["0"]["0"] == 2 * found.read_gb_s["0"]["2"]  # type: ignore[operator]
    assert found.remote_share == 0.5


def test_one_node_has_no_other_to_read_from() -> None:
    if machine.numa_nodes() > 1:
        pytest.skip("this machine has several nodes")
    assert Meter(4 * MIB).between_nodes(2) is None


def test_the_limit_of_memory_is_of_local_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves(monkeypatch)
    with Pool(4) as four, Pool(3) as three:
        assert three.threads_of == [2, 1]
        for pool, nodes in (
            (four, [0] * 4 + [1] * 4),
            (three, [0] * 5 + [1] * 3),
            (four, [0] * 4 + [1] * 4),
        ):
            limit = moves.meter.again(pool)
            assert moves.node.tolist() == nodes
            assert limit.read_gb_s == pytest.approx(
                8 * MIB / (8 // pool.threads + (pool.threads == 3)) / 1e9
            )
