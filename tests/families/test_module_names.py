"""Names of transformers' modules in the table of families, against the one that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import saved
from helpers.family_list import SAVED

from ktconv.source import open_checkpoint
from ktconv.targets.encoded.ignored import ignored_modules, names_in_transformers


def linear_modules(name: str, directory: Path) -> set[str]:
    """Of the models that transformers builds for a config.json, without any weights: the whole one,
    and the language model alone."""
    import torch
    import transformers

    found: set[str] = set()
    kinds = {getattr(transformers, SAVED[name].saved_by), transformers.AutoModelForCausalLM}
    for kind in kinds:
        if issubclass(kind, transformers.PreTrainedConfig):
            continue
        config = transformers.AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            try:
                model: Any = (getattr(kind, "from_config", None) or kind)(config)
            except (ValueError, AttributeError):  # no language model of its own
                continue
        found |= {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    assert found
    return found


@pytest.mark.parametrize("name", [*SAVED])
def test_every_linear_layer_is_named_as_transformers_names_it(name: str, tmp_path: Path) -> None:
    """One that is missing on the list would be taken for quantized, since Linear is a target."""
    model = saved.written(name, tmp_path)
    checkpoint = open_checkpoint(model)
    others = checkpoint.other_tensors
    renamed = names_in_transformers(others, checkpoint.config.families)
    assert linear_modules(name, model) <= set(ignored_modules(others, renamed))


def test_names_that_are_the_same_are_not_repeated(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved.written("qwen3_moe", tmp_path))
    assert names_in_transformers(checkpoint.other_tensors, checkpoint.config.families) == set()
