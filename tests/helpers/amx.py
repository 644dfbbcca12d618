"""AMX for tests: the machine's own, or our emulator of its instructions.

The emulator (native/test/amx_emulator.c) performs AMX instructions in a handler of SIGILL and
counts them. Where a CPU has AVX-512 but no AMX, pytest loads it and claims the level with
KTCONV_ASSUME, in this process only: programs that tests start see the machine as it is.

On a CPU with AMX, KT_EMULATE_AMX=1 makes pytest and what it starts run without the kernel's
permission to use it: there too the instructions are emulated, and counted.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.paths import NATIVE
from ktconv import native

COUNTERS = (
    "configs",
    "loads",
    "stores",
    "zeros",
    "int8_products",
    "bf16_products",
    "releases",
)


@dataclass(frozen=True)
class Counts:
    """How often instructions were executed, in all threads."""

    configs: int
    loads: int
    stores: int
    zeros: int
    int8_products: int
    bf16_products: int
    releases: int

    @property
    def products(self) -> int:
        return self.int8_products + self.bf16_products


class Emulator:
    """The loaded emulator."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self._lib = ctypes.CDLL(str(library))
        self._lib.kt_amx_emulator_gaps.restype = ctypes.c_uint64

    def install(self) -> None:
        """Takes SIGILL again, in case somebody else did: pytest's faulthandler does."""
        self._lib.kt_amx_emulator_install()

    def reset(self) -> None:
        self._lib.kt_amx_emulator_reset()

    def counts(self) -> Counts:
        out = (ctypes.c_uint64 * len(COUNTERS))()
        self._lib.kt_amx_emulator_counts(out)
        return Counts(*out)

    @contextmanager
    def stepping(self, limit: int) -> Iterator[None]:
        """While open, instructions between products are counted up to the limit,
        slowly (see `long_gaps`)."""
        self._lib.kt_amx_emulator_step(ctypes.c_uint64(limit))
        try:
            yield
        finally:
            self._lib.kt_amx_emulator_step(ctypes.c_uint64(0))

    def long_gaps(self) -> int:
        """Number of gaps between two products of a thread with more instructions than the limit;
        AMX's do not count."""
        return int(self._lib.kt_amx_emulator_gaps())

    def environment(self, report: Path) -> dict[str, str]:
        """For a program that is to run under the emulator and leave its counters in `report`."""
        return os.environ | {
            "LD_PRELOAD": str(self.path),
            "KTCONV_ASSUME": "amx",
            "KT_AMX_EMULATOR_REPORT": str(report),
        }


EMULATOR = pytest.StashKey[Emulator | None]()


def read_report(report: Path) -> Counts:
    lines = (line.split() for line in report.read_text().splitlines())
    return Counts(**{name: int(count) for name, count in lines})


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


def build_library(source: Path, cache: Path, *flags: str) -> Path:
    """`source` as a shared library, compiled again when it has changed."""
    text = source.read_bytes() + " ".join(flags).encode()
    target = cache / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}")
        command = [compiler() or "cc", "-std=c11", *flags, "-shared", "-fPIC", str(source)]
        subprocess.run([*command, "-o", str(partial), "-lm"], check=True)
        partial.rename(target)
    return target


def can_emulate() -> bool:
    features = native.cpu_features()
    x86_linux = platform.machine() == "x86_64" and platform.system() == "Linux"
    beside = features["avx512_bf16"] and features["avx512_vbmi"]  # as every CPU with AMX has
    return x86_linux and beside and not features["amx_permission"] and bool(compiler())


def refuse_tiles() -> None:
    """From now on the kernel refuses tile data to this process and those that it starts, unless
    it has been asked already."""
    load_word, equal, result = 0x20, 0x15, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_JEQ, BPF_RET
    arch_prctl, ask_for_state = 158, 0x1023  # of x86-64; ARCH_REQ_XCOMP_PERM
    fail_with_eperm, allow = 0x50001, 0x7FFF0000
    steps = [
        (load_word, 0, 0, 0),  # the number of the system call
        (equal, 0, 3, arch_prctl),
        (load_word, 0, 0, 16),  # its first argument
        (equal, 0, 1, ask_for_state),
        (result, 0, 0, fail_with_eperm),
        (result, 0, 0, allow),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    described = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, by_filter, described):
        raise OSError(ctypes.get_errno(), "KT_EMULATE_AMX: the kernel takes no filter")


KEPT = pytest.StashKey[Path]()


def kept_directory(config: pytest.Config) -> Path:
    """For what is compiled: kept from run to run in pytest's cache, unless that is turned off."""
    if KEPT not in config.stash:
        cache, name = getattr(config, "cache", None), "ktconv-native"
        if cache:
            config.stash[KEPT] = cache.mkdir(name)
        else:
            made = tempfile.TemporaryDirectory(prefix=name)
            config.add_cleanup(made.cleanup)
            config.stash[KEPT] = Path(made.name)
    return config.stash[KEPT]


def build_emulator(cache: Path) -> Path:
    return build_library(NATIVE / "test/amx_emulator.c", cache, "-O2")


def load_emulator(cache: Path) -> Emulator | None:
    """The emulator, with the level claimed in this process; None where it is not needed (the CPU
    has AMX, which the kernel grants) or cannot work."""
    if os.environ.get("KT_EMULATE_AMX") and platform.machine() == "x86_64":
        refuse_tiles()
    if not can_emulate():
        return None
    emulator = Emulator(build_emulator(cache))
    with claimed():
        native.isa()  # the library reads the environment now, and only now
    if not os.environ.get("KTCONV_ISA"):
        native.use_isa("avx512")  # tests that do not ask for a level are faster without faults
    return emulator


def program_levels() -> list[str]:
    """The levels of programs that tests start: without what is claimed for this process."""
    there = native.cpu_features()
    return [level for level in native.isa_available() if level != "amx" or there["amx_permission"]]


class claimed:
    """While open, libraries that look at the CPU for the first time see AMX."""

    def __enter__(self) -> None:
        self.before = os.environ.get("KTCONV_ASSUME")
        os.environ["KTCONV_ASSUME"] = "amx"

    def __exit__(self, *_: object) -> None:
        del os.environ["KTCONV_ASSUME"]
        if self.before is not None:
            os.environ["KTCONV_ASSUME"] = self.before
