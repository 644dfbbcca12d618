"""A model, and its layer folders in every method and number of parts; copies may be broken."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers import reference
from helpers.cli import write_model
from helpers.convert import convert, source_matrices

from ktconv.formats import BACKWARD, FORMATS, kt_path, split

INNER = 512
Made = Callable[[str, int], Path]


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("merge")


@pytest.fixture(scope="session")
def model(room: Path) -> Path:
    """Three layers of four experts, hidden size 128."""
    return write_model(room / "model", layers=3, inner=INNER)


@pytest.fixture(scope="session")
def shards(model: Path, room: Path) -> Made:
    """What quantize-cpu writes; nobody may change it."""

    @cache
    def make(method: str, numa: int) -> Path:
        output = room / f"shards-{method}-{numa}"
        convert(model, output, method=method, numa=numa)
        return output

    return make


@pytest.fixture(scope="session")
def kept_folders(model: Path, room: Path) -> Made:
    """What quantize-cpu --layout layers writes; nobody may change it."""

    @cache
    def make(method: str, numa: int) -> Path:
        output = room / f"layers-{method}-{numa}"
        convert(model, output, method=method, numa=numa, layout="layers")
        return output

    return make


@pytest.fixture
def folders(kept_folders: Made, tmp_path: Path) -> Iterator[Made]:
    """A copy that a test may break."""

    def make(method: str, numa: int) -> Path:
        target = tmp_path / f"layers-{method}-{numa}"
        shutil.copytree(kept_folders(method, numa), target)
        return target

    yield make


@pytest.fixture(scope="session")
def kept_foreign(model: Path, room: Path) -> Made:
    """As the reference converter leaves it: folders and nothing else; nobody may change it."""

    @cache
    def make(method: str, numa: int) -> Path:
        output = room / f"foreign-{method}-{numa}"
        convert(model, output, method=method, numa=numa, layout="layers", compat=True)
        for path in output.iterdir():
            if path.is_file():
                path.unlink()
        return output

    return make


@pytest.fixture
def foreign(kept_foreign: Made, tmp_path: Path) -> Iterator[Made]:
    """A copy of that, which a test may break."""

    def make(method: str, numa: int) -> Path:
        target = tmp_path / f"foreign-{method}-{numa}"
        shutil.copytree(kept_foreign(method, numa), target)
        return target

    yield make


@pytest.fixture(scope="session")
def add_backward(model: Path) -> Callable[[Path, str, int], dict[str, bytes]]:
    """Writes the backward matrices beside the forward ones; name of each tensor -> bytes."""

    def add(root: Path, method: str, numa: int) -> dict[str, bytes]:
        fmt, written = FORMATS[method], {}
        for (layer, expert, proj), values in source_matrices(model).items():
            (backward,) = (name for name in BACKWARD if name.startswith(proj))
            inner, hidden = values.shape if proj != "down" else values.shape[::-1]
            for part in range(numa):
                piece = values[split(proj, hidden, inner, part, numa).index]
                packed, scale = reference.quantize_pack(fmt, np.ascontiguousarray(piece.T))
                for kind, data in (("weight", packed.tobytes()), ("scale", scale.tobytes())):
                    path = kt_path(fmt.name, layer, backward, expert, part, kind, len(data))  # type: ignore[arg-type]
                    (root / path).write_bytes(data)
                    name = f"blk.{layer}.ffn_{backward}_exps.{expert}.numa.{part}.{kind}"
                    written[name] = data
        return written

    return add
