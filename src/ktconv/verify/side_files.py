"""Level structure: configuration, tokenizer and leftovers of other runs."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from ktconv.errors import CheckpointError
from ktconv.formats import parse_tensor_name
from ktconv.source import read_header
from ktconv.source.agreement import absent_layers, contradictions
from ktconv.source.config import CONFIG_NAME
from ktconv.source.settings import ModelSettings
from ktconv.source.side_files import RECORDS, Record, flaws, is_legal, list_side_files, record_of
from ktconv.system.regular_files import read_small
from ktconv.system.text import path_text
from ktconv.verify.findings import Findings
from ktconv.verify.output import OpenedOutput
from ktconv.verify.side_content import content_differences
from ktconv.writer.manifest import MANIFEST


def check_side_files(output: OpenedOutput, findings: Findings) -> int:
    """Checks that they exist, are readable, equal what was written and the source's, and fit the
    tensors.

    Returns how many were compared with their checksums.
    """
    return _SideFiles(output, findings).check()


class _SideFiles:
    def __init__(self, output: OpenedOutput, findings: Findings) -> None:
        self._output, self._findings, self._directory = output, findings, output.directory
        self._flawed: set[str] = set()  # by the manifest: reported already

    def check(self) -> int:
        records = self._records()
        for flaw in flaws(self._directory, records) if records is not None else ():
            self._fail(flaw.check, flaw.message, flaw.name)
            self._flawed.add(flaw.name)
        self._against_source(records is not None)
        self._readable()
        self._config()
        self._leftovers()
        return len(records or self._earlier_record())

    def _fail(self, check: str, words: str, file: str, layer: int | None = None) -> None:
        self._findings.fail("structure", check, f"{words}.", file=file, layer=layer)

    # ---- against the manifest ----

    def _records(self) -> dict[str, Record] | None:
        """The records of the manifest; None if it has none."""
        if self._output.manifest is None:
            return None
        try:
            records = self._output.manifest.side_files
        except CheckpointError as error:
            self._fail("manifest", str(error), MANIFEST)
            return None
        if records is None:
            self._earlier()
        return records

    def _earlier(self) -> None:
        """Checks config.json, of which alone manifests of earlier versions have a checksum."""
        self._findings.note(
            f"{MANIFEST} was written by an earlier version, which recorded no checksums of side "
            f"files: of these only {CONFIG_NAME} can be checked without the source"
        )
        for name, record in self._earlier_record().items():
            with suppress(CheckpointError):  # reported by other checks
                if record_of(self._directory, name)["sha256"] != record["sha256"]:
                    self._fail(
                        "changed file", f"{name} differs from the file that was copied", name
                    )

    def _earlier_record(self) -> dict[str, Record]:
        """The record of config.json if it was copied: outputs for GPUs have another one."""
        manifest = self._output.manifest
        if manifest is None or RECORDS in manifest.record:
            return {}
        about = manifest.source_files.get(CONFIG_NAME, {})
        copied = self._output.packed.tensors and "sha256" in about
        return {CONFIG_NAME: about} if copied else {}

    # ---- against the source ----

    def _against_source(self, recorded: bool) -> None:
        planned = self._output.plan.sidecars if self._output.plan else []
        wanted = self._output.has_config and not (self._directory / CONFIG_NAME).exists()
        if CONFIG_NAME not in map(str, planned) and wanted:
            planned = [*planned, Path(CONFIG_NAME)]
        for name in planned:
            if path_text(name) in self._flawed:
                continue
            if not os.path.lexists(self._directory / name):
                self._absent(str(name))
            elif self._output.checkpoint is not None:
                self._compare(name, recorded)

    def _absent(self, name: str) -> None:
        """A failure for our own outputs, a note for others: tools omit files, and folders that were
        merged without a source may have had none. Files that the manifest records are
        reported before."""
        if is_legal(Path(name)):  # earlier versions copied fewer of them
            self._findings.note(
                f"{self._directory} has no {name}, a licence or notice of the source"
            )
            return
        manifest = self._output.manifest
        if manifest and (manifest.source_files or not manifest.merged):
            self._fail("missing file", f"{self._directory} has no {name}", name)
        elif not self._output.unfinished:
            self._findings.note(f"{self._directory} has no {name}, which models need")

    def _compare(self, name: Path, recorded: bool) -> None:
        """Compares a file with that of the source, which it was copied from."""
        try:
            here = read_small(self._directory, name)
        except CheckpointError as error:
            self._fail("damaged file", str(error), str(name))
            return
        source, made = self._output.source, self._output.source.made_files
        # Where the source has no side files, that of its metadata.
        there = (
            read_small(source.side_directory, name) if source.side_directory else made[str(name)]
        )
        if here == there:
            return
        manifest = self._output.manifest
        if manifest is None or not manifest.source_files:
            self._compare_content(name, here, there)
        elif not recorded or not self._is_changed_source(name, there):
            self._fail("changed file", f"{name} differs from the source's", str(name))
        elif name.name != CONFIG_NAME:  # which the source's identity shows
            words = f"{name} of the source differs from the file that was copied"
            self._fail("changed source", words, str(name))

    def _is_changed_source(self, name: Path, there: bytes) -> bool:
        """Whether the source's file is not the one that was converted: of config.json the manifest
        has its checksum by itself, of others only as they were copied."""
        if name.name != CONFIG_NAME or self._output.manifest is None:
            return True
        recorded = self._output.manifest.source_files.get(CONFIG_NAME, {}).get("sha256")
        return recorded is not None and recorded != hashlib.sha256(there).hexdigest()

    def _compare_content(self, name: Path, here: bytes, there: bytes) -> None:
        """Compares by content, since other tools may rewrite a file."""
        found = content_differences(name, here, there, "in the source")
        for difference in found or ():
            self._fail("changed file", f"{name}: {difference}", str(name))
        if not found:
            equal = "" if found is None else ", but equal in content"
            self._findings.note(f"{name} differs from the source's{equal}")

    # ---- by themselves ----

    def _readable(self) -> None:
        """Checks that text files that engines read are UTF-8 without a byte order mark, and that
        JSON files can be parsed, apart from config.json, which is read elsewhere."""
        for name in list_side_files(self._directory):
            if name.name == CONFIG_NAME or not _is_read(name):
                continue
            try:
                text = read_small(self._directory, name).decode()
                if text.startswith("\ufeff"):
                    raise ValueError("it begins with a byte order mark")
                if name.suffix == ".json":
                    json.loads(text)
            except UnicodeDecodeError as error:
                words = f"{name} is not UTF-8 text at byte {error.start}"
                self._fail("damaged file", words, name.as_posix())
            except (ValueError, RecursionError) as error:
                what = "JSON" if name.suffix == ".json" else "plain UTF-8"
                self._fail("damaged file", f"{name} is not {what}: {error}", name.as_posix())
            except CheckpointError as error:
                self._fail("damaged file", str(error), name.as_posix())

    def _config(self) -> None:
        """Checks that config.json describes the layers, experts and sizes of the tensors."""
        output, dimensions = self._output, self._output.dimensions
        if not os.path.lexists(self._directory / CONFIG_NAME):
            return
        try:
            tower = output.manifest.tower if output.manifest else None
            config = ModelSettings.beside(self._directory, tower).checked
        except CheckpointError as error:
            self._fail("damaged file", str(error).rstrip("."), CONFIG_NAME)
            return
        for message, layer in contradictions(config, dimensions):
            self._fail("dimensions", message, CONFIG_NAME, layer)
        present = output.packed.layers or dimensions
        if output.plan or output.manifest or not present:  # absent layers are known, or unknown
            return
        for layer in absent_layers(config, present):
            words = f"layer {layer} is an MoE layer by {CONFIG_NAME}, but has no experts"
            self._fail("dimensions", words, CONFIG_NAME, layer)

    def _leftovers(self) -> None:
        """Checks subdirectories: KTransformers reads every shard in them, whatever the index
        says."""
        for shard in sorted(self._directory.rglob("*.safetensors")):
            if shard.parent == self._directory:
                continue
            try:
                names = [ref.name for ref in read_header(shard).tensors]
            except CheckpointError:
                continue  # no tool can read it
            if any(parse_tensor_name(name) for name in names):
                inside = shard.relative_to(self._directory).as_posix()
                words = (
                    f"{inside} contains packed experts too, and KTransformers reads every shard "
                    f"below {self._directory}"
                )
                self._fail("double tensor", words, inside)
        if self._output.packed.layout == "safetensors":
            folders = sorted(path.name for path in self._directory.glob("_layer_*"))
            if folders:
                self._findings.note(f"{', '.join(folders)} next to the shards: not checked")


def _is_read(name: Path) -> bool:
    """Whether engines read a side file as text."""
    return name.suffix in (".json", ".jinja") or name.name in ("merges.txt", "vocab.txt")
