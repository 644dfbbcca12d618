"""The index of a sharded checkpoint, which says what tensor is in which shard.

It is the authority: of several copies of a tensor the one that it names counts, and tensors that it
does not list are no part of the model. What it names must be there.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ktconv.errors import CheckpointError
from ktconv.source.adapter.beside import is_adapter_file
from ktconv.source.safetensors_file import Header, Unused, read_header
from ktconv.source.strict_json import read_object
from ktconv.source.types import SourceFile, TensorRef
from ktconv.system.regular_files import MAX_SMALL_BYTES
from ktconv.system.text import first_few, path_of, path_text
from ktconv.system.units import counted, format_size

INDEX_SUFFIX = ".safetensors.index.json"
DEFAULT_INDEX = "model" + INDEX_SUFFIX

_LONGEST_NAME = 255  # bytes of a name, in every file system of Linux
_HINT = "Download the checkpoint again, or repair the index by hand."


class Index(Struct, frozen=True):
    """An index as it was read."""

    path: Path
    weight_map: Mapping[str, str]  # tensor name to file name
    nbytes: int
    sha256: str

    @property
    def state(self) -> SourceFile:
        """The file's state when it was read."""
        return SourceFile(path_text(self.path.name), self.nbytes, None, self.sha256)

    @property
    def shards(self) -> list[str]:
        """Names of files, in order."""
        return sorted(set(self.weight_map.values()))


def read_index(directory: Path, names: Sequence[str]) -> Index | None:
    """The index among the files of a checkpoint; None without one. CheckpointError for several, and
    for one that is damaged or names files outside of `directory`."""
    candidates = [
        name for name in names if name.endswith(INDEX_SUFFIX) and not is_adapter_file(name)
    ]
    if not candidates:
        return None
    if DEFAULT_INDEX not in candidates and len(candidates) > 1:
        raise CheckpointError(
            f"{directory} contains several indexes and none is {DEFAULT_INDEX}: "
            f"{first_few(candidates, 10)}",
            "Keep only one of them in the directory.",
        )
    path = directory / (DEFAULT_INDEX if DEFAULT_INDEX in candidates else candidates[0])
    content, data = read_object(
        directory, path.name, _HINT, MAX_SMALL_BYTES, allow_same_twice=False
    )
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} has no weight_map object", _HINT)
    if not weight_map:
        raise CheckpointError(f"{path} has an empty weight_map", _HINT)
    if {*map(type, weight_map.values())} != {str}:
        key, name = next(one for one in weight_map.items() if not isinstance(one[1], str))
        raise CheckpointError(f"{path} maps {key!r} to {name!r}, not a file", _HINT)
    plain = {name: _plain(name) for name in set(weight_map.values())}
    if any(name != found for name, found in plain.items()):
        weight_map = {key: plain[name] for key, name in weight_map.items()}
    index = Index(path, weight_map, len(data), hashlib.sha256(data).hexdigest())
    for name in index.shards:
        _check_plain_name(path, name)
    return index


def _plain(name: str) -> str:
    """The name of a file, as this machine has it; "./" is the same directory."""
    name = name.removeprefix("./")
    return name if name.isascii() else path_of(name)


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
            f"{index} names a file with {counted(len(name), 'character')}: {name[:40]!r}...", _HINT
        )
    if not name.endswith(".safetensors"):
        raise CheckpointError(f"{index} names {name!r}, not a safetensors file", _HINT)


# ---- what is in the shards -----------------------------------------------------------------


def as_indexed(index: Index, headers: Sequence[Header]) -> tuple[list[Header], list[str]]:
    """The headers with the tensors that the index has in their shards; others are counted in
    `Header.elsewhere` and `unlisted`, and named in notes. CheckpointError if one that it names is
    missing."""
    weight_map, kept = index.weight_map, list[Header]()
    for header in headers:
        shard = header.file.name
        tensors = [one for one in header.tensors if weight_map.get(one.name) == shard]
        if len(tensors) < len(header.tensors):
            others = [one for one in header.tensors if weight_map.get(one.name) != shard]
            header = replace(
                header,
                tensors=tensors,
                elsewhere=_unused(one for one in others if one.name in weight_map),
                unlisted=_unused(one for one in others if one.name not in weight_map),
            )
        kept.append(header)
    if sum(len(header.tensors) for header in kept) < len(weight_map):
        raise _missing_tensors(index, headers)
    return kept, list(_ignored(index, kept))


def _unused(tensors: Iterable[TensorRef]) -> Unused:
    sizes = [tensor.nbytes for tensor in tensors]
    return Unused(len(sizes), sum(sizes))


def _ignored(index: Index, headers: Sequence[Header]) -> Iterator[str]:
    """Copies and tensors that `as_indexed` left out."""
    name = index.path.name
    if found := _in_words([(one.file.name, one.elsewhere) for one in headers]):
        tensors, where = found
        yield f"ignored {tensors} that {name} has in other shards: {where}"
    if found := _in_words([(one.file.name, one.unlisted) for one in headers]):
        tensors, where = found
        yield f"ignored {tensors} that {name} does not list: {where}"


def _in_words(unused: Sequence[tuple[str, Unused]]) -> tuple[str, str] | None:
    """Sentence with the number, size and place of the tensors; None if there are none."""
    there = [(name, one) for name, one in unused if one.tensors]
    count, nbytes = (sum(one[at] for _, one in there) for at in (0, 1))
    tensors = counted(count, "tensor")
    where = f"{format_size(nbytes)} in {first_few([name for name, _ in there])}"
    return (tensors, where) if there else None


def _missing_tensors(index: Index, headers: Sequence[Header]) -> CheckpointError:
    weight_map = index.weight_map
    present = {header.file.name: {one.name for one in header.tensors} for header in headers}
    missing = [key for key, shard in weight_map.items() if key not in present[shard]]
    first = missing[0]
    others = (*headers, *read_files(index.path.parent, _unnamed(index)))
    there = [one.file.name for one in others if any(first == key.name for key in one.tensors)]
    where = f" ({first_few(there)} has it)" if there else ""
    count = f"; {counted(len(missing), 'tensor', 'are')} missing in all" if len(missing) > 1 else ""
    return CheckpointError(
        f"{index.path} says that {weight_map[first]} contains {first!r}, but it does not"
        f"{where}{count}",
        f"The index is of other files than these. If the shards are complete, remove {index.path}: "
        "without it all of them are read."
        if there
        else _HINT,
    )


# ---- shards that are not there -------------------------------------------------------------


class Substitute(Struct, frozen=True):
    """Files that have what an index names in files that are not there."""

    files: Sequence[str]  # to read, in order
    index: Index | None  # with the names of files that are there; None: not needed
    note: str


def substitute(
    index: Index, missing: Sequence[str], names: Iterable[str], single: str
) -> Substitute | str:
    """Files that can be read although shards are missing: the file `single` if it has every tensor,
    or files under other names that have all tensors of the missing shards, each once. Else what
    there is, as the end of a sentence; empty if nothing is.

    `names`: files of the directory that the index does not name.
    """
    name, many = index.path.name, len(missing) > 1
    count = f"{counted(len(missing), 'shard')} that are" if many else "1 shard that is"
    headers = read_files(index.path.parent, names)
    found = {one.file.name: {tensor.name for tensor in one.tensors} for one in headers}
    if single in found and index.weight_map.keys() <= found[single]:
        note = (
            f"{name} names {count} not there: {first_few(missing)}; {single}, which has all "
            f"of its {counted(len(index.weight_map), 'tensor')}, is read instead"
        )
        return Substitute([single], None, note)
    lost = set(missing)
    wanted = {tensor for tensor, shard in index.weight_map.items() if shard in lost}
    owners = Counter(tensor for tensors in found.values() for tensor in tensors & wanted)
    holders = [file for file, tensors in found.items() if tensors & wanted]
    if owners.keys() == wanted and all(number == 1 for number in owners.values()):
        here = {tensor: file for file in holders for tensor in found[file] & wanted}
        weight_map = {tensor: here.get(tensor, shard) for tensor, shard in index.weight_map.items()}
        note = (
            f"{name} names {count} not there: {first_few(missing)}; their tensors are in "
            f"{first_few(holders)}, which are read instead"
        )
        renamed = replace(index, weight_map=weight_map)
        return Substitute(renamed.shards, renamed, note)
    if not owners:
        return ""
    double = ", some of them twice" if any(number > 1 for number in owners.values()) else ""
    tensors = counted(len(wanted), "tensor")
    return f"; {len(owners)} of their {tensors} are in {first_few(holders)}{double}"


def _unnamed(index: Index) -> list[str]:
    """Other safetensors files next to an index."""
    named = set(index.weight_map.values())
    here = (path.name for path in index.path.parent.iterdir())  # as remote directories have it
    beside = sorted(name for name in here if name.endswith(".safetensors"))
    return [name for name in beside if name not in named and not is_adapter_file(name)]


def read_files(directory: Path, names: Iterable[str]) -> list[Header]:
    """The headers of those of these files that can be read."""
    found = []
    for name in names:
        try:
            found.append(read_header(directory / name))
        except CheckpointError:
            continue
    return found
