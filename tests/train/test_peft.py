"""PEFT beside LoRA of experts, and transformers' Trainer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
from helpers.adapted import IDS, apart, example, logits, train_a_little
from helpers.family_list import SAVED
from helpers.family_models import build
from safetensors.torch import load_file, save_file

from ktconv.errors import CheckpointError, UsageError
from ktconv.train import SaveAdapter, load, merge, prepare, save

WEIGHTS = "adapter_model.safetensors"

# Of PEFT 0.21, where it converts adapters for modules with all experts.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys"),
    pytest.mark.slow,
    pytest.mark.torch,
]


def with_both(order: str = "before", **options: Any) -> tuple[Any, Any]:
    """LoRA of PEFT in attention, put there before or after that in experts."""
    model = example()
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_alpha=6, **options)
    torch.manual_seed(3)
    if order == "before":
        model = peft.get_peft_model(model, config)
    prepared = prepare(model, rank=4, alpha=8)
    if order == "after":
        model = peft.get_peft_model(model, config)
        prepared.requires_grad_()
    return model, prepared


def train_both(model: Any, prepared: Any) -> None:
    """As after a few steps."""
    train_a_little(prepared)
    generator = torch.Generator().manual_seed(9)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            with torch.no_grad():
                one.copy_(torch.randn(one.shape, generator=generator) / 10)


@pytest.mark.parametrize("order", ["before", "after"])
def test_both_are_trained(order: str) -> None:
    model, prepared = with_both(order)
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert {name.split(".")[-2] for name in trained} == {"default", "lora"}
    assert len(trained) == 2 * (2 * 2 + 6)
    for name, one in model.named_parameters():
        assert (one.grad is not None) == (name in trained), name
    assert len(prepared.parameters()) == 12


def test_peft_freezes_what_is_not_its_own() -> None:
    model = example()
    prepare(model, rank=4)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    wrapped.train()
    with pytest.raises(UsageError, match="PEFT's get_peft_model freezes"):
        wrapped(input_ids=IDS)


@pytest.mark.parametrize("order", ["before", "after"])
def test_one_directory_for_both(order: str, tmp_path: Path) -> None:
    """Saved, loaded, merged: the same answers. PEFT itself reads it, and computes the same on the
    model's own weights."""
    model, prepared = with_both(order)
    train_both(model, prepared)
    expected, before = logits(model.eval()), logits(example())
    assert apart(expected, before) > 0.05
    save(model, tmp_path / "both")
    config = json.loads((tmp_path / "both/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["rank_pattern"] == {"q_proj": 2, "v_proj": 2}
    assert config["alpha_pattern"] == {"q_proj": 6, "v_proj": 6}
    other, _ = with_both()
    load(other, tmp_path / "both")
    assert torch.equal(logits(other.eval()), expected)
    merged = example()
    merge(merged, tmp_path / "both")
    assert apart(logits(merged), expected) < 0.005
    theirs = peft.PeftModel.from_pretrained(example(), tmp_path / "both")
    assert apart(logits(theirs), logits(merged)) < 1e-5


def test_ranks_of_their_own(tmp_path: Path) -> None:
    """PEFT's patterns, of which one would find experts, too: each module keeps its rank."""
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], r=2, lora_alpha=6,
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 8, ".*v_proj": 3},
        alpha_pattern={"v_proj|gate_proj": 5},
    )  # fmt: skip
    adapted = [peft.get_peft_model(example(), copy.deepcopy(config)) for _ in range(2)]
    prepared = [prepare(model, rank=4, alpha=8) for model in adapted]
    train_both(adapted[0], prepared[0])
    save(adapted[0], tmp_path)
    load(adapted[1], tmp_path)
    expected = logits(adapted[0].eval())
    assert torch.equal(logits(adapted[1].eval()), expected)
    merged = example()
    merge(merged, tmp_path)
    assert apart(logits(merged), expected) < 0.005
    theirs = peft.PeftModel.from_pretrained(example(), tmp_path)
    assert apart(logits(theirs), logits(merged)) < 1e-5


def test_peft_in_all_linear_layers(tmp_path: Path) -> None:
    """Its config names experts, too; where they are packed already it finds none."""
    model = example()
    prepared = prepare(model, rank=4, alpha=8)
    config = peft.LoraConfig(target_modules="all-linear", r=2, lora_alpha=6)
    model = peft.get_peft_model(model, config)
    prepared.requires_grad_()
    train_both(model, prepared)
    save(model, tmp_path)
    merged = example()
    merge(merged, tmp_path)
    theirs = peft.PeftModel.from_pretrained(example(), tmp_path)
    expected = logits(model.eval())
    assert apart(logits(theirs), expected) < 0.005
    assert apart(logits(merged), expected) < 0.005
    with pytest.raises(UsageError, match="have an adapter, which packed experts would leave out"):
        prepare(peft.get_peft_model(example(), config), rank=4)


def test_shared_experts_have_the_names_of_routed_ones(tmp_path: Path) -> None:
    """Rank and alpha of either are its own."""
    model = build(SAVED["qwen2_moe"]).float().eval()
    merged, fresh = copy.deepcopy(model), copy.deepcopy(model)
    config = peft.LoraConfig(target_modules="all-linear", r=2, lora_alpha=6)
    adapted = []
    for one in (model, fresh):
        prepared = prepare(one, rank=4, alpha=8)
        adapted.append(peft.get_peft_model(one, copy.deepcopy(config)))
        train_both(adapted[-1], prepared)
    save(adapted[0], tmp_path)
    assert any("shared_expert.gate_proj" in name for name in load_file(tmp_path / WEIGHTS))
    for one in adapted[1].parameters():
        with torch.no_grad():
            one.mul_(1 + int(one.requires_grad))
    load(adapted[1], tmp_path)
    expected = logits(adapted[0].eval())
    assert torch.equal(logits(adapted[1].eval()), expected)
    merge(merged, tmp_path)
    assert apart(logits(merged), expected) < 0.01


def test_an_adapter_of_experts_in_peft(tmp_path: Path) -> None:
    """Which has none of PEFT's own."""
    model = example()
    train_a_little(prepare(model, rank=4, alpha=8, dtype=torch.bfloat16))
    save(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(example(), tmp_path)
    assert apart(logits(theirs), logits(model)) < 0.005
    assert apart(logits(theirs.merge_and_unload()), logits(model)) < 0.005


def test_what_peft_saves_itself(tmp_path: Path) -> None:
    """Has LoRA of the experts beside what it has without them."""
    model, _ = with_both()
    model.save_pretrained(tmp_path / "with")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_alpha=6)
    torch.manual_seed(3)
    peft.get_peft_model(example(), config).save_pretrained(str(tmp_path / "without"))
    one, other = (load_file(tmp_path / name / WEIGHTS) for name in ("with", "without"))
    assert {name for name in one if ".experts." not in name} == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_adapters_that_do_not_fit_peft(tmp_path: Path) -> None:
    model, prepared = with_both()
    train_both(model, prepared)
    save(model, tmp_path / "both")
    alone = example()
    prepare(alone, rank=4, alpha=8)
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj\.lora_A.*model has no LoRA"):
        load(alone, tmp_path / "both")
    save(alone, tmp_path / "alone")
    with pytest.raises(CheckpointError, match=r"does not contain .*q_proj\.lora_A"):
        load(model, tmp_path / "alone")
    stored = load_file(tmp_path / "both/adapter_model.safetensors")
    name = min(one for one in stored if "q_proj.lora_A" in one)
    stored[name] = torch.ones(3, 128)
    save_file(stored, tmp_path / "both/adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.lora_A.* is \[3, 128\], but .* \[2, 128\]"):
        load(model, tmp_path / "both")
    model.add_adapter("more", peft.LoraConfig(target_modules=["k_proj"], r=2))
    with pytest.raises(UsageError, match="the adapters default, more, and a directory holds one"):
        save(model, tmp_path / "two")


def test_another_kind_of_adapter(tmp_path: Path) -> None:
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    model = peft.get_peft_model(example(), config)
    prepare(model, rank=4)
    with pytest.raises(UsageError, match="an adapter of type IA3"):
        save(model, tmp_path / "ia3")


# ---- Trainer -----------------------------------------------------------------------------


def texts(count: int = 6) -> list[dict[str, list[int]]]:
    numbers = torch.randint(5, 60, (count, 12), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in numbers]


def trained(
    output: Path,
    adapted: bool,
    resume: Path | None = None,
    saver: SaveAdapter | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """By transformers' Trainer, unchanged; the model and the losses of its steps."""
    from transformers import Trainer, TrainingArguments

    if adapted:
        model, _ = with_both()
    else:
        model = example()
        torch.manual_seed(3)
        prepare(model, rank=4, alpha=8, dropout=0.1)
    arguments = TrainingArguments(
        str(output), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, save_steps=2,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=texts(), callbacks=[saver or SaveAdapter()]
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return model.eval(), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("adapted", [False, True])
def test_trainer(adapted: bool, tmp_path: Path) -> None:
    """It trains, saves checkpoints, and goes on from them with the same numbers."""
    model, losses = trained(tmp_path, adapted)
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoint-2/adapter_model.safetensors").exists()
    resumed, _ = trained(tmp_path, adapted, tmp_path / "checkpoint-2")
    assert torch.equal(logits(resumed), logits(model))
    moved = (tmp_path / "checkpoint-2").rename(tmp_path / "moved")
    resumed, _ = trained(tmp_path / "other", adapted, moved, SaveAdapter(resume_from=moved))
    assert torch.equal(logits(resumed), logits(model))
    if not adapted:
        again, _ = trained(tmp_path / "again", adapted, gradient_checkpointing=True)
        assert torch.equal(logits(again), logits(model))


def test_accelerate() -> None:
    """A loop of one's own, with gradients of two batches added up."""
    accelerate = pytest.importorskip("accelerate")
    model = example()
    prepared = prepare(model, rank=4)
    optimizer = torch.optim.AdamW(prepared.parameters(), 1e-2)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    losses = []
    for _ in range(6):
        with accelerator.accumulate(model):
            loss = model(input_ids=IDS, labels=IDS).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[0] == losses[1]
    assert losses[-1] < losses[0]
