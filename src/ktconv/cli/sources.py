"""The options about reading a source, and what MODEL means with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_type_hints

from msgspec import Struct
from msgspec.structs import replace

from ktconv.cli.help import ADVANCED, SOURCE
from ktconv.cli.output import notify
from ktconv.cli.parameters import Run, flag, option, with_options
from ktconv.errors import UsageError
from ktconv.system.units import format_size

if TYPE_CHECKING:
    from ktconv.source.model_source import ModelSource


class Reading(Struct, frozen=True):
    """Options about the source of a command; each field is an option of every command that
    `reads_source` decorates. What does not change where bytes come from is `ModelSource`'s."""

    revision: Annotated[
        str | None,
        option("Branch, tag or commit of a hub model.", "REV", "--revision", panel=SOURCE),
    ] = None
    download: Annotated[
        bool,
        flag(
            "--download",
            "Read a model from the hub if it is not in the cache.",
            SOURCE,
            "Only the bytes that are needed are read, and nothing is stored: docs/remote.md.",
        ),
    ] = False
    cache_dir: Annotated[
        Path | None,
        option(
            "Keep what is read of a remote source here.",
            "DIR",
            panel=ADVANCED,
            detail="Other runs read it again from there instead of the network: docs/remote.md.",
        ),
    ] = None
    config: Annotated[
        Path | None,
        option(
            "Directory with config.json and tokenizer to use.",
            "DIR",
            panel=SOURCE,
            detail="The model's own files are not used then; a GGUF model has none.",
        ),
    ] = None
    map: Annotated[
        Path | None,
        option(
            "Names of the experts in a model unknown to ktconv.",
            "FILE.toml",
            "--map",
            panel=ADVANCED,
            detail="`ktconv inspect MODEL --explain` drafts the file: docs/maps.md. The default is "
            "the map that an output records.",
        ),
    ] = None
    tower: Annotated[
        str | None,
        option(
            "Tower to use if several have experts.",
            "NAME",
            panel=ADVANCED,
            detail="The default is the language model; of a finished output, the tower that it "
            "records.",
        ),
    ] = None
    adapter: Annotated[
        list[str] | None,
        option(
            "LoRA adapter to add to the model's weights.",
            "DIR[:W]",
            panel=SOURCE,
            detail="Adapters of PEFT, KTransformers and ktconv are read. May be repeated; each is "
            "added W times, so that weights get W s B A: docs/fine-tuning.md. The default "
            "is what a finished output records.",
        ),
    ] = None

    prune: Annotated[
        Path | None,
        option(
            "Keep only some experts of the model.",
            "FILE",
            panel=SOURCE,
            detail="A file of `ktconv prune --write`, or the ktconv.json of a pruned output: "
            "docs/pruning.md. The default is what a finished output records.",
        ),
    ] = None

    def source(
        self, model: str, *, headers_only: bool = False, output: Path | None = None
    ) -> ModelSource:
        """The source that MODEL means with these options.

        A URL, with what is read kept in `cache_dir`; a path; or a model of the hub, which becomes a
        URL where the local cache does not have it and it may be read from there: with `download`,
        or when only headers are needed. UsageError for a cache in `output` or around it, and for
        options that do not belong to the model.
        """
        from ktconv.source.model_source import ModelSource, own_options

        found = self._located(model, headers_only, output)
        kept = {name: getattr(self, name) for name in own_options()}
        kept["adapter"] = None if self.adapter is None else tuple(self.adapter)
        return ModelSource(found, cache=self.cache_dir, **kept)

    def source_if(self, model: str | None, *, output: Path | None = None) -> ModelSource | None:
        """The source that --source means; None without it. UsageError for other options about it
        then."""
        if model:
            return self.source(model, output=output)
        for name in Reading.__struct_fields__:
            if getattr(self, name) != getattr(USUAL, name):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} belongs to --source", "give --source MODEL too")
        return None

    def _located(self, model: str, headers_only: bool, output: Path | None) -> str:
        from ktconv.source.remote.urls import is_url

        revision, download, cache_dir = self.revision, self.download, self.cache_dir
        if is_url(model):
            return _opened(_with_revision(model, revision), cache_dir, output)
        from ktconv.source.locate import hub_model, is_cached

        found = None if Path(model).exists() else hub_model(model)
        if found is None:
            for name, given in (("revision", revision), ("download", download)):
                if given:
                    raise UsageError(
                        f"--{name} is for models of the hub, and {model} is not one",
                        f"give org/name, or omit --{name}",
                    )
            _refuse_cache(cache_dir, model)
            return model
        if revision is not None:
            if found.revision is not None:
                raise UsageError(f"{model} names a revision, and --revision another", "give one")
            found = replace(found, revision=revision)
        if not is_cached(found) and (download or (headers_only and not _is_offline())):
            if not download:
                notify(
                    f"note: {found.place} is not in the local cache; headers are read from the hub"
                )
            return _opened(found.whole, cache_dir, output)
        _refuse_cache(cache_dir, model)
        name = found.place + (f"@{found.revision}" if found.revision else "")
        return name + (f":{found.wanted}" if found.wanted else "")


USUAL = Reading()  # no option is given


def reads_source(*left_out: str) -> Callable[[Run], Run]:
    """Give a command the options of `Reading` without those that are left out: its parameter
    `reading` becomes them."""

    def decorate(command: Run) -> Run:
        types = get_type_hints(Reading, include_extras=True)
        options = [
            Parameter(
                name, Parameter.KEYWORD_ONLY, default=getattr(USUAL, name), annotation=types[name]
            )
            for name in Reading.__struct_fields__
            if name not in left_out
        ]
        return with_options(command, "reading", options, lambda given: Reading(**given))

    return decorate


def _is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask the hub, as its library reads it."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return bool(constants.HF_HUB_OFFLINE)


def _with_revision(model: str, revision: str | None) -> str:
    from ktconv.source.remote.urls import parse_url

    if revision is None:
        return model
    url = parse_url(model)
    if url.scheme != "hf" or url.revision is not None:
        raise UsageError(
            f"--revision does not go with {url.shown}",
            "give it with a model of the hub that names no revision of its own",
        )
    return replace(url, revision=revision).whole


def _opened(url: str, cache_dir: Path | None, output: Path | None) -> str:
    if cache_dir is not None:
        if output is not None:
            _refuse_nested(cache_dir, output)
        from ktconv.source.remote.cached import kept_bytes
        from ktconv.source.remote.mirror import open_remote

        open_remote(url, cache_dir)
        notify(f"note: {cache_dir} keeps what is read; it has {format_size(kept_bytes(cache_dir))}")
    return url


def _refuse_nested(cache_dir: Path, output: Path) -> None:
    cache, written = (Path(os.path.realpath(path)) for path in (cache_dir, output))
    if cache.is_relative_to(written) or written.is_relative_to(cache):
        raise UsageError(
            f"--cache-dir {cache_dir} and OUTPUT {output} are one directory, or one is in the "
            "other",
            "choose a directory for the cache that is neither in OUTPUT nor around it",
        )


def _refuse_cache(cache_dir: Path | None, model: str) -> None:
    if cache_dir is not None:
        raise UsageError(
            f"--cache-dir is for sources that are read over a network, and {model} is on this "
            "machine, or should be",
            "omit it, or give a URL or --download",
        )
