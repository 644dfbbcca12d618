"""The modules that an adapter changes, as PEFT reads its config: others were not trained.

A name in target_modules or exclude_modules is that of a module, or the end of one from a dot on; a
text in place of a list is a pattern for whole names. layers_to_transform leaves only layers of
these numbers. Older versions of PEFT (0.18) took the last number of a name for the layer's, which
is an expert's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from ktconv.errors import CheckpointError
from ktconv.source.adapter.parameters import is_named
from ktconv.system.patterns import PatternError, Patterns

_ALL = "all-linear"  # of target_modules


class TargetModules:
    """The modules that `content` of adapter_config.json names; all where it names none.

    `there`: modules of experts that the adapter has. Their names show which number of a name is
    the layer's. CheckpointError for patterns that cannot be matched.
    """

    def __init__(self, config: Path, content: Mapping[str, Any], there: Iterable[str]) -> None:
        targets = content.get("target_modules")
        everything = not targets or (isinstance(targets, str) and targets.lower() == _ALL)
        self._targets = None if everything else _Names(config, "target_modules", targets)
        excluded = content.get("exclude_modules")
        self._excluded = _Names(config, "exclude_modules", excluded) if excluded else None
        self._layers = frozenset(_numbers(content.get("layers_to_transform")))
        pattern = content.get("layers_pattern") or []
        self._before = [pattern] if isinstance(pattern, str) else list(pattern)
        self._number = 0
        if self._layers and not all(self._in_layers(one) for one in there):
            self._number = -1

    def has(self, module: str) -> bool:
        """Whether the adapter is of this module."""
        if self._excluded is not None and self._excluded.name(module):
            return False
        if self._targets is None:
            return True
        if self._layers and self._targets.listed and not self._targets.has_whole(module):
            return self._targets.name(module) and self._in_layers(module)
        return self._targets.name(module)

    def _in_layers(self, module: str) -> bool:
        numbers = list(self._numbers(module.split(".")))
        return bool(numbers) and numbers[self._number] in self._layers

    def _numbers(self, words: Sequence[str]) -> Iterator[int]:
        """Numbers in a name that may be a layer's."""
        for place, (before, word) in enumerate(pairwise(words[:-1])):
            fits = before in self._before if self._before else place > 0
            if word.isdecimal() and fits:
                yield int(word)


class _Names:
    """Names of modules, or a pattern for them."""

    def __init__(self, config: Path, setting: str, value: Any) -> None:
        self._where = f"{config}: the patterns of {setting}"
        self.listed = not isinstance(value, str)
        self._names = frozenset(one for one in value if isinstance(one, str))
        self._pattern = None
        if not self.listed:
            with _named(self._where):
                self._pattern = Patterns([f"^(?:{value})"])

    def has_whole(self, module: str) -> bool:
        return module in self._names

    def name(self, module: str) -> bool:
        """Whether they name a module."""
        if self._pattern is not None:
            with _named(self._where):
                return self._pattern.first(module) is not None
        return is_named(module, self._names)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Names the setting whose pattern cannot be matched."""
    try:
        yield
    except PatternError as error:
        raise CheckpointError(
            f"{where} {error}",
            "write names of modules in place of it; or merge it with PEFT",
        ) from None


def _numbers(value: Any) -> Iterator[int]:
    """Numbers of layers, of which a config may have one or many."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, int) and not isinstance(one, bool):
            yield one
