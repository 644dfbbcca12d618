"""adapter_config.json: which kind of adapter it is, and the factor of each of its products."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

from ktconv.errors import CheckpointError, UsageError
from ktconv.source.adapter.beside import CONFIG, FUSED
from ktconv.source.strict_json import parse_object
from ktconv.system.files import is_there
from ktconv.system.numbers import real
from ktconv.system.patterns import PatternError, Patterns
from ktconv.system.regular_files import MAX_CONFIG_BYTES, MissingFileError, read_small

SAVED_TO = "give the directory that the adapter was saved to"
DAMAGED = "The file is damaged; save or copy the adapter again."
_LARGEST = 3.4028234663852886e38  # of float32
_MERGED_BY_PEFT = "merge it into its base with PEFT (merge_and_unload), and convert the result"
# Kinds of LoRA that compute something else, by the settings that switch them on.
_OTHER_KINDS = ("use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias")
# What else a file may have that W + s B A does not say; harmless values are left out.
_BESIDE = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication",
    "megatron_config", "monteclora_config", "velora_config",
)  # fmt: skip
_OTHER_PARTS = ("modules_to_save", "trainable_token_indices")  # which have tensors of their own
# Ways to begin that leave the base's weights as they are; others take something out of them.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


class AdapterConfig:
    """Settings in adapter_config.json of a directory; none where KTransformers' file is alone.

    `alpha`: where no file has it. CheckpointError for a directory that is none or has no such file,
    and for other kinds of adapters than LoRA; UsageError for an `alpha` that is no factor.
    """

    def __init__(self, directory: Path, alpha: float | None = None) -> None:
        self.directory = directory
        self.data = _data(directory)
        self.content = _content(directory, self.data)
        self._alpha = _checked_alpha(alpha)
        self._patterns: dict[str, Patterns] = {}  # by setting
        targets = self.content.get("target_parameters")
        listed = targets if isinstance(targets, list) else []
        self.targets = frozenset(one for one in listed if isinstance(one, str))

    @property
    def by_module(self) -> bool:
        """Whether modules may have an alpha of their own."""
        return bool(self.content.get("alpha_pattern"))

    def check_mergeable(self) -> None:
        """CheckpointError for what cannot be added to weights as s B A, or is of another base than
        the model that it was made of."""
        self.check_products()
        for name in _OTHER_PARTS:
            if self.content.get(name):
                raise _more(self.directory / CONFIG, name)
        if (bias := self.content.get("bias", "none")) != "none":
            raise CheckpointError(
                f"{self.directory / CONFIG} says bias {bias!r:.40}: biases were trained, too",
                _MERGED_BY_PEFT,
            )

    def check_products(self) -> None:
        """`check_mergeable` of matrices with LoRA, whatever is in the model's other parts."""
        where = self.directory / CONFIG
        for name in self.content:
            known = name in _BESIDE or (name.startswith("use_") and name != "use_rslora")
            if known and self.content[name]:
                raise _more(self.directory / CONFIG, name)
        begun = self.content.get("init_lora_weights")
        if begun not in _PLAIN_BEGINNINGS:
            raise CheckpointError(
                f"{where} says init_lora_weights {begun!r:.40}, which changed the base's weights "
                "before training",
                "save it with path_initial_model_for_weight_conversion of PEFT's save_pretrained, "
                "or merge it there",
            )

    def scale(self, module: str, rank: int) -> float:
        """The factor of a module's product: alpha / rank, or alpha / sqrt(rank)."""
        alpha, stated = self._alpha, self._stated("lora_alpha", "alpha_pattern", module)
        of_rank = self._stated("r", "rank_pattern", module)
        fused = (self.directory / FUSED).exists()
        if of_rank not in (None, rank) and not fused:
            raise CheckpointError(
                f"{self.directory / CONFIG} says rank {of_rank:g} of {module}, whose matrices have "
                f"{rank}",
                DAMAGED,
            )
        if stated is not None and of_rank == rank:
            if alpha not in (None, stated):
                raise UsageError(
                    f"{self.directory / CONFIG} says alpha {stated:g} of {module}, not {alpha:g}",
                    "leave alpha out",
                )
            alpha = stated
        if alpha is None:
            raise UsageError(
                f"{self.directory} does not say the alpha of {module}, whose rank is {rank}",
                "give the alpha that it was trained with: in Python as alpha=, else in an "
                f'{CONFIG} with "peft_type": "LORA", "r": {rank} and "lora_alpha"',
            )
        return alpha / (sqrt(rank) if self.content.get("use_rslora") else rank)

    def _stated(self, setting: str, patterns: str, module: str) -> float | None:
        """A number of the config, by PEFT's rule for modules with one of their own."""
        own = self.content.get(patterns) or {}
        if not isinstance(own, dict):
            raise CheckpointError(
                f"{self.directory / CONFIG} says {patterns} {own!r:.60}, not an object", DAMAGED
            )
        try:
            if patterns not in self._patterns:
                self._patterns[patterns] = Patterns(own)
            found = self._patterns[patterns].first(module)
        except PatternError as error:
            raise CheckpointError(
                f"{self.directory / CONFIG}: the patterns of {patterns} {error}",
                "write fewer or simpler ones, best names of modules; or merge it with PEFT",
            ) from None
        if found is not None:
            return self._number(f"{patterns} {found:.60}", own[found])
        if setting not in self.content:
            return None
        return self._number(setting, self.content[setting])

    def _number(self, name: str, value: Any) -> float:
        """Above 0, within float32."""
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not 0 < value <= _LARGEST:
            raise CheckpointError(
                f"{self.directory / CONFIG} says {name} {value!r:.60}, not a number above 0",
                DAMAGED,
            )
        return float(value)


def _data(directory: Path) -> bytes | None:
    if not directory.is_dir():
        what = "is not a directory" if is_there(directory) else "does not exist"
        raise CheckpointError(f"{directory} {what}", SAVED_TO)
    try:
        return read_small(directory, CONFIG, MAX_CONFIG_BYTES)
    except MissingFileError:
        if (directory / FUSED).exists():
            return None
        raise CheckpointError(f"{directory} has no {CONFIG}", SAVED_TO) from None


def _content(directory: Path, data: bytes | None) -> dict[str, Any]:
    if data is None:
        return {}
    path = directory / CONFIG
    config = parse_object(data, str(path), DAMAGED)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path} is of an adapter of type {config.get('peft_type')!r:.40}, not LORA",
            "give an adapter of LoRA; others can be merged with PEFT",
        )
    if other := next((name for name in _OTHER_KINDS if config.get(name)), None):
        raise _more(path, other)
    return config


def _more(path: Path, setting: str) -> CheckpointError:
    return CheckpointError(
        f"{path} says {setting}, which is more than a product to add to each weight",
        _MERGED_BY_PEFT,
    )


def _checked_alpha(alpha: float | None) -> float | None:
    if alpha is None:
        return None
    found = real("alpha", alpha)
    if not 0 < found <= _LARGEST:
        raise UsageError(f"alpha must be a number above 0, not {found:g}")
    return found
