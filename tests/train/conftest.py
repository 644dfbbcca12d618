"""A layer, and LoRA on it."""

from __future__ import annotations

from typing import Any

import pytest

from ktconv.runtime import MoELayer, Pool


@pytest.fixture(scope="session")
def layer(pool: Pool) -> MoELayer:
    from helpers.training import packed  # which imports torch

    return MoELayer(packed("int8"), pool)


@pytest.fixture
def module(layer: MoELayer) -> Any:
    """LoRA on it."""
    from helpers.training import lora_experts

    return lora_experts(layer)
