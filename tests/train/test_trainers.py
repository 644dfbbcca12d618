"""Experts in what trainers save and load: transformers' Trainer, with and without PEFT, in one
process and in two, and TRL's."""

from __future__ import annotations

import copy
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.forked import forked_together
from helpers.paths import EXAMPLE

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

import peft
import torch
from helpers.adapted import IDS, apart, example, logits, train_a_little
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

import ktconv
from ktconv.errors import CheckpointError, UsageError
from ktconv.model import load_model
from ktconv.train import SaveAdapter, load, merge, prepare, save

BEST = 2  # of 4 steps
WEIGHTS = "adapter_model.safetensors"
CONFIG: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "r": 2, "lora_alpha": 6}

pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys"),
    pytest.mark.slow,
    pytest.mark.torch,
]


def prepared_model(kind: str) -> tuple[Any, Any]:
    """With LoRA of PEFT in attention ("before" or "after" that in experts, "added" by
    transformers' add_adapter), or "without"."""
    model = example()
    torch.manual_seed(3)
    if kind == "before":
        model = peft.get_peft_model(model, peft.LoraConfig(**CONFIG))
    if kind == "added":
        try:
            model.add_adapter(peft.LoraConfig(**CONFIG))
        except ValueError as error:
            assert "version of PEFT" in str(error)  # transformers 5.24 wants one to come
            pytest.skip(str(error))
    prepared = prepare(model, rank=4, alpha=8)
    if kind == "after":
        model = peft.get_peft_model(model, peft.LoraConfig(**CONFIG))
        prepared.requires_grad_()
    return model, prepared


def texts(seed: int, count: int = 6) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(5, 60, (count, 12), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in numbers]


class Seen(TrainerCallback):
    """What the model answers when each checkpoint is written; the second is called the best."""

    def __init__(self) -> None:
        self.logits: dict[int, torch.Tensor] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        before = model.training
        self.logits[state.global_step] = logits(model.eval())
        model.train(before)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["metrics"]["eval_loss"] = float((state.global_step - BEST) ** 2)


def trainer_of(model: Any, output: Path, callbacks: list[Any], **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(output), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2,
        eval_strategy="steps", eval_steps=1, save_steps=1, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant", **options,
    )  # fmt: skip
    return Trainer(
        model=model, args=arguments, train_dataset=texts(1), eval_dataset=texts(2, 2),
        callbacks=callbacks,
    )  # fmt: skip


@pytest.mark.parametrize("saver", [True, False])
@pytest.mark.parametrize("kind", ["before", "after", "without"])
def test_the_best_model_is_loaded_at_the_end(kind: str, saver: bool, tmp_path: Path) -> None:
    """All of it, and it is not the last."""
    model, _ = prepared_model(kind)
    seen = Seen()
    callbacks = [seen, SaveAdapter()] if saver else [seen]
    trainer = trainer_of(model, tmp_path, callbacks, load_best_model_at_end=True)
    trainer.train()
    assert str(trainer.state.best_model_checkpoint).endswith(f"-{BEST}")
    assert not torch.equal(seen.logits[BEST], seen.logits[4])
    assert torch.equal(logits(model.eval()), seen.logits[BEST])


@pytest.mark.parametrize("kind", ["before", "after", "added", "without"])
def test_save_model(kind: str, tmp_path: Path) -> None:
    """What is usually the last line of a training has experts."""
    model, prepared = prepared_model(kind)
    train_a_little(prepared)
    trainer_of(model, tmp_path / "runs", []).save_model(str(tmp_path / "end"))
    stored = load_file(tmp_path / "end" / WEIGHTS)
    assert sum(".experts." in name for name in stored) == 2 * 8 * 3 * 2
    assert sum("self_attn" in name for name in stored) == (0 if kind == "without" else 2 * 2 * 2)
    other, _ = prepared_model(kind)
    load(other, tmp_path / "end")
    assert torch.equal(logits(other.eval()), logits(model.eval()))


def test_the_state_of_a_model_without_peft(tmp_path: Path) -> None:
    """Has LoRA of the experts in it, beside the adapter."""
    model, prepared = prepared_model("without")
    train_a_little(prepared)
    model.save_pretrained(tmp_path)
    other, _ = prepared_model("without")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("kind", ["before", "after"])
def test_training_is_resumed_without_a_callback(kind: str, tmp_path: Path) -> None:
    """With the numbers of a run that was not interrupted, also from another directory."""
    model, _ = prepared_model(kind)
    trainer_of(model, tmp_path / "one", []).train()
    moved = (tmp_path / "one/checkpoint-2").rename(tmp_path / "moved")
    resumed, _ = prepared_model(kind)
    trainer_of(resumed, tmp_path / "two", []).train(resume_from_checkpoint=str(moved))
    assert torch.equal(logits(resumed.eval()), logits(model.eval()))


def test_a_checkpoint_without_experts(tmp_path: Path) -> None:
    """Is said: a warning of PEFT's method, an error of the callback."""
    alone = peft.get_peft_model(example(), peft.LoraConfig(**CONFIG))
    alone.save_pretrained(str(tmp_path / "checkpoint-1"))
    assert not any(".experts." in name for name in load_file(tmp_path / "checkpoint-1" / WEIGHTS))
    model, prepared = prepared_model("before")
    train_a_little(prepared)
    before = [one.detach().clone() for one in prepared.parameters()]
    with pytest.warns(UserWarning, match="has no LoRA of the experts: that of the model stays"):
        model.load_adapter(str(tmp_path / "checkpoint-1"), "default")
    assert all(map(torch.equal, before, prepared.parameters()))
    callback, state = SaveAdapter(tmp_path / "checkpoint-1"), type("S", (), {"global_step": 1})
    with pytest.raises(CheckpointError, match="has LoRA of no experts in layer 0"):
        callback.on_train_begin(None, state, None, model=model)


def test_what_cannot_be_saved_in_one_directory(tmp_path: Path) -> None:
    model, prepared = prepared_model("before")
    train_a_little(prepared)
    with pytest.raises(UsageError, match="would upload the model before LoRA of its experts"):
        model.save_pretrained(str(tmp_path / "hub"), push_to_hub=True)
    model.save_pretrained(str(tmp_path / "one"))
    with pytest.raises(UsageError, match=r"which the model has once, and it is that of default"):
        model.load_adapter(str(tmp_path / "one"), "second")
    model.add_adapter("more", peft.LoraConfig(**CONFIG))
    with pytest.raises(UsageError, match="the adapters default, more, and a directory holds one"):
        model.save_pretrained(str(tmp_path / "two"))
    assert not (tmp_path / "hub").exists() and not (tmp_path / "two").exists()


def test_other_models_are_saved_as_before(tmp_path: Path) -> None:
    """Those without LoRA in experts, and those of processes that are not the first."""
    prepared_model("before")
    plain = example()
    plain.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain/adapter_config.json").exists()
    model = prepared_model("before")[0]
    model.save_pretrained(str(tmp_path / "second"), is_main_process=False)
    assert not (tmp_path / "second" / WEIGHTS).exists()
    copied = copy.deepcopy(model)
    train_a_little(type("P", (), {"parameters": lambda: _lora(copied)}))  # type: ignore[arg-type]
    copied.save_pretrained(str(tmp_path / "copied"))
    load(model, tmp_path / "copied")
    assert torch.equal(logits(model.eval()), logits(copied.eval()))


def _lora(model: Any) -> list[Any]:
    return [one for name, one in model.named_parameters() if ".experts.lora." in name]


def test_rank_stabilized_lora_beside_experts(tmp_path: Path) -> None:
    """Its setting is of the whole file, and PEFT has it wrong in experts: alphas say the same."""
    model = example()
    config = peft.LoraConfig(
        **CONFIG,
        use_rslora=True,
        alpha_pattern={"v_proj": 3},
        target_parameters=["mlp.gate.weight"],
    )
    model = peft.get_peft_model(model, config)
    train_a_little(prepare(model, rank=4, alpha=8))
    for name, one in model.named_parameters():
        if "lora_B" in name:
            one.data.normal_(0, 0.1)
    save(model, tmp_path)
    other = peft.get_peft_model(example(), copy.deepcopy(config))
    prepare(other, rank=4, alpha=8)
    load(other, tmp_path)
    expected = logits(model.eval())
    assert torch.equal(logits(other.eval()), expected)
    merged = example()
    merge(merged, tmp_path)
    assert apart(logits(merged), expected) < 0.005
    theirs = peft.PeftModel.from_pretrained(example(), tmp_path)
    assert apart(logits(theirs), logits(merged)) < 1e-5


# ---- several processes -------------------------------------------------------------------


def rank_of_two(rank: int, port: str, kind: str, out: Path) -> None:
    """Train as one of two processes, and save the best model and the process's own answers."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in places.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    model, _ = prepared_model(kind)
    seen = Seen()
    trainer = trainer_of(
        model, out / "runs", [seen], load_best_model_at_end=True, ddp_backend="gloo",
        ddp_find_unused_parameters=False, ddp_timeout=120,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(out / "end"))
    answers = {"end": logits(model.eval()), "best": seen.logits[BEST], "last": seen.logits[4]}
    torch.save(answers, out / f"rank{rank}.pt")
    assert str(trainer.state.best_model_checkpoint).endswith(f"-{BEST}")
    assert torch.distributed.get_world_size() == 2


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.parametrize("kind", ["before", "without"])
def test_two_processes(kind: str, tmp_path: Path) -> None:
    """DistributedDataParallel on CPUs: both end with the best model, and one directory has it."""
    port = free_port()
    ranks = [partial(rank_of_two, rank, port, kind, tmp_path) for rank in range(2)]
    assert forked_together(ranks) == [0, 0]
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert torch.equal(found[0]["end"], found[0]["best"])
    assert not torch.equal(found[0]["end"], found[0]["last"])
    assert torch.equal(found[0]["end"], found[1]["end"])
    other, _ = prepared_model(kind)
    load(other, tmp_path / "end")
    assert torch.allclose(logits(other.eval()), found[0]["end"], atol=1e-4)


# ---- TRL ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["before", "by the trainer", "without"])
def test_trl(kind: str, tmp_path: Path) -> None:
    """SFTTrainer, which may put LoRA of PEFT into the model itself."""
    trl = pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")
    datasets = pytest.importorskip("datasets")
    model, prepared = prepared_model("without" if kind == "by the trainer" else kind)
    seen = Seen()
    arguments = trl.SFTConfig(
        str(tmp_path / "runs"), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2,
        eval_strategy="steps", eval_steps=1, save_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, lr_scheduler_type="constant", load_best_model_at_end=True, bf16=False,
        gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True},
        metric_for_best_model="loss",
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_list(texts(1)),
        eval_dataset=datasets.Dataset.from_list(texts(2, 2)), callbacks=[seen],
        processing_class=load_model(EXAMPLE, "float32")[1],
        peft_config=peft.LoraConfig(**CONFIG) if kind == "by the trainer" else None,
    )  # fmt: skip
    if kind == "by the trainer":
        with pytest.raises(UsageError, match="PEFT's get_peft_model freezes"):
            trainer.model.train()(input_ids=IDS)
        prepared.requires_grad_()
    trainer.train()
    assert str(trainer.state.best_model_checkpoint).endswith(f"-{BEST}")
    assert torch.equal(logits(trainer.model.eval()), seen.logits[BEST])
    assert not torch.equal(seen.logits[BEST], seen.logits[4])
    trainer.save_model(str(tmp_path / "end"))
    other, _ = prepared_model(kind.replace("by the trainer", "after"))
    load(other, tmp_path / "end")
    assert torch.equal(logits(other.eval()), seen.logits[BEST])
    expect_converted(tmp_path / "end", seen.logits[BEST], tmp_path / "converted")


def expect_converted(adapter: Path, trained: Any, output: Path) -> None:
    """The model with the adapter in its weights, rounded to bf16, says the same."""
    ktconv.quantize_cpu(EXAMPLE, output, adapter=adapter, method="bf16")
    model, _ = load_model(output, "float32")
    assert apart(logits(model), trained) < 0.02
    assert apart(logits(example()), trained) > 0.03


@pytest.mark.parametrize("kind", ["before", "without"])
def test_what_a_trainer_saves_is_converted(kind: str, tmp_path: Path) -> None:
    model, _ = prepared_model(kind)
    trainer = trainer_of(model, tmp_path / "runs", [])
    trainer.train()
    trainer.save_model(str(tmp_path / "end"))
    assert trainer.model is not None
    expect_converted(tmp_path / "end", logits(trainer.model.eval()), tmp_path / "converted")
