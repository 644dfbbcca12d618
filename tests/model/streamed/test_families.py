"""Logits of a streamed pass are those of the model in memory, bit by bit, in every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.family_list import SAVED
from helpers.family_models import write
from helpers.passes import Passed, in_memory, windows

from ktconv.errors import CheckpointError
from ktconv.model import load_model

WITHOUT_LANGUAGE_MODEL = "openai_privacy_filter"
NOT_RUN_BEFORE_5_23 = "deepseek_v4, resaved"
FAMILIES = [name for name in SAVED if name not in (WITHOUT_LANGUAGE_MODEL, NOT_RUN_BEFORE_5_23)]


def written(name: str, directory: Path) -> Path:
    """The checkpoint, if the installed release of transformers has its class."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, SAVED[name].saved_by):
        pytest.skip(f"transformers has no {SAVED[name].saved_by} yet")
    write(SAVED[name], directory / "model")
    return directory / "model"


def same_logits(torch: Any, source: Path, folder: Path, dtype: str = "auto") -> None:
    passed, ids = Passed(source, folder, dtype), windows()
    model, _ = load_model(source, dtype)
    model.set_experts_implementation("eager")
    expected = in_memory(model, ids)
    found = passed.run(ids)
    assert passed.parted.dtype == next(model.parameters()).dtype
    for (own,), theirs in zip(found.outputs, expected, strict=True):
        assert theirs.isfinite().all() and theirs.std() > 0
        assert own.dtype == theirs.dtype and torch.equal(own, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, torch: Any, tmp_path: Path) -> None:
    same_logits(torch, written(name, tmp_path), tmp_path / "states")


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "gpt_oss"])
def test_in_float32(name: str, torch: Any, tmp_path: Path) -> None:
    """Of a bf16 checkpoint: its weights are converted as they are read."""
    same_logits(torch, written(name, tmp_path), tmp_path / "states", "float32")


def test_a_family_that_transformers_runs_since_5_23(torch: Any, tmp_path: Path) -> None:
    import transformers

    source = written(NOT_RUN_BEFORE_5_23, tmp_path)
    if hasattr(transformers, "BeamForCausalLM"):
        same_logits(torch, source, tmp_path / "states")
        return
    with pytest.raises(CheckpointError, match="model cannot be run by transformers: "):
        Passed(source, tmp_path / "states").run(windows())


def test_a_family_without_a_language_model(torch: Any, tmp_path: Path) -> None:
    source = written(WITHOUT_LANGUAGE_MODEL, tmp_path)
    with pytest.raises(CheckpointError, match=r"model is of type openai_privacy_filter, for which"):
        Passed(source, tmp_path / "states")
