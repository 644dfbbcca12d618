"""The content of an output directory, compared with a plan.

OUTPUT may contain only what the plan writes, or what an earlier run wrote, which `--overwrite`
removes.
"""

from __future__ import annotations

import errno
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ktconv.conversion.plan import Plan, Unit
from ktconv.conversion.target import Target
from ktconv.errors import KtconvError, OutputError
from ktconv.system.files import io_error, remove, sync, translated
from ktconv.system.regular_files import opened_regular
from ktconv.system.text import path_of, path_text
from ktconv.writer.journal import (
    STATE_DIRECTORY,
    Journal,
    Record,
    file_is_intact,
    is_run_record,
    is_unit_record,
)
from ktconv.writer.manifest import MANIFEST, read_manifest
from ktconv.writer.metadata import CARD, INDEX, index_lines
from ktconv.writer.staging import shard_record, staged_name


class OutputState:
    """The files of one output directory that matter to one plan."""

    def __init__(self, plan: Plan[Target], journal: Journal) -> None:
        self._plan, self._journal, self._output = plan, journal, journal.output

    # ---- known and foreign files ----

    def claim(self) -> Record:
        """Part of run.json and manifest: every top-level name that this conversion writes."""
        return {"files": sorted(map(path_text, self._planned_names()))}

    def refuse_foreign_files(self) -> None:
        """OutputError for files that neither this plan nor an earlier run writes: loaders read
        every shard they find. Whether settings agree with the earlier run is checked later."""
        try:  # without a look ahead: another run can remove it at any time
            names = sorted(entry.name for entry in self._output.iterdir())
        except OSError as error:
            if error.errno == errno.ENOTDIR and self._output.is_file():
                raise OutputError(
                    f"{self._output} is a file", "choose another path, or remove the file"
                ) from None
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return  # nothing is there yet, or nothing can be
            raise io_error("read", self._output, error) from error
        ours = self._journal.has_run() or read_manifest(self._output) is not None
        known = self._earlier_names() if ours else set()
        if self._journal.has_run() and not is_run_record(self._journal.peek_run()):
            known |= self._planned_names()  # of a damaged record, which names nothing
        for name in names:
            if not name.startswith(".") and name not in known:
                raise self._foreign(name)

    def _foreign(self, name: str) -> OutputError:
        if (self._output / MANIFEST).exists() and read_manifest(self._output) is None:
            return OutputError(
                f"{self._output / MANIFEST} is damaged",
                "restore it from a copy, or choose an empty directory",
            )
        return OutputError(
            f"{self._output} contains {name}, which this conversion did not write",
            "choose an empty directory, or move it elsewhere",
        )

    def _planned_names(self) -> set[str]:
        names = {name for unit in self._plan.units for name in unit.shard_names}
        names |= {unit.folder for unit in self._plan.units if unit.folder}
        names |= {path.parts[0] for path in self._plan.sidecars} | {MANIFEST, CARD}
        names |= set(self._plan.made_files)
        return names | ({INDEX} if self._plan.target.has_index else set())

    def _earlier_names(self) -> set[str]:
        """Top-level names that earlier runs wrote or began, whatever their settings were."""
        manifest = read_manifest(self._output)
        names = set(_names_in(manifest.record if manifest else None))
        if self._journal.has_run():
            names |= set(_names_in(self._journal.peek_run()))
            names |= {MANIFEST}
        for key in self._journal.unit_keys():
            names |= set(_names_in({"units": {key: self._journal.read_unit(key)}}))
        return {path_of(name) for name in names if _is_plain(name)}

    def remove_earlier_run(self) -> None:
        """Remove the files that `_earlier_names` lists: the index first, and last the records that
        name the files, so that a run after a kill can go on."""
        names = self._earlier_names() - {INDEX, MANIFEST}
        for name in [INDEX, *sorted(names)]:
            remove(self._output / name)
        state = self._journal.directory
        for path in state.iterdir():
            if path.name not in ("lock", self._journal.run_file.name):
                remove(path)
        with translated("write", self._output):
            sync(self._output)
            sync(state)
        remove(self._output / MANIFEST)
        remove(self._journal.run_file)

    # ---- finished units ----

    def nothing_is_kept(self) -> bool:
        """True if the state directory is empty or describes no existing file."""
        if not self._journal.has_run() and not self._journal.unit_keys():
            return True
        return [path.name for path in self._output.iterdir()] == [STATE_DIRECTORY]

    def pending(self, units: Sequence[Unit]) -> list[Unit]:
        """The units among `units` that are not here as planned."""
        manifest = read_manifest(self._output)
        finished = manifest.units if manifest else {}
        return [
            unit
            for unit in units
            if not self.intact_record(unit, finished.get(unit.key))
            and not self.intact_record(unit, self._journal.read_unit(unit.key))
        ]

    def intact_record(self, unit: Unit, record: object) -> Record | None:
        """`record` if it describes this unit as planned, and its files still exist."""
        if not isinstance(record, dict) or not is_unit_record(record):
            return None
        names, files = self._planned_files(unit)
        if record["files"] != files or record["tensors"].keys() != names:
            return None
        return record if all(file_is_intact(self._output, file) for file in files) else None

    def _planned_files(self, unit: Unit) -> tuple[set[str], list[dict[str, object]]]:
        """The tensors of a unit, or the parts of them that are recorded by themselves, and the
        journal's records of its files."""
        if unit.folder is not None:
            files = unit.folder_files
            return set(files), [{"name": path, "bytes": size} for path, size in files.values()]
        shards = unit.shards
        slots = unit.slots
        names = {name for shard in shards for name in shard.offsets} | slots.keys()
        names -= {tensor for tensor, _ in slots.values()}
        return names, [shard_record(shard) for shard in shards]

    def final_files_present(self) -> bool:
        """Whether index and manifest exist. Model card and side files may be edited."""
        made = [*map(str, self._plan.sidecars), *self._plan.made_files, CARD]
        if not all((self._output / name).is_file() for name in made):
            return False
        return not self._plan.target.has_index or self._index_is_right()

    def _index_is_right(self) -> bool:
        lines = index_lines(self.weight_map(), self._plan.total_size)
        try:
            with opened_regular(self._output / INDEX) as fd, open(fd, "rb", closefd=False) as file:
                return all(file.read(len(line)) == line for line in lines) and not file.read(1)
        except (OSError, KtconvError):
            return False

    def weight_map(self) -> Iterator[tuple[str, str]]:
        """Every tensor with its shard, unit by unit."""
        for unit in self._plan.units:
            for shard in unit.shards:
                yield from ((tensor, shard.name) for tensor in shard.offsets)

    def remove_stale_staging(self, claimed: Sequence[Unit]) -> None:
        """Staged files of units that this run has locked, left by a killed run."""
        state = self._journal.directory
        for unit in claimed:
            for name in [*unit.shard_names, *([unit.folder] if unit.folder else [])]:
                remove(state / staged_name(name))
                for path in state.glob(f"{glob.escape(name)}.*.part"):  # of one attempt of several
                    remove(path)


def _names_in(record: Any) -> Iterator[str]:
    """Top-level names in run.json, a manifest or its units, which can be damaged."""
    if not isinstance(record, dict):
        return
    files = record.get("files")
    for name in files if isinstance(files, list) else []:
        if isinstance(name, str):
            yield name
    units = record.get("units")
    for unit in units.values() if isinstance(units, dict) else []:
        if is_unit_record(unit):
            yield from (file["name"].split("/")[0] for file in unit["files"])


def _is_plain(name: str) -> bool:
    """Whether a name from a record, whose file may be removed, is one of the directory itself."""
    return name == Path(name).name and name[:1] not in ("", ".")
