"""Adapters of all families that transformers has, added to checkpoints as PEFT adds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
import transformers
from helpers.family_list import SAVED
from helpers.family_models import build
from torch import nn

from ktconv.errors import CheckpointError, UsageError
from ktconv.model.sites import find_experts
from ktconv.source import Checkpoint, ModelSource, open_checkpoint
from ktconv.source.reading.reader import SourceReader
from ktconv.source.reading.tensors import SourceTensors
from ktconv.verify.second_reader import SecondReader

pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys"),
    pytest.mark.slow,
    pytest.mark.torch,
]


# Where a matrix of the checkpoint has the rows of several modules of transformers.
IN_PARTS = {
    "lara_mini": r"model\.layers\.0\.linear_attn\.in_proj\.weight",
    "sarvam_moe": r"model\.layers\.[01]\.attention\.query_key_value\.weight",
}


def adapted(model: Any, modules: list[str], parameters: list[str]) -> Any:
    """The model with LoRA of random numbers; parameters have another rank than modules."""
    settings: Any = {"r": 3, "lora_alpha": 6, "target_modules": modules}
    settings |= {"target_parameters": parameters, "rank_pattern": {r".*experts.*": 2}}
    settings["alpha_pattern"] = {r".*experts.*": 7}
    with_lora: Any = peft.get_peft_model(model, peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(4)
    for name, one in with_lora.named_parameters():
        if "lora_" in name:
            one.data.copy_(torch.randn(one.shape, generator=generator) / 10)
    return with_lora


def linears(model: Any, layers: str) -> list[str]:
    """Linear layers in the layers of the language model, by their whole names. Of MLPs, PEFT takes
    those for experts; of Mamba, it takes all but the output."""
    left_out = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "out_proj")
    found = (name for name, one in model.named_modules() if isinstance(one, nn.Linear))
    return [
        name
        for name in found
        if name.startswith(f"{layers}.") and not name.endswith(left_out) and ".experts." not in name
    ]


def tensors(checkpoint: Checkpoint) -> dict[str, np.ndarray[Any, Any]]:
    """Matrices of experts by layer, expert and projection, others by their names."""
    source, found = SourceTensors(checkpoint), {}
    for layer in checkpoint.layers:
        for expert in range(len(layer.experts)):
            parts = source.expert(layer, expert)
            for name, one in zip("gud", parts, strict=True):
                if one is not None:
                    found[f"{layer.index} {expert} {name}"] = one.values()
    for tensor in checkpoint.other_tensors:
        of_experts = ".experts." in tensor.name  # that give their inputs back, and use no weights
        if tensor.dtype in ("F32", "BF16", "F16") and not of_experts:
            found[tensor.name] = source.plain(tensor)
    return found


def expect_second_reader(checkpoint: Checkpoint) -> None:
    """What `verify` reads by itself is the same."""
    second = SecondReader(checkpoint, SourceReader(checkpoint.files, checkpoint.sources))
    source = SourceTensors(checkpoint)
    for layer in checkpoint.layers:
        for expert in range(len(layer.experts)):
            parts = source.expert(layer, expert)
            for name, one in zip(("gate", "up", "down"), parts, strict=True):
                if one is None:
                    continue
                projection: Any = name
                weight = second.expert(layer, expert, projection)
                found = weight.values(range(one.rows), range(one.cols))
                np.testing.assert_allclose(found, one.values(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SAVED)
def test_all_families(name: str, tmp_path: Path) -> None:
    """Experts, attention, routers and shared experts: every tensor of the merged checkpoint."""
    if not hasattr(transformers, SAVED[name].saved_by):
        pytest.skip(f"transformers has no {SAVED[name].saved_by} yet")
    model = build(SAVED[name]).float().eval()
    sites = find_experts(model)
    site = next(iter(sites.values()))
    words = site.bare_path.rpartition(f".{site.layer}.")[2]
    parameters = [
        ".".join(filter(None, (words, one.module, one.name))) for one in site.parameters_of_all
    ]
    model.save_pretrained(tmp_path / "base")
    before = tensors(open_checkpoint(tmp_path / "base"))
    modules = linears(model, site.layers_path)
    with_lora = adapted(model, modules, parameters)
    with_lora.save_pretrained(str(tmp_path / "adapter"))
    with_lora.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = tensors(open_checkpoint(tmp_path / "merged"))
    source = ModelSource(tmp_path / "base", adapter=(str(tmp_path / "adapter"),))
    if name == "ernie4_5_vl_moe":
        with pytest.raises(UsageError, match="has experts in several towers"):
            open_checkpoint(source)
        return
    if name in IN_PARTS:
        with pytest.raises(CheckpointError, match=rf"that transformers makes of {IN_PARTS[name]}"):
            open_checkpoint(source)
        return
    opened = open_checkpoint(source)
    found = tensors(opened)
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        np.testing.assert_allclose(found[key], one, rtol=1e-5, atol=1e-6, err_msg=key)
    changed = [key for key in expected if not np.array_equal(expected[key], before[key])]
    assert len(changed) > len(sites)
    expect_second_reader(opened)
