"""docs/which-method.md says what the tables say, and what is known of KTransformers."""

from __future__ import annotations

import runpy
from typing import Any, get_args

import pytest
from helpers.paths import ROOT

from ktconv.checkpoint.encodings import ENCODINGS
from ktconv.cli.quantize_cpu import Method


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "write_which_method.py"))


@pytest.fixture(scope="module")
def rows(script: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in script["rows"]()}


def test_the_page_is_up_to_date(script: dict[str, Any]) -> None:
    assert script["PAGE"].read_text() == script["page"](), "run python docs/write_which_method.py"


def test_methods_are_those_of_the_command(script: dict[str, Any]) -> None:
    known = set(get_args(Method))
    assert set(script["BITS"]) <= known
    assert set(script["COMMANDS"].values()) == set(script["BITS"])


def test_encodings_are_known(script: dict[str, Any]) -> None:
    assert set(script["KEPT"]) <= {one.name for one in ENCODINGS}


@pytest.mark.parametrize(
    ("models", "kept", "small", "large"),
    [
        ("Qwen3-MoE", "`bf16`", "`int4`", "`int8`"),
        ("Kimi-K2-Thinking", "`rawint4`", "`rawint4`", "`int8`"),
        ("DeepSeek-V4, V4-Flash, V4-Pro, V4.1-Flash", "`mxfp4`", "`mxfp4`", "`mxfp8`"),
        ("MiniMax-M3", "–", "–", "`mxfp8`"),  # MXFP4 would drop alpha
        ("GLM-5.3-Flash", "`fp8`", "–", "`fp8`"),  # its server refuses all else
        ("gpt-oss-20b, 120b", "–", "–", "–"),  # biases
    ],
)
def test_what_is_known(
    models: str, kept: str, small: str, large: str, rows: dict[str, tuple[str, ...]]
) -> None:
    assert rows[models][2:5] == (kept, small, large)
