"""LoRA in the experts of models: what `prepare` puts there, what it leaves alone and refuses."""

from __future__ import annotations

import copy
import gc
import importlib
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from helpers.convert import Converted
from helpers.forked import forked
from helpers.paths import EXAMPLE

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from helpers.adapted import IDS, apart, example, logits, train_a_little, with_gradient
from helpers.listed import Enumerated, Indexed, Whole, with_lists

from ktconv.errors import CheckpointError, UsageError
from ktconv.model import load_model, move_non_experts, replace_experts
from ktconv.model.sites import find_experts
from ktconv.runtime import Pool
from ktconv.system import machine
from ktconv.system.machine import Cpu
from ktconv.targets.expert_sets import expert_set
from ktconv.train import merge, prepare, save

pytestmark = [pytest.mark.slow, pytest.mark.torch]

NAMES = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


@pytest.fixture
def model() -> Any:
    """The example in float32."""
    return example()


@pytest.fixture(scope="session")
def int8(converted_example: Converted) -> Path:
    return converted_example(method="int8", numa=2)


def loss(model: Any) -> Any:
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def test_only_lora_is_trained(model: Any) -> None:
    """Its B is zero at first, so that the model computes what it did before."""
    before = logits(model)
    prepared = prepare(model, rank=4, alpha=8, dropout=0.25, targets=("up", "down"))
    assert (prepared.layers, prepared.method, prepared.untried) == ((0, 1), "bf16", ())
    assert apart(logits(model), before) < 0.005
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    path = "model.layers.{}.mlp.experts.lora.{}"
    assert trained == {path.format(layer, name) for layer in (0, 1) for name in NAMES[2:]}
    assert len(prepared.parameters()) == len(trained)
    for lora in prepared.lora.values():
        assert (lora.rank, lora.alpha, lora.scale, lora.dropout) == (4, 8, 2, 0.25)


def test_routers_choose_as_before(model: Any) -> None:
    """Bit for bit, for the same hidden states."""
    block = model.model.layers[0].mlp
    hidden = torch.randn((5, 128), generator=torch.Generator().manual_seed(3))
    gate, before = block.gate, block.gate(hidden)
    prepare(model, rank=4)
    assert model.model.layers[0].mlp.gate is gate
    assert all(map(torch.equal, gate(hidden), before))


def test_experts_of_the_model_are_freed(model: Any) -> None:
    names = set(model.state_dict())
    own = weakref.ref(find_experts(model)[0].module)
    prepared = prepare(model, rank=4)
    gc.collect()
    assert own() is None
    gone = {name for name in names if "experts." in name}
    assert gone
    new = {f"model.layers.{layer}.mlp.experts.lora.{name}" for layer in (0, 1) for name in NAMES}
    assert set(model.state_dict()) == names - gone | new
    with pytest.raises(UsageError, match="not kept"):
        prepared.restore()


def test_own_experts_are_put_back(model: Any) -> None:
    before = logits(model)
    prepared = prepare(model, rank=4, keep=True)
    train_a_little(prepared)
    assert apart(logits(model), before) > 0.02
    with prepared.originals():
        assert torch.equal(logits(model), before)
    with prepared:
        assert apart(logits(model), before) > 0.02
    assert torch.equal(logits(model), before)
    assert not isinstance(find_experts(model)[0].module, type(prepared))


@pytest.mark.parametrize("rank", [4, None])
def test_gradients_pass_through_experts(model: Any, rank: int | None) -> None:
    """With and without LoRA in them, which is what the rest of a model is trained by."""
    merged = copy.deepcopy(model)
    prepared = prepare(model, rank=rank)
    assert bool(prepared.parameters()) == (rank is not None)
    ours, our_gradient = with_gradient(model)
    theirs, their_gradient = with_gradient(merged)
    assert apart(ours, theirs) < 0.005
    assert apart(our_gradient, their_gradient) < 0.01


def test_an_output_of_experts_that_are_not_loaded(int8: Path, tmp_path: Path) -> None:
    """The model's own experts stay in their files, and the packed ones are mapped from theirs."""
    with Pool(1) as pool:
        model, _ = load_model(EXAMPLE, "float32", experts=False)
        prepared = prepare(model, int8, rank=4, pool=pool)
        assert (prepared.method, prepared.untried) == ("int8", (0, 1))
        whole = example()
        assert prepare(whole, int8, rank=4, pool=pool).untried == ()
        assert torch.equal(logits(model), logits(whole))
        packed = example()
        replace_experts(packed, int8, threads=1)
        assert apart(logits(model), logits(packed)) < 0.01
        train_a_little(prepared)
        save(model, tmp_path)
        merged = example()
        merge(merged, tmp_path)
        for ours, theirs in zip(with_gradient(model), with_gradient(merged), strict=True):
            assert 1e-4 < apart(ours, theirs) < 0.1


def test_a_checkpoint_as_it_is(model: Any) -> None:
    """Weights that a kernel computes with without rounding them."""
    before = logits(model)
    assert prepare(model, EXAMPLE, rank=4).method == "bf16"
    assert apart(logits(model), before) < 0.005


@pytest.mark.parametrize("memory", ["map", "copy", "shared"])
def test_weights_lie_in_the_memory_asked_for(model: Any, int8: Path, memory: str) -> None:
    prepared = prepare(model, int8, rank=4, memory=memory)
    assert [lora.layer.memory.kind for lora in prepared.lora.values()] == [memory] * 2


def test_weights_come_to_the_nodes_that_compute_them(
    model: Any, int8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine with a second node that does not exist: nothing can be moved there."""
    cpu = machine.topology()[0].number
    made = [Cpu(cpu, 0, 0), Cpu(cpu, 1, 1)]
    monkeypatch.setattr(machine, "topology", lambda: made)
    with Pool(2) as pool, pytest.warns(UserWarning, match="cannot be moved.*they were copied"):
        prepared = prepare(model, int8, rank=4, pool=pool)
        assert [lora.layer.memory.kind for lora in prepared.lora.values()] == ["copy"] * 2


def test_memory_is_for_converted_weights(model: Any) -> None:
    with pytest.raises(UsageError, match='memory "shared" is for converted models'):
        prepare(model, rank=4, memory="shared")
    with pytest.raises(UsageError, match='memory "map" is for converted models'):
        prepare(model, EXAMPLE, rank=4, memory="map")
    with pytest.raises(UsageError, match="memory 'there' is not known"):
        prepare(model, rank=4, memory="there")
    assert prepare(model, rank=4, memory="copy").method == "bf16"


def test_methods(model: Any, int8: Path) -> None:
    assert prepare(copy.deepcopy(model), rank=4, method="int8").method == "int8"
    assert prepare(copy.deepcopy(model), int8, rank=4, method="int8").method == "int8"
    with pytest.raises(UsageError, match=r"the method of .*out is int8, not int4"):
        prepare(model, int8, rank=4, method="int4")
    assert not hasattr(find_experts(model)[0].module, "lora")


@pytest.mark.parametrize("block", [Indexed, Enumerated, Whole])
def test_lists_of_experts(model: Any, block: type[Indexed], tmp_path: Path) -> None:
    """Of models written by hand, whose names for matrices adapters keep."""
    listed = with_lists(model, block, names=("w1", "w3", "w2"))
    merged = copy.deepcopy(listed)
    train_a_little(prepare(listed, rank=4))
    save(listed, tmp_path)
    merge(merged, tmp_path)
    for ours, theirs in zip(with_gradient(listed), with_gradient(merged), strict=True):
        assert apart(ours, theirs) < 0.01
    experts: Any = find_experts(listed)[0].module
    if block is not Whole:
        assert len(experts) == len(list(experts)) == 8


def test_training_lowers_the_loss(model: Any, int8: Path) -> None:
    """With bf16 parameters and gradient checkpointing, too."""
    for dtype in (torch.float32, torch.bfloat16):
        trained = copy.deepcopy(model)
        torch.manual_seed(0)
        prepared = prepare(trained, int8, rank=4, dropout=0.1, dtype=dtype)
        trained.train()
        optimizer = torch.optim.AdamW(prepared.parameters(), 1e-2)
        first = loss(trained).item()
        for _ in range(5):
            optimizer.zero_grad()
            loss(trained).backward()
            optimizer.step()
        assert loss(trained.eval()).item() < 0.8 * first


def test_gradient_checkpointing(model: Any) -> None:
    """Layers that run twice drop the same elements, and give the same gradients."""
    prepared = prepare(model, rank=4, dropout=0.3)
    train_a_little(prepared)
    model.train()

    def gradients() -> list[Any]:
        model.zero_grad()
        torch.manual_seed(11)
        loss(model).backward()
        return [one.grad for one in prepared.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable()
    assert all(map(torch.equal, gradients(), plain))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    assert all(map(torch.equal, gradients(), plain))


def test_the_mode_of_the_model(model: Any) -> None:
    """Dropout is for training alone."""
    model.train()
    prepared = prepare(model, rank=4, dropout=0.5)
    train_a_little(prepared)
    assert all(lora.training for lora in prepared.lora.values())
    assert not torch.equal(logits(model), logits(model))
    model.eval()
    assert torch.equal(logits(model), logits(model))


def test_a_copy_trains_by_itself(model: Any) -> None:
    prepared = prepare(model, rank=4)
    train_a_little(prepared)
    other = copy.deepcopy(model)
    assert torch.equal(logits(other), logits(model))
    loss(other).backward()
    assert all(one.grad is None for one in prepared.parameters())
    other.load_state_dict(model.state_dict())


def test_frozen_experts_do_not_train_in_silence(model: Any) -> None:
    prepared = prepare(model, rank=4)
    model.requires_grad_(False)  # as PEFT's get_peft_model does
    loss(model)  # not in training
    model.train()
    with pytest.raises(UsageError, match="requires no gradients") as refusal:
        loss(model)
    assert refusal.value.hint is not None
    assert "requires_grad_()" in refusal.value.hint
    prepared.requires_grad_(False)
    loss(model)
    prepared.requires_grad_()
    loss(model).backward()
    prepared.lora[0].requires_grad_(False)  # one layer may stay as it is
    loss(model).backward()


def test_a_model_on_a_gpu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA stays on the CPU with the packed weights, and the answer is the same."""
    from helpers.far import FAR, FarTensor, far_device

    prepared = prepare(model, rank=4)
    train_a_little(prepared)
    expected, size = logits(model), sum(one.nbytes for one in prepared.parameters())
    with far_device(monkeypatch), torch.no_grad():
        moved = move_non_experts(model, "cuda")
        packed: list[Any] = [site.module for site in find_experts(model).values()]
        assert moved.experts == size + sum(module.nbytes for module in packed)
        model.to("cuda")  # as Trainer does
        assert {one.device for one in prepared.parameters()} == {torch.device("cpu")}
        found = model(input_ids=IDS.to(FAR), use_cache=False).logits
        assert isinstance(found, FarTensor)
        assert torch.equal(found.to("cpu"), expected)
        assert move_non_experts(model, FAR).moved == 0


def test_models_that_do_not_fit(
    model: Any, int8: Path, tmp_path: Path, converted_example: Converted
) -> None:
    """Nothing has changed after a refusal."""
    with pytest.raises(CheckpointError, match="no experts were found"):
        prepare(torch.nn.Linear(3, 3), rank=4)
    with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module, not str"):
        prepare("MODEL", rank=4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="rank must"):
        prepare(model, rank=0)
    with pytest.raises(UsageError, match="gait"):
        prepare(model, rank=4, targets=("gait",))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="nowhere"):
        prepare(model, tmp_path / "nowhere", rank=4)
    part = converted_example(method="int8", exclude_experts=expert_set({1: [0, 3]}))
    with pytest.raises(UsageError, match=r"leaves out experts \[0, 3\] of layer 1"):
        prepare(model, part, rank=4)
    empty, _ = load_model(EXAMPLE, experts=False)
    with pytest.raises(UsageError, match="not in memory as bf16"):
        prepare(empty, rank=4)
    assert all(one.requires_grad for one in model.parameters())
    prepare(model, rank=4)
    with pytest.raises(UsageError, match="already uses packed experts"):
        prepare(model, rank=4)
    shuffled = example()
    with torch.no_grad():
        experts: Any = find_experts(shuffled)[1].module
        experts.down_proj.copy_(experts.down_proj.flip(0).clone())
    with pytest.raises(CheckpointError, match="not those of the model"):
        prepare(shuffled, int8, rank=4)


def ask_for_names(package: str, answers: Path) -> None:
    """What asking for each name of ktconv.train says where a package cannot be imported."""
    looked = ("ktconv.train", "ktconv.model", "ktconv.runtime", "transformers")
    for name in list(sys.modules):
        if name.startswith(looked):
            del sys.modules[name]  # as in a process that has imported nothing yet
    vars(sys)["modules"][package] = None
    train = importlib.import_module("ktconv.train")
    lines = []
    for name in train.__all__:
        try:
            getattr(train, name)
        except UsageError as error:
            lines.append(f"{name} {error} {error.hint}\n")
    answers.write_text("".join(lines))


@pytest.mark.parametrize(("package", "names"), [("torch", 7), ("peft", 0)])
def test_packages_that_are_not_installed(package: str, names: int, tmp_path: Path) -> None:
    """The message names the extra. PEFT is only needed for models that have something of it."""
    answers = tmp_path / "answers"
    assert forked(lambda: ask_for_names(package, answers)) == 0
    lines = answers.read_text().splitlines()
    assert len(lines) == names
    assert all(f"needs {package}, which is not" in one and "ktconv[train]" in one for one in lines)
