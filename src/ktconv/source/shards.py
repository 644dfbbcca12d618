"""The files that make up a checkpoint: safetensors files that match their index, or GGUF files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path

from msgspec import Struct

from ktconv.errors import CheckpointError, ResourceError
from ktconv.source.adapter.beside import is_adapter_file
from ktconv.source.gguf.parts import SUFFIX, all_parts, read_parts
from ktconv.source.hub_cache import absence
from ktconv.source.index import (
    DEFAULT_INDEX,
    Index,
    as_indexed,
    read_index,
    substitute,
)
from ktconv.source.safetensors_file import Header, read_header
from ktconv.source.types import SourceFile, TensorRef
from ktconv.system.opened import advise
from ktconv.system.stores import Span, is_remote
from ktconv.system.text import first_few
from ktconv.system.units import counted

SINGLE_FILE = "model.safetensors"
HEAD_BYTES = 256 << 10  # of a file of unknown tensors: most headers end there
_ENTRY_BYTES = 90  # of a tensor in a header, beside its name: dtype, shape and offsets
_METADATA_BYTES = 256  # and what else a header has

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NUMBERED = re.compile(r"^(.*-)(\d+)(-of-)(\d+)(\.safetensors)$")
_SHARD_HINT = "Download the missing files; incomplete checkpoints are not converted."


class ShardSelection(Struct, frozen=True):
    """The files to open, before any of them is opened."""

    files: Sequence[Path]  # in name order
    index: Index | None
    notes: Sequence[str]
    gguf: bool = False
    renamed: bool = False  # the index names some of them otherwise


def select_shards(place: Path) -> ShardSelection:
    """Choose the files of the checkpoint at `place`, which `locate_model` found.

    Raises CheckpointError for files that are missing.
    """
    # A broken link or a pipe with such a name is refused when it is opened.
    if place.is_file() or (place.name.endswith(SUFFIX) and not place.is_dir()):
        return ShardSelection(all_parts(place), None, [], gguf=True)
    return _select_safetensors(place)


def _select_safetensors(directory: Path) -> ShardSelection:
    """Choose the safetensors files of the checkpoint in `directory` and check they exist.

    An index decides; without one, model.safetensors; without that, every *.safetensors
    at the top level. Sub-directories, which contain other copies, are not searched.
    """
    names = file_names(directory)
    index = read_index(directory, names)
    if index is None:
        return _select_without_index(directory, names)
    return _select_by_index(directory, index, names)


def _select_without_index(directory: Path, names: Sequence[str]) -> ShardSelection:
    shards = [one for one in names if one.endswith(".safetensors") and not is_adapter_file(one)]
    if not shards:
        raise _no_safetensors(directory, names)
    chosen = [SINGLE_FILE] if SINGLE_FILE in shards else shards
    _check_numbering(directory, chosen)
    notes = _ignored_note(set(shards) - set(chosen), f"the weights are in {SINGLE_FILE}")
    return ShardSelection([directory / name for name in chosen], None, notes)


class Shards(Struct, frozen=True):
    """The selected files, by their headers."""

    headers: Sequence[Header]  # with the tensors that belong to the checkpoint
    notes: Sequence[str]  # about how files and their tensors were chosen
    # The index, if without it, or by a reader that disregards it, other tensors would be read.
    deciding: Index | None

    @property
    def states(self) -> list[SourceFile]:
        """The state of each file whose content decides what tensors there are."""
        files = [header.state for header in self.headers]
        return files if self.deciding is None else [*files, self.deciding.state]

    @property
    def tensors(self) -> Iterator[TensorRef]:
        """Tensors of all files, in their order."""
        return (tensor for header in self.headers for tensor in header.tensors)

    @property
    def unlisted(self) -> int:
        """Number of tensors that are left out because the index does not list them."""
        return sum(header.unlisted.tensors for header in self.headers)


def read_shards(selection: ShardSelection) -> Shards:
    """Read every selected header once, with the tensors that belong to the checkpoint: those that
    the index has in that file, or all. Checks that nothing is missing or there twice."""
    if any(map(is_remote, selection.files)):
        advise([Span(file, 0, size) for file, size in _head_sizes(selection)])
    files, index = selection.files, selection.index
    headers = read_parts(files) if selection.gguf else [read_header(file) for file in files]
    if index is None:
        _check_unique(headers)
        return Shards(headers, selection.notes, None)
    headers, ignored = as_indexed(index, headers)  # it has one shard for each tensor
    deciding = index if selection.renamed or ignored else None
    return Shards(headers, [*selection.notes, *ignored], deciding)


def _head_sizes(selection: ShardSelection) -> Iterator[tuple[Path, int]]:
    """About how many bytes the header of each file has: by the names in the index, where there is
    one. Of a remote source, one request brings it, and little else."""
    sizes: Counter[str] = Counter()
    for name, shard in selection.index.weight_map.items() if selection.index else ():
        sizes[shard] += len(name) + _ENTRY_BYTES
    for file in selection.files:
        known = sizes.get(file.name)
        yield file, HEAD_BYTES if known is None else known + _METADATA_BYTES


def file_names(directory: Path) -> list[str]:
    """Names of the files in `directory`, and of links to nothing, in order.

    Raises CheckpointError if it is no directory, ResourceError if it cannot be listed.
    """
    try:
        # A dangling symlink is listed too: the shard that it should be is missing.
        return sorted(path.name for path in directory.iterdir() if not path.is_dir())
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
            f"{directory} contains only pickle weights ({first_few(pickles)}), which "
            "are not read because unpickling can execute code",
            "Use a safetensors version of the checkpoint; if you trust this one, "
            "load it with transformers and call save_pretrained.",
        )
    return CheckpointError(
        f"{directory} contains no safetensors or GGUF file",
        f"A checkpoint has {DEFAULT_INDEX} with its shards, {SINGLE_FILE}, *.safetensors, or one "
        "GGUF model.",
    )


def _select_by_index(directory: Path, index: Index, names: Sequence[str]) -> ShardSelection:
    chosen = index.shards
    missing = [name for name in chosen if not (directory / name).is_file()]
    others = {name for name in names if name.endswith(".safetensors")} - set(chosen)
    unused = {name for name in others if not is_adapter_file(name)}
    if missing:
        return _select_despite(directory, index, missing, unused)
    if SINGLE_FILE in unused:
        # Loaders disagree on which of the two counts.
        raise CheckpointError(
            f"{directory} contains both {SINGLE_FILE} and {index.path.name}, which does not name "
            "it",
            "Remove the one that does not belong to the checkpoint.",
        )
    notes = _ignored_note(unused, f"{index.path.name} does not name them")
    return ShardSelection([directory / name for name in chosen], index, notes)


def _select_despite(
    directory: Path, index: Index, missing: Sequence[str], unused: Set[str]
) -> ShardSelection:
    """The files that have what shards which are not there should have."""
    there = [name for name in sorted(unused) if (directory / name).is_file()]
    found = substitute(index, missing, there, SINGLE_FILE)
    if isinstance(found, str):
        words, hint = absence(directory, missing, _SHARD_HINT)
        raise CheckpointError(
            f"{len(missing)} of the {counted(len(index.shards), 'shard')} that {index.path} "
            f"names {words}"
            f"{found}",
            hint,
        )
    more = _ignored_note(unused - set(found.files), f"{index.path.name} does not name them")
    return ShardSelection(
        [directory / name for name in found.files],
        found.index,
        [found.note, *more],
        renamed=found.index is not None,
    )


def _check_numbering(directory: Path, names: Iterable[str]) -> None:
    """Check names like x-00002-of-00005.safetensors, which show without an index what is
    missing."""
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
                f"{len(missing)} of the {counted(len(expected), 'shard')} in {directory} are "
                "missing: "
                f"{first_few(missing)}",
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


def _ignored_note(names: Iterable[str], reason: str) -> list[str]:
    ignored = sorted(names)
    return [f"not read, because {reason}: {first_few(ignored, 10)}"] if ignored else []
