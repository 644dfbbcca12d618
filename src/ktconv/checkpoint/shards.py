"""Which files make up a checkpoint: safetensors files that match their index, or GGUF files."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktconv.checkpoint.gguf.parts import SUFFIX, all_parts, read_parts
from ktconv.checkpoint.hub_cache import download_command
from ktconv.checkpoint.safetensors_file import Header, read_header
from ktconv.checkpoint.strict_json import parse_object
from ktconv.errors import CheckpointError, ResourceError
from ktconv.system.elsewhere import Span, advise, elsewhere_of
from ktconv.system.regular_files import read_small
from ktconv.system.text import path_of

INDEX_SUFFIX = ".safetensors.index.json"
DEFAULT_INDEX = "model" + INDEX_SUFFIX
SINGLE_FILE = "model.safetensors"
HEAD_BYTES = 256 << 10  # of a file of unknown tensors: most headers end there
_ENTRY_BYTES = 90  # of a tensor in a header, beside its name: dtype, shape and offsets
_METADATA_BYTES = 256  # and what else a header has

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LONGEST_NAME = 255  # bytes of a name, in every file system of Linux
_NUMBERED = re.compile(r"^(.*-)(\d+)(-of-)(\d+)(\.safetensors)$")
_INDEX_HINT = "Download the checkpoint again, or repair the index by hand."
_SHARD_HINT = "Download the missing files; incomplete checkpoints are not converted."


@dataclass(frozen=True, slots=True)
class ShardSelection:
    """The files to open, before any of them is opened."""

    files: Sequence[Path]  # in name order
    index: Path | None
    weight_map: Mapping[str, str]  # tensor name to file name; empty without an index
    notes: Sequence[str]
    gguf: bool = False


def select_shards(place: Path) -> ShardSelection:
    """Choose the files of the checkpoint at `place`, which `locate_model` found.

    Raises CheckpointError for files that are missing.
    """
    # A broken link or a pipe with such a name is refused when it is opened.
    if place.is_file() or (place.name.endswith(SUFFIX) and not place.is_dir()):
        return ShardSelection(all_parts(place), None, {}, [], gguf=True)
    return _select_safetensors(place)


def _select_safetensors(directory: Path) -> ShardSelection:
    """Choose the safetensors files of the checkpoint in `directory` and check they exist.

    An index decides; without one, model.safetensors; without that, every *.safetensors
    at the top level. Sub-directories, which contain other copies, are not searched.
    """
    names = file_names(directory)
    index = _select_index(directory, names)
    if index is not None:
        return _select_by_index(directory, index, names)
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    if not shards:
        raise _no_safetensors(directory, names)
    chosen = [SINGLE_FILE] if SINGLE_FILE in shards else shards
    _check_numbering(directory, chosen)
    notes = _ignored_note(set(shards) - set(chosen), f"the weights are in {SINGLE_FILE}")
    return ShardSelection([directory / name for name in chosen], None, {}, notes)


def read_shards(selection: ShardSelection) -> list[Header]:
    """Read every selected header once and check them against the index and each other."""
    if any(map(elsewhere_of, selection.files)):
        advise([Span(file, 0, size) for file, size in _head_sizes(selection)], lambda _: None)
    read = read_parts if selection.gguf else _read_each
    headers = read(selection.files)
    if selection.index is None:
        _check_unique(headers)
    else:  # the index has one shard for each tensor, so this checks uniqueness too
        _check_against_index(selection.index, selection.weight_map, headers)
    return headers


def _head_sizes(selection: ShardSelection) -> Iterator[tuple[Path, int]]:
    """About how many bytes the header of each file has: by the names in the index, where there is
    one. Of a source that is elsewhere, one request brings it, and little else."""
    sizes: Counter[str] = Counter()
    for name, shard in selection.weight_map.items():
        sizes[shard] += len(name) + _ENTRY_BYTES
    for file in selection.files:
        known = sizes.get(file.name)
        yield file, HEAD_BYTES if known is None else known + _METADATA_BYTES


def _read_each(files: Sequence[Path]) -> list[Header]:
    return [read_header(file) for file in files]


def file_names(directory: Path) -> list[str]:
    """Names of the files in `directory`, and of links to nothing, in order.

    Raises CheckpointError if it is no directory, ResourceError if it cannot be listed.
    """
    try:
        with os.scandir(directory) as entries:
            # A dangling symlink is listed too: the shard that it should be is missing.
            return sorted(entry.name for entry in entries if not Path(entry).is_dir())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} does not exist", "Check the path.") from None
    except NotADirectoryError:
        raise CheckpointError(f"{directory} is not a directory", "Give the directory.") from None
    except OSError as error:
        raise ResourceError(
            f"{directory} cannot be listed: {error.strerror}", "Check its permissions."
        ) from error


def _no_safetensors(directory: Path, names: Sequence[str]) -> CheckpointError:
    if not names:
        return CheckpointError(f"{directory} is empty", "Give a checkpoint directory.")
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        return CheckpointError(
            f"{directory} contains only pickle weights ({_listed(pickles)}), which "
            "are not read because unpickling can execute code",
            "Use a safetensors version of the checkpoint; if you trust this one, "
            "load it with transformers and call save_pretrained.",
        )
    return CheckpointError(
        f"{directory} contains no safetensors or GGUF file",
        f"A checkpoint has {DEFAULT_INDEX} with its shards, {SINGLE_FILE}, *.safetensors, or one "
        "GGUF model.",
    )


def _select_index(directory: Path, names: Sequence[str]) -> Path | None:
    candidates = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if not candidates:
        return None
    if DEFAULT_INDEX not in candidates and len(candidates) > 1:
        raise CheckpointError(
            f"{directory} contains several indexes and none is {DEFAULT_INDEX}: "
            f"{_listed(candidates, limit=10)}",
            "Keep only one of them in the directory.",
        )
    return directory / (DEFAULT_INDEX if DEFAULT_INDEX in candidates else candidates[0])


def _select_by_index(directory: Path, index: Path, names: Sequence[str]) -> ShardSelection:
    weight_map = _read_weight_map(index)
    chosen = sorted(set(weight_map.values()))
    for name in chosen:
        _check_plain_name(index, name)
    missing = [name for name in chosen if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the {len(chosen)} shards that {index} names are missing: "
            f"{_listed(missing)}",
            _download(directory, missing) or _SHARD_HINT,
        )
    unused = {name for name in names if name.endswith(".safetensors")} - set(chosen)
    if SINGLE_FILE in unused:
        # Loaders disagree on which of the two counts.
        raise CheckpointError(
            f"{directory} contains both {SINGLE_FILE} and {index.name}, which does not name it",
            "Remove the one that does not belong to the checkpoint.",
        )
    notes = _ignored_note(unused, f"{index.name} does not name them")
    return ShardSelection([directory / name for name in chosen], index, weight_map, notes)


def _download(directory: Path, missing: Sequence[str]) -> str | None:
    command = download_command(directory, missing)
    return command and f"Download what is missing: {command}"


def _read_weight_map(index: Path) -> Mapping[str, str]:
    data = read_small(index.parent, index.name)
    weight_map = parse_object(data, str(index), _INDEX_HINT).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map object", _INDEX_HINT)
    if not weight_map:
        raise CheckpointError(f"{index} has an empty weight_map", _INDEX_HINT)
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{index} maps {key!r} to {name!r}, not a file", _INDEX_HINT)
        if not name.isascii():
            weight_map[key] = path_of(name)
    return weight_map


def _check_plain_name(index: Path, name: str) -> None:
    """A file name from an index must not lead out of the checkpoint's directory."""
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise CheckpointError(
            f"{index} names the file {name!r}, which is not a plain name in its own directory",
            "For safety, shards must be in the same directory as the index (symlinks "
            "are followed).",
        )
    if len(os.fsencode(name)) > _LONGEST_NAME:
        raise CheckpointError(
            f"{index} names a file with {len(name)} characters: {name[:40]!r}...", _INDEX_HINT
        )
    if not name.endswith(".safetensors"):
        raise CheckpointError(f"{index} names {name!r}, not a safetensors file", _INDEX_HINT)


def _check_numbering(directory: Path, names: Iterable[str]) -> None:
    """Without an index, names like x-00002-of-00005.safetensors still show what is missing."""
    present = set(names)
    for name in sorted(present):
        match = _NUMBERED.match(name)
        if match is None:
            continue
        stem, number, of, total, suffix = match.groups()
        expected = [
            f"{stem}{i:0{len(number)}d}{of}{total}{suffix}"
            for i in range(1, min(int(total), 99_999) + 1)
        ]
        missing = [other for other in expected if other not in present]
        if missing and name in expected:
            raise CheckpointError(
                f"{len(missing)} of the {len(expected)} shards in {directory} are missing: "
                f"{_listed(missing)}",
                _SHARD_HINT,
            )


def _check_unique(headers: Sequence[Header]) -> None:
    total = sum(len(header.tensors) for header in headers)
    if len({tensor.name for header in headers for tensor in header.tensors}) == total:
        return
    owner: dict[str, Path] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in owner:
                raise CheckpointError(
                    f"tensor {tensor.name!r} is in both {owner[tensor.name]} and {header.file}",
                    "Keep only the files of one checkpoint in the directory.",
                )
            owner[tensor.name] = header.file


def _check_against_index(
    index: Path, weight_map: Mapping[str, str], headers: Sequence[Header]
) -> None:
    found = 0
    for header in headers:
        shard = header.file.name
        for tensor in header.tensors:
            if weight_map.get(tensor.name) != shard:
                raise _unlisted(index, weight_map, tensor.name, shard)
        found += len(header.tensors)
    if found == len(weight_map):
        return
    present = {tensor.name for header in headers for tensor in header.tensors}
    missing = [name for name in weight_map if name not in present]
    raise CheckpointError(
        f"{index} says that {weight_map[missing[0]]} contains {missing[0]!r}, but "
        "it does not"
        + (f" ({len(missing)} tensors are missing in all)" if len(missing) > 1 else ""),
        _INDEX_HINT,
    )


def _unlisted(
    index: Path, weight_map: Mapping[str, str], tensor: str, shard: str
) -> CheckpointError:
    listed = weight_map.get(tensor)
    where = f"says it is in {listed}" if listed else "does not list it"
    return CheckpointError(f"{shard} contains {tensor!r}, but {index} {where}", _INDEX_HINT)


def _ignored_note(names: Iterable[str], reason: str) -> list[str]:
    ignored = sorted(names)
    return [f"not read, because {reason}: {_listed(ignored, limit=10)}"] if ignored else []


def _listed(names: Sequence[str], limit: int = 3) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
