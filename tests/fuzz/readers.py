"""What is fuzzed: each reader of files that somebody else wrote, as a function of bytes.

A reader returns, or raises a KtconvError, whatever the bytes are. Anything else is a defect.
Nothing here needs atheris, so that the tests replay every input that was ever kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconv.bench.routing import parse_routing
from ktconv.errors import KtconvError
from ktconv.families.config import Config
from ktconv.source import open_checkpoint
from ktconv.source.config import interpret_config, read_config
from ktconv.source.gguf.file import read_gguf_header
from ktconv.source.naming_map import read_map
from ktconv.source.safetensors_file import read_header
from ktconv.source.shards import read_shards, select_shards
from ktconv.stats.files import read_statistics
from ktconv.stats.importance import read_importance
from ktconv.targets.encoded.recipe import read_recipe
from ktconv.targets.expert_sets import read_expert_set
from ktconv.writer.journal import Journal, is_unit_record, parse_record
from ktconv.writer.manifest import read_manifest

Read = Callable[[Path, bytes], None]
# A file that claims tensors of this size has them, as a hole: readers only look at its headers.
HOLE = 1 << 24
CORPUS = Path(__file__).with_name("corpus")
_INDEX = "model.safetensors.index.json"
_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass(frozen=True, slots=True)
class Reader:
    """`read` is given an empty directory, which it may write to, and the bytes."""

    read: Read
    json: bool = False  # whether inputs are JSON, which is then changed as JSON, too
    header: bool = False  # whether they are safetensors, whose header is JSON


def _safetensors(directory: Path, data: bytes) -> None:
    read_header(_file(directory / "model.safetensors", data))


def _checkpoint(directory: Path, data: bytes) -> None:
    """`data` is {"config": config.json, "header": of one shard}; its tensors are holes."""
    document = _object(data)
    header = document.get("header")
    _file(directory / "config.json", json.dumps(document.get("config")).encode())
    text = json.dumps(header).encode()
    path = _file(directory / "model.safetensors", len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + _end(header))
    open_checkpoint(directory)


def _end(header: Any) -> int:
    """Where the last tensor ends, as far as a file here may reach."""
    ends = [
        entry["data_offsets"][1]
        for entry in (header.values() if isinstance(header, dict) else ())
        if isinstance(entry, dict)
        and isinstance(entry.get("data_offsets"), list)
        and len(entry["data_offsets"]) == 2
        and type(entry["data_offsets"][1]) is int
    ]
    return min(max([0, *ends]), HOLE)


def _index(directory: Path, data: bytes) -> None:
    _file(directory / _INDEX, data)
    for number, name in enumerate(_SHARDS):
        entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
        text = json.dumps({f"tensor.{number}": entry}).encode()
        _file(directory / name, len(text).to_bytes(8, "little") + text + bytes(4))
    read_shards(select_shards(directory))


def _config(directory: Path, data: bytes) -> None:
    _file(directory / "config.json", data)
    interpret_config(Config(read_config(directory).content))


def _manifest(directory: Path, data: bytes) -> None:
    _file(directory / "ktconv.json", data)
    manifest = read_manifest(directory)
    if manifest is None:
        return
    for name in dir(type(manifest)):
        if isinstance(getattr(type(manifest), name), property):
            getattr(manifest, name)
    manifest.names("notes")


def _journal(directory: Path, data: bytes) -> None:
    journal = Journal(directory)
    journal.create()
    _file(journal.run_file, data)
    journal.read_run()
    record = parse_record(data)
    if is_unit_record(record):
        journal.unit_is_intact(record)


def _gguf(directory: Path, data: bytes) -> None:
    path = _file(directory / "model.gguf", data)
    os.truncate(path, len(data) + HOLE)
    header = read_gguf_header(path)
    for tensor in header.tensors:
        assert tensor.nbytes <= HOLE + len(data)


def _importance(directory: Path, data: bytes) -> None:
    read_importance(_file(directory / "importance", data))


def _trace(directory: Path, data: bytes) -> None:
    name = "trace.npz" if data[:2] == b"PK" else "trace.safetensors"
    parse_routing(f"trace:{_file(directory / name, data)}")


def _statistics(directory: Path, data: bytes) -> None:
    read_statistics(_file(directory / "trace.safetensors", data))


def _counts(directory: Path, data: bytes) -> None:
    read_statistics(_file(directory / "counts.json", data))


def _experts(directory: Path, data: bytes) -> None:
    read_expert_set(_file(directory / "set.json", data))


def _map(directory: Path, data: bytes) -> None:
    read_map(_file(directory / "map.toml", data))


def _recipe(directory: Path, data: bytes) -> None:
    _file(directory / "hot.json", b'{"schema": 1, "experts": {"3": [0]}}')
    read_recipe(_file(directory / "recipe.toml", data))


READERS: Mapping[str, Reader] = {
    "safetensors": Reader(_safetensors, header=True),
    "checkpoint": Reader(_checkpoint, json=True),
    "index": Reader(_index, json=True),
    "config": Reader(_config, json=True),
    "manifest": Reader(_manifest, json=True),
    "journal": Reader(_journal, json=True),
    "gguf": Reader(_gguf),
    "imatrix": Reader(_importance),
    "importance": Reader(_importance, header=True),
    "trace": Reader(_trace, header=True),
    "statistics": Reader(_statistics, header=True),
    "counts": Reader(_counts, json=True),
    "experts": Reader(_experts, json=True),
    "map": Reader(_map),
    "recipe": Reader(_recipe),
}


def accepts(reader: Reader, directory: Path, data: bytes) -> bool:
    """Whether the reader takes these bytes; False: it refused them with a sentence.

    Raises AssertionError for a refusal without one, and whatever else the reader raises.
    """
    try:
        reader.read(directory, data)
    except KtconvError as error:
        assert str(error).strip(), "a refusal without a sentence"
        return False
    return True


def _file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _object(data: bytes) -> dict[str, Any]:
    """The JSON object that an input is; anything else is none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
