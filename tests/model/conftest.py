"""The example model, its conversions, and what loading it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.convert import Converted


@pytest.fixture(scope="session")
def int8(converted_example: Converted) -> Path:
    """The example model in INT8."""
    return converted_example(method="int8")


@pytest.fixture(scope="session")
def int4(converted_example: Converted) -> Path:
    """The example model in INT4, cut into two parts."""
    return converted_example(method="int4", numa=2)


@pytest.fixture
def loaded(torch: Any) -> tuple[Any, Any]:
    """(model, tokenizer): the example in float32."""
    from helpers import adapted

    return adapted.loaded()


@pytest.fixture
def model(loaded: tuple[Any, Any]) -> Any:
    return loaded[0]


@pytest.fixture
def tokenizer(loaded: tuple[Any, Any]) -> Any:
    return loaded[1]


@pytest.fixture
def fused_experts(torch: Any) -> Callable[[], Any]:
    """Makes a module that looks like two experts in two stacks."""

    def make() -> Any:
        module = torch.nn.Module()
        module.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 8, 4))
        module.down_proj = torch.nn.Parameter(torch.zeros(2, 4, 4))
        return module

    return make
