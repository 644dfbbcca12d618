"""The content of an output directory, compared with a plan.

OUTPUT may contain only what the plan writes, or what an earlier run wrote, which `--overwrite`
removes.
"""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ktconv.conversion.plan import Plan, Unit
from ktconv.conversion.target import Target
from ktconv.errors import KtconvError, OutputError
from ktconv.system.files import io_error, remove, remove_empty, sync, translated
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
        """Part of run.json and manifest: every file that this conversion writes, and folders of
        layers, whose files are in the records of units."""
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
        files = _Files(known)
        for name in names:
            if name.startswith("."):
                continue
            if name not in files.tops:
                raise self._foreign(name)
            for path, is_folder in _tree(self._output, name):
                if not is_folder and path not in files:
                    raise self._foreign(path)

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
        names |= set(map(str, self._plan.sidecars)) | {MANIFEST, CARD}
        names |= set(self._plan.made_files)
        return names | ({INDEX} if self._plan.target.has_index else set())

    def _earlier_names(self) -> set[str]:
        """Files and folders that earlier runs wrote or began, whatever their settings were."""
        manifest = read_manifest(self._output)
        names = set(_names_in(manifest.record if manifest else None))
        if self._journal.has_run():
            names |= set(_names_in(self._journal.peek_run()))
            names |= {MANIFEST}
        for key in self._journal.unit_keys():
            names |= set(_names_in({"units": {key: self._journal.read_unit(key)}}))
        return {path_of(name) for name in names if _is_inside(name)}

    def remove_earlier_run(self) -> None:
        """Remove the files that `_earlier_names` lists, and folders that are empty then: the index
        first, and last the records that name the files, so that a run after a kill can go on."""
        files = _Files(self._earlier_names() - {INDEX, MANIFEST})
        remove(self._output / INDEX)
        for name in sorted(files.tops):
            for inner, is_folder in _tree(self._output, name):
                if is_folder:
                    remove_empty(self._output / inner)
                elif inner in files:
                    remove(self._output / inner)
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


class _Files:
    """Files that earlier runs wrote, by their names in records."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self.tops = {name.partition("/")[0] for name in names}
        self._unrecorded = names - {name.partition("/")[0] for name in names if "/" in name}

    def __contains__(self, path: str) -> bool:
        """Whether a path is one of them. A folder that no record of a unit describes, as after a
        kill, has the .kt files of a layer."""
        top = path.partition("/")[0]
        return path in self._names or (top in self._unrecorded and path.endswith(".kt"))


def _tree(output: Path, name: str) -> Iterator[tuple[str, bool]]:
    """A file, link or folder of the output, and all that is below it: paths from the output, True
    with folders, which come after what is in them. Links are not followed."""
    if (output / name).is_symlink() or not (output / name).is_dir():
        yield name, False
        return
    for place, folders, files in os.walk(output / name, topdown=False, onerror=_raise_unless_gone):
        inside = os.path.relpath(place, output)
        links = [one for one in folders if Path(place, one).is_symlink()]
        yield from ((f"{inside}/{one}", False) for one in sorted([*files, *links]))
        yield inside, True


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # another run replaces a folder
        raise io_error("read", error.filename, error) from error


def _names_in(record: Any) -> Iterator[str]:
    """Files and folders of run.json, a manifest or its units, which can be damaged."""
    if not isinstance(record, dict):
        return
    files = record.get("files")
    for name in files if isinstance(files, list) else []:
        if isinstance(name, str):
            yield name
    units = record.get("units")
    for unit in units.values() if isinstance(units, dict) else []:
        if is_unit_record(unit):
            yield from (file["name"] for file in unit["files"])


def _is_inside(name: str) -> bool:
    """Whether a name from a record, whose file may be removed, is that of a file below the
    directory, and not hidden."""
    parts = Path(name).parts
    return name == "/".join(parts) and name[:1] not in ("", ".") and ".." not in parts
