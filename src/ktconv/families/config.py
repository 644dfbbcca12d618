"""The one reader of config.json: settings by the names that families have for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktconv.families import table
from ktconv.families.config_values import contradiction, is_whole, wrong_value
from ktconv.families.family import Family

USUAL_TOP_K = 8  # where config.json does not say


class _Values(dict[str, Any]):
    """Values of a section by names of settings, each looked up when it is first asked for."""

    def __init__(
        self,
        section: Mapping[str, Any],
        family: Family | None = None,
        layer: int | None = None,
    ) -> None:
        super().__init__()
        self._section, self._family, self._layer = section, family, layer

    def __missing__(self, setting: str) -> Any:
        value = _value(self._section, setting, self._family)
        return self.setdefault(setting, of_layer(value, self._layer))


class Config:
    """A model's config.json, in which the text model's section and the family were found once.

    Values are those under the first of a setting's names in `table.KEYS` that is present, None
    where none is.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        # The language model's section, which is all of it for a text model.
        self.text = text_section(content)
        # The first takes precedence.
        self.sections = (self.text,) if self.text is content else (self.text, content)
        # Of each section; None where it has none.
        self.model_types = [_value(section, "model type") for section in self.sections]
        # That of the text section, which may leave it to the whole model (DeepSeek-VL), or have one
        # of its own that only the model's code knows (minimax_m3_text); "": none.
        said = [kind for kind in self.model_types if kind]
        known = next((kind for kind in said if table.FAMILIES.of(kind)), said[0] if said else "")
        self.type = str(known).removesuffix("_text")
        self.family = table.FAMILIES.of(self.type)
        self.values: Mapping[str, Any] = _Values(self.text)
        # The same, by the family's names first.
        self.own: Mapping[str, Any] = _Values(self.text, self.family)

    def own_of(self, layer: int) -> Mapping[str, Any]:
        """The values by the family's names, of lists those for `layer`."""
        return _Values(self.text, self.family, layer)

    @property
    def checked_text(self) -> Mapping[str, Any]:
        """The text section. Raises CheckpointError for a text_config that is no object."""
        if not isinstance(self.content.get("text_config"), (Mapping, type(None))):
            raise wrong_value("text_config", self.content["text_config"], "an object")
        return self.text


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's section of config.json, which is all of it for a text model.

    Settings of a section of its own for the experts (DBRX) are among it.
    """
    section: Any = config
    while section is not None:
        config = section
        inner = (config.get(key) for key in table.FAMILIES.keys("text section"))
        section = next((one for one in inner if isinstance(one, dict)), None)
    inside = (config.get(key) for key in table.FAMILIES.keys("MoE section"))
    experts = next((one for one in inside if isinstance(one, dict)), None)
    return config if experts is None else {**experts, **config}


def _value(section: Mapping[str, Any], setting: str, family: Family | None = None) -> Any:
    given = (section.get(key) for key in table.FAMILIES.keys(setting, family))
    return next((value for value in given if value is not None), None)


def top_k_of(config: Config, layer: int | None = None) -> int | None:
    """The number of experts of each token in `layer`; None where config.json does not say.

    The first section with any of the keys decides, and in it the first key in the order of
    `Families.keys`; a list that is too short for `layer` decides that nothing is said. Raises
    CheckpointError for a value that is not a count, such as a list without a `layer`, and where
    keys of one section disagree.
    """
    keys = table.FAMILIES.keys("top_k", config.family)
    for section in (config.checked_text, *config.sections[1:]):
        given = [(key, section[key]) for key in keys if section.get(key) is not None]
        if given:
            return _agreed([(key, of_layer(value, layer)) for key, value in given])
    return None


def of_layer(value: Any, layer: int | None) -> Any:
    """The value for `layer` in a list with one for each; None if the list is too short."""
    if layer is None or not isinstance(value, list):
        return value
    return value[layer] if layer < len(value) else None


def _agreed(given: Sequence[tuple[str, Any]]) -> int | None:
    (first, top_k), *others = given
    if top_k is None:
        return None
    if not is_whole(top_k, 1):
        raise wrong_value(first, top_k, "a number of experts")
    for key, value in others:
        if not isinstance(value, list) and value not in (None, top_k):
            raise contradiction(first, top_k, key, value)
    return int(top_k)
