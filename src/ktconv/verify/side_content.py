"""Differences between two versions of a side file that affect a model.

Tools that save a model or tokenizer again rewrite its files, with other spellings and explicit
defaults in config.json. These count as equal, as do layout and information about the tool; every
other difference counts, unless it is known to be harmless.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isnan
from pathlib import Path
from typing import Any

from ktconv.families import table
from ktconv.source.config import CONFIG_NAME

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# Information about the tool that wrote the file, and settings for training.
_NO_EFFECT = frozenset((
    "transformers_version", "_name_or_path", "_commit_hash", "use_cache", "initializer_range",
    "attention_dropout", "router_aux_loss_coef", "router_jitter_noise", "output_router_logits",
    "aux_loss_alpha", "seq_aux", "return_dict", "output_attentions", "output_hidden_states",
    "torchscript", "problem_type",
))  # fmt: skip
# Values that have the same effect as a missing key.
_DEFAULTS: Mapping[str, Any] = {
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "rope_scaling": None,
    "head_dim": None, "quantization_config": None, "attention_bias": False, "pretraining_tp": 1,
    "ep_size": 1, "mlp_only_layers": [], "qkv_bias": True, "rope_interleave": True,
}  # fmt: skip
_ROPE = ("rope_theta", "partial_rotary_factor")  # in rope_parameters, or next to rope_scaling
_FULL = "full_attention"
_NO_SECTIONS = (*QUANTIZATION_KEYS, "rope_scaling", "rope_parameters")  # of a model
_FLOAT, _FLOATS = "__float__", ("Infinity", "-Infinity", "NaN")
_SHOWN = 60  # characters of a value
_NOTHING = object()


def config_differences(
    here: Mapping[str, Any], there: Mapping[str, Any], other: str = "in the source"
) -> list[str]:
    """ "num_experts_per_tok is 3, but 2 in the source" for every key that matters; sections are
    compared key by key."""
    try:
        a, b = (flat(_canonical(_with_floats(config))) for config in (here, there))
    except RecursionError:
        return ["sections are nested too deeply to be compared"]
    return differences(a, b, other)


def differences(here: Mapping[str, Any], there: Mapping[str, Any], other: str) -> list[str]:
    """Such a sentence for every key whose values or types differ."""
    found = []
    for key in sorted(here.keys() | there.keys()):
        one, two = here.get(key, _NOTHING), there.get(key, _NOTHING)
        if not _same(one, two):
            found.append(f"{key} is {shown(one)}, but {shown(two)} {other}")
    return found


def shown(value: object) -> str:
    """A JSON value, cut if it is long."""
    text = "not given" if value is _NOTHING else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def flat(section: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Values of nested sections by their paths: "weights.num_bits"."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = value
    return found


def _same(one: Any, two: Any) -> bool:
    """1 is 1.0, but not true; NaN, which JSON of Python may have, is NaN."""
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, float) and isinstance(two, float) and isnan(one):
        return isnan(two)
    return isinstance(one, bool) == isinstance(two, bool) and bool(one == two)


def _canonical(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section in one spelling, without keys that have no effect."""
    kept = {
        key: _canonical(value) if isinstance(value, dict) and key not in _NO_SECTIONS else value
        for key, value in section.items()
        if key not in _NO_EFFECT and not _is_default(section, key, value)
    }
    _spell_dtype(kept)
    _spell_rope(kept)
    _spell_experts(kept)
    return kept


def _is_default(section: Mapping[str, Any], key: str, value: Any) -> bool:
    """Whether a missing key has the same effect."""
    if key in _DEFAULTS and _same(value, _DEFAULTS[key]):
        return not (key == "attention_bias" and section.get("model_type") == "gpt_oss")
    sliding = section.get("use_sliding_window") is not False and section.get("sliding_window")
    if key in ("sliding_window", "max_window_layers"):
        return section.get("use_sliding_window") is False
    if key == "layer_types":
        return not sliding and isinstance(value, list) and set(map(str, value)) == {_FULL}
    rope, other = section.get("qk_rope_head_dim"), section.get("qk_nope_head_dim")
    if type(rope) is not int or type(other) is not int:
        return False
    return (key, value) in (("qk_head_dim", rope + other), ("head_dim", rope))


def _with_floats(value: Any) -> Any:
    """A value with floats for what transformers 5 writes in place of those that JSON has not."""
    if isinstance(value, list):
        return list(map(_with_floats, value))
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {_FLOAT} and value[_FLOAT] in _FLOATS:
        return float(value[_FLOAT])
    return {key: _with_floats(one) for key, one in value.items()}


def _spell_dtype(kept: dict[str, Any]) -> None:
    old, new = kept.get("torch_dtype", _NOTHING), kept.get("dtype", _NOTHING)
    if old is not _NOTHING and new in (_NOTHING, old):
        kept["dtype"] = kept.pop("torch_dtype")
    if isinstance(kept.get("dtype"), str):
        kept["dtype"] = kept["dtype"].removeprefix("torch.")


def _spell_rope(kept: dict[str, Any]) -> None:
    """rope_theta and rope_scaling of older files are rope_parameters of newer ones."""
    scaling, parameters = kept.get("rope_scaling", {}), kept.get("rope_parameters", {})
    if not isinstance(scaling, dict) or not isinstance(parameters, dict):
        return
    rope = {key: kept.pop(key) for key in _ROPE if key in kept}
    for found in (scaling, parameters):
        for key, value in found.items():
            name = "rope_type" if key == "type" else key
            if not _same(rope.setdefault(name, value), value):
                rope[f"other {name}"] = value  # contradicts the first
    if rope.get("rope_type") == "default":
        del rope["rope_type"]
    kept.pop("rope_scaling", None)
    kept.pop("rope_parameters", None)
    if rope:
        kept["rope_parameters"] = rope


def _spell_experts(kept: dict[str, Any]) -> None:
    present = [key for key in table.FAMILIES.keys("experts") if key in kept]
    if len(present) == 1:
        kept["num_experts"] = kept.pop(present[0])


# ---- any side file ----------------------------------------------------------------------

# Written anew in another form whenever a tokenizer is saved: differences do not matter.
_REWRITTEN = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_DECIDING = (".py", ".jinja", ".txt", ".model", ".tiktoken")
_UNUSED = {
    "generation_config.json": ("transformers_version", "_from_model_config"),
    "tokenizer.json": ("version", "padding", "truncation"),
    "vocab.json": (),
}
_REGEX = ("use_regex", True)


def content_differences(name: Path, here: bytes, there: bytes, other: str) -> list[str] | None:
    """Differences that affect a model's input or output: "temperature is 1, but 2 in the source".

    None for a file that ktconv does not know. `other` ends the sentences.
    """
    if name.name in _REWRITTEN:
        return None
    if name.name != CONFIG_NAME and name.name not in _UNUSED:
        return ["its bytes differ"] if name.suffix in _DECIDING else None
    try:
        one, two = json.loads(here), json.loads(there)
        if not isinstance(one, dict) or not isinstance(two, dict):
            return ["it is not a JSON object"]
        if name.name == CONFIG_NAME:
            return config_differences(one, two, other)
        return _differences(name.name, one, two, other)
    except (ValueError, RecursionError):
        return ["it cannot be compared as JSON"]


def _differences(
    name: str, here: Mapping[str, Any], there: Mapping[str, Any], other: str
) -> list[str]:
    spelled: Callable[[Any], Any] = _tokenizer if name == "tokenizer.json" else dict
    a, b = (
        {key: value for key, value in spelled(content).items() if key not in _UNUSED[name]}
        for content in (here, there)
    )
    return differences(flat(a), flat(b), other)


def _tokenizer(value: Any, key: str = "") -> Any:
    """tokenizer.json in one spelling: newer versions add flags with default values, and write a
    merge as a pair."""
    if isinstance(value, dict):
        return {
            name: _tokenizer(inner, name)
            for name, inner in value.items()
            if key == "vocab" or not (inner in (None, False, "") or (name, inner) == _REGEX)
        }
    if not isinstance(value, list):
        return value
    if key == "merges":
        return [" ".join(map(str, one)) if isinstance(one, list) else one for one in value]
    return [_tokenizer(one) for one in value]
