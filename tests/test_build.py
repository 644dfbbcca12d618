"""The build of the extension: setup.py, with a compiler that only notes when it runs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.process]

# A shell starts in a tenth of the time of Python, for each of some hundred files.
COMPILER = """#!/bin/sh
parent=$PPID
for word; do
    case $last in -o) output=$word ;; esac
    case $word in -c) compiles=1 ;; -g0) without=1 ;; esac
    last=$word
done
if [ "$compiles" ]; then
    : > {meeting}/$$
    until set -- {meeting}/* && [ $# -ge 2 ]; do  # the first waits for a second, whatever it takes
        kill -0 $parent || exit 1  # the build was ended
        sleep 0.01
    done
    [ "$without" ] || {{ echo "debug information is asked for" >&2; exit 1; }}
fi
: > "$output"
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU compiles one file at a time")
def test_files_compile_in_parallel(tmp_path: Path) -> None:
    """It would wait for ever if they did not."""
    pytest.importorskip("setuptools")
    compiler, meeting = tmp_path / "cc", tmp_path / "meeting"
    meeting.mkdir()
    compiler.write_text(COMPILER.format(meeting=shlex.quote(str(meeting))))
    compiler.chmod(0o755)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force"]
    command += [f"--build-temp={tmp_path / 'objects'}", f"--build-lib={tmp_path / 'library'}"]
    environment = os.environ | {"CC": str(compiler), "LDSHARED": str(compiler)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sources = len(list((ROOT / "native/src").rglob("*.c"))) + 1
    assert len(list((tmp_path / "objects").rglob("*.o"))) == sources
    assert list((tmp_path / "library").rglob("_native*.so"))


def test_data_files_are_packaged() -> None:
    """Every file beside the modules, as of git, is in package-data."""
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    package = ROOT / "src/ktconv"
    named = {
        path
        for pattern in settings["tool"]["setuptools"]["package-data"]["ktconv"]
        for path in package.glob(pattern)
    }
    data = {
        path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert data - named == {path for path in data if path.suffix in (".py", ".so")}


def test_a_source_distribution_has_what_its_tests_read(tmp_path: Path) -> None:
    """test_docs holds these pages and hooks to the code."""
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", f"--egg-base={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = set((tmp_path / "ktconv.egg-info/SOURCES.txt").read_text("utf-8").splitlines())
    pages = {"README.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "docs/architecture.md"}
    assert listed >= {*pages, ".pre-commit-config.yaml", ".github/workflows/ci.yml", ".ci/run"}
