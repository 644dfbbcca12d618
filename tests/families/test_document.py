"""docs/families.md says what the table of families says, and what the tests' checkpoints have."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from helpers.family_list import MODELS
from helpers.paths import ROOT

from ktconv.families.table import FAMILIES
from ktconv.source.encodings import ENCODINGS


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "write_families.py"))


def test_the_page_is_up_to_date(script: dict[str, Any]) -> None:
    assert script["PAGE"].read_text() == script["page"](), "run python docs/write_families.py"


def test_every_family_is_on_the_page(script: dict[str, Any]) -> None:
    encodings = {one.name for one in ENCODINGS}
    for row in FAMILIES.rows:
        listed = {released.type for released in row.released}
        assert listed <= set(row.types)
        assert listed or not row.types, row.types
        for released in row.released:
            assert released.layout in script["LAYOUTS"]
            assert encodings.issuperset(released.encodings.split())


def test_the_checkpoints_of_the_tests_are_on_the_page(script: dict[str, Any]) -> None:
    """Names, layouts and encodings of what is converted from end to end."""
    listed = {
        (script["tensors_of"](row, released), encoding)
        for row in FAMILIES.rows
        for released in row.released
        for encoding in released.encodings.split()
    }
    names = {name for name, _ in listed}
    for name, model in MODELS.items():
        if "resaved" in name or "mlx" in name:
            continue  # not as it is released
        tensors = model.at.format("L") + script["LAYOUTS"][model.layout][0]
        assert tensors in names, name
        assert model.saved_by or (tensors, model.encoding) in listed, name
