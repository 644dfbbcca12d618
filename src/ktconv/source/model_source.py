"""A model to read: where it is, and how it is to be read. Requests carry it as one value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ktconv.errors import UsageError
from ktconv.source.adapter.choices import absolute, choices_of
from ktconv.source.locate import locate_model
from ktconv.source.naming_map import NamingMap, read_map
from ktconv.source.pruning.kept import Pruning, pruning_of_record, read_pruning

if TYPE_CHECKING:
    from ktconv.source.types import Checkpoint


class ModelSource(Struct, frozen=True):
    """A model, and the options about reading it. Nothing is opened before `place` or
    `source.open_checkpoint` is called; plain values only, for other processes."""

    model: str | Path  # a directory, GGUF file, hub id or URL; a revision follows an @
    config: Path | None = None  # directory of config.json and other side files; None: the model's
    map: Path | NamingMap | None = None  # describes the names of a model that nobody knows
    tower: str | None = None  # of several with experts; None: the language model
    adapter: tuple[str, ...] | None = None  # DIR or DIR:WEIGHT: LoRA that is added to weights
    # Which experts stay: a file of `ktconv prune`, or the record of a manifest; None: all.
    prune: Path | Mapping[str, Any] | None = None
    cache: Path | None = None  # keeps what is read of a remote model, for other runs

    @staticmethod
    def of(model: ModelSource | str | Path) -> ModelSource:
        """A model that is named without options, as it is read by default."""
        return model if isinstance(model, ModelSource) else ModelSource(model)

    def __str__(self) -> str:
        """The model as users see it: a URL has no password and no signature."""
        from ktconv.source.remote.urls import shown_model

        return shown_model(str(self.model))

    @property
    def is_url(self) -> bool:
        return isinstance(self.model, str) and "://" in self.model

    def place(self) -> Path:
        """The directory or the GGUF file that the model means; see `locate_model`."""
        return locate_model(self.model, self.cache)

    def naming(self) -> NamingMap | None:
        """The map of names; raises as `read_map`."""
        return read_map(self.map)

    def pruning(self) -> Pruning | None:
        """The experts that stay; None: all. Raises as `read_pruning`."""
        if self.prune is None:
            return None
        if isinstance(self.prune, Path):
            return read_pruning(self.prune)
        return pruning_of_record(self.prune, "the record of kept experts")

    def views(self) -> Iterator[Callable[[Checkpoint], Checkpoint]]:
        """The views through which the opened checkpoint is read, one upon the other: each takes a
        checkpoint and returns another. Raise as `with_adapters` and `with_pruning`."""
        if self.adapter:
            from ktconv.source.adapter.view import with_adapters

            yield partial(with_adapters, texts=self.adapter)
        if (pruning := self.pruning()) is not None:
            from ktconv.source.pruning.view import with_pruning

            yield partial(with_pruning, pruning=pruning)

    def options(self) -> Iterator[tuple[str, Any]]:
        """Names of options and their values, of those that were given."""
        for name in own_options():
            if (value := getattr(self, name)) is not None:
                yield name, value

    def files(self) -> tuple[str | Path, ...]:
        """The files and directories that are read, which no option may write to."""
        paths = (self.config, self.map, self.prune)
        adapters = (one.directory for one in choices_of(self.adapter or ()))
        return (self.model, *(path for path in paths if isinstance(path, Path)), *adapters)

    def recorded(
        self,
        naming: NamingMap | None,
        tower: str | None,
        adapters: tuple[str, ...] | None,
        pruning: Pruning | None = None,
    ) -> ModelSource:
        """Take the map, the tower, the adapters and the kept experts that a manifest has, if none
        is given."""
        return replace(
            self,
            map=self.map or naming,
            tower=self.tower or tower,
            adapter=self.adapter or adapters,
            prune=self.prune or (None if pruning is None else pruning.record()),
        )

    def portable(self) -> ModelSource:
        """Name the model as another machine understands it: by an absolute path, or a URL; of a
        repository of the hub that of its commit, of other URLs with their signatures."""
        there = self if self.adapter is None else replace(self, adapter=absolute(self.adapter))
        if (pruning := self.pruning()) is not None:
            there = replace(there, prune=pruning.record())
        if isinstance(self.model, str) and self.model.startswith("hf://"):
            from ktconv.source.remote.mirror import pinned

            return replace(there, model=pinned(self.model))
        if self.is_url or not Path(self.model).exists():
            return there
        return replace(there, model=str(Path(self.model).absolute()))


def own_options() -> list[str]:
    """Names of the options that decide how a source is read; others say where it is."""
    return [name for name in ModelSource.__struct_fields__ if name not in ("model", "cache")]


def source_or_none(model: ModelSource | str | None) -> ModelSource | None:
    """A source that may be missing: None for None and for an empty name."""
    return ModelSource.of(model) if model else None


def refuse_options(source: ModelSource, reason: str, hint: str) -> None:
    """UsageError for the first option about reading the source that was given."""
    for name, _ in source.options():
        raise UsageError(f"--{name} {reason}", hint)
