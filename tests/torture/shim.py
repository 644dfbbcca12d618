"""shim.c compiled, and its instructions."""

from __future__ import annotations

import errno
import shutil
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
FLAGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC")
LIBRARIES = ("-ldl", "-lpthread")
ALLOCATING = "write,allocate,create,mkdir,rename,sync"  # calls for which a disk can be too full


def why_not() -> str | None:
    """What this machine lacks; None: nothing."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    return None if shutil.which("cc") else "needs a C compiler"


def compiled(room: Path) -> Path:
    """The library, in `room`."""
    library = room / "shim.so"
    subprocess.run(["cc", *FLAGS, "-o", library, SOURCE, *LIBRARIES], check=True)
    return library


@dataclass(frozen=True)
class Wrong:
    """What goes wrong with calls that change the disk, by default nothing at all."""

    kind: str = "count"  # or fail, short, kill
    at: int = 0  # which one, from 1 on; 0: all
    calls: str = ""  # classes of calls that count; default: all
    error: int = 0  # of `fail`
    sticky: bool = False  # all later ones, too
    signal: int = signal.SIGKILL  # of `kill`
    clock: int = 0  # seconds by which the clock is wrong
    jump: int = 0  # after so many readings of the clock in the other direction
    nfs: bool = False  # open files that are removed stay under another name
    locks: int = 0  # the error of every lock

    def __str__(self) -> str:
        if self.clock:
            return f"clock {self.clock:+} s, jump {self.jump}"
        if self.kind == "fail":
            name = errno.errorcode[self.error]
            return f"{name} at call {self.at}{' and later' * self.sticky} of {self.calls or 'all'}"
        if self.kind == "kill":
            return f"{signal.Signals(self.signal).name} at call {self.at}"
        more = " as on NFS" * self.nfs + f" locks fail with {self.locks}" * bool(self.locks)
        return f"{self.kind} at call {self.at} of {self.calls or 'all'}{more}"


@dataclass(frozen=True)
class Told:
    """The shim's environment, and what it counted."""

    root: Path
    state: Path
    log: Path | None = None

    def variables(self, wrong: Wrong) -> dict[str, str]:
        """For a process that has loaded the library. Counters begin anew."""
        self.state.write_bytes(bytes(16))
        found = {
            "TORTURE_ROOT": str(self.root.resolve()),
            "TORTURE_STATE": str(self.state),
            "TORTURE_KIND": wrong.kind,
            "TORTURE_CALLS": wrong.calls,
            "TORTURE_AT": str(wrong.at),
            "TORTURE_STICKY": str(int(wrong.sticky)),
            "TORTURE_ERRNO": str(wrong.error),
            "TORTURE_SIGNAL": str(int(wrong.signal)),
            "TORTURE_NFS": str(int(wrong.nfs)),
            "TORTURE_LOCKS": str(wrong.locks),
        }
        if wrong.clock:
            found |= {"TORTURE_CLOCK": str(wrong.clock), "TORTURE_JUMP": str(wrong.jump)}
        return found | ({"TORTURE_LOG": str(self.log)} if self.log else {})

    def counted(self) -> tuple[int, int]:
        """Calls that count, and those that were hit."""
        calls, hit = struct.unpack("=QQ", self.state.read_bytes())
        return calls, hit
