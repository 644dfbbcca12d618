"""Level structure for experts on CPUs: every tensor of the plan, manifest or layers, no other."""

from __future__ import annotations

from ktconv.formats import FORMATS, parse_kt_path
from ktconv.system.units import counted
from ktconv.targets.packed.weights import name_of
from ktconv.verify.packed.output import PackedOutput
from ktconv.verify.structure import StructureCheck, where_of
from ktconv.writer.manifest import MANIFEST
from ktconv.writer.shards import Tensor


class PackedStructureCheck(StructureCheck):
    _output: PackedOutput

    def tensors(self) -> int:
        output = self._output
        if output.contradiction and output.manifest:
            self._fail("manifest", f"{output.contradiction}.", file=MANIFEST)
        self._kinds()
        self._kt_files()
        if output.plan is not None:
            return self._check_planned(output.plan.units)
        self._wrong_sizes()
        if output.manifest is not None:
            return self._check_names({*self._output.records})
        layers = self._packed.layers.items()
        backward = output.options.save_backward
        names = {
            name_of(one)
            for index, here in layers
            for one in here.tensors(index, here.matrices(backward))
        }
        self._missing(sorted(names - self._found()))
        self._unexpected_packed(names)
        return len(names)

    def _kinds(self) -> None:
        """Checks that all layers have the same method and number of parts."""
        options = self._output.options
        for layer, geometry in self._packed.layers.items():
            words = None
            if geometry.format is None or geometry.format.key != options.method:
                name = FORMATS[options.method].name
                words = f"the tensors of layer {layer} do not have the sizes of {name}"
            elif geometry.parts != options.numa:
                parts = counted(geometry.parts, "NUMA part")
                words = f"layer {layer} has {parts}, not {options.numa}"
            if words:
                self._fail("dimensions", f"{words}.", layer=layer)

    def _kt_files(self) -> None:
        """Checks that names of `.kt` files begin with the method, as readers expect."""
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

    def _unexpected(self, expected: set[str]) -> None:
        self._unexpected_packed(expected)
        extra = self._packed.others.keys() - expected
        if self._output.ours:
            super()._unexpected(expected)
        elif extra:
            self._findings.note(
                f"{counted(len(extra), 'other tensor', 'do')} not exist in the source"
            )

    def _unexpected_packed(self, expected: set[str]) -> None:
        for tensor, place in self._packed.tensors.items():
            name = name_of(tensor)
            if name not in expected:
                self._unexpected_tensor(name, place.file, **where_of(tensor))

    def _wrong_sizes(self) -> None:
        for tensor, place in self._packed.tensors.items():
            geometry = self._packed.layers[tensor.layer]
            expected = geometry.stored(tensor.proj, tensor.kind)
            if expected is None or tensor.part >= geometry.parts:
                continue
            planned = Tensor(name_of(tensor), *expected)
            if not self._as_planned(place, planned, packed=True):
                self._wrong_shape(planned, place, tensor)
