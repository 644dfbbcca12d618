"""Files of a source that stay open while a layer is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ktconv.errors import ResourceError, SourceChangedError
from ktconv.source import SourceFile
from ktconv.source.reading.reader import KEPT_FILES, KeptReader, SourceReader


def reader_of(directory: Path, count: int) -> tuple[KeptReader, list[Path]]:
    paths = [directory / f"{index}.safetensors" for index in range(count)]
    sources = []
    for index, path in enumerate(paths):
        path.write_bytes(bytes([index]) * 100)
        about = path.stat()
        sources.append(SourceFile(path.name, about.st_size, about.st_mtime_ns, "0" * 64))
    return SourceReader(paths, sources).keeping(), paths


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_are_opened_once_and_closed(tmp_path: Path) -> None:
    reader, paths = reader_of(tmp_path, KEPT_FILES + 5)
    before = descriptors()
    for _ in range(3):
        for index, path in enumerate(paths):
            with reader.open(path) as opened:
                assert opened.take(3, 7) == bytes([index]) * 3
        assert descriptors() == before + KEPT_FILES
    reader.confirm()
    reader.close()
    assert descriptors() == before


@pytest.mark.parametrize("change", ["longer", "touched", "another"])
def test_a_change_is_refused_before_anything_becomes_final(tmp_path: Path, change: str) -> None:
    reader, (path,) = reader_of(tmp_path, 1)
    with reader.open(path):
        pass
    if change == "another":
        other = tmp_path / "other"
        other.write_bytes(b"x" * 100)
        os.utime(other, ns=(1, 1))
        other.replace(path)
    elif change == "longer":
        path.write_bytes(b"x" * 101)
    else:
        os.utime(path, ns=(1, 1))
    with pytest.raises(SourceChangedError, match="changed while it was read"):
        reader.confirm()
    reader.close()


def test_a_change_explains_what_reading_met(tmp_path: Path) -> None:
    reader, (path,) = reader_of(tmp_path, 1)
    with pytest.raises(SourceChangedError), reader.open(path):
        os.utime(path, ns=(1, 1))
        raise ValueError("a NaN")
    with pytest.raises(ValueError, match="a NaN"), reader_of(tmp_path, 1)[0].open(path):
        raise ValueError("a NaN")


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    reader, (path,) = reader_of(tmp_path, 1)
    path.unlink()
    with pytest.raises(ResourceError, match="No such file"), reader.open(path):
        pass
