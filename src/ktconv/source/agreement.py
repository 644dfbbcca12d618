"""Whether tensors and config.json agree: what cannot be right is refused, what is odd is noted.

Numbers of experts and layers are compared where layers are built; here are the settings that no
shape depends on, and the tensors next to the experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from ktconv.errors import CheckpointError
from ktconv.families.config import Config
from ktconv.families.family import SCORINGS, Router
from ktconv.families.routers import stated_router
from ktconv.families.table import FAMILIES
from ktconv.source.config import CONFIG_NAME, ModelConfig, Setting
from ktconv.source.encodings.unquantized import UNQUANTIZED
from ktconv.source.moe_tensors import MoETensors
from ktconv.source.types import MoELayer, TensorRef
from ktconv.system.patterns import PatternError, Patterns
from ktconv.system.units import listed

# experts, hidden size, intermediate size, and whether experts have gates
Dimensions = tuple[int, int, int, bool]

_SIZES = ("a number of experts of", "a hidden size of", "an intermediate size of")


# Whose checkpoints have quantized weights alone; other tools also describe what is not stored.
_ALWAYS_STORED = ("fp8", "bitsandbytes", "gptq", "awq", "mxfp4", "hqq", "eetq", "aqlm", "vptq")
_COMPANION = re.compile(
    r"\.(weight_(scale|packed|scale_inv|zero_point)|scale|qweight|scales|SCB|.*absmax|quant_state.*|"
    r"weight\.absmax)$|_(scale_inv|blocks|scales)$"
)
_CODES = ("F8_E4M3", "F8_E5M2", "F4", "U8", "I8")  # dtypes of quantized weights
_GLOB = re.compile(r"[*?\[]")
_HEADS = {"lm_head", "head", "output", "unembed"}
_LARGE_FACTOR = 100.0  # of the experts' sum; the largest in the table of families is 16


def check_agreement(
    content: Config,
    config: ModelConfig,
    layers: Sequence[MoELayer],
    others: Sequence[TensorRef],
) -> list[str]:
    """Notes about what is odd in config.json (`content`, read as `config`) or the tensors next to
    the experts.

    Raises CheckpointError for a router that the family does not have, that the numbers of experts
    do not allow or that only other layers have, a quantization_config that the weights
    contradict, and tensors whose shapes do not fit the experts.
    """
    tensors, notes = MoETensors(others, layers, config, content.family), dict[str, list[int]]()
    missing = list(tensors.check_routers(layers))
    for layer in layers:
        corrected = tensors.has_correction(layer)
        spec = stated_router(content, layer.index, len(layer.experts), corrected)
        for note in tensors.check(layer, spec):
            notes.setdefault(note, []).append(layer.index)
    found = [f"{note} ({listed('layer', indices)})" for note, indices in notes.items()]
    return [
        *missing,
        *found,
        *_odd_settings(content),
        *_missing_head(content, others),
        *_check_quantization(config, layers, others),
    ]


def _missing_head(content: Config, others: Sequence[TensorRef]) -> Iterator[str]:
    """A note where the model has embeddings, but no head, which config.json says is not theirs."""
    words = {word for one in others for word in one.name.split(".")[-2:]}  # of a quantized one too
    tied = content.text.get("tie_word_embeddings") is not False
    if "embed_tokens" in words and not tied and not words & _HEADS:
        yield (
            f"no tensor is the head (lm_head.weight), although {CONFIG_NAME} says "
            "tie_word_embeddings false: loaders would start with a random one"
        )


def _odd_settings(content: Config) -> Iterator[str]:
    """Values that no released model has, but one could."""
    text, row = content.text, content.family
    for key in FAMILIES.keys("scale", row):
        value = text.get(key)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, (int, float)) and one is not False and not 0 < one <= _LARGE_FACTOR:
                yield f"{CONFIG_NAME} has {key} {one:g}, which no known model has"
                break
    if row is None or not isinstance(row.routing, Router):
        return
    methods = {text.get(key) for key in FAMILIES.keys("method")}
    for key in FAMILIES.keys("scoring", row):
        value = text.get(key)
        if isinstance(value, str) and value not in SCORINGS and value not in methods:
            yield (
                f"{CONFIG_NAME} has {key} {value!r:.40}; the routers of {content.type} score "
                f"by {row.routing.spec.scoring}"
            )


def _check_quantization(
    config: ModelConfig, layers: Sequence[MoELayer], others: Sequence[TensorRef]
) -> Iterator[str]:
    """CheckpointError if config.json describes quantized weights, and none is there; notes where
    it excludes weights that are quantized, or does not exclude those that are not."""
    yield from _excluded(config, layers)
    yield from _other_groups(config, layers)
    method, up = config.quant_method, layers[0].experts[0]["up"].tensor
    plain = all(name in UNQUANTIZED for layer in layers for name in layer.encodings)
    if not method or not plain or up.file.suffix == ".gguf":
        return
    if any(_excludes(pattern, up.name) for pattern in config.left_alone):
        return
    stored = any(one.dtype in _CODES or _COMPANION.search(one.name) for one in others)
    if not stored and any(word in method.lower() for word in _ALWAYS_STORED):
        raise CheckpointError(
            f"{up.name} is {up.dtype}, as all weights here, but quantization_config in "
            f"{CONFIG_NAME} says that they are quantized (quant_method {method!r:.40})",
            "Remove quantization_config from config.json, or from a copy of it that you give with "
            "--config DIR, if the weights are right; else use the checkpoint that belongs to it.",
        )
    yield (
        f"the experts are {up.dtype}, but quantization_config in {CONFIG_NAME} (quant_method "
        f"{method!r:.40}) does not say that they are left as they are"
    )


def _excluded(config: ModelConfig, layers: Sequence[MoELayer]) -> Iterator[str]:
    """A note for each module in a list of exclusions whose experts are quantized."""
    found: dict[str, list[MoELayer]] = {}
    for layer in layers:
        down = layer.experts[0]["down"].tensor
        if down.file.suffix == ".gguf" or any(name in UNQUANTIZED for name in layer.encodings):
            continue
        for pattern in config.left_alone:
            if pattern != "*" and _names_module(pattern, down.name):
                found.setdefault(pattern, []).append(layer)
    for pattern, some in found.items():
        yield (
            f"quantization_config in {CONFIG_NAME} says that {pattern!r:.60} is not quantized, but "
            f"the experts are {some[0].encoding} ({listed('layer', [one.index for one in some])}): "
            "engines that go by it load wrong weights"
        )


def _other_groups(config: ModelConfig, layers: Sequence[MoELayer]) -> Iterator[str]:
    """A note where integers have groups of a size that the configuration does not name."""
    found: dict[int, list[int]] = {}
    for layer in layers:
        for matrix in layer.experts[0].values() if config.group_sizes else ():
            grid, inner = matrix.scale, matrix.element.name
            if grid is None or inner.startswith("F") or grid.block_rows != 1:
                continue
            if grid.block_cols < matrix.cols and grid.block_cols not in config.group_sizes:
                found.setdefault(grid.block_cols, []).append(layer.index)
    said = " or ".join(map(str, sorted(config.group_sizes)))
    for size, indices in found.items():
        yield (
            f"the scales of experts are for groups of {size}, but group_size in the "
            f"quantization_config (or quantize_config.json) is {said} ({listed('layer', indices)})"
        )


def _names_module(pattern: str, name: str) -> bool:
    """Whether a module's name or pattern in a list of exclusions is that of a tensor's module, or
    of a module that it is in; unlike `_excludes` words must be whole."""
    if pattern.startswith("re:"):
        return _excludes(pattern, name)
    inside = _inside(name)
    return pattern in inside or (
        bool(_GLOB.search(pattern)) and any(fnmatchcase(one, pattern) for one in inside)
    )


@lru_cache(maxsize=8)  # of one name after the other, each with all patterns
def _inside(name: str) -> frozenset[str]:
    """The runs of a name's words."""
    parts = name.split(".")
    ends = range(1, len(parts) + 1)
    return frozenset(".".join(parts[start:end]) for end in ends for start in range(end))


def _excludes(pattern: str, name: str) -> bool:
    """Whether a module's name or pattern in a list of exclusions is that of an expert's tensor, or
    of a part of the model that it is in."""
    if pattern.startswith("re:"):
        try:
            return _compiled(pattern[3:]).first(name) is not None
        except PatternError:  # nobody knows what it excludes
            return False
    return pattern in name or fnmatchcase(name, pattern) or fnmatchcase(name, f"*{pattern}*")


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Patterns:
    """A search for a pattern anywhere in a name, in bounded time: it comes from a stranger."""
    return Patterns([f".*(?:{pattern}).*"])


def contradictions(
    config: ModelConfig, layers: Mapping[int, Dimensions]
) -> Iterator[tuple[str, int]]:
    """Sentences about layers whose sizes or projections differ from config.json, and their
    numbers."""
    widest = max((sizes[0] for sizes in layers.values()), default=0)
    partial = bool(absent_layers(config, layers))
    for index, (*sizes, gated) in layers.items():
        settings = (
            _experts_setting(config, index, sizes[0], widest, partial),
            config.width_of(sizes[1]),
            config.intermediate_size,
        )
        if config.gated not in (None, gated):
            found, expected = ("have", "have none") if gated else ("have no", "have one")
            yield (
                f"the experts of layer {index} {found} gate projection, but those of this "
                f"model {expected} by {CONFIG_NAME}",
                index,
            )
        if fault := config.top_k_fault(sizes[0], index):
            yield fault, index
        for words, size, setting in zip(_SIZES, sizes, settings, strict=True):
            if setting is not None and setting.value != size:
                yield (
                    f"layer {index} has {words} {size}, but {CONFIG_NAME} says {setting.key} "
                    f"{setting.value}",
                    index,
                )


def _experts_setting(
    config: ModelConfig, index: int, found: int, widest: int, partial: bool
) -> Setting | None:
    """The setting that the number of experts `found` in a layer must be: that of a list, else the
    one of all layers, which is the largest where they differ. `widest`: the largest of those that
    are there, which are not all where `partial`."""
    for said in config.listed_experts:
        if (count := said.of_layer(index)) is not None:
            return Setting(said.key, count)
    one = config.num_experts
    differ = one is not None and found < one.value and (widest == one.value or partial)
    return None if differ else one


def absent_layers(config: ModelConfig, present: Iterable[int]) -> list[int]:
    """MoE layers of config.json that are not among these; empty if it does not say which layers
    are MoE layers."""
    if config.num_layers is None or config.dense_layers is None:
        return []
    absent = set(range(config.num_layers.value)) - set(present)
    return sorted(index for index in absent if config.dense_layers.key_of(index) is None)
