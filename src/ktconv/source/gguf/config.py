"""A config.json of what the metadata of a GGUF file say about the experts.

It has what ktconv reads, under the keys of Hugging Face's config.json. What a model needs besides
that (attention, tokenizer) is not in it, so no library can load the model by it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.names import is_in_experts
from ktconv.source.config import ConfigFile
from ktconv.source.gguf.architectures import (
    ARCHITECTURES,
    GLM_4_7_FLASH_LAYERS,
    GLM_4_7_FLASH_TOKENS,
    SAID_BY_FAMILY,
    SCORING,
    SETTINGS,
    Architecture,
)
from ktconv.source.safetensors_file import Header

_CONFIG = "Give the config.json of the model: --config DIR."
_CLAMPED_AFTER = "step35"
_CHUNKS = "_chexps."  # of Grove: experts that several others share
_EXPERTS = re.compile(r"blk\.[0-9]+\.ffn_(?!norm_)[a-z_]+_exps(\..*)?", re.DOTALL)


def config_of_metadata(header: Header) -> ConfigFile:
    """The config.json for a model by the metadata of its first file.

    Raises CheckpointError where they name no architecture, or one whose experts cannot be read.
    """
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise CheckpointError(f"{header.file} has no general.architecture", _CONFIG)
    content = _content(header, architecture, known_architecture(header))
    data = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    return ConfigFile(content, len(data), hashlib.sha256(data).hexdigest(), data)


def refuse_unread(headers: Sequence[Header]) -> None:
    """CheckpointError for models whose experts consist of more than is read."""
    known_architecture(headers[0])
    for header in headers:
        for tensor in header.tensors:
            if _CHUNKS in tensor.name:
                raise CheckpointError(
                    f"{tensor.name} is a matrix of chunk experts, which are not supported",
                    "No file of this model can be converted.",
                )
            if _EXPERTS.fullmatch(tensor.name) and not is_in_experts(tensor.name):
                raise CheckpointError(
                    f"{tensor.name} is not a known tensor of experts",
                    "Convert the model again with a current version of llama.cpp, or use a "
                    "safetensors version.",
                )


def known_architecture(header: Header) -> Architecture:
    """The row of the file's architecture, or one made up from its name.

    Raises CheckpointError for architectures whose experts are of another kind.
    """
    name = str(header.metadata.get("general.architecture"))
    found = ARCHITECTURES.get(name, Architecture(name))
    if found.refused:
        raise CheckpointError(
            f"{header.file} is a model of architecture {name}, which is not supported: "
            f"{found.refused}",
            "Models whose experts have gate, up and down projections can be converted, and those "
            "without a gate.",
        )
    return found


def _content(header: Header, name: str, known: Architecture) -> dict[str, Any]:
    given = {
        key.removeprefix(f"{name}."): value
        for key, value in header.metadata.items()
        if key.startswith(f"{name}.") and value is not None
    }
    content: dict[str, Any] = {"model_type": known.model_type, **known.config}
    if name in ARCHITECTURES and table.FAMILIES.of(known.model_type) is None:
        content.setdefault("hidden_act", "silu")  # which the files do not say
    content |= {ours: _finite(given[key]) for key, ours in SETTINGS.items() if key in given}
    width = given.get("feed_forward_length")  # a list where layers differ, with dense ones in it
    if "moe_intermediate_size" not in content and not isinstance(width, (list, type(None))):
        content["intermediate_size"] = width
    blocks, extra = given.get("block_count"), given.get("nextn_predict_layers", 0)
    if type(blocks) is int and type(extra) is int:
        content["num_hidden_layers"] = blocks - extra
    content |= _scoring(given) | _dense(given)
    content |= _clamp(name, given, content.get("num_hidden_layers", 1))
    if content.get("routed_scaling_factor") == 0:
        del content["routed_scaling_factor"]  # which llama.cpp reads as none
    if name == "deepseek2":
        content |= _deepseek(content, blocks, _tokens(header, given))
    if name == "nemotron_h_moe":
        content |= _hybrid(given)
    return content


def _finite(value: Any) -> Any:
    """JSON has no NaN; what is left is refused as any other wrong value."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _scoring(given: Mapping[str, Any]) -> dict[str, Any]:
    function = given.get("expert_gating_func")
    if function is None or function in SAID_BY_FAMILY:
        return {}
    return {"scoring_func": SCORING.get(function, f"expert_gating_func {function}")}


def _dense(given: Mapping[str, Any]) -> dict[str, Any]:
    """Dense layers, unless every n-th has experts: then the tensors show it."""
    leading = given.get("leading_dense_block_count")
    steps = (given.get(key) for key in ("interleave_moe_layer_step", "moe_every_n_layers"))
    if leading is None or any(step not in (None, 0, 1) for step in steps):
        return {}
    return {"first_k_dense_replace": leading}


def _clamp(name: str, given: Mapping[str, Any], layers: Any) -> dict[str, Any]:
    """The limit of the activation: one number, or one per layer (0: none). llama.cpp applies that
    of Step's models to the activation's result, that of others to its arguments."""
    content: dict[str, Any] = {}
    for key, before, after in (
        ("swiglu_clamp_exp", "swiglu_limit", "swiglu_limits"),
        ("swiglu_clamp_shexp", None, "swiglu_limits_shared"),
    ):
        limits = given.get(key)
        found = [_finite(one) for one in limits] if isinstance(limits, list) else _finite(limits)
        if not (any(found) if isinstance(found, list) else found):
            continue
        if name != _CLAMPED_AFTER:
            content |= {before: found} if before else {}
        else:
            content[after] = found if isinstance(found, list) else [found] * layers
    return content


def _hybrid(given: Mapping[str, Any]) -> dict[str, Any]:
    """Nemotron's layers are attention, Mamba or experts; only the last have a width."""
    widths = given.get("feed_forward_length")
    if not isinstance(widths, list):
        return {}
    return {"moe_layers": [layer for layer, width in enumerate(widths) if width]}


def _tokens(header: Header, given: Mapping[str, Any]) -> Any:
    """Number of tokens in the vocabulary; None if the file does not say."""
    embedding = (one.shape[0] for one in header.tensors if one.name == "token_embd.weight")
    return next(embedding, given.get("vocab_size"))


def _deepseek(content: Mapping[str, Any], blocks: Any, tokens: Any) -> dict[str, Any]:
    """llama.cpp has one architecture for V2, V3, Kimi K2 and GLM-4.7-Flash, and no groups where
    none are given. Files of V2 and the last need not say how their routers score."""
    groups = {"n_group": content.get("n_group", 1), "topk_group": content.get("topk_group", 1)}
    if content.get("scoring_func") == "sigmoid":
        return groups
    if "scoring_func" not in content and (
        blocks in GLM_4_7_FLASH_LAYERS and tokens == GLM_4_7_FLASH_TOKENS
    ):
        return {"model_type": "glm4_moe_lite", "scoring_func": "sigmoid", **groups}
    method = "group_limited_greedy" if groups["n_group"] != 1 else "greedy"
    return {"model_type": "deepseek_v2", "topk_method": method, **groups}
