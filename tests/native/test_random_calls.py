"""Random calls of every function of ktconv.h that takes memory, between unreadable pages, and calls
from many threads. `make asan` makes the former under sanitizers, `make fuzz-native` as many as one
likes, `make tsan` the latter under ThreadSanitizer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from helpers.amx import compiler, kept_directory
from helpers.levels import isa_parts
from helpers.random_calls import build_calls, calls_command, environment

from ktconv import native
from ktconv.native import build

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def library(pytestconfig: pytest.Config) -> Path:
    if compiler() is None:
        pytest.skip("no C compiler")
    return build_calls(kept_directory(pytestconfig))


def run(library: Path, *options: str) -> str:
    command = calls_command(library, *options)
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_calls_of_many_threads(pytestconfig: pytest.Config) -> None:
    if compiler() is None:
        pytest.skip("no C compiler")
    kept = kept_directory(pytestconfig)
    assert "threads: 0 failures" in run(build_calls(kept, "threads_check.c"))


def functions_that_take_memory() -> set[str]:
    text = re.sub(r"/\*.*?\*/", "", build.declarations(build.HEADER), flags=re.DOTALL)
    return {name for name, given in re.findall(r"\b(kt_\w+)\(([^()]*)\);", text) if "*" in given}


def test_every_function_that_takes_memory_is_called(library: Path) -> None:
    found = functions_that_take_memory()
    assert {"kt_decode", "kt_moe_forward", "kt_pool_destroy"} < found
    assert set(run(library, "--list").split()) == found


@pytest.mark.parametrize("memory", ["end", "start"])
def test_calls_between_unreadable_pages(library: Path, memory: str) -> None:
    """A whole round: every function, weight format, dtype and refusal, at every level and part."""
    out = run(library, "--memory", memory, "--rounds", "1")
    levels = out.splitlines()[0].split()[2:]
    parts = isa_parts()
    wanted = [level for level in native.isa_available() if level != "avx512"]
    assert set(wanted) | set(parts) <= set(levels)
    assert re.search(r"\d+ cases of seed 0 in memory of \w+: 0 failures", out)


@pytest.mark.parametrize(
    "options", [["--memory", "heaps"], ["--rounds"], ["--what", "1"]], ids=" ".join
)
def test_options_that_are_none(library: Path, options: list[str]) -> None:
    done = subprocess.run(calls_command(library, *options), capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout.startswith("usage:")
