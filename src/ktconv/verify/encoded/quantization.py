"""The quantization_config of config.json: which modules are packed, and how.

Read as engines read it, from the published format: a group's targets name modules by their whole
name, by a regular expression after "re:" that must match from the start, or by class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ktconv.errors import CheckpointError
from ktconv.system.text import first_few
from ktconv.targets.encoded.names import LINEAR
from ktconv.targets.encoded.sections import IGNORED_KEYS
from ktconv.verify.side_content import QUANTIZATION_KEYS, differences, flat, shown

QUANT_METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
BITS = (4, 8)
_WRITTEN = "in what ktconv writes"
# Keys of other tools that `read_quantization` checks, and those that have no effect.
_CHECKED = frozenset(("config_groups", "ignore"))
_NO_EFFECT = frozenset(("version", "global_compression_ratio"))
_GROUP_CHECKED = frozenset(
    ("targets", "weights", "input_activations", "output_activations", "format")
)
_WEIGHTS_CHECKED = frozenset((
    "num_bits", "type", "symmetric", "strategy", "group_size", "actorder", "observer",
    "observer_kwargs", "zp_dtype", "scale_dtype",
))  # fmt: skip
_USUAL = {"quant_method": QUANT_METHOD, "format": FORMAT, "quantization_status": "compressed"}
_EMPTY: tuple[object, ...] = (None, {}, [], False)
_HINT = "ktconv verifies W4A16 and W8A16 in the pack-quantized format"


class Group(Struct, frozen=True):
    """Modules that are quantized in the same way."""

    name: str
    targets: Sequence[str]
    bits: int
    group_size: int | None  # None: one scale per row
    observer: str  # "" where it is not given

    @property
    def max_level(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    @property
    def half_range(self) -> float:
        """The largest weight of a group in steps: 7.5 or 127.5."""
        return float(2**self.bits - 1) / 2

    def words(self, cols: int) -> int:
        """int32 words of a row."""
        return -(-cols * self.bits // 32)

    def scales(self, cols: int) -> int | None:
        """Scales of a row; None if the group size does not divide the columns."""
        if self.group_size is None:
            return 1
        return None if cols % self.group_size else cols // self.group_size

    @property
    def scheme(self) -> str:
        return f"W{self.bits}A16"


class Quantization(Struct, frozen=True):
    """All groups, and the modules that none of them applies to."""

    groups: Sequence[Group]
    ignore: Sequence[str]

    def group_of(self, module: str, linear: bool = True) -> Group | None:
        """The group whose targets match `module`; `linear`: whether it is a linear layer."""
        for group in self.groups:
            if any(_matches(target, module, linear) for target in group.targets):
                return group
        return None

    def ignores(self, module: str, linear: bool = True) -> bool:
        return any(_matches(target, module, linear) for target in self.ignore)


def _matches(target: str, module: str, linear: bool) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module or (linear and target == LINEAR)


def quantization_section_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section of config.json; None if it is another method's, or there is none."""
    section = config.get("quantization_config")
    if isinstance(section, Mapping) and section.get("quant_method") == QUANT_METHOD:
        return section
    return None


def unlike_ours(section: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Differences of a quantization_config of ktconv from `ours`, which it writes for this
    output."""
    here, there, found = dict(section), dict(ours), []
    for key in IGNORED_KEYS:
        if key in there:
            found += _ignored_otherwise(key, here.pop(key, None), there.pop(key))
    return [*differences(flat(here), flat(there), _WRITTEN), *found]


def _ignored_otherwise(key: str, here: Any, there: Sequence[str]) -> list[str]:
    """Differences of the list of modules that are not quantized, apart from its order."""
    if not _is_texts(here):
        return [] if key == "ignore" else [f"{key} is not a list of names"]  # else refused
    more, fewer = sorted(set(here) - set(there)), sorted(set(there) - set(here))
    found = [f"{key} names {shown(name)}, which is not a non-expert module" for name in more]
    if fewer:
        found.append(f"{key} does not name {first_few(fewer, 1)}")
    return found


def unusual(section: Mapping[str, Any]) -> list[str]:
    """Unsupported settings in another tool's quantization_config. Groups, targets and ignore list
    are checked by `read_quantization`."""
    here = {key: value for key, value in section.items() if key not in _CHECKED | _NO_EFFECT}
    sparsity = here.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") == "dense":
        del here["sparsity_config"]  # nothing is sparse, and the rest is statistics
    for name, group in section["config_groups"].items():
        weights = {k: v for k, v in group["weights"].items() if k not in _WEIGHTS_CHECKED}
        about = {k: v for k, v in group.items() if k not in _GROUP_CHECKED}
        here[f"config_groups.{name}"] = about | {"weights": weights}
    given = {key: value for key, value in flat(here).items() if value not in _EMPTY}
    expected = {key: _USUAL[key] for key in given if key in _USUAL}
    return differences(given, expected, _WRITTEN)


def quantization_elsewhere(config: Mapping[str, Any], path: str = "") -> list[str]:
    """Paths of other sections about quantization: engines differ in which one they read."""
    found = []
    for key, value in config.items():
        if key in QUANTIZATION_KEYS and (path or key != QUANTIZATION_KEYS[0]) and value:
            found.append(f"{path}{key}")
        elif isinstance(value, Mapping) and key not in QUANTIZATION_KEYS:
            found += quantization_elsewhere(value, f"{path}{key}.")
    return found


def read_quantization(section: Mapping[str, Any]) -> Quantization:
    """Raises CheckpointError for what ktconv cannot verify or engines cannot read."""
    groups, ignore = section.get("config_groups"), section.get("ignore") or []
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError("config.json: quantization_config has no config_groups", _HINT)
    if not _is_texts(ignore):
        raise CheckpointError("config.json: quantization_config's ignore is not a list of names")
    _check_patterns(ignore)
    formats = section.get("format")
    return Quantization([_group(name, about, formats) for name, about in groups.items()], ignore)


def _group(name: str, about: Any, outer: Any) -> Group:
    where = f"config.json: quantization group {name!r}"
    about = about if isinstance(about, Mapping) else {}
    weights, targets = about.get("weights"), about.get("targets")
    if not isinstance(weights, Mapping) or not _is_texts(targets) or not targets:
        raise CheckpointError(f"{where} has no targets or no weights", _HINT)
    _check_patterns(targets)
    if (about.get("format") or outer) != FORMAT:
        raise CheckpointError(f"{where} is in the format {about.get('format') or outer}", _HINT)
    if about.get("input_activations") or about.get("output_activations"):
        raise CheckpointError(f"{where} quantizes activations", _HINT)
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if bits not in BITS or kind != "int" or weights.get("symmetric", True) is not True:
        raise CheckpointError(f"{where} is not symmetric with 4 or 8 bits", _HINT)
    if weights.get("actorder") not in (None, "weight", "static"):
        raise CheckpointError(f"{where} has reordered columns (actorder)", _HINT)
    observer = weights.get("observer")
    size = _group_size(weights, where)
    return Group(name, targets, bits, size, observer if isinstance(observer, str) else "")


def _group_size(weights: Mapping[str, Any], where: str) -> int | None:
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel" or (strategy is None and size == -1):
        return None
    if strategy not in ("group", None) or type(size) is not int or size <= 0:
        raise CheckpointError(f"{where} has strategy {strategy} and group size {size}", _HINT)
    return size


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _check_patterns(targets: Sequence[str]) -> None:
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise CheckpointError(
                f"config.json: {target!r} is not a regular expression: {error}"
            ) from error
