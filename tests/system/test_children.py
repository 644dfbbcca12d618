"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ktconv.system import children

pytestmark = pytest.mark.process

# Prints its number when it is started from a thread that has ended since, then never ends itself.
_PARENT = """
import subprocess, sys, threading, time
from ktconv.system import children
def begin():
    global child
    child = children.start("import time; print(1, flush=True); time.sleep(600)", stderr=None)
thread = threading.Thread(target=begin)
thread.start()
thread.join()
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(number: int) -> None:
    """And not with the thread that started it, nor with the end of its own input."""
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        assert runs(child)
        parent.send_signal(number)
        parent.wait()
    until = time.monotonic() + 20
    while runs(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not runs(child)


def test_a_child_that_a_sibling_outlives() -> None:
    """Children hold no writing end of the pipe: each sees the end, whatever the others do."""
    found = [
        children.start("import os; print(*os.listdir('/proc/self/fd'))", stderr=None)
        for _ in range(2)
    ]
    descriptors = [{int(one) for one in child.communicate()[0].split()} for child in found]
    reading, writing = children._pipe()
    assert all(reading in held and writing not in held for held in descriptors)
    assert not os.get_inheritable(reading) and not os.get_inheritable(writing)
