"""Measurements that the benchmarks share: processes, files, and the machine's own limits.

Linux only (/proc, posix_fadvise, mincore).
"""

from __future__ import annotations

import ctypes
import datetime
import mmap
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SAMPLE_SECONDS = 0.02
READ_CHUNK = 4 << 20
WRITE_CHUNK = 8 << 20
MEMORY_BYTES = 512 << 20
STAGING = Path("/dev/shm")


# --- processes --------------------------------------------------------------------------


@dataclass
class Peak:
    """Largest values seen over a process tree while it ran, in bytes."""

    total: int = 0
    anonymous: int = 0
    file_mapped: int = 0
    shared: int = 0
    # largest VmHWM of one process; not ru_maxrss, which begins at the size of our own process
    high_water: int = 0
    staging: int = 0  # growth of /dev/shm, which no process's RSS shows

    def add(self, anonymous: int, file_mapped: int, shared: int, staging: int) -> None:
        self.anonymous = max(self.anonymous, anonymous)
        self.file_mapped = max(self.file_mapped, file_mapped)
        self.shared = max(self.shared, shared)
        self.total = max(self.total, anonymous + file_mapped + shared)
        self.staging = max(self.staging, staging)


@dataclass
class Run:
    """What one run of a command took."""

    command: list[str]
    code: int
    seconds: float
    cpu_seconds: float
    other_cpu_seconds: float  # everything else on the machine meanwhile: was it quiet?
    peak: Peak
    stdout: str
    stderr: str
    first_write_seconds: float | None = None
    extra: dict[str, object] = field(default_factory=dict)


def children(pid: int) -> Iterator[int]:
    """The live children of a process, over all its threads."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, path.read_text().split())


def process_tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            found.extend(children(parent))
        except OSError:
            continue  # it ended while we looked
    return found


def status_bytes(pid: int) -> dict[str, int]:
    """The kB lines of /proc/PID/status, in bytes; empty when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {key: int(value.split()[0]) * 1024 for key, value in pairs}


def staging_used() -> int:
    try:
        information = os.statvfs(STAGING)
    except OSError:
        return 0
    return (information.f_blocks - information.f_bfree) * information.f_frsize


def allocated_bytes(directory: Path) -> int:
    """Disk blocks behind the tensor files of a directory, so a sparse file counts as empty."""
    total = 0
    for path in directory.rglob("*"):
        try:
            if "safetensors" in path.name and path.suffix != ".json":
                total += path.stat().st_blocks * 512
        except OSError:
            continue  # renamed while we looked
    return total


def machine_cpu_seconds() -> float:
    """CPU time that the whole machine has spent so far, idle time excluded."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Sampler(threading.Thread):
    """Looks at a process tree every 20 ms until told to stop."""

    def __init__(self, pid: int, started: float, output: Path | None) -> None:
        super().__init__(daemon=True)
        self.pid, self.started, self.output = pid, started, output
        self.peak = Peak()
        self.first_write: float | None = None
        self.finished = threading.Event()
        self.staging_before = staging_used()

    def run(self) -> None:
        while not self.finished.is_set():
            self.sample()
            self.finished.wait(SAMPLE_SECONDS)

    def sample(self) -> None:
        states = [status_bytes(pid) for pid in process_tree(self.pid)]
        anonymous, mapped, shared = (
            sum(state.get(key, 0) for state in states) for key in ("RssAnon", "RssFile", "RssShmem")
        )
        self.peak.add(anonymous, mapped, shared, staging_used() - self.staging_before)
        marks = [state.get("VmHWM", 0) for state in states]
        self.peak.high_water = max([self.peak.high_water, *marks])
        self.watch_output()

    def watch_output(self) -> None:
        if self.output is None or self.first_write is not None or not self.output.is_dir():
            return
        if allocated_bytes(self.output) > 0:
            self.first_write = time.perf_counter() - self.started


def run_measured(command: list[str], watch: Path | None = None) -> Run:
    """Run a command to its end; `watch` is a directory whose first written byte is timed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        busy_before = machine_cpu_seconds()
        started = time.perf_counter()
        # the sampler must see the process before wait4 reaps it, hence no subprocess.run
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        sampler = Sampler(process.pid, started, watch)
        sampler.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        busy = machine_cpu_seconds() - busy_before
        process.returncode = os.waitstatus_to_exitcode(status)
        sampler.finished.set()
        sampler.join()
        out.seek(0)
        err.seek(0)
        own = usage.ru_utime + usage.ru_stime
        return Run(
            command=command,
            code=process.returncode,
            seconds=seconds,
            cpu_seconds=own,
            other_cpu_seconds=max(0.0, busy - own),
            peak=sampler.peak,
            stdout=out.read().decode(errors="replace"),
            stderr=err.read().decode(errors="replace"),
            first_write_seconds=sampler.first_write,
        )


# --- files and the page cache -----------------------------------------------------------


def source_files(model: Path) -> list[Path]:
    return sorted(path for path in model.iterdir() if path.suffix == ".safetensors")


def total_bytes(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def drop_from_cache(files: list[Path]) -> None:
    """Ask the kernel to forget the files' pages; dirty pages are written out first."""
    os.sync()
    for path in files:
        with opened(path) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: list[Path]) -> float:
    """Share of the files' pages that are in the page cache now (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    present = pages = 0
    for path in files:
        size = path.stat().st_size
        count = -(-size // mmap.PAGESIZE)
        vector = np.zeros(count, np.uint8)
        mapping = np.memmap(path, np.uint8, "r")
        if libc.mincore(mapping.ctypes.data, size, vector.ctypes.data) != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        present += int(np.count_nonzero(vector & 1))
        pages += count
    return present / pages


# --- the machine's own limits -----------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def read_ranges(files: list[Path], ranges: list[tuple[int, int, int]]) -> None:
    """pread (file number, start, stop) ranges into one reused buffer."""
    buffer = memoryview(bytearray(READ_CHUNK))
    descriptors = [os.open(path, os.O_RDONLY) for path in files]
    try:
        for number, start, stop in ranges:
            os.preadv(descriptors[number], [buffer[: stop - start]], start)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def read_all(files: list[Path], threads: int) -> None:
    """Read every byte of the files once, chunks dealt to the threads in turn."""
    ranges = [
        (number, start, min(start + READ_CHUNK, size))
        for number, size in enumerate(path.stat().st_size for path in files)
        for start in range(0, size, READ_CHUNK)
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda i: read_ranges(files, ranges[i::threads]), range(threads)))


def write_and_sync(directory: Path, nbytes: int) -> None:
    """Write nbytes of noise to a new file, fsync it, delete it."""
    noise = memoryview(os.urandom(WRITE_CHUNK))
    path = directory / ".benchmark-write"
    try:
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            for start in range(0, nbytes, WRITE_CHUNK):
                os.write(descriptor, noise[: nbytes - start])
            os.fsync(descriptor)
    finally:
        path.unlink(missing_ok=True)


def read_and_write(files: list[Path], threads: int, directory: Path, nbytes: int) -> None:
    """Both at once: what reading and writing cost when they share the disk."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(read_all, files, threads),
            pool.submit(write_and_sync, directory, nbytes),
        ]
        for job in jobs:
            job.result()


def memory_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read from memory, best of five."""
    data = np.ones(MEMORY_BYTES // 8, np.uint64)
    parts = np.array_split(data, threads)
    with ThreadPoolExecutor(threads) as pool:
        times = [timed(lambda: list(pool.map(np.bitwise_or.reduce, parts))) for _ in range(5)]
    return data.nbytes / min(times)


# --- description ------------------------------------------------------------------------


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def cpu_flags() -> list[str]:
    """The instruction-set levels that matter to the packers."""
    wanted = ["avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd"]
    text = Path("/proc/cpuinfo").read_text()
    have = set(text.split())
    return [flag for flag in wanted if flag in have]


def filesystem_type(directory: Path) -> str:
    """The type of the mount that holds a directory."""
    resolved = str(directory.resolve())
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind = line.split()[:3]
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def memory_total() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_machine(directory: Path, threads: int) -> dict[str, object]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cpu_flags": cpu_flags(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_total(),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "filesystem": filesystem_type(directory),
        "memory_read_bytes_per_second": {
            str(count): memory_bandwidth(count) for count in sorted({1, threads})
        },
        "load_average_at_start": os.getloadavg()[0],
    }
