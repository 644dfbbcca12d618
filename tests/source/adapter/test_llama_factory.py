"""LLaMA-Factory's file on docs/fine-tuning.md, and the adapter that PEFT writes by its options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.lora import sides, write_adapter
from helpers.paths import EXAMPLE

from ktconv.errors import CheckpointError
from ktconv.source import ModelSource, open_checkpoint
from ktconv.source.reading.tensors import SourceTensors

PAGE = (EXAMPLE.parents[1] / "fine-tuning.md").read_text(encoding="utf-8")
HIDDEN, QUERY = 128, "model.layers.0.self_attn.q_proj"

# Its options about LoRA: fields of LoraArguments, and finetuning_type, at 00577a85775a.
OPTIONS = {
    "additional_target", "create_new_adapter", "finetuning_type", "lora_alpha", "lora_dropout",
    "lora_rank", "lora_target", "loraplus_lr_embedding", "loraplus_lr_ratio", "pissa_convert",
    "pissa_init", "pissa_iter", "use_dora", "use_rslora",
}  # fmt: skip


def file_of_page() -> dict[str, str]:
    block = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    return dict(line.split(": ", 1) for line in block[1].splitlines())


def names_of_page() -> dict[str, str]:
    """The name in adapter_config.json of each option, by the page's table."""
    rows = re.findall(r"^\| `(\w+)`[^|]* \| `(\w+)` \|", PAGE, re.MULTILINE)
    return {option: name for option, name in rows if option in OPTIONS}


def test_options_are_those_of_llama_factory() -> None:
    assert set(file_of_page()) <= OPTIONS
    assert {"lora_rank", "lora_alpha", "use_rslora", "use_dora", "pissa_init"} <= set(
        names_of_page()
    )


def query_of(adapter: Path | None) -> Any:
    checkpoint = open_checkpoint(
        ModelSource(EXAMPLE, adapter=None if adapter is None else (str(adapter),))
    )
    tensor = next(one for one in checkpoint.other_tensors if one.name == f"{QUERY}.weight")
    return SourceTensors(checkpoint).plain(tensor)


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_of_these_options_is_added(tmp_path: Path, rslora: bool) -> None:
    """With its rank and alpha, by the page's names for them."""
    said, names = file_of_page(), names_of_page()
    rank, alpha = int(said["lora_rank"]), int(said["lora_alpha"])
    a, b = sides(np.random.default_rng(2), HIDDEN, HIDDEN, rank)
    settings = {names["lora_alpha"]: alpha, names["use_rslora"]: rslora, "target_modules": "all"}
    adapter = write_adapter(tmp_path / "saves", {QUERY: (a, b)}, rank, **settings)
    scale = alpha / (rank**0.5 if rslora else rank)
    expected = query_of(None) + scale * (b @ a)
    found = query_of(adapter)
    assert np.abs(found - expected).max() <= 2.0**-8 * np.abs(expected).max()
    assert np.abs(found - query_of(None)).max() > 0.02


@pytest.mark.parametrize(
    ("option", "value"), [("use_dora", True), ("pissa_init", "pissa"), ("additional_target", ["x"])]
)
def test_what_the_page_calls_refused_is_refused(tmp_path: Path, option: str, value: Any) -> None:
    a, b = sides(np.random.default_rng(2), HIDDEN, HIDDEN)
    setting = {names_of_page()[option]: value}
    adapter = write_adapter(tmp_path / "saves", {QUERY: (a, b)}, **setting)
    with pytest.raises(CheckpointError, match=names_of_page()[option]):
        query_of(adapter)
