"""Models on packed experts with adapters beside them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import EXAMPLE

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from helpers.adapted import IDS, apart, example, logits, train_a_little
from safetensors.torch import load_file, save_file

from ktconv.errors import CheckpointError, UsageError
from ktconv.model import add_adapters, load_model, replace_experts
from ktconv.train import merge, prepare, save

pytestmark = [pytest.mark.slow, pytest.mark.torch]

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two that differ, of experts; the second of attention and no expert's gate, too."""
    found = {}
    for number, name in enumerate(("first", "second")):
        model = example()
        targets: Any = ("gate", "up", "down") if number == 0 else ("up", "down")
        prepared = prepare(model, EXAMPLE, rank=4 + 5 * number, alpha=8, targets=targets)
        train_a_little(prepared, seed=number)
        found[name] = tmp_path_factory.mktemp("adapters") / name
        save(model, found[name])
    generator = torch.Generator().manual_seed(9)
    tensors = load_file(found["second"] / WEIGHTS)
    for side, shape in (("A", (3, 128)), ("B", (128, 3))):
        key = f"base_model.model.model.layers.1.self_attn.o_proj.lora_{side}.weight"
        tensors[key] = torch.randn(shape, generator=generator) / 10
    save_file(tensors, found["second"] / WEIGHTS)
    config = json.loads((found["second"] / CONFIG).read_text())
    config["rank_pattern"] = {"o_proj": 3}
    (found["second"] / CONFIG).write_text(json.dumps(config))
    return found


def merged(adapter: Path) -> Any:
    """Logits of the model in float32 whose weights the adapter was added to."""
    model = example()
    merge(model, adapter)
    return logits(model)


def test_logits_are_those_of_the_merged_model(int8: Path, adapters: dict[str, Path]) -> None:
    model = example()
    replace_experts(model, int8)
    base = logits(model)
    added = add_adapters(model, adapters)
    assert added.names == ("first", "second")
    assert torch.equal(logits(model), base)
    alone = {}
    for name, directory in adapters.items():
        wanted = merged(directory)
        with added.using(name):
            alone[name] = logits(model)
        assert apart(alone[name], wanted) < 0.02 < apart(base, wanted), name
    with added.using(["second", None]):
        both = logits(model)
    assert torch.equal(both[1], base[1])
    assert apart(both[0], alone["second"][0]) < 1e-4
    with added.using(["first", "second"]):
        assert apart(logits(model)[0], alone["first"][0]) < 1e-4
        with added.using(None):
            assert torch.equal(logits(model), base)
        twin = copy.deepcopy(model)
    assert torch.equal(logits(model), base)
    assert logits(twin).shape == base.shape
    added.remove()
    assert torch.equal(logits(model), base)


def test_generate(int8: Path, adapters: dict[str, Path]) -> None:
    model = load_model(EXAMPLE, "bfloat16")[0]
    replace_experts(model, int8)
    added = add_adapters(model, adapters)
    options: Any = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    with added.using("first"):
        alone = model.generate(IDS[:1], **options)
    with added.using(["first", "second"]):
        both = model.generate(IDS[:1].repeat(2, 1), **options)
    assert torch.equal(both[0, : alone.shape[1]], alone[0])


def test_what_is_refused(int8: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    model = example()
    with pytest.raises(UsageError, match="has no packed experts"):
        add_adapters(model, adapters)
    replace_experts(model, int8)
    with pytest.raises(UsageError, match="no adapter is given"):
        add_adapters(model, {})
    tensors = load_file(adapters["first"] / WEIGHTS)
    for side, shape in (("A", (4, 128)), ("B", (8, 4))):
        tensors[f"base_model.model.model.layers.0.mlp.gate.lora_{side}.weight"] = torch.ones(shape)
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_bytes((adapters["first"] / CONFIG).read_bytes())
    base = logits(model)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate, which is no linear layer"):
        add_adapters(model, {"router": tmp_path})
    added = add_adapters(model, adapters)
    with pytest.raises(UsageError, match="has LoRA already"):
        add_adapters(model, adapters)
    with pytest.raises(UsageError, match="no adapter 'third'"), added.using("third"):
        pass
    for names in (["first"] * 4, ["first"] * 3, []):  # 18 tokens are 3 times 6, too
        said = f"the batch has 2 sequences, and using\\(\\) was given {len(names)} names"
        with added.using(names), pytest.raises(UsageError, match=said):
            logits(model)
    assert torch.equal(logits(model), base)
