"""What is true on a machine with several NUMA nodes: runs in an emulated one, see boot.py.

Words of the kernel's command line say what is expected: nodes=0,1 (those that compute), and
remark=WORDS+OF+A+SENTENCE of `doctor`. Prints a line for each check; exit code 1: one failed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import ktconv
from ktconv import native
from ktconv.bench import limits
from ktconv.bench import run as bench_run
from ktconv.bench.cases import Request
from ktconv.bench.measure import Effort
from ktconv.bench.presets import parse_shape
from ktconv.conversion import pipeline
from ktconv.formats import FORMATS
from ktconv.inspect.doctor import examine
from ktconv.runtime import MoELayer, Pool
from ktconv.runtime.memory.needs import part_nodes
from ktconv.source.reading.buffers import Buffers
from ktconv.system import machine
from ktconv.system import nodes as numa

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 512, 1024, 4, 2, 16
MODEL = Path("/tmp/model")
WORDS = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
NODES = [int(word) for word in WORDS["nodes"].split(",")]
STARTED = time.monotonic()
failures = 0


def check(name: str, good: bool, found: object = "") -> None:
    global failures
    failures += not good
    after = f"{time.monotonic() - STARTED:.0f} s"
    print(f"{'ok' if good else 'FAILED'}: {after}: {name} {found}", flush=True)


def write_model() -> None:
    rng = np.random.default_rng(0)
    MODEL.mkdir()
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    tensors = {
        f"model.layers.0.mlp.experts.{e}.{name}_proj.weight": rng.standard_normal(shape, np.float32)
        * 0.05
        for e in range(EXPERTS)
        for name, shape in shapes.items()
    }
    tensors["model.layers.0.mlp.gate.weight"] = rng.standard_normal((EXPERTS, HIDDEN), np.float32)
    save_file(tensors, MODEL / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER, "intermediate_size": INNER, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu", "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 64,
        "torch_dtype": "float32",
    }  # fmt: skip
    (MODEL / "config.json").write_text(json.dumps(config))


def convert(to: str, parts: int | None = None) -> Path:
    more: dict[str, Any] = {} if parts is None else {"numa": parts}
    path = Path("/tmp") / to
    ktconv.quantize_cpu(MODEL, path, method="int8", scale="amax", experts_only=True, **more)
    return path


def answers(layer: MoELayer) -> Any:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((TOKENS, HIDDEN), np.float32)
    ids = np.argsort(rng.random((TOKENS, EXPERTS)), 1)[:, :TOP_K].astype(np.int64)
    return layer(x, np.ascontiguousarray(ids), np.full((TOKENS, TOP_K), 0.5, np.float32))


def share(layer: MoELayer) -> float:
    found = layer.memory.local_share
    return -1.0 if found is None else found


def workspace_share(pool: Pool) -> float:
    """Share of the pages of the pool's workspaces that lie on the node whose team uses them."""
    local = pages = 0
    for memory in pool.workspaces:
        cuts = [memory.nbytes * node // pool.nodes for node in range(pool.nodes + 1)]
        for number, node in enumerate(pool.os_nodes):
            region = native.Ranges([memory[cuts[number] : cuts[number + 1]]])
            found = native.pages_by_node(region, max(NODES) + 1)
            assert found is not None
            on_nodes, _ = found  # others have never been written to
            local += on_nodes[node]
            pages += sum(on_nodes)
    return local / pages if pages else 0.0


@contextmanager
def heard() -> Iterator[list[str]]:
    """Sentences of the library."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(one.message) for one in caught]


def in_child(work: Callable[[], int | None]) -> int:
    """The exit code of a process that does it."""
    global failures
    pid = os.fork()
    if not pid:
        code, failures = 99, 0
        try:
            code = work() or 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Beside:
    """A process that does something, and then waits to be ended."""

    def __init__(self, work: Callable[[], object]) -> None:
        ready, tell = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                kept = work()
                os.write(tell, b"1")
                signal.pause()
                del kept
            finally:
                os._exit(1)
        os.close(tell)
        self.started = os.read(ready, 1) == b"1"
        os.close(ready)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def forbid_placement() -> None:
    """As the default profile of container engines: mbind, move_pages and their like are EPERM."""
    numbers = (237, 238, 239, 279)  # mbind, set_mempolicy, get_mempolicy, move_pages of x86-64

    class Filter(ctypes.Structure):
        _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte),
                    ("k", ctypes.c_uint))  # fmt: skip

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter)))

    lines = [Filter(0x20, 0, 0, 0)]  # the number of the call
    for left, number in enumerate(numbers):
        lines.append(Filter(0x15, len(numbers) - left, 0, number))
    lines += [Filter(0x06, 0, 0, 0x7FFF0000), Filter(0x06, 0, 0, 0x00050000 | 1)]
    table = (Filter * len(lines))(*lines)
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(lines), table)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()


def by_numa_maps(layer: MoELayer) -> float:
    """Share of pages that lie where they should, of mappings, of which parts may share one."""
    pages: dict[int, dict[int, int]] = {}
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        found = re.findall(r"N(\d+)=(\d+)", line)
        pages[int(line.split()[0], 16)] = {int(node): int(count) for node, count in found}
    wanted: dict[int, dict[int, int]] = {}
    for part, node in enumerate(part_nodes(layer.parts, layer.pool)):
        ranges = native.Ranges(layer.packed.layer.arrays(part))
        start = max(start for start in pages if start <= ranges.spans[0][0])
        of = wanted.setdefault(start, {})
        of[-1 if node is None else node] = of.get(-1 if node is None else node, 0) + ranges.nbytes
    right, every = 0, 0
    for start, of in wanted.items():
        for node, size in of.items():
            right += min(size // native.PAGE, pages[start].get(node, 0))
            every += size // native.PAGE
    return right / every


# ---- checks ------------------------------------------------------------------------------


def check_machine() -> None:
    facts = examine(Path("/tmp"))
    check("nodes", facts["cpu"]["numa_nodes"] == len(NODES), facts["cpu"]["numa_nodes"])
    check("threads", Pool.shared().os_nodes == NODES, Pool.shared().os_nodes)
    remarks = " ".join(facts["remarks"])
    wanted = WORDS.get("remark", "").replace("+", " ")
    check("remarks", wanted in remarks if wanted else not remarks, remarks)


def check_placement(path: Path, wanted: Any) -> None:
    several = len(NODES) > 1
    with heard() as said:
        layer = MoELayer.load(path)
    check("mapped", layer.memory.kind == "map" and not said, layer.memory)
    check("its pages", share(layer) > 0.97, share(layer))
    check("its parts", layer.parts == len(NODES), layer.parts)
    check("its answers", (answers(layer) == wanted).all())
    check("its pages after calls", share(layer) > 0.97, share(layer))
    check("workspace", (found := workspace_share(layer.pool)) > 0.97, found)
    copy = MoELayer.load(path, memory="copy")
    check("copied", share(copy) == 1.0 and (answers(copy) == wanted).all(), copy.memory)
    if several:
        planned = MoELayer.plan_load(path)
        check("planned", sorted(planned, key=str) == NODES, planned)


def check_pages_of_others(path: Path) -> None:
    """That another process has mapped and which lie on one node."""

    def touch_all() -> object:
        layer = MoELayer.load(path, memory="map", pool=Pool(1, nodes=[NODES[0]]))
        return layer, layer.touch()

    gc.collect()  # pages that this process has mapped would stay
    one = Beside(touch_all)
    check("another process", one.started)
    with heard() as said:
        layer = MoELayer.load(path)
    check("copied for others' sake", layer.memory.kind == "copy", layer.memory)
    check("and said so", any("other processes have mapped them" in one for one in said), said)
    check("copied pages", share(layer) == 1.0, share(layer))
    with heard() as said:
        layer = MoELayer.load(path, memory="map")
    check("mapped only", layer.memory.kind == "map" and len(said) == 1, (share(layer), said))
    one.kill()


def check_shared(path: Path, wanted: Any) -> None:
    def shmem() -> int:
        return int(re.search(r"Shmem:\s+(\d+)", Path("/proc/meminfo").read_text())[1])  # type: ignore[index]

    before = shmem()
    one = Beside(lambda: MoELayer.load(path, memory="shared"))
    first = shmem() - before
    layer = MoELayer.load(path, memory="shared")
    second = shmem() - before
    check("shared", share(layer) == 1.0 and layer.memory.kind == "shared", layer.memory)
    check("once", first > 6000 and second < 1.2 * first, (first, second))
    one.kill()
    check("after a kill", (answers(layer) == wanted).all())
    del layer
    check("gone", shmem() - before < 0.1 * first, shmem() - before)
    check("no file", not list(Path("/dev/shm").glob("ktconv*")))


def check_without_permission(path: Path, wanted: Any) -> None:
    def work() -> int:
        forbid_placement()
        with heard() as said:
            layer = MoELayer.load(path)
        check("forbidden", layer.memory.kind == "copy" and bool(said), said)
        check("first touched", by_numa_maps(layer) > 0.97, by_numa_maps(layer))
        check("forbidden answers", (answers(layer) == wanted).all())
        remarks = " ".join(examine(Path("/tmp"))["remarks"])
        check("doctor says so", "does not let this process place memory" in remarks, remarks)
        return failures

    check("without permission", in_child(work) == 0)


def check_other_parts(path: Path, wanted: Any) -> None:
    more = Path("/tmp/more")
    ktconv.reshard(path, more, numa=2 * len(NODES))
    with heard() as said:
        layer = MoELayer.load(more)
    good = layer.parts == 2 * len(NODES) and share(layer) > 0.97 and not said
    check("more parts than nodes", good, layer.memory)
    again = Path("/tmp/again")
    ktconv.reshard(more, again, numa=len(NODES))
    check("and back", bool((answers(MoELayer.load(again)) == wanted).all()))
    with heard() as said:
        layer = MoELayer.load(convert("one", 1))
    check("fewer parts are said", any("reshard" in one for one in said), said)
    close = np.abs(answers(layer) - wanted).max() <= 0.05 * np.abs(wanted).max()
    check("their answers", bool(close))


def check_cpuset(path: Path) -> None:
    """A container with the CPUs and the memory of the last node."""
    last = NODES[-1]
    cpus = sorted(cpu.number for cpu in machine.topology() if cpu.node == last)
    root, own = Path("/group"), Path("/group/last")
    (root / "cgroup.subtree_control").write_text("+cpuset")
    own.mkdir()
    (own / "cpuset.cpus").write_text(",".join(map(str, cpus)))
    (own / "cpuset.mems").write_text(str(last))

    def work() -> int:
        (own / "cgroup.procs").write_text(str(os.getpid()))
        check("cpuset", machine.numa_nodes() == 1 and machine.allowed_memory() == {last})
        layer = MoELayer.load(path, memory="copy")
        found = native.pages_by_node(native.Ranges(layer.packed.layer.arrays(0)), 64)
        good = found is not None and found[0][last] == sum(found[0])
        check("cpuset pages", good, found and found[0][:8])
        return failures

    check("in a cpuset", in_child(work) == 0)


def check_membind(path: Path) -> None:
    """numactl --membind of the first node."""

    def work() -> int:
        mask = ctypes.c_ulong(1 << NODES[0])
        libc = ctypes.CDLL(None)
        assert libc.syscall(238, 2, ctypes.byref(mask), 64) == 0  # set_mempolicy(MPOL_BIND)
        check("membind", machine.allowed_memory() == {NODES[0]}, machine.allowed_memory())
        layer = MoELayer.load(path, memory="copy")
        found = native.pages_by_node(native.Ranges(layer.packed.layer.arrays(0)), 64)
        check("membind pages", found is not None and found[0][NODES[0]] == sum(found[0]))
        remarks = " ".join(examine(Path("/tmp"))["remarks"])
        check("membind is said", "is not for this process" in remarks, remarks)
        return failures

    check("with membind", in_child(work) == 0)


def check_relative(path: Path) -> None:
    """numactl --membind=+0 in the cpuset of check_cpuset: its first node."""
    last = NODES[-1]

    def work() -> int:
        Path("/group/last/cgroup.procs").write_text(str(os.getpid()))
        mask, mode = ctypes.c_ulong(1), 2 | 1 << 14  # MPOL_BIND, MPOL_F_RELATIVE_NODES
        assert ctypes.CDLL(None).syscall(238, mode, ctypes.byref(mask), 64) == 0
        check("relative nodes", machine.allowed_memory() == {last}, machine.allowed_memory())
        return failures

    check("with relative nodes", in_child(work) == 0)


def check_reserved(path: Path, wanted: Any) -> None:
    """Copies on pages of 2 MB that were reserved on each node."""
    for node in NODES:
        kept = Path(f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages")
        kept.write_text("16")
    before = sum(node.huge_free for node in numa.nodes())
    for memory in ("copy", "shared"):
        layer = MoELayer.load(path, memory=memory)
        found = layer.memory
        good = found.reserved_bytes == found.huge_bytes == found.nbytes and share(layer) == 1.0
        check(f"reserved, {memory}", good and "reserved huge pages" in str(found), found)
        check(f"its answers, {memory}", bool((answers(layer) == wanted).all()))
        used = before - sum(node.huge_free for node in numa.nodes())
        smaps = Path("/proc/self/smaps").read_text()
        own = sum(1024 * int(kb) for kb in re.findall(r"_Hugetlb:\s+(\d+) kB", smaps))
        check(f"taken from the system, {memory}", used >= own >= found.nbytes, (used, own))
        del layer
        gc.collect()
    check("given back", sum(node.huge_free for node in numa.nodes()) == before)
    for node in NODES:
        kept = Path(f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages")
        kept.write_text("0")


def check_conversion() -> None:
    """Buffers of workers lie on the node where the worker runs that fills them, and workers may
    run everywhere."""
    # The system does not say where pages are that it watches, to move them to who reads them.
    Path("/proc/sys/kernel/numa_balancing").write_text("0")
    libc, found, lock = ctypes.CDLL(None), [], threading.Lock()
    nodes_of = {cpu.number: cpu.node for cpu in machine.topology()}

    class Watched(Buffers):
        def __init__(self, sizes: Any) -> None:
            free = os.sched_getaffinity(0)  # of this thread
            # The test alone holds a worker to a node, so that it does not move meanwhile.
            own = nodes_of[libc.sched_getcpu()]
            os.sched_setaffinity(0, {cpu for cpu, node in nodes_of.items() if node == own})
            super().__init__(sizes)
            with lock:
                found.append((self, own, free))

    vars(pipeline)["Buffers"] = Watched
    try:
        ktconv.quantize_cpu(
            MODEL, "/tmp/watched", method="int8", scale="amax", experts_only=True,
            threads=2 * len(NODES),
        )  # fmt: skip
    finally:
        vars(pipeline)["Buffers"] = Buffers
    here, elsewhere, whole = 0, 0, len(nodes_of)
    for buffers, own, _ in found:
        arrays = (buffers.source, buffers.packed, buffers.readback, buffers.scratch)
        pages, _ = native.pages_by_node(native.Ranges(arrays), 64) or ([], 0)
        here += pages[own]
        elsewhere += sum(pages) - pages[own]
    check("workers", len(found) == 2 * len(NODES), len(found))
    check("workers are free", all(len(free) == whole for *_, free in found))
    check("their buffers", here > 0 and elsewhere <= 0.02 * here, (here, elsewhere))


def check_commands(path: Path) -> None:
    report = ktconv.verify(path, source=MODEL, level="weights")
    check("verify", bool(report["passed"]))


def check_bench() -> None:
    """Runs bench with limits of a few MB: times mean nothing in a guest."""
    quick = partial(limits.Meter, 16 << 20, dot_seconds=(1e-4, 1e-4))
    vars(bench_run).update(Meter=quick)
    vars(limits).update(_STREAMS=(1,), _REPEATS=1, settle=lambda *_: None)
    shape = f"{HIDDEN},{INNER},{EXPERTS},{TOP_K}"
    facts = ktconv.bench(method="int8", shape=[shape], tokens="1", iters=1, seconds=0.0)
    (row,) = facts["rows"]
    check("bench --numa", row["parts"] == len(NODES), row["parts"])
    check("its weights", row["local_share"] > 0.95, row["local_share"])
    reads = facts["numa"]["read_gb_s"]
    with_memory = [str(node.number) for node in numa.nodes() if node.total]
    good = list(reads) == [str(node) for node in NODES]
    good = good and all(list(rates) == with_memory for rates in reads.values())
    check("reads between nodes", good and all(map(all, map(dict.values, reads.values()))), reads)
    heard: list[str] = []
    request = Request(
        methods=(FORMATS["int8"],), shapes=(parse_shape(shape),), tokens=(1,),
        threads=(len(machine.topology()),), isas=(native.isa(),), effort=Effort(iterations=1),
    )  # fmt: skip
    (one,) = bench_run.bench(request, heard.append).rows
    told = any("of the weights' pages lie on the NUMA node" in line for line in heard)
    few = 1.5 / len(NODES)
    check(
        "remote weights",
        one.local_share is not None and one.local_share < few and told,
        one.local_share,
    )


def main() -> None:
    check_machine()
    write_model()
    path = convert("out")
    with Pool(1, nodes=1) as alone:
        wanted = answers(MoELayer.load(path, pool=alone))
    check_placement(path, wanted)
    if len(NODES) > 1:
        check_pages_of_others(path)
        check_shared(path, wanted)
        check_without_permission(path, wanted)
        check_reserved(path, wanted)
        check_cpuset(path)
        check_relative(path)
        check_membind(path)
        check_conversion()
        check_bench()
        check_other_parts(path, wanted)
    check_commands(path)
    print(f"numa: {failures} failures")
    sys.exit(bool(failures))


main()
