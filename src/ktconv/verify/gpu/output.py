"""A compressed-tensors checkpoint on disk: which modules are packed, and by which tool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconv.checkpoint import (
    Checkpoint,
    ExpertMatrix,
    NamingMap,
    Projection,
    TensorRef,
    open_checkpoint,
)
from ktconv.checkpoint.agreement import Dimensions
from ktconv.checkpoint.config import CONFIG_NAME, read_config
from ktconv.conversion.plan import plan_checkpoint
from ktconv.errors import CheckpointError, KtconvError, UsageError
from ktconv.families.family import PROJECTIONS, UNGATED
from ktconv.families.names import ExpertModule, expert_module, layer_number
from ktconv.packed.weights import PackedWeights, open_packed
from ktconv.placement.expert_sets import set_of_record
from ktconv.system.regular_files import MAX_CONFIG_BYTES, MissingFileError, read_small
from ktconv.targets.pack_quantized.scheme import BITS, CHANNEL, PARTS
from ktconv.targets.pack_quantized.target import RECIPE, Options, PackQuantizedTarget
from ktconv.verify.gpu.quantization import (
    FORMAT,
    Group,
    Quantization,
    quantization_section_of,
    read_quantization,
)
from ktconv.verify.output import NO_LIMIT, OpenedOutput
from ktconv.writer.journal import Journal
from ktconv.writer.manifest import MANIFEST, Manifest, read_manifest

_OTHER_PARTS = ("weight_zero_point", "weight_g_idx")  # of schemes that experts do not have
# Observers with which the scale follows from the largest weight.
_TAKING_LARGEST = ("", "minmax", "memoryless_minmax", "static_minmax")
_PART = re.compile(rf"(.+)\.({'|'.join((*PARTS, *_OTHER_PARTS))})")


@dataclass(frozen=True, slots=True)
class Module:
    """A packed module and its tensors by the last component of their names."""

    name: str
    parts: Mapping[str, TensorRef]
    where: ExpertModule | None  # None: no routed expert
    layer: int | None

    @property
    def whole(self) -> bool:
        return all(part in self.parts for part in PARTS)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parts.values())

    @property
    def at(self) -> dict[str, Any]:
        """The fields of a failure that locate this module."""
        if self.where is None:
            return {}
        return {"layer": self.layer, "expert": self.where.expert, "projection": self.where.proj}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOutput(OpenedOutput):
    quantization: Quantization
    why_not: str | None  # the fault of config.json, if `quantization` is the manifest's
    modules: Mapping[str, Module]
    layers: Mapping[int, Sequence[int]]  # ids of experts with at least one tensor
    method: str  # rtn, gptq or unknown
    config: Mapping[str, Any]

    @property
    def described(self) -> dict[str, Any]:
        groups = {(group.scheme, group.group_size) for group in self.quantization.groups}
        scheme, size = next(iter(groups)) if len(groups) == 1 else ("mixed", None)
        return {"method": self.method, "numa": None, "scheme": scheme, "group_size": size}

    def experts_in(self, layer: int) -> Sequence[int]:
        return self.layers.get(layer, ())

    @property
    def dimensions(self) -> dict[int, Dimensions]:
        """By the rows of packed matrices; empty with a source, whose config.json is compared
        instead. The number of experts is that of the manifest, if it says how many there are."""
        if self.checkpoint is not None:
            return {}
        recorded = self.manifest.layers if self.manifest else {}
        rows: dict[int, dict[str, int]] = {}
        for (layer, _, proj), module in self.experts.items():
            packed = module.parts.get(PARTS[0])
            if layer is not None and packed and packed.shape:
                rows.setdefault(layer, {}).setdefault(proj, packed.shape[0])
        whole = {
            layer: found for layer, found in sorted(rows.items()) if found.keys() >= {*UNGATED}
        }
        counts = {n: recorded.get(n, {}).get("experts", len(self.layers[n])) for n in whole}
        return {
            n: (counts[n], found["down"], found["up"], "gate" in found)
            for n, found in whole.items()
        }

    def projections(self, layer: int) -> Sequence[Projection]:
        """The matrices that an expert of a layer has: by the source, else the manifest, else by the
        experts that are there."""
        if layer in self.source_layers:
            return self.source_layers[layer].projections
        if self.manifest is not None:
            gated = self.manifest.layers.get(layer, {}).get("gated") is not False
        else:
            here = (one.where for one in self.modules.values() if one.layer == layer)
            gated = any(where.proj == "gate" for where in here if where is not None)
        return PROJECTIONS if gated else UNGATED

    @property
    def experts(self) -> dict[tuple[int | None, int, Projection], Module]:
        """Modules by layer, expert and projection."""
        return {
            (module.layer, module.where.expert, module.where.proj): module
            for module in self.modules.values()
            if module.where is not None
        }

    @property
    def decoded(self) -> Mapping[str, ExpertMatrix]:
        """Non-expert tensors that are quantized in the source and bf16 here, by their new names."""
        if self.plan is None:
            return {}
        target = self.plan.target
        assert isinstance(target, PackQuantizedTarget)
        return {target.output_name(name): one.matrix for name, one in target.decoded.items()}


def is_gpu_output(directory: Path) -> bool:
    """Whether it is a compressed-tensors checkpoint: by its manifest, else by config.json or names
    of tensors, unless it has experts for KTransformers, which keep their source's config.json."""
    manifest = read_manifest(directory)
    if manifest is not None:
        return bool(manifest.options.get("format") == FORMAT)
    packed = open_packed(directory)
    if packed.tensors:
        return False
    if any(name.endswith(f".{PARTS[0]}") for name in packed.others):
        return True
    try:
        return quantization_section_of(read_config(directory).content) is not None
    except KtconvError:
        return False


def open_gpu_output(
    output: Path,
    source: str | None,
    side_files: Path | None = None,
    naming: NamingMap | None = None,
    tower: str | None = None,
) -> GpuOutput:
    """`side_files`, `naming` and `tower`: of `open_checkpoint`.

    Raises CheckpointError for an unsupported checkpoint, UsageError for one without packed
    modules.
    """
    packed = open_packed(output)
    manifest = _usable(read_manifest(output))
    quantization, why_not, config = _quantization(output, manifest)
    checkpoint = open_checkpoint(source, side_files, naming, tower) if source else None
    plan = _plan(checkpoint, manifest) if checkpoint else None
    numbers = _numbers(checkpoint, manifest)
    modules, others = _sort(packed, numbers)
    if not modules and not packed.damaged and manifest is None:
        raise UsageError(f"{output} contains no packed modules", "give an OUTPUT of quantize-gpu")
    return GpuOutput(
        packed=packed,
        manifest=manifest,
        checkpoint=checkpoint,
        plan=plan,
        quantization=quantization,
        why_not=why_not,
        modules=modules,
        layers=_experts_by_layer(modules),
        others=others,
        method=_method(output, manifest, quantization),
        config=config,
    )


def _usable(manifest: Manifest | None) -> Manifest | None:
    """The manifest if it is a valid one of ours, else None."""
    if manifest is None or not manifest.has_source:
        return None
    options = manifest.options
    size, scheme = options.get("group_size"), options.get("scheme")
    sound = scheme in BITS and type(size) is int and isinstance(options.get("method"), str)
    return manifest if sound else None


def _quantization(
    output: Path, manifest: Manifest | None
) -> tuple[Quantization, str | None, Mapping[str, Any]]:
    """By config.json; by our manifest where config.json cannot be used, with the reason."""
    config: Mapping[str, Any] = {}
    try:
        config = read_config(output).content
        section = quantization_section_of(config)
        if section is None:
            raise CheckpointError(f"{CONFIG_NAME} has no quantization_config of compressed-tensors")
        return read_quantization(section), None, config
    except CheckpointError as error:
        if manifest is None and Journal(output).run_file.exists():
            raise CheckpointError(
                f"{output} is incomplete", "run the same quantize-gpu command again, then verify"
            ) from error
        if manifest is None:
            raise
        options = manifest.options
        size = None if options["group_size"] == CHANNEL else options["group_size"]
        group = Group("manifest", [r"re:.*\.experts\.[0-9]+\."], BITS[options["scheme"]], size, "")
        return Quantization([group], []), str(error), config


def _plan(checkpoint: Checkpoint, manifest: Manifest | None) -> Any:
    """The planned copies, side files and experts. Scheme and group size are not those of the
    output: they are checked elsewhere."""
    options = manifest.options if manifest else {}
    selection = None
    if options.get("experts"):
        chosen = set_of_record(options["experts"], MANIFEST)
        selection = {layer.index: chosen.of(layer.index) for layer in checkpoint.layers}
    ours = Options(group_size=CHANNEL, mtp=options.get("mtp", True), max_shard_size=NO_LIMIT)
    return plan_checkpoint(checkpoint, PackQuantizedTarget(ours, checkpoint), selection)


def _numbers(checkpoint: Checkpoint | None, manifest: Manifest | None) -> dict[str, int]:
    """Layers by the path of their experts, as far as source or manifest say."""
    if checkpoint is not None:
        return {layer.source: layer.index for layer in checkpoint.layers}
    return {
        about["source"]: index
        for index, about in (manifest.layers if manifest else {}).items()
        if isinstance(about.get("source"), str)
    }


def _sort(
    packed: PackedWeights, numbers: Mapping[str, int]
) -> tuple[dict[str, Module], dict[str, TensorRef]]:
    """Packed modules and all other tensors."""
    parts: dict[str, dict[str, TensorRef]] = {}
    others = {}
    for name, tensor in packed.others.items():
        found = _PART.fullmatch(name)
        if found:
            parts.setdefault(found[1], {})[found[2]] = tensor
        else:
            others[name] = tensor
    modules = {}
    for name, tensors in parts.items():
        where = expert_module(name)
        layer = numbers.get(where.source, layer_number(where.source)) if where else None
        modules[name] = Module(name, tensors, where, layer)
    return modules, others


def _experts_by_layer(modules: Mapping[str, Module]) -> dict[int, list[int]]:
    found: dict[int, set[int]] = {}
    for module in modules.values():
        if module.where is not None and module.layer is not None:
            found.setdefault(module.layer, set()).add(module.where.expert)
    return {layer: sorted(found[layer]) for layer in sorted(found)}


def _method(output: Path, manifest: Manifest | None, quantization: Quantization) -> str:
    """How weights were rounded, by the manifest or by another tool's recipe."""
    if manifest is not None:
        return str(manifest.options["method"])
    try:
        text = read_small(output, RECIPE, MAX_CONFIG_BYTES).decode(errors="replace")
    except MissingFileError:
        return "unknown"
    modifiers = set(re.findall(r"\b(\w+Modifier)\b", text))
    plain = all(group.observer in _TAKING_LARGEST for group in quantization.groups)
    known = {"GPTQModifier": "gptq", "QuantizationModifier": "rtn"}
    return known.get(modifiers.pop(), "unknown") if len(modifiers) == 1 and plain else "unknown"
