"""`save_pretrained` and `load_adapter` of PEFT and transformers, with LoRA of the experts.

PEFT saves and loads what is its own, and LoRA of packed experts is not. Trainer's checkpoints, its
`save_model`, `load_best_model_at_end` and `resume_from_checkpoint`, and the trainers of TRL all go
through these methods, so that without them experts would be lost, or stay at another step than the
rest of the model, without a word.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn

from ktconv.errors import UsageError
from ktconv.train import peft_part
from ktconv.train.adapters import load_experts, opened, save, trains_experts

_DONE = "_with_ktconv_experts"  # what a method has that saves or loads them


def include_experts() -> None:
    """Let `save_pretrained` of PEFT's and transformers' models, and `load_adapter` of PEFT's, from
    now on save and load LoRA of the experts of models that `prepare` has given some. Other models
    are saved and loaded as before."""
    for module, kind, name, including in _METHODS:
        found = getattr(sys.modules.get(module), kind, None)
        if found is not None and not hasattr(own := getattr(found, name), _DONE):
            method = wraps(own)(including(own))
            setattr(method, _DONE, True)
            setattr(found, name, method)


def _saving(own: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained`: afterwards the directory has what `ktconv.train.save` writes."""
    signature = inspect.signature(own)

    def save_pretrained(model: nn.Module, *given: Any, **named: Any) -> Any:
        if not trains_experts(model):
            return own(model, *given, **named)
        options = _arguments(signature, model, given, named)
        if options.get("push_to_hub"):
            raise UsageError(
                "save_pretrained with push_to_hub would upload the model before LoRA of its "
                "experts is in the directory",
                "save it first, and upload the directory with huggingface_hub's upload_folder",
            )
        peft_part.check_kind(model)
        found = own(model, *given, **named)
        if options.get("is_main_process", True):
            save(model, options["save_directory"])
        return found

    return save_pretrained


def _loading(own: Callable[..., Any]) -> Callable[..., Any]:
    """`load_adapter`: the experts get what the directory has for them."""
    signature = inspect.signature(own)

    def load_adapter(model: nn.Module, *given: Any, **named: Any) -> Any:
        if not trains_experts(model):
            return own(model, *given, **named)
        options = _arguments(signature, model, given, named)
        there = _has_experts(model, options["model_id"])
        others = {*peft_part.names(model)} - {options["adapter_name"]}
        if there and others:
            raise UsageError(
                f"{options['model_id']} has LoRA of the experts, which the model has once, and it "
                f"is that of {', '.join(sorted(others))}",
                "delete all other adapters with delete_adapter, and load it with ktconv.train.load",
            )
        found = own(model, *given, **named)
        if there:
            load_experts(model, options["model_id"])
        return found

    return load_adapter


def _has_experts(model: nn.Module, directory: Any) -> bool:
    """Whether an adapter has LoRA of experts; a warning where it has none or cannot be asked."""
    there = Path(directory).is_dir()
    if there and opened(model, directory, None).projections:
        return True
    reason = "has no LoRA of the experts" if there else "is not a directory"
    warnings.warn(
        f"{directory} {reason}: that of the model stays as it is (ktconv.train.load reads one)",
        stacklevel=3,
    )
    return False


def _arguments(
    signature: inspect.Signature, model: nn.Module, given: Any, named: Any
) -> dict[str, Any]:
    """Arguments by name, those with names of their own and those without."""
    bound = signature.bind(model, *given, **named).arguments
    return {**bound, **bound.get("kwargs", {})}


Including = Callable[[Callable[..., Any]], Callable[..., Any]]
_METHODS: tuple[tuple[str, str, str, Including], ...] = (
    ("peft", "PeftModel", "save_pretrained", _saving),
    ("peft", "PeftModel", "load_adapter", _loading),
    ("transformers", "PreTrainedModel", "save_pretrained", _saving),
)
