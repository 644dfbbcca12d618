"""Level 1 for experts on GPUs: every expert packed once and as config.json says, nothing else
packed, everything else as the source has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ktconv.checkpoint import PROJECTIONS, ExpertMatrix, TensorRef
from ktconv.checkpoint.agreement import Dimensions, absent_layers, contradictions
from ktconv.checkpoint.config import CONFIG_NAME, interpret_config
from ktconv.errors import KtconvError
from ktconv.targets.pack_quantized.config import quantization_section
from ktconv.targets.pack_quantized.module_classes import class_of
from ktconv.targets.pack_quantized.names import module_name, pattern_of, target_pattern
from ktconv.targets.pack_quantized.scheme import CHANNEL, Scheme
from ktconv.targets.pack_quantized.target import weight_dtype
from ktconv.verify.config_differences import (
    QUANTIZATION_KEYS,
    config_differences,
    differences,
    flat,
)
from ktconv.verify.gpu.output import PARTS, GpuOutput, Module
from ktconv.verify.gpu.quantization import Group, quantization_elsewhere, unlike_ours, unusual
from ktconv.verify.gpu.unpack import SCALE_DTYPES
from ktconv.verify.structure import StructureCheck
from ktconv.writer.manifest import MANIFEST

NOT_LINEAR = ("embeddings", "router gates", "norms")  # two-dimensional, yet no engine packs them


class GpuStructureCheck(StructureCheck):
    """Files, manifest and index are those of any output; tensors are not."""

    _output: GpuOutput

    def tensors(self) -> int:
        self._config()
        if self._output.method == "unknown":
            self._findings.note(
                "how these weights were rounded is not known, so only errors of whole "
                "matrices are checked, not every element"
            )
        planned = dict(self._planned())
        for name, matrix in planned.items():
            self._expert(name, matrix)
        for name, module in self._output.modules.items():
            if name not in planned:
                self._stray(module, known=bool(self._output.plan))
        self._plain_weights()
        return len(PARTS) * len(planned) + self._copies(planned)

    # ---- config.json ----

    def _config(self) -> None:
        output = self._output
        if output.why_not is not None:
            self._wrong_config(f"{output.why_not}.")
            return
        if output.manifest is not None:
            options = output.manifest.options
            size = None if options["group_size"] == CHANNEL else options["group_size"]
            for group in output.quantization.groups:
                if (group.scheme, group.group_size) != (options["scheme"], size):
                    self._wrong_config(
                        f"{CONFIG_NAME} says {_words(group)}, but {MANIFEST} says "
                        f"{options['scheme']} with group size {options['group_size']}."
                    )
        self._quantization()
        if output.checkpoint is None:
            self._dimensions()
        else:
            self._unlike(output.checkpoint.config)

    def _quantization(self) -> None:
        """quantization_config as a whole: engines act on keys that nothing else here reads."""
        output = self._output
        section = output.config["quantization_config"]
        found = unlike_ours(section, self._written()) if output.ours else unusual(section)
        for difference in found:
            self._wrong_config(f"{CONFIG_NAME}: quantization_config.{difference}.")
        for path in quantization_elsewhere(output.config):
            self._wrong_config(f"{CONFIG_NAME} also describes quantization in {path}.")

    def _written(self) -> dict[str, Any]:
        """What ktconv writes for the experts and other tensors that are there, or should be."""
        output = self._output
        assert output.manifest is not None
        options = output.manifest.options
        scheme = Scheme(options["scheme"], options["group_size"])
        if output.plan is not None:
            layers = list(output.source_layers.values())
            others: Any = (tensor for unit in output.plan.others for tensor in unit.tensors())
            return quantization_section(scheme, target_pattern(layers), others)
        pattern = pattern_of(name for name, one in output.modules.items() if one.where)
        return quantization_section(scheme, pattern, output.others.values())

    def _unlike(self, source: Mapping[str, Any]) -> None:
        """Engines build the model by this file: beside the quantization it is the source's."""
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

    def _dimensions(self) -> None:
        """Without a source: the sizes, experts and layers of config.json are those there are."""
        output = self._output
        try:
            config = interpret_config(output.config)
        except KtconvError:
            return  # what lies beside the tensors is checked elsewhere
        layers = dict(_dimensions_of(output))
        for message, layer in contradictions(config, layers):
            self._fail("dimensions", f"{message}.", file=CONFIG_NAME, layer=layer)
        if output.manifest is None:
            for layer in absent_layers(config, layers):
                message = f"layer {layer} is an MoE layer by {CONFIG_NAME}, but has no experts."
                self._fail("dimensions", message, file=CONFIG_NAME, layer=layer)

    def _wrong_config(self, message: str, **where: Any) -> None:
        self._fail("config", message, file=CONFIG_NAME, **where)

    # ---- experts ----

    def _planned(self) -> Iterator[tuple[str, ExpertMatrix | None]]:
        """Modules that should be there: by the source, else the manifest, else by what is there
        of every expert. The matrix is that of the source."""
        output = self._output
        if output.plan is not None:
            for unit in output.plan.layers:
                for expert in unit.experts:
                    for proj in PROJECTIONS:
                        yield (
                            module_name(unit.layer, expert, proj),
                            unit.layer.experts[expert][proj],
                        )
        elif output.manifest is not None:
            for name in sorted(self._recorded()):
                if name.endswith(f".{PARTS[0]}"):
                    yield name.removesuffix(f".{PARTS[0]}"), None
        else:
            yield from ((name, None) for name, module in output.modules.items() if module.where)

    def _expert(self, name: str, matrix: ExpertMatrix | None) -> None:
        module = self._output.modules.get(name, Module(name, {}, None, None))
        lacking = [f"{name}.{part}" for part in PARTS if part not in module.parts]
        for missing in lacking:
            self._fail("missing tensor", f"{missing} is missing.", tensor=missing, **module.at)
        for part in sorted(module.parts.keys() - set(PARTS)):
            tensor = module.parts[part]
            self._unexpected_tensor(tensor.name, tensor.file, **module.at)
        if not lacking:
            group = self._group(module)
            if group is not None:
                self._shapes(module, group, matrix)

    def _group(self, module: Module) -> Group | None:
        """The group that config.json gives it; says so if engines would not know that it is
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
        packed, scale, shape = (module.parts[part] for part in PARTS)
        rows = matrix.rows if matrix else (packed.shape[0] if packed.shape else 0)
        # Without a source the number of words tells the columns: groups fill whole words.
        cols = matrix.cols if matrix else packed.shape[-1] * 32 // group.bits if packed.shape else 0
        per_row = group.scales(cols)
        if per_row is None:
            self._wrong_config(
                f"{CONFIG_NAME} says group size {group.group_size}, which does not divide the "
                f"{cols} columns of {module.name}.",
                **module.at,
            )
            return
        held = (weight_dtype(matrix),) if matrix and self._output.ours else SCALE_DTYPES
        self._as_expected(packed, ("I32",), (rows, group.words(cols)), module)
        self._as_expected(scale, held, (rows, per_row), module)
        self._as_expected(shape, ("I64", "I32"), (2,), module)

    def _as_expected(
        self, tensor: TensorRef, dtypes: tuple[str, ...], shape: tuple[int, ...], module: Module
    ) -> None:
        if tensor.dtype in dtypes and tensor.shape == shape:
            return
        words = f"is {tensor.dtype} {list(tensor.shape)}, not {' or '.join(dtypes)} {list(shape)}"
        self._fail_tensor("wrong shape", tensor.name, tensor.file, words, **module.at)

    def _stray(self, module: Module, known: bool) -> None:
        """A packed module that is none of the experts that should be."""
        if module.where is None:
            for tensor in module.parts.values():
                words = "is packed, but is not a routed expert"
                self._fail_tensor("packed module", tensor.name, tensor.file, words)
        elif known or self._output.manifest is not None:
            for tensor in module.parts.values():
                self._unexpected_tensor(tensor.name, tensor.file, **module.at)

    # ---- everything else ----

    def _plain_weights(self) -> None:
        """Weights that are not packed, though an engine would expect them to be, or would not
        know."""
        quantization, unnamed = self._output.quantization, []
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
            more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
            self._wrong_config(
                f"{CONFIG_NAME} neither quantizes nor ignores {unnamed[0]}{more}: SGLang, and vLLM "
                "before 0.24, refuse to load such a checkpoint."
            )

    def _copies(self, experts: Mapping[str, Any]) -> int:
        """Copies against the plan, everything against the manifest; how many copies there are."""
        output, recorded = self._output, self._recorded()
        expected = {f"{name}.{part}" for name in experts for part in PARTS}
        if output.plan is None:
            if output.manifest is None:
                return len(output.others)
            copies = recorded - expected
            self._missing(sorted(copies - self._found()))
            for name, tensor in output.others.items():
                if name not in copies:
                    self._unexpected_tensor(name, tensor.file)
            return len(copies)
        copies = set()
        for unit in output.plan.others:
            for planned in unit.tensors():
                copies.add(planned.name)
                if not self._check_tensor(planned):
                    self._missing([planned.name])
        for name, ref in output.others.items():
            if name not in copies:
                self._unexpected_tensor(name, ref.file)
        self._missing(sorted(recorded - expected - copies - self._found()))
        if output.manifest is not None:
            self._unlisted(self._found() - recorded)
        return len(copies)


def _dimensions_of(output: GpuOutput) -> Iterator[tuple[int, Dimensions]]:
    """Layers with their sizes by rows of packed matrices. Where a manifest tells that experts are
    left out, it tells how many the model has."""
    experts = output.layers
    recorded = output.manifest.layers if output.manifest else {}
    rows: dict[int, dict[str, int]] = {}
    for module in output.modules.values():
        packed = module.parts.get(PARTS[0])
        if module.where is not None and module.layer is not None and packed and packed.shape:
            rows.setdefault(module.layer, {}).setdefault(module.where.proj, packed.shape[0])
    for layer, found in sorted(rows.items()):
        if {"gate", "down"} <= found.keys():
            count = recorded.get(layer, {}).get("experts", len(experts[layer]))
            yield layer, (count, found["down"], found["gate"])


def _words(group: Group) -> str:
    size = CHANNEL if group.group_size is None else group.group_size
    return f"{group.scheme} with group size {size}"


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what tells of quantization, at any depth."""
    return {
        key: _plain(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in QUANTIZATION_KEYS
    }
