"""The checks of native/test that need no Python, on the extension that is installed. `make asan`
builds the same ones with the library under sanitizers, `make neon` for another architecture."""

from __future__ import annotations

import re
import subprocess

import pytest
from helpers.amx import compiler, kept_directory
from helpers.paths import NATIVE, ROOT
from helpers.random_calls import build_calls, calls_command, environment

pytestmark = pytest.mark.slow

PROGRAMS = (
    "check", "moe_check", "train_check", "train_calls_check", "gradients_check", "strips_check",
    "placement_check",
)  # fmt: skip
# test_random_calls and test_pool
ELSEWHERE = {"random_check", "threads_check", "pool_check", "pool_crowd"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(pytestconfig: pytest.Config, program: str) -> None:
    if compiler() is None:
        pytest.skip("no C compiler")
    library = build_calls(kept_directory(pytestconfig), f"{program}.c")
    done = subprocess.run(
        calls_command(library), capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "0 failures" in done.stdout


def test_every_program_is_run_here_and_under_sanitizers() -> None:
    found = {path.stem for path in (NATIVE / "test").glob("*.c") if "int main(" in path.read_text()}
    assert found == ELSEWHERE | {*PROGRAMS}
    makefile = (ROOT / "Makefile").read_text()
    line = re.compile(r"^\t(?:\$\(QEMU\) )?build/(asan|tsan|aarch64)/(\w+)", re.MULTILINE)
    run = set(line.findall(makefile))
    assert {name for kind, name in run if kind != "aarch64"} == found | {"portable_pool_check"}
    assert {name for kind, name in run if kind == "aarch64"} == {
        "check", "moe_check", "train_check", "strips_check", "pool_check"
    }  # fmt: skip
