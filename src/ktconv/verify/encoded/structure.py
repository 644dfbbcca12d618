"""Level structure for experts on GPUs: every expert is packed once, as config.json says, and
everything else is as in the source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ktconv.source import ExpertMatrix, TensorRef
from ktconv.source.config import CONFIG_NAME
from ktconv.source.encodings.base import BIAS
from ktconv.source.settings import ModelSettings
from ktconv.system.text import first_few
from ktconv.targets.encoded.config import quantization_section
from ktconv.targets.encoded.ignored import names_in_transformers
from ktconv.targets.encoded.layouts.packed import PACK_QUANTIZED
from ktconv.targets.encoded.module_classes import class_of
from ktconv.targets.encoded.names import patterns_of, target_pattern
from ktconv.targets.encoded.scheme import CHANNEL
from ktconv.targets.encoded.target import RENAMED, EncodedTarget, bias_tensors, weight_dtype
from ktconv.verify.encoded.output import EncodedOutput, Module, is_expert
from ktconv.verify.encoded.quantization import Group, quantization_elsewhere, unlike_ours, unusual
from ktconv.verify.encoded.unpack import SCALE_DTYPES
from ktconv.verify.side_content import QUANTIZATION_KEYS, config_differences, differences, flat
from ktconv.verify.structure import StructureCheck
from ktconv.writer.manifest import MANIFEST

NOT_LINEAR = ("embeddings", "router gates", "norms")  # two-dimensional, yet no engine packs them


class EncodedStructureCheck(StructureCheck):
    _output: EncodedOutput

    def tensors(self) -> int:
        self._config()
        planned = dict(self._planned())
        for name, matrix in planned.items():
            self._expert(name, matrix)
        for name, module in self._output.modules.items():
            if name not in planned:
                self._stray(module, known=bool(self._output.plan))
        self._plain_weights()
        checked = {
            f"{name}.{part}"
            for name, matrix in planned.items()
            for part in self._expected_parts(name, matrix)
        }
        if self._output.plan is not None:
            return self._check_planned(self._output.plan.others, checked)
        if self._output.manifest is not None:
            return len(checked) + self._check_names(self._output.records.keys() - checked)
        return len(checked) + len(self._output.others)

    def _parts_of(self, module: str) -> Sequence[str]:
        return self._output.module(module).layout.parts

    def _expected_parts(self, name: str, matrix: ExpertMatrix | None) -> Sequence[str]:
        """Parts with a bias where the source has one; without a source, where it is recorded or
        there."""
        parts, module = self._parts_of(name), self._output.module(name)
        if matrix is not None:
            biased = matrix.bias is not None
        else:
            biased = BIAS in module.parts or f"{name}.{BIAS}" in self._output.records
        return (*parts, BIAS) if biased else parts

    # ---- config.json ----

    def _config(self) -> None:
        output = self._output
        if output.why_not is not None:
            self._wrong_config(f"{output.why_not}.")
            return
        if output.scheme is not None and output.recipe is None:
            scheme = output.scheme
            recorded = f"W{scheme.bits}A16 with group size {scheme.group_size}"
            for group in output.quantization.groups:
                if _words(group) != recorded:
                    self._wrong_config(
                        f"{CONFIG_NAME} says {_words(group)}, but {MANIFEST} says {recorded}."
                    )
        self._quantization()
        if output.checkpoint is not None:
            self._unlike(output.checkpoint.config.document())

    def _quantization(self) -> None:
        """Checks all of quantization_config, since engines use keys that are not read elsewhere."""
        output = self._output
        section, ours = output.config.get("quantization_config"), None
        if output.scheme is not None and not output.ours:
            self._note_section(section)
            return
        if output.ours and (ours := self._written()) is None:
            if section is not None:
                self._wrong_config(
                    f"{CONFIG_NAME} has a quantization_config, but nothing is quantized."
                )
            return
        if not isinstance(section, Mapping):
            self._wrong_config(f"{CONFIG_NAME} has no quantization_config.")
            return
        found = unusual(section) if ours is None else unlike_ours(section, ours)
        for difference in found:
            self._wrong_config(f"{CONFIG_NAME}: quantization_config.{difference}.")
        for path in quantization_elsewhere(output.config):
            self._wrong_config(f"{CONFIG_NAME} also describes quantization in {path}.")

    def _note_section(self, section: Any) -> None:
        """Note how quantization_config differs from ours. Without a manifest that is no failure:
        another tool may have written these experts, and describes them in its own way."""
        written = self._written()
        if not isinstance(section, Mapping):
            found = [f"{CONFIG_NAME} has no quantization_config"] if written else []
        else:
            found = [
                f"{CONFIG_NAME}: quantization_config.{difference}"
                for difference in unlike_ours(section, written or {})
            ]
        for difference in found[:3]:
            self._findings.note(difference)

    def _written(self) -> dict[str, Any] | None:
        """The quantization_config that ktconv writes for these experts and other tensors."""
        output = self._output
        assert output.scheme is not None
        scheme = replace(output.scheme, search=False)
        if output.manifest is not None:
            renamed: Iterable[str] = output.manifest.names(RENAMED)
        else:
            rows = ModelSettings(output.config).families
            renamed = names_in_transformers(output.others.values(), rows)
        if output.plan is not None:
            others: Any = (tensor for unit in output.plan.others for tensor in unit.tensors())
            target, layers = output.plan.target, output.plan.layers
            assert isinstance(target, EncodedTarget)
            patterns = target.patterns((unit.layer, unit.experts) for unit in layers)
            if output.recipe is None:  # a group size is compared by itself
                patterns = {scheme: next(iter(patterns.values()))}
            return quantization_section(scheme, patterns, others, renamed)
        experts = [(one.name, one) for one in output.modules.values() if one.where]
        if output.recipe is None:
            names = (name for name, _ in experts)
            patterns = {scheme: [target_pattern(names, output.stacked)]}
        else:
            patterns = patterns_of(
                (name, one.where.proj, output.scheme_of(one)) for name, one in experts if one.where
            )
        return quantization_section(scheme, patterns, output.others.values(), renamed)

    def _unlike(self, source: Mapping[str, Any]) -> None:
        """Checks that config.json, by which engines build the model, is otherwise the source's."""
        here, there = _plain(self._output.config), _plain(source)
        if self._output.ours:
            found = differences(flat(here), flat(there), "in the source")
        else:
            found = config_differences(here, there)
        for difference in found:
            self._wrong_config(f"{CONFIG_NAME}: {difference}.")
        if not found and here != there:
            self._findings.note(
                f"{CONFIG_NAME} is written differently from the source's, but equal in content"
            )

    def _wrong_config(self, message: str, **where: Any) -> None:
        self._fail("config", message, file=CONFIG_NAME, **where)

    # ---- experts ----

    def _planned(self) -> Iterator[tuple[str, ExpertMatrix | None]]:
        """Expected modules by the source, else the manifest, else by the experts that are there;
        with their matrix in the source."""
        output = self._output
        if output.plan is not None:
            for unit in output.plan.layers:
                for expert in unit.experts:
                    for proj in unit.layer.projections:
                        yield (
                            output.plan.target.module(unit.layer, expert, proj),
                            unit.layer.experts[expert][proj],
                        )
        elif output.manifest is not None:
            for name in sorted(self._output.records):
                module, _, part = name.rpartition(".")
                if is_expert(module) and part == self._parts_of(module)[0]:
                    yield module, None
        else:
            yield from ((name, None) for name, module in output.modules.items() if module.where)

    def _expert(self, name: str, matrix: ExpertMatrix | None) -> None:
        module = self._output.module(name)
        parts = self._expected_parts(name, matrix)
        missing_parts = [f"{name}.{part}" for part in parts if part not in module.parts]
        for missing in missing_parts:
            self._fail("missing tensor", f"{missing} is missing.", tensor=missing, **module.at)
        for part in sorted(module.parts.keys() - set(parts)):
            tensor = module.parts[part]
            self._unexpected_tensor(tensor.name, tensor.file, **module.at)
        if not missing_parts:
            for bias in bias_tensors(name, matrix) if matrix is not None else ():
                self._as_expected(module.parts[BIAS], (bias.dtype,), bias.shape, module)
            group = self._group(module)
            if group is not None:
                self._shapes(module, group, matrix)

    def _group(self, module: Module) -> Group | None:
        """Group of a module in config.json. A failure if engines would not know that it is
        packed."""
        quantization = self._output.quantization
        group = quantization.group_of(module.name)
        if group is None:
            self._wrong_config(
                f"{module.name} is packed, but no target of {CONFIG_NAME} matches it.", **module.at
            )
        elif quantization.ignores(module.name):
            self._wrong_config(
                f"{module.name} is packed, but the ignore list of {CONFIG_NAME} names it.",
                **module.at,
            )
        return group

    def _shapes(self, module: Module, group: Group, matrix: ExpertMatrix | None) -> None:
        if self._output.layout is not PACK_QUANTIZED:
            self._shapes_of_layout(module, matrix)
            return
        packed, scale, *shapes = (module.parts[part] for part in module.layout.parts)
        rows = matrix.rows if matrix else (packed.shape[0] if packed.shape else 0)
        # Without a source, columns follow from the number of words, which groups fill.
        cols = matrix.cols if matrix else packed.shape[-1] * 32 // group.bits if packed.shape else 0
        per_row = group.scales(cols)
        if per_row is None:
            self._wrong_config(
                f"{CONFIG_NAME} says group size {group.group_size}, which does not divide the "
                f"{cols} columns of {module.name}.",
                **module.at,
            )
            return
        dtypes: tuple[str, ...] = SCALE_DTYPES
        if matrix and self._output.ours and self._output.scheme is not None:
            half = self._output.scheme.is_half(weight_dtype(matrix) == "F16")
            dtypes = ("F16" if half else "BF16",)
        self._as_expected(packed, ("I32",), (rows, group.words(cols)), module)
        self._as_expected(scale, dtypes, (rows, per_row), module)
        for shape in shapes:
            self._as_expected(shape, ("I64", "I32"), (2,), module)

    def _shapes_of_layout(self, module: Module, matrix: ExpertMatrix | None) -> None:
        """Check shapes of layouts that only our manifest tells."""
        if matrix is None:
            return  # checksums and sizes of files are what there is
        scheme = self._output.scheme_of(module)
        half = weight_dtype(matrix) == "F16"
        for tensor in scheme.layout.tensors(
            module.name, scheme.sizes(matrix.rows, matrix.cols, half)
        ):
            found = module.parts[tensor.name.rpartition(".")[2]]
            self._as_expected(found, (tensor.dtype,), tensor.shape, module)

    def _as_expected(
        self, tensor: TensorRef, dtypes: tuple[str, ...], shape: tuple[int, ...], module: Module
    ) -> None:
        if tensor.dtype in dtypes and tensor.shape == shape:
            return
        words = f"is {tensor.dtype} {list(tensor.shape)}, not {' or '.join(dtypes)} {list(shape)}"
        self._fail_tensor("wrong shape", tensor.name, tensor.file, words, **module.at)

    def _stray(self, module: Module, known: bool) -> None:
        """Reports a packed module that is not one of the expected experts."""
        if module.where is None:
            for tensor in module.parts.values():
                words = "is packed, but is not a routed expert"
                self._fail_tensor("packed module", tensor.name, tensor.file, words)
        elif known or self._output.manifest is not None:
            for tensor in module.parts.values():
                self._unexpected_tensor(tensor.name, tensor.file, **module.at)

    # ---- everything else ----

    def _plain_weights(self) -> None:
        """Reports weights that engines would take for packed, or would not know."""
        quantization, unnamed = self._output.quantization, []
        if self._output.layout is not PACK_QUANTIZED:
            return  # the whole section was compared
        for name, tensor in self._output.others.items():
            if not name.endswith(".weight") or len(tensor.shape) != 2:
                continue
            module = name.removesuffix(".weight")
            linear = class_of(name) not in NOT_LINEAR
            if quantization.ignores(module, linear):
                continue
            if quantization.group_of(module, linear) is not None:
                self._wrong_config(
                    f"{CONFIG_NAME} says that {module} is packed, but it is {tensor.dtype}.",
                    tensor=name,
                )
            elif linear:
                unnamed.append(module)
        if unnamed and self._output.why_not is None:
            self._wrong_config(
                f"{CONFIG_NAME} neither quantizes nor ignores {first_few(unnamed, 1)}: SGLang, and "
                "vLLM before 0.24, refuse to load such a checkpoint."
            )


def _words(group: Group) -> str:
    size = CHANNEL if group.group_size is None else group.group_size
    return f"{group.scheme} with group size {size}"


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without sections about quantization, at any depth."""
    return {
        key: _plain(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in QUANTIZATION_KEYS
    }
