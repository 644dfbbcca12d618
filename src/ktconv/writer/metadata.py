"""The files around the shards: configuration, model card, manifest, index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconv.checkpoint.side_files import Fingerprint
from ktconv.system.files import make_directory, write_durably
from ktconv.system.regular_files import MissingFileError, opened_small, read_chunks, read_small
from ktconv.system.text import path_text
from ktconv.writer.journal import Record, is_run_record, is_unit_record, parse_record

MANIFEST = "ktconv.json"
INDEX = "model.safetensors.index.json"
CARD = "README.md"


def copy_sidecars(
    files: Sequence[Path], source: Path, output: Path, staging: Path
) -> dict[str, Record]:
    """Copy small files, given relative to `source`, unchanged; their records for the manifest."""
    records = {}
    for relative in files:
        make_directory((output / relative).parent)
        with opened_small(source, relative) as descriptor:
            found = Fingerprint()
            data = found.of(read_chunks(source / relative, descriptor))
            write_durably(output / relative, data, staging)
        records[path_text(relative)] = found.record()
    return records


def write_made_files(files: Mapping[str, bytes], output: Path, staging: Path) -> dict[str, Record]:
    """Write small files that the conversion makes; their records for the manifest."""
    records = {}
    for name, content in files.items():
        found = Fingerprint()
        write_durably(output / name, found.of([content]), staging)
        records[name] = found.record()
    return records


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


def write_manifest(
    run: Mapping[str, Any],
    units: Iterable[tuple[str, Mapping[str, Any]]],
    output: Path,
    staging: Path,
) -> None:
    """ktconv.json: `run` and the record of every unit. Units are taken one at a time."""
    lines = (line.encode() for line in _manifest_lines(run, units))
    write_durably(output / MANIFEST, lines, staging)


def _manifest_lines(
    run: Mapping[str, Any], units: Iterable[tuple[str, Mapping[str, Any]]]
) -> Iterator[str]:
    """JSON with one tensor per line: it can be searched and compared with line tools."""
    yield json.dumps(run, indent=1)[:-2]
    yield ',\n "units": {'
    for count, (key, record) in enumerate(units):
        yield f'{"," if count else ""}\n  {json.dumps(key)}: {{\n   "files": [\n    '
        yield ",\n    ".join(json.dumps(file) for file in record["files"])
        yield '\n   ],\n   "tensors": {\n    '
        tensors = sorted(record["tensors"].items())
        yield ",\n    ".join(f"{json.dumps(name)}: {json.dumps(about)}" for name, about in tensors)
        yield "\n   }"
        for name in sorted(record.keys() - {"files", "tensors"}):
            yield f",\n   {json.dumps(name)}: {json.dumps(record[name])}"
        yield "\n  }"
    yield "\n }\n}\n"


def read_manifest(output: Path) -> dict[str, Any] | None:
    """The manifest of an output; None if there is none or it is not ours.

    A unit whose record is damaged is None: the others still tell what is done.
    Raises CheckpointError for what is no regular file, ResourceError where it cannot be read.
    """
    try:
        content = parse_record(read_small(output, MANIFEST))
    except MissingFileError:
        return None
    if not is_run_record(content) or not isinstance(content.get("units"), dict):
        return None
    units = content["units"].items()
    return content | {
        "units": {key: record if is_unit_record(record) else None for key, record in units}
    }


def read_index(output: Path) -> Record | None:
    """The index of an output; None if there is none, empty if it is damaged. Raises as
    `read_manifest`."""
    try:
        return parse_record(read_small(output, INDEX)) or {}
    except MissingFileError:
        return None


def write_card(text: str, output: Path, staging: Path) -> None:
    write_durably(output / CARD, text.encode(), staging)
