"""Keys of config.json that decide how a checkpoint is read, found by watching the readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ktconv.errors import CheckpointError
from ktconv.families.activations import expert_activation
from ktconv.families.config import Config
from ktconv.families.config_values import check_values
from ktconv.families.routers import find_router
from ktconv.source.config import interpret_config
from ktconv.source.types import Checkpoint


class _Watched(dict[str, Any]):
    """A section of config.json that counts how often its keys are looked up."""

    def __init__(self, content: Mapping[str, Any], path: str, seen: Counter[str]) -> None:
        super().__init__(
            (key, _Watched(value, f"{path}{key}.", seen) if isinstance(value, dict) else value)
            for key, value in content.items()
        )
        self._path, self._seen = path, seen

    def __getitem__(self, key: str) -> Any:
        self._see(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._see(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._see(key)
        return super().__contains__(key)

    def _see(self, key: object) -> None:
        if super().__contains__(key):
            self._seen[f"{self._path}{key}"] += 1


def settings_used(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """Settings that decide how experts, activation and router are read, and keys of config.json
    next to them; those of sections for other models are not listed."""
    seen, checked = Counter[str](), Counter[str]()
    watched = Config(_Watched(checkpoint.config.content, "", seen))
    interpret_config(watched)
    # That also checks all values, which is no use of them.
    check_values(Config(_Watched(checkpoint.config.content, "", checked)).sections)
    seen -= checked
    for layer in checkpoint.layers:
        expert_activation(watched, layer.index)
        try:
            find_router(watched, layer.index)
        except CheckpointError:
            continue
    sections = Config(checkpoint.config.content).sections
    every = dict(_leaves(checkpoint.config.content, sections, ""))
    used = {path: value for path, value in every.items() if seen[path] > 0 and value is not None}
    return used, sorted(every.keys() - used.keys())


def _leaves(
    section: Mapping[str, Any], wanted: Sequence[Mapping[str, Any]], path: str
) -> Iterator[tuple[str, Any]]:
    """Keys of the language model's sections and of quantization_config."""
    for key, value in section.items():
        if not isinstance(value, dict):
            yield f"{path}{key}", value
        elif key == "quantization_config" or any(value is one for one in wanted):
            yield from _leaves(value, wanted, f"{path}{key}.")
