"""What quantizing for GPUs needs; without llm-compressor all of it is skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import EXAMPLE


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch, where llm-compressor is installed too."""
    pytest.importorskip("llmcompressor")
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def quantized(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The example model, quantized once per scheme and group size by rounding to nearest."""
    from helpers.gpu import quantize

    made: dict[tuple[str, int], Path] = {}

    def get(scheme: str = "W4A16", group_size: int = 128) -> Path:
        key = scheme, group_size
        if key not in made:
            made[key] = tmp_path_factory.mktemp("quantized") / "out"
            quantize(EXAMPLE, made[key], scheme=scheme, group_size=group_size)
        return made[key]

    return get
