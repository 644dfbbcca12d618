"""The files around the shards: configuration, model card, index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ktconv.source.side_files import CARD as CARD
from ktconv.source.side_files import INDEX as INDEX
from ktconv.source.side_files import Fingerprint
from ktconv.system.files import make_directory, write_durably
from ktconv.system.regular_files import MissingFileError, opened_small, read_chunks, read_small
from ktconv.system.text import path_text
from ktconv.writer.journal import Record, parse_record


def copy_sidecars(
    files: Sequence[Path], source: Path, output: Path, staging: Path
) -> dict[str, Record]:
    """Copy small files, given relative to `source`, unchanged; their records for the manifest."""
    records = {}
    for relative in files:
        make_directory((output / relative).parent)
        with opened_small(source, relative) as descriptor:
            chunks = read_chunks(source / relative, descriptor)
            records[path_text(relative)] = _write(output / relative, chunks, staging)
    return records


def write_made_files(files: Mapping[str, bytes], output: Path, staging: Path) -> dict[str, Record]:
    """Write small files that the conversion makes; their records for the manifest."""
    return {name: _write(output / name, [data], staging) for name, data in files.items()}


def _write(path: Path, chunks: Iterable[bytes], staging: Path) -> Record:
    found = Fingerprint()
    write_durably(path, found.of(chunks), staging)
    return found.record()


def write_index(
    weight_map: Iterable[tuple[str, str]], total_size: int, output: Path, staging: Path
) -> None:
    """model.safetensors.index.json from (tensor, shard); `total_size` is the bytes of all
    tensors."""
    write_durably(output / INDEX, index_lines(weight_map, total_size), staging)


def index_lines(weight_map: Iterable[tuple[str, str]], total_size: int) -> Iterator[bytes]:
    """The index line by line: for large models it is larger than all buffers."""
    yield f'{{\n  "metadata": {{"total_size": {total_size}}},\n  "weight_map": {{'.encode()
    for count, (tensor, shard) in enumerate(weight_map):
        comma = "," if count else ""
        yield f"{comma}\n    {json.dumps(tensor)}: {json.dumps(shard)}".encode()
    yield b"\n  }\n}\n"


def read_index(output: Path) -> Record | None:
    """The index of an output; None if there is none, empty if it is damaged. Raises as
    `manifest.read_manifest`."""
    try:
        return parse_record(read_small(output, INDEX)) or {}
    except MissingFileError:
        return None
