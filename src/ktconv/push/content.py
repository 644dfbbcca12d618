"""Files of a finished output that are sent: those that its manifest names, after comparing each
with the checksums there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from msgspec import Struct

from ktconv.errors import OutputError
from ktconv.formats import parse_kt_path
from ktconv.source import TensorRef, read_header
from ktconv.source.gguf.file import read_gguf_header
from ktconv.source.reading.buffers import BufferSizes
from ktconv.source.reading.reader import SourceReader
from ktconv.source.side_files import CARD, flaws
from ktconv.system.files import io_error, is_there
from ktconv.system.machine import usable_cpus
from ktconv.system.pointers import refuse_pointer_at
from ktconv.system.regular_files import opened_small
from ktconv.system.text import path_of
from ktconv.targets.encoded.stacking import is_stacked, unstacked
from ktconv.targets.packed.weights import name_of
from ktconv.verify.findings import Findings
from ktconv.verify.reading import Context, CopyCheck
from ktconv.verify.runner import run_checks, sizes_by_unit
from ktconv.writer.journal import STATE_DIRECTORY, Record, file_is_intact
from ktconv.writer.manifest import MANIFEST, Manifest, read_manifest
from ktconv.writer.metadata import INDEX, read_index

_AGAIN = (
    "convert again with --overwrite, or into another directory; `ktconv verify` finds all flaws"
)
_MOST_THREADS = 8  # a disk has no more to give

# Sizes of files -> what shows how far their check is
Progression = Callable[[dict[str, int]], AbstractContextManager[Any]]


class Content(Struct, frozen=True):
    """The files of an output that are sent, relative to it, with their sizes in bytes."""

    output: Path
    files: dict[str, int]
    not_sent: tuple[str, ...]  # what else lies there; a folder without any such file ends with /

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def content_of(output: Path, progression: Progression) -> Content:
    """Read the files that would be sent, and compare them with the manifest.

    OutputError for an output that is incomplete, damaged or none, CheckpointError for a file that
    is a link to somewhere else, ResourceError where a file cannot be read.
    """
    manifest = _manifest(output)
    weights = {str(record["name"]): record for record in manifest.files}
    for name in sorted({*weights, *(manifest.side_files or {})}):
        refuse_pointer_at(output / name)
    _check_weights(output, weights, manifest, progression)
    side_files = _check_side_files(output, manifest)
    own = [name for name in (MANIFEST, CARD, INDEX) if name in manifest.names("files")]
    for name in own:
        with opened_small(output, name):  # raises: it is missing, or leads elsewhere
            pass
    names = sorted({*weights, *map(path_of, side_files), *own, MANIFEST})
    sizes = {name: (output / name).stat().st_size for name in names}
    return Content(output, sizes, tuple(_others(output, set(names))))


def _manifest(output: Path) -> Manifest:
    if not output.is_dir():
        what = "is a file, not an output of ktconv" if is_there(output) else "does not exist"
        raise OutputError(f"{output} {what}", "give the directory of a conversion")
    if os.path.lexists(output / STATE_DIRECTORY):
        raise OutputError(
            f"the conversion in {output} is not finished",
            "run the same conversion again, which continues it, then push",
        )
    manifest = read_manifest(output)
    if manifest is None and (output / MANIFEST).exists():
        raise OutputError(f"{output / MANIFEST} is damaged", "restore it, or convert again")
    if manifest is None:
        raise OutputError(
            f"{output} has no {MANIFEST}, so nothing says which of its files belong to a model",
            "give the directory of a conversion; other checkpoints: hf upload",
        )
    if damaged := manifest.damaged_units:
        raise OutputError(
            f"{output / MANIFEST} is damaged: its record of {damaged[0]}",
            "restore it, or convert again",
        )
    return manifest


# ---- weights -------------------------------------------------------------------------------


def _check_weights(
    output: Path,
    weights: Mapping[str, Record],
    manifest: Manifest,
    progression: Progression,
) -> None:
    """Every tensor has its checksum, no other is there, and the index describes them."""
    refs: dict[str, tuple[str, TensorRef]] = {}  # by tensor, with the name of its file
    for file, record in weights.items():
        if not file_is_intact(output, record):
            what = "is not as it was written" if (output / file).exists() else "is missing"
            raise OutputError(f"{output / file} {what}", _AGAIN)
        refs |= {ref.name: (file, ref) for ref in _tensors(output, file, record)}
    parts = refs
    if is_stacked(manifest):
        some = ((file, one) for file, ref in refs.values() for one in unstacked([ref]))
        parts = {one.name: (file, one) for file, one in some}
    records = manifest.tensors
    if odd := sorted(parts.keys() ^ records.keys()):
        what = "has no checksum in" if odd[0] in parts else "is missing, but named by"
        raise OutputError(f"{odd[0]} {what} {output / MANIFEST}", _AGAIN)
    _check_index(output, refs)
    findings = Findings()
    context = Context(findings, records, SourceReader([], []))
    checks = [CopyCheck(context, file, ref, None) for file, ref in parts.values()]
    with progression(sizes_by_unit(checks)) as observer:
        for _ in run_checks(checks, BufferSizes(), min(usable_cpus(), _MOST_THREADS), observer):
            if findings.listed:  # the rest of hundreds of GB changes nothing
                break
    if findings.listed:
        raise OutputError(f"{output}: {findings.listed[0].message}", _AGAIN)


def _tensors(output: Path, file: str, record: Record) -> Iterator[TensorRef]:
    """Tensors of a shard, or of a file of a layer folder, which is one tensor."""
    packed = parse_kt_path(file)
    if file.endswith(".gguf"):
        yield from read_gguf_header(output / file).tensors
    elif packed is None:
        yield from read_header(output / file).tensors
    else:
        yield TensorRef(name_of(packed.tensor), output / file, "", (), 0, record["bytes"])


def _check_index(output: Path, refs: Mapping[str, tuple[str, TensorRef]]) -> None:
    if (index := read_index(output)) is None:
        return  # where there should be one, its name is missing later
    metadata = index.get("metadata")
    places = {name: file for name, (file, _) in refs.items()}
    total = sum(ref.nbytes for _, ref in refs.values())
    if index.get("weight_map") != places or metadata != {"total_size": total}:
        raise OutputError(f"{output / INDEX} does not describe the tensors next to it", _AGAIN)


# ---- other files ---------------------------------------------------------------------------


def _check_side_files(output: Path, manifest: Manifest) -> Mapping[str, Record]:
    """The records of files next to the weights, which are as they were written."""
    records = manifest.side_files
    if records is None:
        raise OutputError(
            f"{output / MANIFEST} has no checksums of the files next to the weights",
            "it is of an earlier version: convert again, or use hf upload",
        )
    for flaw in flaws(output, records):
        if flaw.name in records:
            raise OutputError(flaw.message, _AGAIN)
    return records


def _others(output: Path, sent: set[str]) -> Iterator[str]:
    """Names of the files in OUTPUT that are not sent."""

    def refuse(error: OSError) -> None:
        raise io_error("read", Path(error.filename or output), error) from error

    folders_sent = {parent.as_posix() for name in sent for parent in Path(name).parents}
    for place, folders, names in os.walk(output, onerror=refuse):
        inside = {name: Path(place, name).relative_to(output).as_posix() for name in folders}
        folders[:] = sorted(name for name in folders if inside[name] in folders_sent)
        yield from sorted(f"{name}/" for name in inside.values() if name not in folders_sent)
        for name in sorted(names):
            if (file := Path(place, name).relative_to(output).as_posix()) not in sent:
                yield file
