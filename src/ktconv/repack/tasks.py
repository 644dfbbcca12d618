"""The work of a merge: the two files of one matrix, copied unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from ktconv.conversion.tasks import Advance, pieces_of, write_tensor
from ktconv.errors import CheckpointError, VerificationError
from ktconv.formats import Format, output_named, scales
from ktconv.repack.tree import KtEntry
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.reader import Span
from ktconv.system.arrays import U8
from ktconv.system.checksums import checksum_for, of_record
from ktconv.system.files import read_exactly, translated
from ktconv.system.regular_files import opened_regular
from ktconv.targets.packed.weights import name_of
from ktconv.writer.journal import Record
from ktconv.writer.staging import Staging


class MergeTask(Struct, frozen=True):
    """Copies some `.kt` files into the shards, a few MiB at a time."""

    root: Path
    entries: Sequence[KtEntry]
    known: Mapping[str, Record]  # of a manifest, by tensor
    verify: bool  # read back what was written

    @property
    def source_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def spans(self) -> Sequence[Span]:
        return [Span(self.root / entry.name, 0, entry.nbytes) for entry in self.entries]

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        return {
            name_of(entry.tensor): self._copy(entry, staging, buffers, advance)
            for entry in self.entries
        }

    def _copy(self, entry: KtEntry, staging: Staging, buffers: Buffers, advance: Advance) -> Record:
        """Copy a matrix, and return its record in the new manifest: the checksum, and what a
        manifest there records too."""
        name, path = name_of(entry.tensor), self.root / entry.name
        fmt, known = output_named(entry.method), self.known.get(name)
        assert fmt is not None  # read_tree refuses other methods
        with self._open(entry) as fd:

            def read(piece: U8, offset: int) -> None:
                with translated("read", path):
                    read_exactly(fd, piece.data, offset)
                if entry.tensor.kind == "scale":
                    refuse_odd_scales(fmt, piece, str(path))

            pieces = pieces_of(entry.nbytes, read, buffers, advance)
            digest = checksum_for(known)
            found = write_tensor(name, pieces, staging, self.verify, buffers, digest)
        check_sum(found, known, str(path))
        return dict(known or found)

    @contextmanager
    def _open(self, entry: KtEntry) -> Iterator[int]:
        """A descriptor of a file that is as it was when the folder was listed, to the end."""
        path = self.root / entry.name
        with opened_regular(path) as fd:
            _refuse_changed(fd, entry, path)
            yield fd
            _refuse_changed(fd, entry, path)


def check_sum(found: Record, known: Record | None, where: str) -> None:
    """Refuse bytes that are not those that a manifest knows. Both have checksums of one
    algorithm."""
    if known is not None and of_record(known) != of_record(found):
        raise VerificationError(
            f"the checksum of {where} differs from the one in its manifest",
            "it was damaged after its conversion: copy it again, or convert again",
        )


def _refuse_changed(fd: int, entry: KtEntry, path: Path) -> None:
    status = os.fstat(fd)
    if (status.st_size, status.st_mtime_ns) != (entry.nbytes, entry.mtime_ns):
        raise CheckpointError(
            f"{path} changed during the merge",
            "make sure nothing writes there, then start again with --overwrite",
        )


def refuse_odd_scales(fmt: Format, data: U8, where: str) -> None:
    """Refuse packed scales that are negative, denormal or not finite."""
    scale = scales.values(fmt, data.view(fmt.layout.scale_array))
    sound = np.isfinite(scale) & ((scale == 0) | (scale >= np.finfo(np.float32).tiny))
    if not sound.all():
        raise CheckpointError(
            f"{where} contains a scale that is negative, denormal, infinite or NaN",
            "the file is damaged, or the model had such weights: convert it again",
        )
