"""Files of tests that cannot be imported: skipped for an optional package, else errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.process

# The function stands above the line that fails: half a file must not pass.
TEST = "def test_it(): ...\n"
LAST_LINES = {
    "error": "raise ValueError('broken')",
    "needed": "import no_such_package",
    "optional": "import no_such_optional.part",
    "skip": "import pytest; pytest.skip('not here', allow_module_level=True)",
    "whole": "",
}


def test_files_that_cannot_be_imported(tmp_path: Path) -> None:
    conftest = (ROOT / "tests/conftest.py").read_text("utf-8")
    changed = conftest.replace("OPTIONAL = {", 'OPTIONAL = {"no_such_optional", ')
    assert changed != conftest
    (tmp_path / "conftest.py").write_text(changed, "utf-8")
    for name, line in LAST_LINES.items():
        (tmp_path / f"test_{name}.py").write_text(TEST + line, "utf-8")
    command = [
        sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT),
        "-rEsp", "--continue-on-collection-errors", "-p", "no:cacheprovider", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    told = [line for line in done.stdout.splitlines() if line.startswith(("ERROR", "SKIP", "PASS"))]
    found = {word: [line for line in told if f"test_{word}.py" in line] for word in LAST_LINES}
    assert sum(map(len, found.values())) == len(told) == len(LAST_LINES), told
    assert found["error"][0].startswith("ERROR") and "ValueError: broken" in done.stdout
    assert found["needed"][0].startswith("ERROR")
    assert found["optional"][0].endswith("no_such_optional is not installed")
    assert found["skip"][0].startswith("SKIPPED") and found["skip"][0].endswith("not here")
    assert found["whole"][0].startswith("PASSED")
