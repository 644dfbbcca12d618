"""Models of transformers whose layers have different numbers of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.convert import convert
from helpers.saved import written

from ktconv.model import load_model, replace_experts
from ktconv.model.load import check_language_model
from ktconv.stats.record import Recorder
from ktconv.verify import VerifyRequest, verify

pytestmark = [pytest.mark.slow, pytest.mark.torch]

# One for each way in which blocks are built: in the MLP, with groups, in the layer itself.
FAMILIES = ("qwen3_moe", "glm4_moe", "mixtral", "gpt_oss", "granitemoe")


def pruned(name: str, directory: Path) -> tuple[Path, dict[int, int]]:
    """A model whose last layer lost its last expert, with all that it had for it; and how many
    experts each layer has."""
    from safetensors.torch import load_file, save_file

    from ktconv.families.names import router_tensors
    from ktconv.source import open_checkpoint

    source = written(name, directory)
    layers = open_checkpoint(source).layers
    counts = {layer.index: len(layer.experts) for layer in layers if not layer.is_mtp}
    last = next(layer for layer in layers if layer.index == max(counts))
    count = counts[last.index]
    names = router_tensors(last.source)
    of_router = {*names.weight, *names.bias, *names.correction}
    file = source / "model.safetensors"
    tensors: dict[str, Any] = {}
    for key, tensor in load_file(file).items():
        if key.startswith(f"{last.source}.{count - 1}."):
            continue
        stacked = key.startswith(f"{last.source}.") and tensor.shape[0] == count
        cut = stacked and not key.removeprefix(f"{last.source}.")[0].isdecimal()
        tensors[key] = tensor[:-1].clone() if cut or key in of_router else tensor
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    if "n_group" in config:  # an odd number is in no two groups
        (source / "config.json").write_text(json.dumps({**config, "n_group": 1, "topk_group": 1}))
    return source, counts | {last.index: count - 1}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_uneven_layers(name: str, tmp_path: Path, torch: Any) -> None:
    source, counts = pruned(name, tmp_path)
    output, ids = tmp_path / "int8", torch.arange(5, 14)[None]
    convert(source, output, method="int8", allow_activation_mismatch=True)

    def logits(model: Any) -> Any:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    model, _ = load_model(source, "float32")
    own = logits(model)
    replace_experts(model, output, threads=1)
    ours = logits(model)
    assert 1e-4 < float((ours - own).norm() / own.norm()) < 0.05
    without, _ = load_model(source, "float32", experts=False)
    replace_experts(without, output, threads=1)
    assert torch.equal(logits(without), ours)

    recorder = Recorder(source)
    assert recorder.experts == counts
    with recorder.prepare(["some words"] * 9, 40, work=tmp_path) as recording:
        found, _ = recording.run()
    assert {layer.layer: len(layer.counts) for layer in found.layers} == counts
    # transformers itself is as it was: another model has as many experts in each layer
    check_language_model(source)
    again, _ = load_model(written(name, tmp_path / "whole"), "float32")
    assert torch.isfinite(logits(again)).all()


@pytest.mark.usefixtures("tiles")
def test_level_model_of_uneven_layers(tmp_path: Path, torch: Any) -> None:
    source, _ = pruned("glm4_moe", tmp_path)
    output = tmp_path / "int8"
    convert(source, output, method="int8")
    request = VerifyRequest(output, str(source), level="model", windows=1)
    facts = verify(request).facts
    assert 0 < facts["model"]["kl_mean"] < 0.1
    assert {failure["check"] for failure in facts["failures"]} <= {"perplexity", "divergence"}


def test_stacks_with_identity_experts(tmp_path: Path, torch: Any) -> None:
    """LongCat as transformers stacks it gives the same as with numbered experts."""
    source, ids = written("longcat_flash", tmp_path), torch.arange(5, 14)[None]
    model, _ = load_model(source, "bfloat16")
    stacked = tmp_path / "stacked"
    model.save_pretrained(stacked, save_original_format=False)
    for file in source.glob("*token*"):
        (stacked / file.name).write_bytes(file.read_bytes())
    config = json.loads((stacked / "config.json").read_text())
    assert config["zero_expert_num"] == 2
    outputs = []
    for place in (source, stacked):
        output = place.parent / f"{place.name}-int8"
        convert(place, output, method="int8")
        loaded, _ = load_model(place, "float32", experts=False)
        replace_experts(loaded, output, threads=1)
        with torch.no_grad():
            outputs.append(loaded(input_ids=ids, use_cache=False).logits)
    assert torch.equal(*outputs)
