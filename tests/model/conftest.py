"""The example model, its conversions, and what loading it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.convert import convert
from helpers.paths import EXAMPLE


@pytest.fixture(scope="session")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model in INT8."""
    output = tmp_path_factory.mktemp("model") / "int8"
    convert(EXAMPLE, output, method="int8")
    return output


@pytest.fixture(scope="session")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model in INT4, cut into two parts."""
    output = tmp_path_factory.mktemp("model") / "int4"
    convert(EXAMPLE, output, method="int4", numa=2)
    return output


@pytest.fixture
def loaded(torch: Any) -> tuple[Any, Any]:
    """(model, tokenizer): the example in float32, so that only our own rounding is seen."""
    from ktconv.model import load_model

    return load_model(EXAMPLE, "float32")


@pytest.fixture
def model(loaded: tuple[Any, Any]) -> Any:
    return loaded[0]


@pytest.fixture
def tokenizer(loaded: tuple[Any, Any]) -> Any:
    return loaded[1]
