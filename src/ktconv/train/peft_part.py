"""The part of a model that PEFT has put into it, besides the experts. PEFT is imported where a
model has some."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ktconv.errors import CheckpointError, UsageError
from ktconv.source.adapter.names import PREFIX
from ktconv.source.adapter.parameters import LAYOUT, LAYOUTS

# What PEFT and engines want to know of an adapter of experts alone.
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none",
    "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "rank_pattern": {},
    "alpha_pattern": {}, "modules_to_save": None,
}  # fmt: skip


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors by the names that PEFT saves them under; none where it has put nothing into the
    model."""
    adapted = _adapted(model)
    if adapted is None:
        return {}
    from peft import get_peft_model_state_dict

    # Else PEFT asks the hub whether the vocabulary has grown.
    found = get_peft_model_state_dict(
        adapted, adapter_name=_name(adapted), save_embedding_layers=False
    )
    return {PREFIX + name.removeprefix(PREFIX): one for name, one in found.items()}


def config(
    model: nn.Module,
    rank: int,
    alpha: float,
    dropout: float,
    words: Collection[str],
    ranks: Mapping[str, int],
) -> dict[str, Any]:
    """adapter_config.json: rank and alpha of the experts' LoRA on modules called `words`, or of
    parameters with ranks of their own, and what PEFT has in other modules. Where these have another
    rank or alpha, patterns say so."""
    found = _of_modules(model, rank, alpha, dropout, words)
    if not ranks:
        return found
    other = {name: one for name, one in ranks.items() if one != rank}
    patterns = {
        "rank_pattern": {re.escape(name): one for name, one in other.items()},
        "alpha_pattern": {re.escape(name): alpha * one / rank for name, one in other.items()},
    }
    targets = {*(found.get("target_parameters") or ()), *map(_in_layer, ranks)}
    found |= {key: one | found[key] for key, one in patterns.items()}
    found |= {"target_parameters": sorted(targets), "lora_dropout": 0.0}  # PEFT's has none there
    if "unsloth" in json.dumps(found).lower():
        found[LAYOUT] = LAYOUTS[0]
    return found


def _in_layer(name: str) -> str:
    """The name of a parameter from its layer on: mlp.experts.gate_up_proj."""
    return re.split(r"\.[0-9]+\.", name)[-1]


def _of_modules(
    model: nn.Module, rank: int, alpha: float, dropout: float, words: Collection[str]
) -> dict[str, Any]:
    """`config` without adapters of parameters with experts."""
    own: dict[str, Any] = {
        "base_model_name_or_path": _path_of(model),
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": dropout,
    }
    adapted = _adapted(model)
    if adapted is None:
        return {**_PLAIN, **own, "target_modules": sorted(words)}
    theirs = adapted.peft_config[_name(adapted)]
    found: dict[str, Any] = {key: _plain(one) for key, one in theirs.to_dict().items()}
    modules = sorted({name.rpartition(".lora_")[0] for name in tensors(model)} - {""})
    targets = {_last(name) for name in modules}
    own["target_modules"] = sorted(targets | set(words))
    own["inference_mode"] = True
    if found.get("use_rslora") or found["rank_pattern"] or found["alpha_pattern"]:
        return {**found, **own, **_by_module(adapted, modules)}
    patterns = _patterns(modules, words, found.get("target_parameters") or ())
    for key, ours, pattern in (("r", rank, "rank_pattern"), ("lora_alpha", alpha, "alpha_pattern")):
        own[pattern] = dict.fromkeys(patterns, found[key]) if found[key] != ours else {}
    return {**found, **own}


def _by_module(adapted: Any, modules: Iterable[str]) -> dict[str, Any]:
    """Rank and alpha of each module by its name: PEFT's own patterns might find experts, too. Alpha
    is divided by the rank, not by its root as use_rslora has it, since that setting is of the whole
    file, and PEFT has it wrong in experts, whose gate and up it fuses."""
    ranks, alphas = {}, {}
    layers: dict[str, Any] = {
        path.removeprefix(PREFIX): one for path, one in adapted.named_modules()
    }
    for name in modules:
        layer = layers[name.removeprefix(PREFIX)]
        key = re.escape(name.removeprefix(PREFIX))
        if parameter := getattr(layer, "parameter_name", None):
            key += rf"(\.{parameter})?"  # PEFT matches this name, others that of the module
        ranks[key] = layer.r[_name(adapted)]
        alphas[key] = layer.scaling[_name(adapted)] * ranks[key]
    return {"use_rslora": False, "rank_pattern": ranks, "alpha_pattern": alphas}


def check(model: nn.Module, directory: Path, stored: Mapping[str, Tensor]) -> None:
    """CheckpointError unless these are the tensors that PEFT has in the model."""
    own = tensors(model)
    if stored and not own:
        raise CheckpointError(
            f"{directory} has {min(stored)}, where the model has no LoRA",
            "put it there with PEFT's get_peft_model, before or after ktconv.train.prepare",
        )
    for name in sorted(own.keys() ^ stored.keys()):
        raise CheckpointError(
            f"{directory} does not contain {name}"
            if name in own
            else f"{directory} contains {name}, which the model does not have",
            "give the adapter of this model, with the targets that PEFT was given",
        )
    for name, one in own.items():
        if one.shape != stored[name].shape:
            raise CheckpointError(
                f"{name} in {directory} is {list(stored[name].shape)}, but the model has "
                f"{list(one.shape)}",
                "give PEFT the rank that the adapter has",
            )


def names(model: nn.Module) -> list[str]:
    """Names of the adapters that PEFT has put into the model."""
    adapted = _adapted(model)
    return [] if adapted is None else list(adapted.peft_config)


def check_kind(model: nn.Module) -> None:
    """UsageError where PEFT has something in the model that `save` cannot save next to LoRA of
    the experts."""
    adapted = _adapted(model)
    if adapted is not None:
        _name(adapted)


def put(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Into the model, which `check` has approved."""
    adapted = _adapted(model)
    if adapted is None:
        return
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(adapted, dict(stored), adapter_name=_name(adapted))


def _adapted(model: nn.Module) -> Any:
    """The outermost module that PEFT knows; None where there is none."""
    found = (one for one in model.modules() if isinstance(getattr(one, "peft_config", None), dict))
    return next(found, None)


def _name(adapted: Any) -> str:
    """Name of the adapter. UsageError where there are several, or one that is no LoRA."""
    names = list(adapted.peft_config)
    if len(names) != 1:
        raise UsageError(
            f"the model has the adapters {', '.join(names)}, and a directory holds one",
            "delete all others with delete_adapter",
        )
    kind = adapted.peft_config[names[0]].peft_type
    if _plain(kind) != "LORA":
        raise UsageError(
            f"PEFT has an adapter of type {_plain(kind)} in the model, which cannot be in one "
            "directory with LoRA of experts",
            "give PEFT a LoraConfig",
        )
    name: str = names[0]
    return name


def _path_of(model: nn.Module) -> str | None:
    """Path that the model was loaded from, as transformers recorded it."""
    paths: Iterable[Any] = (getattr(one, "name_or_path", None) for one in model.modules())
    return next((path for path in paths if isinstance(path, str) and path), None)


def _last(module: str, count: int = 1) -> str:
    return ".".join(module.split(".")[-count:])


def _patterns(
    modules: Iterable[str], words: Collection[str], parameters: Iterable[str]
) -> list[str]:
    """Patterns that find these modules and no expert: names that experts have, too, with that
    before them; of routers, whose parameters PEFT adapts, those."""
    found = {_last(name) if _last(name) not in words else _last(name, 2) for name in modules}
    found |= {name for name in parameters if _last(name.rpartition(".")[0]) in found}
    return sorted(map(re.escape, found))


def _plain(value: Any) -> Any:
    """Sets and enumerations as JSON has them."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, torch.dtype):
        return str(value)
    return getattr(value, "value", value)
