"""Adapters in the checkpoints of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ktconv.train.adapters import load, save


class SaveAdapter(TrainerCallback):
    """Saves LoRA of the experts into each checkpoint of a Trainer whose model has no
    `save_pretrained`, which would do that; and reads it again where training is resumed.

        Trainer(model=model, callbacks=[SaveAdapter()], ...)

    Models of transformers and PEFT need it only to be told that a checkpoint they resume from lacks
    LoRA of the experts: it is an error with this callback, else a warning.
    """

    def __init__(self, resume_from: str | Path | None = None) -> None:
        """`resume_from`: the checkpoint that training goes on from, where that is not in the
        Trainer's own output directory."""
        super().__init__()
        self._resume_from = None if resume_from is None else Path(resume_from)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves the adapter next to what the Trainer saves."""
        model = kwargs["model"]
        if state.is_world_process_zero and not hasattr(model, "save_pretrained"):
            save(model, _folder(args, state))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Loads the adapter where training goes on from a checkpoint."""
        if state.global_step:
            load(kwargs["model"], self._resume_from or _folder(args, state))


def _folder(args: Any, state: Any) -> Path:
    """Folder of the Trainer for a checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
