"""Settings of a model, asked for by meaning; the keys of config.json stay in this room."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ktconv.families import table
from ktconv.families.activations import expert_activation, post_norm_epsilon, shared_activation
from ktconv.families.config import Config, top_k_of
from ktconv.families.family import ExpertActivation, Family, RouterSpec
from ktconv.families.routers import FoundRouter, find_router, router_of
from ktconv.source.config import ModelConfig, interpret_config, read_config
from ktconv.source.towers import tower_config

_QUANTIZATION = ("quantization_config", "compression_config")


class ModelSettings:
    """The settings of a model, by the names that all families have for them.

    Everything is what config.json says; None, or the usual value, where it says nothing. Methods
    raise CheckpointError where a setting has an impossible value or contradicts another one.
    """

    def __init__(
        self, config: Config | Mapping[str, Any], whole: Mapping[str, Any] | None = None
    ) -> None:
        """`config`: config.json, or the dictionary of an object of transformers, as the converted
        experts' tower reads it; `whole`: of all towers, where `config` is of one."""
        self._config = config if isinstance(config, Config) else Config(config)
        self._whole = self._config.content if whole is None else whole

    @staticmethod
    def beside(directory: Path, tower: str | None = None) -> ModelSettings:
        """The settings of config.json in a directory. Raises as `read_config`."""
        return ModelSettings(tower_config(read_config(directory).content, tower))

    def __bool__(self) -> bool:
        """Whether anything is said."""
        return bool(self._config.content)

    @cached_property
    def checked(self) -> ModelConfig:
        """The sizes and counts that experts are checked against; raises as `interpret_config`."""
        return interpret_config(self._config)

    @property
    def content(self) -> Mapping[str, Any]:
        """config.json, for what checks the file as such."""
        return self._config.content

    @property
    def family(self) -> Family | None:
        """The row of the table of families."""
        return self._config.family

    @property
    def model_type(self) -> str | None:
        """The model_type at the top of config.json."""
        return self._config.content.get("model_type")

    @property
    def model_types(self) -> list[Any]:
        """The model types of the text section and, if that is another one, of the whole file; None
        for a section without one."""
        return self._config.model_types

    def activation(self, layer: int | None = None) -> ExpertActivation:
        """The activation of the routed experts; see `expert_activation`."""
        return expert_activation(self._config, layer)

    def shared_activation(self, layer: int) -> ExpertActivation:
        """The activation of the shared experts."""
        return shared_activation(self._config, layer)

    @property
    def post_norm_epsilon(self) -> float:
        """The epsilon of norms of the experts' outputs."""
        return post_norm_epsilon(self._config)

    def top_k(self, layer: int | None = None) -> int | None:
        """Experts per token; see `top_k_of`."""
        return top_k_of(self._config, layer)

    def router(self, layer: int) -> RouterSpec:
        """See `router_of`."""
        return router_of(self._config, layer)

    def find_router(self, layer: int, corrected: bool | None = None) -> FoundRouter:
        """See `families.routers.find_router`."""
        return find_router(self._config, layer, corrected)

    @property
    def hidden_size(self) -> Any:
        """The width of the language model."""
        return self._config.values["hidden size"]

    @property
    def num_layers(self) -> int | None:
        """Layers of the language model, without MTP layers."""
        given = (self._config.text.get(key) for key in table.FAMILIES.keys("layers", self.family))
        return next((value for value in given if isinstance(value, int)), None)

    @property
    def vocabulary(self) -> Any:
        """Tokens of the language model."""
        return self._config.text.get("vocab_size")

    @property
    def dtype(self) -> str | None:
        """The name of the dtype in which the model computes."""
        found = (one.get("dtype") or one.get("torch_dtype") for one in self._config.sections)
        return next(filter(None, found), None)

    @property
    def is_quantized(self) -> bool:
        """Whether there is a quantization_config, empty or not."""
        return any(one.get("quantization_config") is not None for one in self._config.sections)

    def document(self) -> dict[str, Any]:
        """The content of a config.json for an output of the same model: all towers, without the
        settings of quantization."""
        return _without_quantization(self._whole)

    @property
    def families(self) -> list[Family]:
        """The rows of the table of families for the whole file, then for its text section."""
        sections = reversed(Config(self._whole).sections)
        kinds = (one.get("model_type") for one in sections)
        return [row for kind in kinds if (row := table.FAMILIES.of(kind)) is not None]

    def keys(self) -> list[str]:
        """Keys of the whole file."""
        return list(self._whole)


def _without_quantization(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_quantization(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if key not in _QUANTIZATION
    }
