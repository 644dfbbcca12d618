"""Finds the files of the MODEL argument: a path, or a hub id in the local cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from ktconv.errors import CheckpointError
from ktconv.source.adapter.beside import refuse_adapter
from ktconv.source.gguf.parts import is_gguf, model_files
from ktconv.source.index import INDEX_SUFFIX
from ktconv.source.remote.urls import Url, parse_url
from ktconv.source.shards import file_names
from ktconv.system.files import is_there
from ktconv.system.regular_files import broken_link
from ktconv.system.text import first_few

_HUB_ID = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[^:\0]+))?(?::(?P<file>[^:\0]+))?"
)
_IMATRIX = (".imatrix", ".dat")


def hub_model(model: str) -> Url | None:
    """Hub model of a MODEL argument that is no path; None for one that cannot be on the hub."""
    match = _HUB_ID.fullmatch(model)
    return match and Url("hf", match["id"], match["revision"], wanted=match["file"])


def locate_model(model: str | Path, cache: Path | None = None) -> Path:
    """The directory of safetensors files, or one of the GGUF files, that `model` means; touches
    the network for a URL only.

    `model` is a URL (see `remote.urls`), a directory, a GGUF file, or a hub id `org/name` or
    `org/name@revision` of the local Hugging Face cache; a name after a colon chooses one of several
    GGUF models there, as in `org/name:Q4_K_M`. A directory with safetensors files counts as such;
    otherwise it must contain one GGUF model, or its subdirectories must. `cache` keeps what is read
    of a URL. Raises CheckpointError, whose hint says what to give instead.
    """
    if isinstance(model, str) and "://" in model:
        return _remote(model, cache)
    path = model if isinstance(model, Path) else Path(model)
    if path.is_dir():
        return _in_directory(path, str(model))
    if is_there(path):
        return _file(path)
    if isinstance(model, str) and (found := hub_model(model)):
        return _in_directory(_locate_in_cache(found), model, found.wanted)
    if link := broken_link(path):
        raise link
    raise CheckpointError(
        f"{model} does not exist",
        "Give a checkpoint directory, a GGUF file, or a hub id org/name from the local cache.",
    )


def _remote(model: str, cache: Path | None) -> Path:
    from ktconv.source.remote.mirror import open_remote

    return _in_directory(open_remote(model, cache), model, parse_url(model).wanted)


def _file(path: Path) -> Path:
    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        raise CheckpointError(
            f"{path} is a file, not a checkpoint directory",
            f"Use its directory: {path.parent}",
        )
    if path.name.endswith(_IMATRIX):
        raise CheckpointError(
            f"{path} is an importance matrix, not a model",
            "Give the model that it was computed for.",
        )
    if is_gguf(path):
        return path
    raise CheckpointError(
        f"{path} is not a directory, and no GGUF file either",
        "Give a checkpoint directory or a GGUF file.",
    )


# ---- GGUF models in a directory --------------------------------------------------------


def _in_directory(directory: Path, model: str, wanted: str | None = None) -> Path:
    """`directory`, or a file of the one GGUF model in it."""
    names = file_names(directory)
    refuse_adapter(directory, names)
    if wanted is None and any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in names):
        return directory
    found = {name: directory / file for name, file in model_files(names).items()}
    if not found or wanted is not None:
        found |= _below(directory)
    if wanted is not None:
        found = _chosen(found, directory, model, wanted)
    if not found:
        return directory  # whose weights, if any, are of another kind
    if len(found) > 1:
        raise CheckpointError(
            f"{directory} contains {len(found)} GGUF models: {first_few([*found], 20)}",
            "Give the file of one of them"
            + (f", or its name after a colon: {model}:NAME." if not Path(model).exists() else "."),
        )
    [file] = found.values()
    return file


def _below(directory: Path) -> dict[str, Path]:
    """GGUF models in subdirectories, where repositories with several have them."""
    folders = (path for path in directory.iterdir() if path.is_dir())
    inner = sorted(path.name for path in folders if path.name[0] != ".")
    found: dict[str, Path] = {}
    for name in inner:
        with contextlib.suppress(OSError):  # one that cannot be listed has no model for us
            inside = (path for path in (directory / name).iterdir() if not path.is_dir())
            files = model_files(path.name for path in inside)
            found |= {f"{name}/{stem}": directory / name / file for stem, file in files.items()}
    return found


def _chosen(found: Mapping[str, Path], directory: Path, model: str, wanted: str) -> dict[str, Path]:
    """Models that `wanted` names: by their files, else by a word of their names."""
    whole = {
        name: file
        for name, file in found.items()
        if wanted in (name, file.name, file.relative_to(directory).as_posix())
    }
    word = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9_])", re.IGNORECASE)
    chosen = whole or {name: file for name, file in found.items() if word.search(name)}
    if chosen:
        return chosen
    there = f"; there are {first_few([*found], 20)}" if found else ""
    raise CheckpointError(
        f"{model}: {directory} contains no GGUF model called {wanted}{there}",
        "Give the name of a file that is there, or download it.",
    )


# ---- the hub's cache -------------------------------------------------------------------


def is_cached(model: Url) -> bool:
    """Whether the local cache has this revision."""
    try:
        _locate_in_cache(model)
    except CheckpointError:
        return False
    return True


def _locate_in_cache(model: Url) -> Path:
    named = model.place + (f"@{model.revision}" if model.revision else "")
    try:
        from huggingface_hub import snapshot_download  # imports slowly; only needed here
    except ImportError:
        raise CheckpointError(
            f"{named} is not a directory, and without huggingface_hub the local Hugging Face "
            "cache cannot be searched for it",
            f"pip install huggingface_hub, then: {model.download}",
        ) from None
    try:
        return Path(snapshot_download(model.place, revision=model.revision, local_files_only=True))
    except (OSError, ValueError):  # not cached, cached in part, or not a valid id
        raise CheckpointError(
            f"{named} is neither a directory nor a model in the local Hugging Face cache",
            f"Check the path, or download it first: {model.download}; or read it from the hub "
            f"while it is used: {model.whole}",
        ) from None
