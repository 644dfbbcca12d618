"""Level 1: every tensor that should be there is there, once, and described rightly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconv.checkpoint import source_identity
from ktconv.formats import FORMATS, TensorId, is_backward, parse_tensor_name
from ktconv.packed.weights import Place, name_of
from ktconv.targets.ktransformers import Plan
from ktconv.verify.findings import Findings
from ktconv.verify.side_files import check_side_files
from ktconv.verify.subject import Subject
from ktconv.writer.journal import file_is_intact
from ktconv.writer.metadata import INDEX, MANIFEST, read_index
from ktconv.writer.shards import Tensor

LEVEL = "structure"


def check_structure(subject: Subject, findings: Findings) -> dict[str, Any]:
    """Headers, names, shapes, index, manifest and sidecar files; reads no weight."""
    return StructureCheck(subject, findings).run()


class StructureCheck:
    """`check_structure`, step by step; other kinds of outputs have steps of their own."""

    def __init__(self, subject: Subject, findings: Findings) -> None:
        self._subject, self._findings = subject, findings
        self._packed, self._directory = subject.packed, subject.directory

    def run(self) -> dict[str, Any]:
        self.files()
        self.manifest()
        expected = self.tensors()
        self.index()
        side_files = check_side_files(self._subject, self._findings)
        packed = self._packed
        return {
            "tensors_expected": expected,
            "tensors_found": len(packed.tensors) + len(packed.others),
            "side_files": side_files,
            "files": len({place.file for place in packed.tensors.values()} | {*packed.headers}),
        }

    def _fail(self, check: str, message: str, **where: Any) -> None:
        self._findings.fail(LEVEL, check, message, **where)

    # ---- files ----

    def files(self) -> None:
        for name, why in self._packed.damaged.items():
            self._fail("damaged file", f"{why}.", file=name)
        for tensor, first, second in self._packed.doubles:
            self._fail(
                "double tensor",
                f"{tensor} is in {first} and again in {second}.",
                file=second,
                tensor=tensor,
            )
        if self._subject.unfinished:
            self._fail("unfinished", f"{self._directory} is not finished: continue it first.")

    def manifest(self) -> None:
        """Files as the manifest records them, and a source that is still the same."""
        manifest = self._subject.manifest
        if manifest is None:
            if (self._directory / MANIFEST).exists():
                self._fail("manifest", f"{MANIFEST} is damaged.", file=MANIFEST)
            elif not self._subject.unfinished:
                self._findings.note(
                    f"{self._directory} has no {MANIFEST}: it was made by another tool, so there "
                    "are no checksums, and how it was made follows from its tensors"
                )
            return
        if self._subject.contradiction:
            self._fail("manifest", f"{self._subject.contradiction}.", file=MANIFEST)
        for key, unit in manifest["units"].items():
            if unit is None:
                self._fail("manifest", f"{MANIFEST} has a damaged record of {key}.", file=MANIFEST)
                continue
            for record in unit["files"]:
                if not file_is_intact(self._directory, record):
                    self._fail(
                        "changed file",
                        f"{record['name']} is missing, or not as large or not with the header "
                        "that the manifest records.",
                        file=record["name"],
                    )
        self._source_identity(manifest)

    def _told(self) -> set[str]:
        """Tensors that the manifest lists."""
        units = self._subject.manifest["units"].values() if self._subject.manifest else ()
        return {name for unit in units if unit is not None for name in unit["tensors"]}

    def _found(self) -> set[str]:
        return {name_of(tensor) for tensor in self._packed.tensors} | self._packed.others.keys()

    def _source_identity(self, manifest: Mapping[str, Any]) -> None:
        before = manifest.get("source", {}).get("files", {})
        if self._subject.checkpoint is None or not before:  # merged from another tool's folders
            return
        now = {file["name"]: file for file in source_identity(self._subject.checkpoint)}
        for name in sorted(before.keys() | now.keys()):
            old, new = dict(before.get(name, {})), dict(now.get(name, {}))
            times = old.pop("mtime_ns", None), new.pop("mtime_ns", None)
            if old != new:
                self._fail(
                    "changed source",
                    f"{name} of the source is not the file that was converted.",
                    file=name,
                )
            elif times[0] != times[1]:
                self._findings.note(f"{name} of the source has another time than when converted")

    # ---- tensors ----

    def tensors(self) -> int:
        """How many tensors should be there."""
        self._kinds()
        if self._subject.plan is not None:
            return self._tensors_of_plan(self._subject.plan)
        self._odd_sizes()
        if self._subject.manifest is not None:
            return self._names(self._told())
        return self._names(
            {
                name_of(tensor)
                for layer, geometry in self._packed.layers.items()
                for tensor in geometry.tensors(layer)
            },
            others_too=False,
        )

    def _kinds(self) -> None:
        """All layers are of one method and have as many parts."""
        options = self._subject.options
        for layer, geometry in self._packed.layers.items():
            if geometry.format is None or geometry.format.key != options.method:
                self._fail(
                    "dimensions",
                    f"the tensors of layer {layer} do not have the sizes of "
                    f"{FORMATS[options.method].name}.",
                    layer=layer,
                )
            elif geometry.parts != options.numa:
                self._fail(
                    "dimensions",
                    f"layer {layer} has {geometry.parts} NUMA part(s), not {options.numa}.",
                    layer=layer,
                )

    def _tensors_of_plan(self, plan: Plan) -> int:
        missing, expected = [], set()
        for unit in plan.units:
            for tensor in unit.tensors():
                expected.add(tensor.name)
                if not self._check_tensor(tensor):
                    missing.append(tensor.name)
        told = self._told()
        self._missing(missing + sorted(told - expected - self._found()))
        self._unexpected(expected)
        if self._subject.manifest is not None:
            self._unlisted(self._found() - told)
        return len(expected)

    def _unlisted(self, names: set[str]) -> None:
        """Without a checksum nothing tells a flipped bit that rounding might have made too."""
        if names:
            self._fail(
                "manifest",
                f"{MANIFEST} has no record of {min(names)}"
                + (f" and {len(names) - 1} more tensor(s)." if len(names) > 1 else "."),
                file=MANIFEST,
                tensor=min(names),
            )

    def _check_tensor(self, tensor: Tensor) -> bool:
        """Whether it is there; says so if it is not as planned."""
        key = parse_tensor_name(tensor.name)
        if key is None:
            ref = self._packed.others.get(tensor.name)
            place = Place(ref.file, ref.offset, ref.nbytes, ref.dtype, ref.shape) if ref else None
        else:
            place = self._packed.tensors.get(key)
        if place is None:
            return False
        if not self._as_planned(place, tensor, packed=key is not None):
            self._fail(
                "wrong shape",
                f"{tensor.name} in {place.file.name} is {_words(place)}, not {tensor.dtype} "
                f"{list(tensor.shape)}.",
                file=place.file.name,
                tensor=tensor.name,
                **_where(key),
            )
        return True

    def _as_planned(self, place: Place, tensor: Tensor, *, packed: bool) -> bool:
        if not place.dtype:
            return place.nbytes == tensor.nbytes
        found = place.dtype
        if packed and not self._subject.ours and (found, tensor.dtype) == ("U8", "I8"):
            found = "I8"  # others may spell it so
        return (found, tuple(place.shape)) == (tensor.dtype, tuple(tensor.shape))

    def _names(self, expected: set[str], *, others_too: bool = True) -> int:
        self._missing(sorted(expected - self._found()))
        self._unexpected(expected, others_too=others_too)
        return len(expected)

    def _missing(self, names: list[str]) -> None:
        for name in names:
            self._fail(
                "missing tensor",
                f"{name} is missing.",
                tensor=name,
                **_where(parse_tensor_name(name)),
            )

    def _unexpected(self, expected: set[str], *, others_too: bool = True) -> None:
        for tensor, place in self._packed.tensors.items():
            if name_of(tensor) not in expected and not self._is_extra(tensor):
                self._fail(
                    "unexpected tensor",
                    f"{name_of(tensor)} in {place.file.name} should not be there.",
                    file=place.file.name,
                    tensor=name_of(tensor),
                    **_where(tensor),
                )
        others = self._packed.others.items() if others_too else ()
        extra = [(name, ref) for name, ref in others if name not in expected]
        if extra and not self._subject.ours:
            self._findings.note(f"{len(extra)} other tensors have no counterpart in the source")
            return
        for name, ref in extra:
            self._fail(
                "unexpected tensor",
                f"{name} in {ref.file.name} should not be there.",
                file=ref.file.name,
                tensor=name,
            )

    def _is_extra(self, tensor: TensorId) -> bool:
        """Backward matrices: the reference converter can write them, and merge keeps them."""
        manifest = self._subject.manifest or {}
        kept = "merged_from" in manifest or "resharded_from" in manifest
        return is_backward(tensor.proj) and (kept or not self._subject.ours)

    def _odd_sizes(self) -> None:
        for tensor, place in self._packed.tensors.items():
            if is_backward(tensor.proj):
                continue
            geometry = self._packed.layers[tensor.layer]
            expected = geometry.nbytes(tensor.proj, tensor.kind)  # type: ignore[arg-type]
            if expected is None or tensor.part >= geometry.parts:
                continue
            dtype, size = ("F32", 4) if tensor.kind == "scale" else ("I8", 1)
            planned = Tensor(name_of(tensor), dtype, (expected // size,), expected)
            if not self._as_planned(place, planned, packed=True):
                self._fail(
                    "wrong shape",
                    f"{name_of(tensor)} in {place.file.name} is {_words(place)}, not {dtype} "
                    f"{list(planned.shape)}.",
                    file=place.file.name,
                    tensor=name_of(tensor),
                    **_where(tensor),
                )

    # ---- index ----

    def index(self) -> None:
        if self._packed.layout != "safetensors":
            return
        content = read_index(self._directory)
        if content is None:
            if self._subject.ours:
                self._fail("missing file", f"{self._directory} has no {INDEX}.", file=INDEX)
            elif not self._subject.unfinished:
                self._findings.note(f"{self._directory} has no index")
            return
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict):
            self._fail("index", f"{INDEX} is damaged.", file=INDEX)
            return
        self._weight_map(weight_map)
        self._total_size(content)

    def _weight_map(self, weight_map: Mapping[str, Any]) -> None:
        found = {name_of(tensor): place.file.name for tensor, place in self._packed.tensors.items()}
        found |= {name: ref.file.name for name, ref in self._packed.others.items()}
        for name in sorted(found.keys() | weight_map.keys()):
            said, actual = weight_map.get(name), found.get(name)
            if said == actual:
                continue
            told = "does not name it" if said is None else f"says {said}"
            place = "is nowhere" if actual is None else f"is in {actual}"
            self._fail("index", f"{name} {place}, but {INDEX} {told}.", file=INDEX, tensor=name)

    def _total_size(self, content: Mapping[str, Any]) -> None:
        metadata = content.get("metadata")
        said = metadata.get("total_size") if isinstance(metadata, dict) else None
        actual = sum(place.nbytes for place in self._packed.tensors.values())
        actual += sum(ref.nbytes for ref in self._packed.others.values())
        if said == actual:
            return
        if self._subject.ours:
            self._fail("index", f"{INDEX} says total_size {said}, not {actual}.", file=INDEX)
        else:
            self._findings.note(f"{INDEX} says total_size {said}, not {actual}")


def _words(place: Place) -> str:
    """What a tensor is."""
    return f"{place.dtype} {list(place.shape)}" if place.dtype else f"{place.nbytes} bytes"


def _where(tensor: TensorId | None) -> dict[str, Any]:
    """The fields of a failure that tell which tensor it is about."""
    if tensor is None:
        return {}
    return {
        "layer": tensor.layer,
        "expert": tensor.expert,
        "projection": tensor.proj,
        "part": tensor.part,
    }
