"""Programs of native/test on the extension that is installed: their calls go to the code that users
run."""

from __future__ import annotations

import os
import platform
import sys
import zlib
from pathlib import Path

import ktconv._native

from helpers.amx import build_emulator, build_library
from helpers.paths import NATIVE

TESTS = NATIVE / "test"
IN_PYTHON = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
words = [word.encode() for word in sys.argv[2:]]
sys.exit(ctypes.CDLL(sys.argv[2]).main(len(words), (ctypes.c_char_p * len(words))(*words)))
"""


def build_calls(cache: Path, program: str = "random_check.c") -> Path:
    """A program as a library that finds ktconv's functions in the extension."""
    headers = b"".join(path.read_bytes() for path in sorted(NATIVE.rglob("*.h")))
    flags = ["-O1", f"-I{NATIVE / 'include'}", f"-DKT_HEADERS={zlib.crc32(headers)}"]
    if platform.machine() == "x86_64" and platform.system() == "Linux":
        # It installs itself: no program calls it.
        flags += ["-Wl,--no-as-needed", str(build_emulator(cache))]
    return build_library(TESTS / program, cache, *flags)


def calls_command(library: Path, *options: str) -> list[str]:
    """A process that runs it with these options."""
    extension = str(Path(ktconv._native.__file__))
    return [sys.executable, "-c", IN_PYTHON, extension, str(library), *options]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KTCONV_")}
