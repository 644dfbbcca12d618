"""Every input that was kept, without a fuzzer: a sentence or a result, in little time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fuzz.readers import CORPUS, READERS, Reader, accepts

INPUTS = sorted(path for path in CORPUS.glob("*/*") if path.is_file())
MOST_BYTES = 1 << 20  # of the whole corpus


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_an_input(path: Path, tmp_path: Path) -> None:
    accepts(READERS[path.parent.name], tmp_path, path.read_bytes())


@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_one_of_its_inputs(name: str, tmp_path: Path) -> None:
    """Else the fuzzer would begin, and stay, in front of the first check."""
    taken = False
    for path in sorted((CORPUS / name).iterdir()):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        taken |= accepts(READERS[name], tmp_path, path.read_bytes())
    assert taken


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in INPUTS) < MOST_BYTES


def test_a_defect_is_one(tmp_path: Path) -> None:
    """What a reader raises beyond refusals reaches the fuzzer."""

    def broken(directory: Path, data: bytes) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        accepts(Reader(broken), tmp_path, b"")
