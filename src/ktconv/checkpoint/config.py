"""What config.json says about the experts, under the many names that models use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconv.checkpoint.strict_json import parse_object
from ktconv.errors import CheckpointError, ResourceError

CONFIG_NAME = "config.json"
_HINT = "Copy the config.json that belongs to this checkpoint beside its weights."

# Multimodal models keep the language model's sizes in a section of their own.
_TEXT_SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config")
_EXPERT_COUNT_KEYS = (
    "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts",
)  # fmt: skip
_EXPERT_SIZE_KEYS = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")
_LAYER_KEYS = ("num_hidden_layers", "num_layers")
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
# No model comes near; loops up to a count end soon, whatever a damaged file says.
MAX_SIZE = 1_000_000


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of config.json together with the key that gave it, for messages."""

    key: str
    value: int


@dataclass(frozen=True, slots=True)
class DenseLayers:
    """Which layers config.json makes dense, by each key that does; all others are MoE."""

    by_key: Mapping[str, Callable[[int], bool]]

    def key_of(self, index: int) -> str | None:
        """The key that makes layer `index` dense; None for an MoE layer."""
        return next((key for key, is_dense in self.by_key.items() if is_dense(index)), None)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The part of config.json that the experts are checked against; None: not given."""

    model_types: frozenset[str]
    hidden_size: Setting | None
    intermediate_size: Setting | None  # of one expert
    num_experts: Setting | None
    num_layers: Setting | None  # without MTP layers
    num_mtp_layers: int
    dense_layers: DenseLayers | None  # None: no known key tells dense layers from MoE ones
    quant_method: str | None
    block_size: tuple[int, int] | None  # quantization_config.weight_block_size: rows, columns


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """config.json as it is, and what identifies its state."""

    content: Mapping[str, Any]
    file_bytes: int
    sha256: str


def read_config(directory: Path) -> ConfigFile:
    """Read `directory`/config.json; raises CheckpointError if missing or not an object."""
    path = directory / CONFIG_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", _HINT) from None
    except OSError as error:
        raise ResourceError(f"{path} cannot be read: {error.strerror}") from error
    content = parse_object(data, str(path), _HINT, allow_same_twice=True)
    return ConfigFile(content, len(data), hashlib.sha256(data).hexdigest())


def interpret_config(content: Mapping[str, Any]) -> ModelConfig:
    """Pick from config.json what the experts are checked against.

    Raises CheckpointError where a known key has an impossible or contradictory value.
    """
    text = _text_section(content)
    sections = (text, content)
    mtp_layers = _first_size(sections, _MTP_KEYS)
    quantization = next(_objects(sections, "quantization_config"), {})
    method = quantization.get("quant_method")
    return ModelConfig(
        model_types=frozenset(_strings(sections, "model_type")),
        hidden_size=_one_size(sections, ("hidden_size",)),
        intermediate_size=_expert_size(sections),
        num_experts=_one_size(sections, _EXPERT_COUNT_KEYS),
        num_layers=_first_size(sections, _LAYER_KEYS),
        num_mtp_layers=mtp_layers.value if mtp_layers else 0,
        dense_layers=_dense_layers(text),
        quant_method=method if isinstance(method, str) else None,
        block_size=_block_size(quantization),
    )


def _text_section(content: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _TEXT_SECTIONS:
        section = content.get(key)
        if isinstance(section, dict):
            return _text_section(section)
    return content


def _one_size(sections: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Setting | None:
    """The positive integer that the first section with any of `keys` gives.

    Lists (a size per layer or modality) say nothing that can be checked here.
    """
    for section in sections:
        found = [
            Setting(key, section[key])
            for key in keys
            if section.get(key) is not None and not isinstance(section[key], list)
        ]
        for setting in found:
            _check_size(setting)
            if setting.value != found[0].value:
                raise CheckpointError(
                    f"{CONFIG_NAME} contradicts itself: {found[0].key} is {found[0].value} "
                    f"but {setting.key} is {setting.value}",
                    _HINT,
                )
        if found:
            return found[0] if found[0].value else None
    return None


def _check_size(setting: Setting) -> None:
    if type(setting.value) is not int or setting.value < 0:
        raise CheckpointError(
            f"{CONFIG_NAME}: {setting.key} is {setting.value!r}, not a size", _HINT
        )
    if setting.value > MAX_SIZE:
        raise CheckpointError(
            f"{CONFIG_NAME}: {setting.key} is {setting.value}, beyond the limit of {MAX_SIZE}",
            _HINT,
        )


def _first_size(sections: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Setting | None:
    """Of the first key that gives one: these keys need not agree."""
    return next(filter(None, (_one_size(sections, (key,)) for key in keys)), None)


def _expert_size(sections: Sequence[Mapping[str, Any]]) -> Setting | None:
    """An expert's intermediate size; plain intermediate_size where it has no key of its own."""
    if any(section.get(key) is not None for section in sections for key in _EXPERT_SIZE_KEYS):
        return _one_size(sections, _EXPERT_SIZE_KEYS)
    return _one_size(sections, ("intermediate_size",))


def _objects(sections: Sequence[Mapping[str, Any]], key: str) -> Iterator[Mapping[str, Any]]:
    for section in sections:
        if isinstance(section.get(key), dict):
            yield section[key]


def _strings(sections: Sequence[Mapping[str, Any]], key: str) -> Iterator[str]:
    for section in sections:
        if isinstance(section.get(key), str):
            yield section[key]


def _block_size(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    value = quantization.get("weight_block_size")
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if type(rows) is int and type(columns) is int and rows > 0 and columns > 0:
            return rows, columns
    raise CheckpointError(
        f"{CONFIG_NAME}: quantization_config.weight_block_size is {value!r}, "
        "not two positive integers",
        _HINT,
    )


def _dense_layers(text: Mapping[str, Any]) -> DenseLayers | None:
    """By the first rule whose keys are there."""
    for rule in (_by_layer_types, _by_layer_list, _by_leading_dense, _by_sparse_step):
        layers = rule(text)
        if layers is not None:
            return layers
    return None


def _by_layer_types(text: Mapping[str, Any]) -> DenseLayers | None:
    """mlp_layer_types: ["dense", "sparse", ...]."""
    types = text.get("mlp_layer_types")
    if not isinstance(types, list):
        return None
    return _all_but("mlp_layer_types", (i for i, kind in enumerate(types) if kind != "dense"))


def _by_layer_list(text: Mapping[str, Any]) -> DenseLayers | None:
    """moe_layers: [1, 3, 5] (Llama 4)."""
    layers = text.get("moe_layers")
    if not isinstance(layers, list) or not all(type(index) is int for index in layers):
        return None
    return _all_but("moe_layers", layers)


def _by_leading_dense(text: Mapping[str, Any]) -> DenseLayers | None:
    """first_k_dense_replace and moe_layer_freq: an interval, or a 0/1 per layer (DeepSeek)."""
    frequency = text.get("moe_layer_freq")
    if isinstance(frequency, list):
        return _all_but("moe_layer_freq", (i for i, moe in enumerate(frequency) if moe))
    key = "first_k_dense_replace" if "first_k_dense_replace" in text else "num_dense_layers"
    first = text.get(key)
    if type(first) is not int and type(frequency) is not int:
        return None
    first = first if type(first) is int else 0
    step = frequency if type(frequency) is int and frequency > 0 else 1
    return DenseLayers({key: lambda i: i < first, "moe_layer_freq": lambda i: i % step != 0})


def _by_sparse_step(text: Mapping[str, Any]) -> DenseLayers | None:
    """decoder_sparse_step: every n-th layer, counted from 1, less mlp_only_layers (Qwen)."""
    step = text.get("decoder_sparse_step")
    dense = text.get("mlp_only_layers")
    if type(step) is not int and not isinstance(dense, list):
        return None
    step = step if type(step) is int and step > 0 else 1
    listed = {i for i in dense if type(i) is int} if isinstance(dense, list) else set()
    return DenseLayers(
        {
            "mlp_only_layers": listed.__contains__,
            "decoder_sparse_step": lambda i: (i + 1) % step != 0,
        }
    )


def _all_but(key: str, moe_layers: Iterable[int]) -> DenseLayers:
    listed = frozenset(moe_layers)
    return DenseLayers({key: lambda index: index not in listed})
