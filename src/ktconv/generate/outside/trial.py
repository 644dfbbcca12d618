"""Trials of models' code: its answers, or that it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def answer_of(code: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The answer, without gradients; None where the code fails, as that which is called in another
    way does: with a gate, other shapes, or a cache of another kind."""
    with torch.inference_mode():
        try:
            return code(*given, **named)
        except Exception:  # whatever unknown code raises
            return None
