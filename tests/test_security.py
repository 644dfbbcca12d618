"""docs/security.md has a test for each line; what concerns the whole package is tested here."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.parsed import nodes
from helpers.paths import EXAMPLE, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.process]

MODULES = sorted((ROOT / "src/ktconv").rglob("*.py"))
PAGE = (ROOT / "docs/security.md").read_text("utf-8")
NAMED = re.findall(r"\| `(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
# What makes objects of text or bytes by running it.
MODULES_THAT_RUN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS_THAT_RUN = {"eval", "exec", "compile", "__import__"}

# Ends the process at an event that talks to others or runs what was read.
WATCHED = """
import os, sys
FORBIDDEN = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "os.system",
             "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "urllib.Request",
             "ftplib.connect", "http.client.connect")
def watch(event, arguments):
    if event in FORBIDDEN:
        os.write(2, f"FORBIDDEN {event} {arguments!r}".encode())
        os._exit(99)
sys.addaudithook(watch)
"""


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_line_has_its_test(path: str, name: str) -> None:
    assert not name or f"\ndef {name}(" in (ROOT / path).read_text("utf-8")


def test_every_line_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(NAMED) == len(rows) - 1 > 10


def test_no_module_runs_what_it_reads() -> None:
    for path in MODULES:
        for node in nodes(path):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {one.name.split(".")[0] for one in node.names} & MODULES_THAT_RUN, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in MODULES_THAT_RUN, where
            elif isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name):
                    assert node.func.id not in CALLS_THAT_RUN, where
                for keyword in node.keywords:
                    risky = keyword.arg in ("allow_pickle", "trust_remote_code", "shell")
                    value = ast.unparse(keyword.value)
                    assert not risky or value in ("False", "shell"), where  # shell: its name


# Commands one after the other, until one fails.
ONE_PROCESS = """
import json
from ktconv.cli.entry import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


def test_a_local_run_talks_to_nobody(tmp_path: Path) -> None:
    output = tmp_path / "output"
    runs = (
        ("inspect", EXAMPLE),
        ("quantize-cpu", EXAMPLE, output, "--method", "int4"),
        ("verify", output, "--source", EXAMPLE),
    )
    words = json.dumps([list(map(str, run)) for run in runs])
    command = [sys.executable, "-c", WATCHED + ONE_PROCESS, words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for said in ("family", f"{output} is complete", f"{output}: OK, verified to level layers"):
        assert said in done.stdout, done.stdout


def test_talking_would_be_noticed() -> None:
    code = f"{WATCHED}\nimport socket\nsocket.getaddrinfo('localhost', 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 99
