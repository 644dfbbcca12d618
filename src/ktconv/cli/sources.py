"""Sources that are not on this machine: the options for them, and what MODEL means with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from ktconv.cli.help import SOURCE
from ktconv.cli.output import notify
from ktconv.cli.parsing import flag, option
from ktconv.errors import UsageError
from ktconv.system.units import format_size

RevisionOption = Annotated[
    str | None,
    option("Branch, tag or commit of a hub model.", "REV", "--revision", panel=SOURCE),
]
DownloadOption = Annotated[
    bool,
    flag(
        "--download",
        "Read a model from the hub if it is not in the cache.",
        SOURCE,
        "Only the bytes that are needed are read, and nothing is stored: docs/remote.md.",
    ),
]
CacheDirOption = Annotated[
    Path | None,
    option(
        "Keep what is read of a remote source here.",
        "DIR",
        panel=SOURCE,
        detail="Other runs read it again from there instead of the network: docs/remote.md.",
    ),
]


def source_of(
    model: str,
    revision: str | None = None,
    download: bool = False,
    cache_dir: Path | None = None,
    *,
    headers_only: bool = False,
    output: Path | None = None,
) -> str:
    """The MODEL that these options mean together, for `locate_model`.

    A URL, with what is read kept in `cache_dir`; a path; or a model of the hub, which becomes a URL
    where the local cache does not have it and it may be read from there: with `download`, or when
    only headers are needed. UsageError for a cache in `output` or around it, and for options that
    do not belong to the model.
    """
    from ktconv.source.remote.urls import is_url

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
        found = found._replace(revision=revision)
    if not is_cached(found) and (download or (headers_only and not _is_offline())):
        if not download:
            notify(f"note: {found.id} is not in the local cache; headers are read from the hub")
        return _opened(found.url, cache_dir, output)
    _refuse_cache(cache_dir, model)
    name = found.id + (f"@{found.revision}" if found.revision else "")
    return name + (f":{found.file}" if found.file else "")


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
    from dataclasses import replace

    file = f":{url.wanted}" if url.wanted else ""
    return replace(url, revision=revision).shown + file


def _opened(url: str, cache_dir: Path | None, output: Path | None) -> str:
    """Opened now, since a model is opened without options."""
    from ktconv.source.remote import open_remote

    if cache_dir is not None:
        if output is not None:
            _refuse_nested(cache_dir, output)
        from ktconv.source.remote.cached import kept_bytes

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
