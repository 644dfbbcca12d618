"""Fixtures for all tests: levels of instruction sets, and AMX where the CPU has none."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
import typer.testing
from helpers.amx import EMULATOR, Emulator, kept_directory, load_emulator

from ktconv import native

MEMORY = "/dev/shm"  # where Linux keeps files in memory


def pytest_configure(config: pytest.Config) -> None:
    # Scripts in the background and nohup ignore signals, and so would every process of a test.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # Conversions wait for their disk more than they compute. What matters is that and when they
    # sync, which tests find by hooks: the files may be in memory.
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
    # The models here are tiny: PyTorch's threads would wait for one another, and take what other
    # processes of tests need. Set before PyTorch is loaded, here and in programs that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The tree of commands takes 40 ms to build, and tests run some thousand of them.
    vars(typer.testing)["_get_command"] = cache(typer.main.get_command)
    # Else those compile all modules of the package again, each time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    config.stash[EMULATOR] = load_emulator(kept_directory(config, "ktconv-amx"))


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For what commands keep in the user's cache."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path))
        yield path


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config) -> Emulator:
    """The emulator of AMX; skips where the CPU has AMX itself or nothing can emulate it."""
    found = pytestconfig.stash[EMULATOR]
    if found is None:
        pytest.skip("AMX is not emulated here")
    return found


@pytest.fixture
def tiles(pytestconfig: pytest.Config) -> Emulator | None:
    """For tests that execute AMX: sees to it that they can."""
    found = pytestconfig.stash[EMULATOR]
    if found is not None:
        found.install()
    return found


@pytest.fixture(params=list(native.ISA_NAMES.values()))
def isa(request: pytest.FixtureRequest, tiles: Emulator | None) -> Iterator[str]:
    """Each level in turn, in use during the test; one that the machine lacks is skipped."""
    level: str = request.param
    if level not in native.isa_available():
        pytest.skip(f"this machine does not support {level}")
    before = native.isa()
    native.use_isa(level)
    yield level
    native.use_isa(before)
