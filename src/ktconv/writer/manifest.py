"""ktconv.json, the manifest of an output: how it was made, from what, and every tensor of it.

All reading of manifests is here, because a file on a disk can contain anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from ktconv.source.adapter.recorded import ENCODED_AGAIN, located
from ktconv.source.model_source import ModelSource
from ktconv.source.naming_map import NamingMap, map_of_record
from ktconv.source.pruning.kept import Pruning, recorded_pruning
from ktconv.source.side_files import MANIFEST as MANIFEST
from ktconv.source.side_files import recorded
from ktconv.system.files import write_durably
from ktconv.system.regular_files import MissingFileError, read_small
from ktconv.writer.journal import Journal, Record, is_run_record, is_unit_record, parse_record

_UNITS = ',\n "units":'  # behind all else


class Manifest(Struct, frozen=True):
    """A readable ktconv.json; or run.json of a conversion that is not finished, without units."""

    path: Path
    record: Record

    @property
    def version(self) -> object:
        return self.record.get("ktconv_version")

    # ---- how it was made ----

    @property
    def options(self) -> Record:
        options: Record = self.record["options"]
        return options

    def names(self, key: str) -> list[str]:
        """A list of names; empty where there is none."""
        found = self.record.get(key)
        return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []

    # ---- from what ----

    @property
    def has_source(self) -> bool:
        """Whether its entry about the source, if any, has the expected form."""
        source = self.record.get("source", {})
        files = source.get("files", {}) if isinstance(source, dict) else None
        return isinstance(files, dict) and all(isinstance(file, dict) for file in files.values())

    @property
    def source_files(self) -> dict[str, Record]:
        """Name -> size, time and checksum of each file of the model that was converted; empty
        where that is not known."""
        return dict(self.record.get("source", {}).get("files", {})) if self.has_source else {}

    @property
    def naming(self) -> NamingMap | None:
        """The map of the source's names, where one was given."""
        return map_of_record(self.record.get("source"))

    @property
    def tower(self) -> str | None:
        """The one of the source's towers with experts that was converted; None: it has one."""
        source = self.record.get("source")
        tower = source.get("tower") if isinstance(source, dict) else None
        return tower if isinstance(tower, str) else None

    @property
    def adapters(self) -> tuple[str, ...] | None:
        """The adapters that were added to the source's weights, as NAME:WEIGHT; None: none."""
        found = self.record.get("adapters")
        named = isinstance(found, list) and all(isinstance(one, str) for one in found)
        return tuple(found) if found and named else None

    @property
    def pruning(self) -> Pruning | None:
        """The experts of the source that stay, where some were dropped."""
        return recorded_pruning(self.record, str(self.path))

    def located_adapters(self, source: ModelSource) -> tuple[str, ...] | None:
        """The adapters of `source`: those that were given with it, else those that are named here,
        where they are found. UsageError where one is not."""
        if source.adapter is not None or (recorded := self.adapters) is None:
            return source.adapter
        return located(recorded, self.source_files, self.path.parent, source.model)

    def as_converted(self, source: ModelSource) -> ModelSource:
        """The source, read as the conversion did: with the same map, tower, adapters and
        experts."""
        adapters = self.located_adapters(source)
        return source.recorded(self.naming, self.tower, adapters, self.pruning)

    @property
    def encoded_again(self) -> list[str]:
        """Weights that are no expert's, by the source's names, that have new codes and scales with
        adapters in them."""
        return self.names(ENCODED_AGAIN)

    @property
    def model_type(self) -> object:
        return self.record["geometry"].get("model_type")

    @property
    def geometry(self) -> Record:
        geometry: Record = self.record["geometry"]
        return geometry

    @property
    def layers(self) -> dict[int, Record]:
        """Dimensions of every layer."""
        return {int(index): entry for index, entry in self.record["geometry"]["layers"].items()}

    @property
    def merged(self) -> bool:
        return "merged_from" in self.record

    @property
    def resharded_from(self) -> Record | None:
        """Record of what a recut output was made from."""
        record = self.record.get("resharded_from")
        return record if isinstance(record, dict) else None

    # ---- what was written ----

    @property
    def units(self) -> dict[str, Record]:
        """Files and tensors by unit, without damaged records."""
        return {key: unit for key, unit in self._units() if unit is not None}

    @property
    def damaged_units(self) -> list[str]:
        return [key for key, unit in self._units() if unit is None]

    def _units(self) -> Iterable[tuple[str, Record | None]]:
        units: Mapping[str, Record | None] = self.record.get("units", {})
        return units.items()

    @property
    def files(self) -> list[Record]:
        """Name, size and header of every file with tensors."""
        return [file for unit in self.units.values() for file in unit["files"]]

    @property
    def tensors(self) -> dict[str, Record]:
        """Checksum and, of weights, quantization errors of every tensor."""
        units = self.units.values()
        return {name: entry for unit in units for name, entry in unit["tensors"].items()}

    @property
    def side_files(self) -> dict[str, Record] | None:
        """Size and checksum of every file next to the weights; None: written by an earlier version,
        which recorded nothing. Raises CheckpointError for anything of another form."""
        return recorded(self.record)


def read_manifest(output: Path) -> Manifest | None:
    """The manifest of an output; None if it is missing or was not written by ktconv.

    A unit whose record is damaged is None: the others are still valid.
    Raises CheckpointError for anything but a regular file, ResourceError where it cannot be read.
    """
    try:
        data = read_small(output, MANIFEST)
    except MissingFileError:
        return None
    return _manifest(output, parse_record(data))


def read_run(output: Path) -> Manifest | None:
    """`read_manifest` without the records of units, of which large models have many megabytes: what
    the output was made of and how."""
    try:
        data = read_small(output, MANIFEST)
    except MissingFileError:
        return None
    # As `write_manifest` has it; no text of JSON has a line break in it.
    run, found, _ = data.partition(_UNITS.encode())
    head = parse_record(run + b"}") if found else None
    return _manifest(output, head | {"units": {}} if head else parse_record(data))


def read_begun(output: Path) -> Manifest:
    """The manifest of a conversion as it was begun, finished or not, without units; with an empty
    record where nothing says that."""
    if output.is_dir():
        if (finished := read_run(output)) is not None:
            return finished
        if is_run_record(run := Journal(output).peek_run()):
            return Manifest(output / MANIFEST, run)
    return Manifest(output / MANIFEST, {})


def _manifest(output: Path, content: Record | None) -> Manifest | None:
    if not is_run_record(content) or not isinstance(content.get("units"), dict):
        return None
    units = content["units"].items()
    sound = {key: record if is_unit_record(record) else None for key, record in units}
    return Manifest(output / MANIFEST, content | {"units": sound})


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
    yield f"{_UNITS} {{"
    for count, (key, record) in enumerate(units):
        yield f'{"," if count else ""}\n  {json.dumps(key)}: {{\n   "files": [\n    '
        yield ",\n    ".join(json.dumps(file) for file in record["files"])
        yield '\n   ],\n   "tensors": {\n    '
        tensors = sorted(record["tensors"].items())
        yield ",\n    ".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in tensors)
        yield "\n   }"
        for name in sorted(record.keys() - {"files", "tensors"}):
            yield f",\n   {json.dumps(name)}: {json.dumps(record[name])}"
        yield "\n  }"
    yield "\n }\n}\n"
