"""Models that several tests plan for."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.convert import convert
from plan.models import uneven, write_counts, write_model

SKEWED = {0: [80, 1, 2, 3, 40, 5, 6, 7], 1: [1, 2, 3, 4, 5, 60, 70, 8]}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 8 experts of 3 * 128 * 128 weights in bf16."""
    return write_model(tmp_path_factory.mktemp("plan") / "model")


@pytest.fixture(scope="session")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uneven(tmp_path_factory.mktemp("plan") / "uneven")


@pytest.fixture(scope="session")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its conversion to INT8 in two NUMA parts."""
    output = tmp_path_factory.mktemp("plan") / "int8"
    convert(model, output, method="int8", numa=2)
    return output


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    return write_counts(tmp_path / "counts.json", SKEWED)
