"""Level 1 for experts on CPUs: every tensor of the plan, manifest or layers, and no other."""

from __future__ import annotations

from typing import Any

from ktconv.conversion.plan import Plan
from ktconv.formats import FORMATS, TensorId, is_backward, parse_kt_path
from ktconv.packed.weights import name_of
from ktconv.verify.cpu.output import CpuOutput
from ktconv.verify.structure import StructureCheck, where_of
from ktconv.writer.manifest import MANIFEST
from ktconv.writer.shards import Tensor


class CpuStructureCheck(StructureCheck):
    _output: CpuOutput

    def tensors(self) -> int:
        """How many tensors should be there."""
        output = self._output
        if output.contradiction and output.manifest:
            self._fail("manifest", f"{output.contradiction}.", file=MANIFEST)
        self._kinds()
        self._kt_files()
        if self._output.plan is not None:
            return self._tensors_of_plan(self._output.plan)
        self._wrong_sizes()
        if self._output.manifest is not None:
            return self._names(self._recorded())
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
        options = self._output.options
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

    def _kt_files(self) -> None:
        """`.kt` files are found by names that begin with the method."""
        if self._packed.layout != "layers":
            return
        method = FORMATS[self._output.options.method].name
        for place in self._packed.tensors.values():
            name = place.file.relative_to(self._directory).as_posix()
            file = parse_kt_path(name)
            if file is not None and file.method != method:
                self._fail(
                    "damaged file", f"{name} is named {file.method}, not {method}.", file=name
                )

    def _tensors_of_plan(self, plan: Plan[Any]) -> int:
        missing, expected = [], set()
        for unit in plan.units:
            for tensor in unit.tensors():
                expected.add(tensor.name)
                if not self._check_tensor(tensor):
                    missing.append(tensor.name)
        recorded = self._recorded()
        self._missing(missing + sorted(recorded - expected - self._found()))
        self._unexpected(expected)
        if self._output.manifest is not None:
            self._unlisted(self._found() - recorded)
        return len(expected)

    def _names(self, expected: set[str], *, others_too: bool = True) -> int:
        self._missing(sorted(expected - self._found()))
        self._unexpected(expected, others_too=others_too)
        return len(expected)

    def _unexpected(self, expected: set[str], *, others_too: bool = True) -> None:
        for tensor, place in self._packed.tensors.items():
            name = name_of(tensor)
            if name not in expected and not self._is_extra(tensor):
                self._unexpected_tensor(name, place.file, **where_of(tensor))
        others = self._packed.others.items() if others_too else ()
        extra = [(name, ref) for name, ref in others if name not in expected]
        if extra and not self._output.ours:
            self._findings.note(f"{len(extra)} other tensors do not exist in the source")
            return
        for name, ref in extra:
            self._unexpected_tensor(name, ref.file)

    def _is_extra(self, tensor: TensorId) -> bool:
        """Backward matrices: the reference converter can write them, and merge keeps them."""
        manifest = self._output.manifest
        kept = manifest is None or manifest.merged or manifest.resharded_from is not None
        return is_backward(tensor.proj) and kept

    def _wrong_sizes(self) -> None:
        for tensor, place in self._packed.tensors.items():
            if is_backward(tensor.proj):
                continue
            geometry = self._packed.layers[tensor.layer]
            expected = geometry.nbytes(tensor.proj, tensor.kind)
            if expected is None or tensor.part >= geometry.parts:
                continue
            dtype, size = ("F32", 4) if tensor.kind == "scale" else ("I8", 1)
            planned = Tensor(name_of(tensor), dtype, (expected // size,), expected)
            if not self._as_planned(place, planned, packed=True):
                self._wrong_shape(planned, place, tensor)
