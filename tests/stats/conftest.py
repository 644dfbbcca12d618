"""Fixtures of the tests that need a model."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch on one thread, where transformers is installed too."""
    pytest.importorskip("transformers")
    found = pytest.importorskip("torch")
    found.set_num_threads(1)
    return found
