"""Files as memory: their bytes, what happens when these are gone, other signals of that kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ktconv import native
from ktconv.native.mapped import MAPPED_FROM

PAGE = native.PAGE
SIZE = 4 * MAPPED_FROM

START = """
import faulthandler, mmap, os, signal, sys, tempfile
from ktconv import native

def truncated(nbytes=1 << 20):
    file = tempfile.TemporaryFile()
    file.write(bytes(nbytes))
    file.flush()
    return file
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    return path


def mapped(path: Path, nbytes: int = SIZE, offset: int = 0) -> native.Mapped | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        return native.map_file(fd, nbytes, offset)
    finally:
        os.close(fd)  # the mapping stays


@pytest.mark.parametrize("offset", [0, 8, 64, PAGE - 1, PAGE, 3 * PAGE + 40, SIZE - MAPPED_FROM])
def test_bytes_of_a_file(file: Path, offset: int) -> None:
    found = mapped(file, MAPPED_FROM, offset)
    assert found is not None and not found.lost
    assert found.data.tobytes() == file.read_bytes()[offset : offset + MAPPED_FROM]
    assert not found.data.flags.writeable


def test_data_outlives_the_mapping_object(file: Path) -> None:
    found = mapped(file)
    assert found is not None
    data, found = found.data[PAGE:], None
    assert data.tobytes() == file.read_bytes()[PAGE:]


def test_what_is_read_instead(file: Path, tmp_path: Path) -> None:
    assert mapped(file, MAPPED_FROM - 1) is None  # copied in less time
    assert mapped(file, MAPPED_FROM, SIZE) is None  # not there
    assert mapped(file, 2 * SIZE) is None
    os.truncate(file, SIZE - 100)
    assert mapped(file, SIZE) is None  # its last page is there, with zeros in it
    assert mapped(file, SIZE - 100) is not None
    assert mapped(tmp_path, MAPPED_FROM) is None
    assert native.map_file(-1, MAPPED_FROM, 0) is None
    reader, writer = os.pipe()
    assert native.map_file(reader, MAPPED_FROM, 0) is None
    os.close(reader), os.close(writer)


def test_no_more_than_the_table_takes(file: Path) -> None:
    kept = [mapped(file, MAPPED_FROM) for _ in range(1025)]
    assert kept[1023] is not None and kept[1024] is None
    kept.pop(7)
    assert mapped(file, MAPPED_FROM) is not None


@pytest.mark.parametrize("left", [0, PAGE, SIZE // 2])
def test_a_file_that_becomes_shorter_reads_as_zeros_and_says_so(file: Path, left: int) -> None:
    content = file.read_bytes()
    found, other = mapped(file), mapped(file, MAPPED_FROM)
    assert found is not None and other is not None
    os.truncate(file, left)
    assert not found.lost  # nobody has asked yet
    assert found.data.tobytes() == content[:left] + bytes(SIZE - left)
    assert found.lost and not other.lost


def dies_of_sigbus(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", START + code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGBUS, (done.returncode, done.stderr)
    return done.stderr


MAP = "file = truncated(); found = native.map_file(file.fileno(), 1 << 20, 0)\n"
FAULT = "other = truncated(); m = mmap.mmap(other.fileno(), 1 << 20); other.truncate(0); m[5000]\n"
ENABLE = "faulthandler.enable()\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "told"),
    [
        (MAP + FAULT, False),
        (ENABLE + MAP + FAULT, True),
        (MAP + ENABLE + FAULT, True),
        (MAP + ENABLE + MAP + FAULT, True),  # each of the two has the other one's handler
        (MAP + "os.kill(os.getpid(), signal.SIGBUS)\n", False),
    ],
    ids=["fault", "handler-before", "handler-after", "both", "sent"],
)
def test_another_bus_error_goes_to_who_had_it(code: str, told: bool) -> None:
    assert ("Fatal Python error: Bus error" in dies_of_sigbus(code)) == told


@pytest.mark.process
def test_a_handler_that_came_later_does_not_get_ours() -> None:
    code = "file.truncate(0); assert not any(found.data) and found.lost; print('alive')"
    code = START + MAP + ENABLE + MAP + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
