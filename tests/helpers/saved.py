"""Checkpoints of `family_list.SAVED`, as far as the installed release of transformers has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.family_list import SAVED
from helpers.family_models import write


def written(name: str, directory: Path) -> Path:
    """directory/model, which is written; the test is skipped where transformers lacks the class."""
    if not hasattr(pytest.importorskip("transformers"), SAVED[name].saved_by):
        pytest.skip(f"transformers has no {SAVED[name].saved_by} yet")
    write(SAVED[name], directory / "model")
    return directory / "model"
