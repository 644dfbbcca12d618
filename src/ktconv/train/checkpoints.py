"""Adapters in the checkpoints of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ktconv.train.adapters import load, save


class SaveAdapter(TrainerCallback):
    """Saves LoRA of the experts into each checkpoint of a Trainer, as `save` does, and reads it
    again where training is resumed.

        Trainer(model=model, callbacks=[SaveAdapter()], ...)

    Of a model that PEFT has wrapped, Trainer saves PEFT's own adapter alone.
    """

    def __init__(self, resume_from: str | Path | None = None) -> None:
        """`resume_from`: the checkpoint that training goes on from, where that is not in the
        Trainer's own output directory."""
        super().__init__()
        self._resume_from = None if resume_from is None else Path(resume_from)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves the adapter beside what the Trainer saves."""
        if state.is_world_process_zero:
            save(kwargs["model"], _folder(args, state))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Loads the adapter where training goes on from a checkpoint."""
        if state.global_step:
            load(kwargs["model"], self._resume_from or _folder(args, state))


def _folder(args: Any, state: Any) -> Path:
    """Where the Trainer puts a checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
