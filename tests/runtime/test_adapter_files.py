"""Adapters in directories, loaded beside the weights of layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import EXAMPLE

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from helpers.adapted import example, train_a_little
from safetensors.torch import load_file, save_file

from ktconv.errors import CheckpointError, UsageError
from ktconv.model import add_adapters
from ktconv.runtime import MoELayer
from ktconv.train import merge, prepare, save

pytestmark = [pytest.mark.slow, pytest.mark.torch]

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
KEY = "base_model.model.model.layers.{}.mlp.experts.{}.{}_proj.lora_{}.weight"
HIDDEN, TOP_K = 128, 2


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    """The example with LoRA that makes a difference, on weights of BF16."""
    model = example()
    prepared = prepare(model, EXAMPLE, rank=4, alpha=8)
    train_a_little(prepared)
    return model, prepared


@pytest.fixture
def adapter(trained: tuple[Any, Any], tmp_path: Path) -> Path:
    save(trained[0], tmp_path / "adapter")
    return tmp_path / "adapter"


def batch(tokens: int = 12) -> tuple[Any, Any, Any]:
    made = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 8, generator=made).argsort(dim=1)[:, :TOP_K].contiguous()
    x = torch.randn(tokens, HIDDEN, generator=made)
    return x, ids, torch.rand(tokens, TOP_K, generator=made)


def apart(one: Any, other: Any) -> float:
    return float((one - other).norm() / other.norm())


def expected(trained: tuple[Any, Any], layer: int, given: Any) -> Any:
    """What the layer with LoRA computes in training, whose LoRA rounds a little more."""
    with torch.no_grad():
        return trained[1].lora[layer].eval()(*given)


def test_a_layer_computes_what_was_trained(trained: Any, adapter: Path) -> None:
    given = batch()
    for number in (0, 1):
        layer = MoELayer.load(EXAMPLE, number, adapter=adapter)
        assert layer.adapters == ("default",)
        wanted = expected(trained, number, given)
        assert apart(layer(*given), wanted) < 0.002
        assert apart(layer(*given, adapter="default"), wanted) < 0.002
        assert apart(layer(*given, adapter=None), wanted) > 0.05
        assert torch.equal(layer(*given, adapter=None), MoELayer.load(EXAMPLE, number)(*given))


def test_all_layers_and_several_adapters(trained: Any, adapter: Path, tmp_path: Path) -> None:
    other = _scaled(adapter, tmp_path / "other", 0.5)
    layers = MoELayer.load_all(EXAMPLE, adapters={"whole": adapter, "half": other})
    given = batch()
    numbers = torch.tensor([0, 1, -1] * 4, dtype=torch.int64)
    for number, layer in layers.items():
        assert layer.adapters == ("whole", "half")
        found = layer(*given, adapter_ids=numbers)
        for place, name in ((0, "whole"), (1, "half"), (-1, None)):
            rows = numbers == place
            assert torch.equal(found[rows], layer(*given, adapter=name)[rows])
        assert torch.equal(layer(*given), layer(*given, adapter=None))
        assert apart(layer(*given, adapter="whole"), expected(trained, number, given)) < 0.002


def _scaled(adapter: Path, to: Path, factor: float) -> Path:
    """The same adapter with another alpha."""
    to.mkdir()
    (to / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes())
    config = json.loads((adapter / CONFIG).read_text())
    (to / CONFIG).write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * factor}))
    return to


def test_layouts_of_files_are_the_same_adapter(trained: Any, adapter: Path, tmp_path: Path) -> None:
    """A matrix for each expert, PEFT's parameters, and KTransformers' stacks."""
    save(trained[0], tmp_path / "parameters", layout="parameters")
    stacks = {}
    for number, lora in trained[1].lora.items():
        for name, one in lora.named_parameters():
            stacks[f"layers.{number}.experts.{name[:-2]}_lora_{name[-1]}"] = one.detach()
    (tmp_path / "kt").mkdir()
    save_file(stacks, tmp_path / "kt" / "fused_expert_lora.safetensors")
    (tmp_path / "kt" / CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8})
    )
    given, layer = batch(), MoELayer.load(EXAMPLE, 1, adapter=adapter)
    wanted = layer(*given)
    for name in ("kt", "parameters"):
        layer.add_adapter(name, tmp_path / name)
        # Gate and up have a rank of their sum in parameters: other zeros, the same numbers.
        assert torch.allclose(layer(*given, adapter=name), wanted, atol=1e-5), name


def test_experts_with_ranks_of_their_own(adapter: Path, tmp_path: Path) -> None:
    """rank_pattern and alpha_pattern of single experts: zeros of a larger rank change nothing."""
    tensors = load_file(adapter / WEIGHTS)
    wide, module = dict(tensors), "model.layers.1.mlp.experts.3.gate_proj"
    a, b = (KEY.format(1, 3, "gate", side) for side in "AB")
    wide[a] = torch.cat([tensors[a], torch.zeros(7, HIDDEN)])
    wide[b] = torch.cat([tensors[b], torch.zeros(len(tensors[b]), 7)], dim=1)
    config = json.loads((adapter / CONFIG).read_text())
    config |= {"rank_pattern": {module: 11}, "alpha_pattern": {module: 22}}
    (tmp_path / "wide").mkdir()
    save_file(wide, tmp_path / "wide" / WEIGHTS)
    (tmp_path / "wide" / CONFIG).write_text(json.dumps(config))
    given, layer = batch(40), MoELayer.load(EXAMPLE, 1, adapter=adapter)
    layer.add_adapter("wide", tmp_path / "wide")
    assert layer.adapter("wide").rank == 11
    assert torch.allclose(layer(*given, adapter="wide"), layer(*given), atol=1e-5)


def test_rslora(adapter: Path, trained: Any) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, "use_rslora": True, "lora_alpha": 4}))
    given = batch()  # 4 / sqrt(4) is 8 / 4
    found = MoELayer.load(EXAMPLE, 0, adapter=adapter)(*given)
    assert apart(found, expected(trained, 0, given)) < 0.002


def test_other_modules_are_named(adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS)
    for side, shape in (("A", (4, 128)), ("B", (128, 4))):
        for name in ("self_attn.q_proj", "mlp.shared_expert.up_proj"):
            key = f"base_model.model.model.layers.0.{name}.lora_{side}.weight"
            tensors[key] = torch.ones(shape)
    save_file(tensors, adapter / WEIGHTS)
    with pytest.warns(
        UserWarning, match=r"layers\.0\.mlp\.shared_expert\.up_proj, .*q_proj, which"
    ):
        layer = MoELayer.load(EXAMPLE, 0, adapter=adapter)
    assert len(layer.adapter("default").others) == 2


def test_arrays_get_the_adapter_of_a_layer(adapter: Path) -> None:
    stored = MoELayer.load(EXAMPLE, 1, adapter=adapter)
    streams: Any = [stored.packed.streams(expert) for expert in range(stored.experts)]
    gate, up, down = (np.stack([one[i].values() for one in streams]) for i in range(3))
    layer = MoELayer.pack(gate, up, down, "bf16")
    with pytest.raises(UsageError, match="which layer of the adapter"):
        layer.add_adapter("one", adapter)
    layer.add_adapter("one", adapter, layer=1)
    given = batch()
    assert torch.equal(layer(*given, adapter="one"), stored(*given))
    with pytest.raises(UsageError, match="this is layer 1, not 0"):
        stored.add_adapter("one", adapter, layer=0)


def _without(adapter: Path, key: str) -> None:
    tensors = load_file(adapter / WEIGHTS)
    save_file({name: one for name, one in tensors.items() if name != key}, adapter / WEIGHTS)


def _changed(key: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def write(adapter: Path) -> None:
        tensors = load_file(adapter / WEIGHTS)
        tensors[key] = change(tensors[key]).contiguous()
        save_file(tensors, adapter / WEIGHTS)

    return write


FIRST = KEY.format(1, 0, "up", "A")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: _without(a, FIRST), r"does not contain .*experts\.0\.up_proj\.lora_A"),
        (_changed(FIRST, lambda one: one * torch.nan), "has a NaN or an infinity"),
        (_changed(FIRST, lambda one: one[:, :-1]), r"A of up of expert 0 in layer 1 in .* is"),
        (_changed(FIRST, lambda one: one[:3]), "B of up of expert 0 in layer 1"),
        (lambda a: (a / CONFIG).unlink(), f"has no {CONFIG}"),
        (lambda a: (a / WEIGHTS).rename(a / "adapter_model.bin"), "but adapter_model.bin"),
    ],
)
def test_damaged_adapters(adapter: Path, damage: Any, message: str) -> None:
    damage(adapter)
    with pytest.raises(CheckpointError, match=message):
        MoELayer.load(EXAMPLE, 1, adapter=adapter)


def test_what_does_not_fit(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not both"):
        MoELayer.load(EXAMPLE, 1, adapter=adapter, adapters={"a": adapter})
    with pytest.raises(CheckpointError, match="does not exist"):
        MoELayer.load(EXAMPLE, 1, adapter=tmp_path / "nothing")
    tensors = load_file(adapter / WEIGHTS)
    later = {name.replace("layers.0", "layers.7"): one for name, one in tensors.items()}
    save_file(later, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match="layer 7 of the model has no experts"):
        MoELayer.load_all(EXAMPLE, adapter=adapter)
    with pytest.raises(UsageError, match="no LoRA of the experts in layer 0"):
        MoELayer.load(EXAMPLE, 0, adapter=adapter)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "which changed the base's weights"),
        ({"use_later_kind": True}, "says use_later_kind, which is more than a product"),
        ({"alora_invocation_tokens": [5]}, "says alora_invocation_tokens"),
        ({"layer_replication": [[0, 1]]}, "says layer_replication"),
    ],
)
def test_more_than_products_is_refused(setting: Any, said: str, adapter: Path) -> None:
    """The same outputs cannot be computed by adding s B A to these weights."""
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, **setting}))
    with pytest.raises(CheckpointError, match=said):
        MoELayer.load(EXAMPLE, 1, adapter=adapter)
    with pytest.raises(CheckpointError, match=said):
        MoELayer.load(EXAMPLE, 1).add_adapter("one", adapter)
    with pytest.raises(CheckpointError, match=said):
        merge(example(), adapter)


def test_trained_heads_are_no_part_of_a_layer(adapter: Path) -> None:
    """Whole weights beside the experts are named, as LoRA there is."""
    config, tensors = json.loads((adapter / CONFIG).read_text()), load_file(adapter / WEIGHTS)
    (adapter / CONFIG).write_text(json.dumps({**config, "modules_to_save": ["lm_head"]}))
    save_file(
        {**tensors, "base_model.model.lm_head.weight": torch.ones(4, HIDDEN)}, adapter / WEIGHTS
    )
    with pytest.warns(UserWarning, match=r"has LoRA of .*lm_head.weight, which are no routed"):
        MoELayer.load(EXAMPLE, 1, adapter=adapter)


def test_adapters_are_opened_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("ktconv.runtime.layer.sources.loaded", fail)
    with pytest.raises(CheckpointError, match="nothing does not exist"):
        MoELayer.load(EXAMPLE, 1, adapter=tmp_path / "nothing")


@pytest.mark.parametrize("given", ["ADAPTER", ["ADAPTER"], 3])
def test_adapters_without_names(given: Any) -> None:
    calls: list[Any] = [
        partial(MoELayer.load, EXAMPLE, 1),
        partial(add_adapters, torch.nn.Module()),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="adapters must be directories by name, not"):
            call(adapters=given)
        for name in ("", 3):
            with pytest.raises(UsageError, match="the name of an adapter must be a word"):
                call(adapters={name: "ADAPTER"})
        with pytest.raises(UsageError, match="the adapter 'one' must be a directory, not None"):
            call(adapters={"one": None})
