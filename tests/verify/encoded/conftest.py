"""The small model of the tests of verify, quantized for GPUs, to damage copies of."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.gpu import quantize


@pytest.fixture(scope="session")
def for_gpu(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Both schemes, each made once: for_gpu("W4A16")."""
    pytest.importorskip("llmcompressor")
    made: dict[str, Path] = {}

    def get(scheme: str = "W4A16") -> Path:
        if scheme not in made:
            made[scheme] = tmp_path_factory.mktemp("for-gpu") / "out"
            quantize(model, made[scheme], scheme=scheme)
        return made[scheme]

    return get


@pytest.fixture
def copied(for_gpu: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy, to be damaged; `method` is what its manifest then says."""

    def get(scheme: str = "W4A16", method: str = "rtn") -> Path:
        copy = tmp_path / f"copy-{scheme}"
        shutil.copytree(for_gpu(scheme), copy)
        manifest = copy / "ktconv.json"
        told = manifest.read_text().replace('"method": "rtn"', f'"method": "{method}"')
        manifest.write_text(told)
        return copy

    return get
