"""Level structure: every expected tensor is there once, and index and manifest describe it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ktconv.conversion.plan import Unit
from ktconv.formats import TensorId, parse_tensor_name
from ktconv.source import TensorRef, source_identity
from ktconv.system.units import counted
from ktconv.targets.packed.weights import name_of
from ktconv.verify.findings import Findings
from ktconv.verify.output import OpenedOutput
from ktconv.verify.side_files import check_side_files
from ktconv.writer.journal import file_is_intact
from ktconv.writer.manifest import MANIFEST, Manifest
from ktconv.writer.metadata import INDEX, read_index
from ktconv.writer.shards import Tensor

LEVEL = "structure"


class StructureCheck(ABC):
    """Headers, names, shapes, index, manifest and side files; reads no weight."""

    def __init__(self, output: OpenedOutput, findings: Findings) -> None:
        self._output, self._findings = output, findings
        self._packed, self._directory = output.packed, output.directory

    def run(self) -> dict[str, Any]:
        self.files()
        self.manifest()
        expected = self.tensors()
        self.index()
        side_files = check_side_files(self._output, self._findings)
        packed = self._packed
        return {
            "tensors_expected": expected,
            "tensors_found": len(packed.tensors) + len(packed.others),
            "side_files": side_files,
            "files": len({place.file for place in packed.tensors.values()} | {*packed.headers}),
        }

    def _fail(self, check: str, message: str, **where: Any) -> None:
        self._findings.fail(LEVEL, check, message, **where)

    def _fail_tensor(self, check: str, name: str, file: Path, words: str, **where: Any) -> None:
        self._findings.fail_tensor(LEVEL, check, name, file, words, **where)

    # ---- files ----

    def files(self) -> None:
        for name, why in self._packed.damaged.items():
            self._fail("damaged file", f"{why}.", file=name)
        for tensor, first, second in self._packed.doubles:
            message = f"{tensor} is in {first} and again in {second}."
            self._fail("double tensor", message, file=second, tensor=tensor)
        if self._output.unfinished:
            again = "run the command that converted it again"
            self._fail("unfinished", f"{self._directory} is incomplete: {again}.")

    def manifest(self) -> None:
        """Checks that files and source are those that the manifest records."""
        manifest = self._output.manifest
        if manifest is None:
            if (self._directory / MANIFEST).exists():
                self._fail("manifest", f"{MANIFEST} is damaged.", file=MANIFEST)
            elif not self._output.unfinished:
                self._findings.note(
                    f"{self._directory} has no {MANIFEST}: there are no checksums, and its "
                    "options are inferred from its tensors"
                )
            return
        for key in manifest.damaged_units:
            self._fail("manifest", f"{MANIFEST} has a damaged record of {key}.", file=MANIFEST)
        for record in manifest.files:
            if not file_is_intact(self._directory, record):
                name = record["name"]
                message = f"{name} is missing, or its size or header differs from the manifest."
                self._fail("changed file", message, file=name)
        self._source_identity(manifest)

    def _found(self) -> set[str]:
        return {name_of(tensor) for tensor in self._packed.tensors} | self._packed.others.keys()

    def _source_identity(self, manifest: Manifest) -> None:
        before = manifest.source_files
        if self._output.checkpoint is None or not before:  # merged from another tool's folders
            return
        now = {file["name"]: file for file in source_identity(self._output.checkpoint)}
        for name in sorted(before.keys() | now.keys()):
            old, new = dict(before.get(name, {})), dict(now.get(name, {}))
            tags = {old.pop("etag", None), new.pop("etag", None)} - {None}
            times = {old.pop("mtime_ns", None), new.pop("mtime_ns", None)} - {None}
            if old != new or len(tags) > 1:
                message = f"{name} of the source differs from the file that was converted."
                self._fail("changed source", message, file=name)
            elif len(times) > 1:
                self._findings.note(
                    f"{name} of the source has another modification time than at conversion"
                )

    # ---- tensors ----

    @abstractmethod
    def tensors(self) -> int:
        """Checks the tensors. Returns how many there should be."""

    def _check_planned(self, units: Iterable[Unit], checked: Iterable[str] = ()) -> int:
        """Checks the tensors of these units; others than these and those that are `checked`
        already are unexpected. Returns how many tensors that makes."""
        expected, missing = set(checked), []
        for unit in units:
            for tensor in unit.tensors():
                expected.add(tensor.name)
                if not self._check_tensor(tensor):
                    missing.append(tensor.name)
        recorded, found = self._output.records.keys(), self._found()
        self._missing(missing + sorted(recorded - expected - found))
        self._unexpected(expected)
        if self._output.manifest is not None:
            self._unlisted(found - recorded)
        return len(expected)

    def _check_names(self, expected: set[str]) -> int:
        """Checks that exactly these are there, of tensors that are not checked otherwise."""
        self._missing(sorted(expected - self._found()))
        self._unexpected(expected)
        return len(expected)

    def _unexpected(self, expected: set[str]) -> None:
        for name, ref in self._output.others.items():
            if name not in expected:
                self._unexpected_tensor(name, ref.file)

    def _unlisted(self, names: set[str]) -> None:
        """Report tensors without a checksum, in which a changed bit that could be due to rounding
        is not found."""
        if names:
            more = f" and {counted(len(names) - 1, 'more tensor')}" if len(names) > 1 else ""
            message = f"{MANIFEST} has no record of {min(names)}{more}."
            self._fail("manifest", message, file=MANIFEST, tensor=min(names))

    def _check_tensor(self, tensor: Tensor) -> bool:
        """Whether it is there; a failure if it has another type or shape than planned."""
        key = parse_tensor_name(tensor.name)
        packed = self._packed
        place = packed.others.get(tensor.name) if key is None else packed.tensors.get(key)
        if place is None:
            return False
        if not self._as_planned(place, tensor, packed=key is not None):
            self._wrong_shape(tensor, place, key)
        return True

    def _wrong_shape(self, planned: Tensor, place: TensorRef, key: TensorId | None) -> None:
        actual = f"{place.dtype} {list(place.shape)}" if place.dtype else f"{place.nbytes} bytes"
        words = f"is {actual}, not {planned.dtype} {list(planned.shape)}"
        self._fail_tensor("wrong shape", planned.name, place.file, words, **where_of(key))

    def _unexpected_tensor(self, name: str, file: Path, **where: Any) -> None:
        self._fail_tensor("unexpected tensor", name, file, "is not expected", **where)

    def _as_planned(self, place: TensorRef, tensor: Tensor, *, packed: bool) -> bool:
        if not place.dtype:
            return place.nbytes == tensor.nbytes
        found = place.dtype
        if packed and not self._output.ours and (found, tensor.dtype) == ("U8", "I8"):
            found = "I8"  # as other tools write it
        return (found, tuple(place.shape)) == (tensor.dtype, tuple(tensor.shape))

    def _missing(self, names: list[str]) -> None:
        for name in names:
            where = where_of(parse_tensor_name(name))
            self._fail("missing tensor", f"{name} is missing.", tensor=name, **where)

    # ---- index ----

    def index(self) -> None:
        if self._packed.layout != "safetensors":
            return
        content = read_index(self._directory)
        if content is None:
            if self._output.ours:
                self._fail("missing file", f"{self._directory} has no {INDEX}.", file=INDEX)
            elif not self._output.unfinished:
                self._findings.note(f"{self._directory} has no index")
            return
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict):
            self._fail("index", f"{INDEX} is damaged.", file=INDEX)
            return
        self._weight_map(weight_map)
        self._total_size(content)

    def _weight_map(self, weight_map: Mapping[str, Any]) -> None:
        found = {name: ref.file.name for name, ref in self._packed.in_files().items()}
        for name in sorted(found.keys() | weight_map.keys()):
            listed, actual = weight_map.get(name), found.get(name)
            if listed == actual:
                continue
            entry = "does not list it" if listed is None else f"says {listed}"
            place = "does not exist" if actual is None else f"is in {actual}"
            self._fail("index", f"{name} {place}, but {INDEX} {entry}.", file=INDEX, tensor=name)

    def _total_size(self, content: Mapping[str, Any]) -> None:
        metadata = content.get("metadata")
        recorded = metadata.get("total_size") if isinstance(metadata, dict) else None
        actual = sum(place.nbytes for place in self._packed.tensors.values())
        actual += sum(ref.nbytes for ref in self._packed.others.values())
        if recorded == actual:
            return
        if self._output.ours:
            self._fail("index", f"{INDEX} says total_size {recorded}, not {actual}.", file=INDEX)
        else:
            self._findings.note(f"{INDEX} says total_size {recorded}, not {actual}")


def where_of(tensor: TensorId | None) -> dict[str, Any]:
    """The fields of a failure that locate a packed tensor."""
    if tensor is None:
        return {}
    return {
        "layer": tensor.layer,
        "expert": tensor.expert,
        "projection": tensor.proj,
        "part": tensor.part,
    }
