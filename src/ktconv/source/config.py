"""Settings of the experts in config.json, by the keys of all families."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ktconv.errors import CheckpointError, KtconvError, UsageError
from ktconv.families import table
from ktconv.families.activations import experts_have_gate
from ktconv.families.config import Config
from ktconv.families.config_values import (
    CONFIG_HINT,
    check_values,
    contradiction,
    is_whole,
    wrong_value,
)
from ktconv.families.config_values import CONFIG_NAME as CONFIG_NAME
from ktconv.families.layer_kinds import DenseLayers, dense_layers
from ktconv.families.routers import rows_beside_experts
from ktconv.source.strict_json import read_object
from ktconv.system.regular_files import MissingFileError
from ktconv.system.units import counted

DESCRIPTION = "quant_model_description.json"  # of msModelSlim
_QUANTIZE_CONFIG = "quantize_config.json"  # of GPTQ, in old checkpoints instead of a section
_QUANTIZE_HINT = f"Copy what {_QUANTIZE_CONFIG} has to {CONFIG_NAME}, as quantization_config."
# No model comes near; loops up to a count end soon, whatever a damaged file says.
MAX_SIZE = 1_000_000


class Setting(Struct, frozen=True):
    """A value of config.json together with the key that gave it, for messages."""

    key: str
    value: int


class ListSetting(Struct, frozen=True):
    """A list of config.json with one value for each layer, or for text and for vision."""

    key: str
    values: Sequence[int]
    by_layer: bool = False  # and never for text and vision

    @property
    def of_towers(self) -> bool:
        """Whether it can be for text and vision."""
        return len(self.values) == 2 and not self.by_layer

    def of_layer(self, layer: int) -> int | None:
        """The value for decoder layer `layer`; None where there is none, or it may mean towers."""
        return self.values[layer] if layer < len(self.values) and not self.of_towers else None

    def most(self, layer: int | None) -> int:
        """The largest value that `layer`, or any layer, can have."""
        if layer is None or self.of_towers:
            return max(self.values)
        return self.values[layer] if layer < len(self.values) else 0

    def allows(self, layer: int, value: int) -> bool:
        """Whether decoder layer `layer` can have `value` by one of the two readings."""
        if layer < len(self.values) and self.values[layer] == value:
            return True
        return self.of_towers and value in (*self.values, sum(self.values))


class ModelConfig(Struct, frozen=True):
    """The part of config.json that the experts are checked against; None: not given."""

    model_types: frozenset[str]
    widths: Sequence[Setting]  # that experts' inputs may have: first the one that most have
    intermediate_size: Setting | None  # of one expert
    num_experts: Setting | None
    listed_sizes: Sequence[ListSetting]  # of intermediate_size, where it is a list
    listed_experts: Sequence[ListSetting]
    top_k: Sequence[Setting | ListSetting]  # experts per token, from every key that is present
    null_top_k: str | None  # the key, where config.json has null instead of a number
    zero_experts: int  # that a router can choose too, and that have no weights
    rows_beside_experts: int | None  # of routers, for no expert with weights; None: not known
    turned_router: bool | None  # whether routers are stored [in, out]; None: not known
    shared_sizes: Sequence[
        int
    ]  # intermediate sizes that a shared expert may have; empty: not given
    vocabulary: int | None  # tokens
    gated: bool | None  # whether experts have a gate; None: nothing says it
    num_layers: Setting | None  # without MTP layers
    num_mtp_layers: int
    dense_layers: DenseLayers | None  # None: no known key says which layers are dense
    quant_method: str | None
    fp8_format: str | None  # quantization_config.fmt
    power_scales: bool  # scales are powers of two, in whatever dtype (scale_fmt: ue8m0)
    block_size: tuple[int, int] | None  # quantization_config.weight_block_size: rows, columns
    packing: str  # quantization_config's name of how integers are packed, in lower case
    packed_bits: int | None  # num_bits of compressed-tensors' groups, if all have the same
    group_sizes: frozenset[int]  # inputs that share a scale, by every group_size of weights
    asymmetric: bool  # all of these groups say that weights have zero points
    data_types: frozenset[str]  # of AutoRound: of all modules, and of those that differ
    e5m3_scales: bool  # of NVFP4; else U8 has powers of two
    left_alone: Sequence[str]  # names and patterns of modules that quantization_config excludes
    online_rotation: str  # the setting by which a model rotates inputs as it runs; "": none
    described: Mapping[str, str]  # msModelSlim's type of each tensor; empty for others

    def width_of(self, found: int) -> Setting | None:
        """The setting of the experts' hidden size, which is `found`, or else should be."""
        return next(
            (one for one in self.widths if one.value == found), next(iter(self.widths), None)
        )

    def top_k_fault(self, experts: int, layer: int | None = None) -> str | None:
        """A sentence if a token is to go to more experts than the `experts` of a layer, or to null;
        of lists the largest value counts where `layer` is None."""
        if self.null_top_k is not None and layer is not None:
            return (
                f"{CONFIG_NAME}: {self.null_top_k} is null, but a layer has "
                f"{counted(experts, 'expert')}, of "
                "which a token needs a number"
            )
        for setting in self.top_k:
            most = setting.value if isinstance(setting, Setting) else setting.most(layer)
            if most > experts + self.zero_experts:
                has = counted(experts, "expert")
                return f"{CONFIG_NAME}: {setting.key} is {most}, but a layer has {has}"
        return None


class ConfigFile(Struct, frozen=True):
    """config.json as it is, and what identifies its state."""

    content: Mapping[str, Any]
    file_bytes: int
    sha256: str
    made: bytes | None = None  # the file, where it was made from other files' metadata
    # msModelSlim's type of each tensor, by a file beside the weights; empty for others.
    described: Mapping[str, str] = field(default_factory=dict)
    # What quantize_config.json says, or why it cannot be read, which matters where it is needed.
    quantize: Mapping[str, Any] | KtconvError | None = None


def side_directory_of(place: Path, gguf: bool, given: Path | None) -> Path | None:
    """The directory of config.json and other side files, which may be `given`; None: there is none,
    next to GGUF files. UsageError for another thing than a directory."""
    if given is None:
        return None if gguf else place
    if not given.is_dir():
        raise UsageError(
            f"--config {given} is not a directory", f"name a directory with {CONFIG_NAME}"
        )
    return given


def read_config(directory: Path, weights: Path | None = None) -> ConfigFile:
    """Read `directory`/config.json, and what describes the tensors of a directory of `weights`.

    Raises CheckpointError if config.json is missing, or if it or the description is no object.
    """
    try:
        content, data = read_object(directory, CONFIG_NAME, CONFIG_HINT)
    except MissingFileError as error:
        raise CheckpointError(str(error), CONFIG_HINT) from None
    file = ConfigFile(content, len(data), hashlib.sha256(data).hexdigest())
    if weights is None:
        return file
    described: Mapping[str, Any] = {}
    with suppress(MissingFileError):
        described = read_object(weights, DESCRIPTION, "Download it again.").content
    types = {name: kind for name, kind in described.items() if isinstance(kind, str)}
    quantize: Mapping[str, Any] | KtconvError | None = None
    try:
        quantize = read_object(directory, _QUANTIZE_CONFIG, _QUANTIZE_HINT).content
    except MissingFileError:
        pass
    except KtconvError as error:
        quantize = error
    return replace(file, described=types, quantize=quantize)


def with_quantize_config(
    config: ModelConfig, file: ConfigFile, directory: Path, content: Config
) -> tuple[ModelConfig, CheckpointError | None]:
    """Add the group size of quantize_config.json in `directory`, which GPTQ and AWQ have, to
    `config` if config.json does not mention quantization. The second result is the error for GPTQ
    weights if that file names another packing than the first version, as which they would be read.

    Raises a KtconvError for a file that cannot be read.
    """
    said = file.quantize
    if said is None or _quantization(content.sections):
        return config, None
    if isinstance(said, KtconvError):
        raise said
    key = "checkpoint_format" if "checkpoint_format" in said else "format"
    packing, other = said.get(key), None
    if packing not in (None, "gptq"):
        other = CheckpointError(
            f"{directory / _QUANTIZE_CONFIG} has {key} {packing!r:.60}, but "
            f"{CONFIG_NAME} next to it has no quantization_config",
            _QUANTIZE_HINT,
        )
    return replace(config, group_sizes=_group_sizes(said)), other


def interpret_config(
    content: Config, described: Mapping[str, str] = MappingProxyType({})
) -> ModelConfig:
    """Pick from config.json what the experts are checked against.

    Raises CheckpointError where a known key has an impossible or contradictory value.
    """
    keys, sections, row = table.FAMILIES.keys, content.sections, content.family
    text = sections[0]
    check_values(sections)
    num_layers = next(_sizes(sections, keys("layers", row)), None) or _counted(text)
    num_mtp = next((one.value for one in _sizes(sections, keys("MTP layers")) if one.value), 0)
    quantization = _quantization(sections)
    size_keys = _expert_size_keys(sections)
    config = ModelConfig(
        model_types=frozenset(
            one["model_type"] for one in sections if isinstance(one.get("model_type"), str)
        ),
        widths=_widths(sections),
        intermediate_size=_not_zero(_one_size(sections, size_keys, or_lists=True)),
        num_experts=_one_size(sections, keys("experts"), or_lists=True),
        listed_sizes=_lists(text, size_keys, num_layers, num_mtp),
        listed_experts=[
            *_lists(text, keys("experts"), num_layers, num_mtp),
            *_lists(text, keys("experts of each layer"), num_layers, num_mtp, by_layer=True),
        ],
        top_k=_top_k(sections, num_layers, num_mtp),
        null_top_k=_null_top_k(sections),
        zero_experts=sum(setting.value for setting in _scalars(sections, keys("zero experts"))),
        rows_beside_experts=rows_beside_experts(content),
        turned_router=row.router_is_transposed if row is not None else None,
        shared_sizes=_shared_sizes(sections, size_keys),
        vocabulary=_whole_number(text, keys("vocabulary")),
        gated=experts_have_gate(content),
        num_layers=num_layers,
        num_mtp_layers=num_mtp,
        dense_layers=_dense_layers(text, num_layers, num_mtp),
        quant_method=quantization.get("quant_method"),
        fp8_format=quantization.get("fmt"),
        power_scales=quantization.get("scale_fmt") == "ue8m0",
        block_size=_block_size(quantization),
        packing=_packing(quantization),
        packed_bits=_packed_bits(quantization),
        group_sizes=_group_sizes(quantization),
        asymmetric=_asymmetric(quantization),
        data_types=_data_types(quantization),
        e5m3_scales=_has_e5m3_scales(quantization),
        left_alone=_left_alone(quantization),
        online_rotation=_online_rotation(quantization),
        described=described,
    )
    experts = config.num_experts.value if config.num_experts else 0
    if experts and (fault := config.top_k_fault(experts)):
        raise CheckpointError(fault, CONFIG_HINT)
    return config


def _one_size(
    sections: Sequence[Mapping[str, Any]], keys: Sequence[str], or_lists: bool = False
) -> Setting | None:
    """The size in the first section that has any of `keys`.

    With `or_lists`, lists are left to `_lists`.
    """
    for section in sections:
        found = [
            Setting(key, section[key])
            for key in keys
            if section.get(key) is not None and not (or_lists and isinstance(section[key], list))
        ]
        for setting in found:
            _check_size(setting)
            if setting.value != found[0].value:
                raise contradiction(found[0].key, found[0].value, setting.key, setting.value)
        if found:
            return found[0]
    return None


def _widths(sections: Sequence[Mapping[str, Any]]) -> Sequence[Setting]:
    """Widths of latent experts, and of the model: an MTP layer's experts need not be latent too."""
    keys = table.FAMILIES.keys
    found = [one for one in _sizes(sections, keys("width of experts")) if one.value]
    return list(filter(None, (*found, _one_size(sections, keys("hidden size")))))


def _check_size(setting: Setting) -> None:
    if not is_whole(setting.value):
        raise wrong_value(setting.key, setting.value, "a size")
    if setting.value > MAX_SIZE:
        raise CheckpointError(
            f"{CONFIG_NAME}: {setting.key} is {setting.value}, beyond the limit of {MAX_SIZE}",
            CONFIG_HINT,
        )


def _not_zero(setting: Setting | None) -> Setting | None:
    return setting if setting is not None and setting.value else None


def _sizes(sections: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Iterator[Setting]:
    """The size under each of these keys, which need not agree."""
    return filter(None, (_one_size(sections, (key,)) for key in keys))


def _counted(text: Mapping[str, Any]) -> Setting | None:
    """The number of layers by their kinds, where config.json does not give it (Nemotron)."""
    kinds = {key: text.get(key) for key in table.FAMILIES.keys("kind of each block")}
    return next(
        (Setting(f"the length of {key}", len(one)) for key, one in kinds.items() if one), None
    )


def _top_k(
    sections: Sequence[Mapping[str, Any]], num_layers: Setting | None, num_mtp: int
) -> Sequence[Setting | ListSetting]:
    """Settings by all keys of the first section that has any; CheckpointError where they
    disagree."""
    keys = table.FAMILIES.keys("top_k")
    number = _one_size(sections, keys, or_lists=True)
    lists = _lists(sections[0], keys, num_layers, num_mtp)
    if number is None:
        return lists
    for listed in lists:
        if number.value not in listed.values and number.key in sections[0]:
            raise contradiction(number.key, number.value, listed.key, listed.values)
    return [number, *lists]


def _null_top_k(sections: Sequence[Mapping[str, Any]]) -> str | None:
    """The first key of experts per token, if there are such keys and all of them are null; readers
    have defaults of their own for a key that is missing, and none for null."""
    given = [(key, one[key]) for one in sections for key in table.FAMILIES.keys("top_k")
             if key in one]  # fmt: skip
    return given[0][0] if given and all(value is None for _, value in given) else None


def _expert_size_keys(sections: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """Keys of an expert's intermediate size; plain intermediate_size if none of them is present."""
    keys = table.FAMILIES.keys("intermediate size")
    own = any(section.get(key) is not None for section in sections for key in keys)
    return keys if own else table.FAMILIES.keys("plain intermediate size")


def _shared_sizes(sections: Sequence[Mapping[str, Any]], size_keys: Sequence[str]) -> Sequence[int]:
    """Sizes that config.json may mean: families disagree on whether a size is of one shared expert
    or of all of them together."""
    keys = table.FAMILIES.keys
    counts = (*keys("shared experts"), *keys("further numbers of shared experts"))
    count = _whole_number(sections[0], counts)
    own = _whole_number(sections[0], keys("shared size"))
    size = _whole_number(sections[0], size_keys)
    found = [] if not own else [own, own * (count or 1)]
    if count and size and not found:
        found = [size * count]
    return tuple(dict.fromkeys(found))


def _whole_number(section: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """The first that is one."""
    given = (section.get(key) for key in keys)
    return next((value for value in given if is_whole(value)), None)


def _scalars(sections: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[Setting]:
    """The numbers in the first section that has any of `keys`."""
    found = ([Setting(k, s[k]) for k in keys if type(s.get(k)) is int] for s in sections)
    return next(filter(None, found), [])


def _lists(
    text: Mapping[str, Any],
    keys: Sequence[str],
    num_layers: Setting | None,
    num_mtp: int,
    by_layer: bool = False,
) -> list[ListSetting]:
    """The lists under `keys` in the text section.

    CheckpointError for one that has neither a number for each layer nor, unless `by_layer`, two,
    for the text and the vision model.
    """
    found = [
        ListSetting(key, text[key], by_layer) for key in keys if isinstance(text.get(key), list)
    ]
    for listed in found:
        sizes = all(is_whole(value) and value <= MAX_SIZE for value in listed.values)
        if not listed.values or not sizes:
            raise wrong_value(listed.key, listed.values, "a number or a list of one for each layer")
        if not listed.of_towers:
            _check_length(listed.key, listed.values, num_layers, num_mtp)
    return found


def _check_length(
    key: str, values: Sequence[Any], num_layers: Setting | None, num_mtp: int
) -> None:
    """CheckpointError unless there is one value for each layer, with or without MTP layers."""
    least = num_layers.value if num_layers else 1
    if len(values) < least or (num_layers and len(values) > least + num_mtp):
        known = f"{num_layers.key} is {least}" if num_layers else "a model has at least one"
        more = f", and there are {counted(num_mtp, 'MTP layer')}" if num_mtp else ""
        raise CheckpointError(
            f"{CONFIG_NAME} contradicts itself: {key} lists {counted(len(values), 'layer')} but "
            f"{known}{more}",
            CONFIG_HINT,
        )


def _quantization(sections: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first section's quantization_config, with texts where it must have them."""
    found = (section.get("quantization_config") for section in sections)
    quantization: Any = next((one for one in found if one is not None), {})
    if not isinstance(quantization, dict):
        raise wrong_value("quantization_config", quantization, "an object")
    for key in ("quant_method", "fmt", "checkpoint_format", "packing_format"):
        if not isinstance(quantization.get(key), (str, type(None))):
            raise wrong_value(f"quantization_config.{key}", quantization[key], "a name")
    return quantization


def _packing(quantization: Mapping[str, Any]) -> str:
    """GPTQ's checkpoint_format, AutoRound's packing_format (in old files backend), AWQ's version,
    or the format by which GPTQModel calls both; if none is there "gptq", as in files from before
    there was a second, and "" of AutoRound's, which means nothing."""
    method, keys = quantization.get("quant_method"), ["checkpoint_format", "packing_format"]
    keys += ["version", *(["format"] if method in ("gptq", "awq") else []), "backend"]
    for key in keys:
        if isinstance(quantization.get(key), str):
            return str(quantization[key]).lower()
    return "" if "round" in str(method) else "gptq"


def _data_types(quantization: Mapping[str, Any]) -> frozenset[str]:
    extra = quantization.get("extra_config")
    modules = extra.values() if isinstance(extra, dict) else ()
    found = [quantization, *(one for one in modules if isinstance(one, dict))]
    return frozenset(str(one["data_type"]) for one in found if one.get("data_type"))


def _has_e5m3_scales(quantization: Mapping[str, Any]) -> bool:
    """Whether scales of NVFP4 are E5M3, which AutoRound says in sections of its own and of
    compressed-tensors."""
    said = (quantization.get(key) for key in ("format", "packing_format"))
    return any("nvfp4" in str(one) and "e5m3" in str(one) for one in said)


# Of modules that stay as they are, or of those alone that do not, by the tools' names for them.
_EXCLUDED = (
    "ignore", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules",
    "exclude_modules", "exclude", "modules_to_not_quantize",
)  # fmt: skip
_CHOSEN = (
    "dynamic", "extra_config", "modules_in_block_to_quantize", "inside_layer_modules",
    "block_name_to_quantize", "to_quant_block_names", "layer_quant_config", "quantized_layers",
)  # fmt: skip


def _left_alone(quantization: Mapping[str, Any]) -> Sequence[str]:
    """`*` where a tool chose modules in another way than by excluding some."""
    lists = (quantization.get(key) for key in _EXCLUDED)
    found = [str(one) for some in lists if isinstance(some, list) for one in some]
    return [*found, "*"] if any(quantization.get(key) for key in _CHOSEN) else found


def _online_rotation(quantization: Mapping[str, Any]) -> str:
    """The setting by which inputs or outputs of layers are rotated while the model runs, "" if
    there is none; rotations of weights are inside them already."""
    config = quantization.get("transform_config")
    groups = config.get("config_groups") if isinstance(config, dict) else None
    applied = (
        one
        for group in (groups.values() if isinstance(groups, dict) else ())
        for one in (group.get("apply", ()) if isinstance(group, dict) else ())
    )
    if any(isinstance(one, dict) and one.get("location") in ("input", "output") for one in applied):
        return "transform_config"
    algorithms = quantization.get("algo_config")  # of Quark: one, or a list
    listed = algorithms if isinstance(algorithms, list) else [algorithms]
    return "algo_config" if any(map(_rotates_inputs, listed)) else ""


def _rotates_inputs(algorithm: object) -> bool:
    """Whether an algorithm of Quark's rotates inputs: R4 does, whose older name is QuaRot, and R1
    where it is called online."""
    if not isinstance(algorithm, dict):
        return False
    name = algorithm.get("name")
    r4 = algorithm.get("r4", name == "quarot")
    r1 = algorithm.get("r1") and algorithm.get("online_r1_rotation")
    return name in ("rotation", "quarot") and bool(r4 or r1)


def _weights_of_groups(quantization: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Sections about weights in the groups of compressed-tensors."""
    groups = quantization.get("config_groups")
    weights = [
        group.get("weights")
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict)
    ]
    return [one for one in weights if isinstance(one, dict)]


def _block_structure(quantization: Mapping[str, Any]) -> Any:
    """Block structure of the first group that has one; None where they differ."""
    found = [one.get("block_structure") for one in _weights_of_groups(quantization)]
    there = [one for one in found if one is not None]
    return there[0] if there and all(one == there[0] for one in there) else None


def _packed_bits(quantization: Mapping[str, Any]) -> int | None:
    found: list[Any] = [one.get("num_bits") for one in _weights_of_groups(quantization)]
    if not found or any(type(bits) is not int or bits != found[0] for bits in found):
        return None
    return found[0] if 2 <= found[0] <= 8 else None


def _group_sizes(quantization: Mapping[str, Any]) -> frozenset[int]:
    """Every group_size of weights, wherever a quantizer writes it: for the whole model, for groups
    of modules or for single ones. Config files are not nested too deeply."""
    found: set[int] = set()
    level = [quantization]
    while level:
        pairs = [pair for section in level for pair in section.items()]
        sizes = [value for key, value in pairs if key == "group_size"]
        found.update(size for size in sizes if type(size) is int and size > 0)
        level = [value for key, value in pairs if isinstance(value, dict) and _of_weights(key)]
    return frozenset(found)


def _of_weights(key: str) -> bool:
    """Whether a section of quantization_config is not one about activations."""
    return not key.startswith(("input", "output")) and "activation" not in key


def _asymmetric(quantization: Mapping[str, Any]) -> bool:
    weights = _weights_of_groups(quantization)
    return bool(weights) and all(one.get("symmetric") is False for one in weights)


def _block_size(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    key, value = "weight_block_size", quantization.get("weight_block_size")
    if value is None:
        key, value = "config_groups.*.weights.block_structure", _block_structure(quantization)
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if type(rows) is int and type(columns) is int and rows > 0 and columns > 0:
            return rows, columns
    raise wrong_value(f"quantization_config.{key}", value, "two positive integers")


# Settings that are, or may be, lists with a value for each layer.
_BY_LAYER = (
    "kind of each layer", "kind of each block", "MoE frequency", "activation limit",
    "limit after activation", "limit after activation of shared experts",
)  # fmt: skip


def _dense_layers(
    text: Mapping[str, Any], num_layers: Setting | None, num_mtp: int
) -> DenseLayers | None:
    for key in (key for what in _BY_LAYER for key in table.FAMILIES.keys(what)):
        values = text.get(key)
        if num_layers and isinstance(values, (list, str)):
            _check_length(key, values, num_layers, num_mtp)
    return dense_layers(text)
