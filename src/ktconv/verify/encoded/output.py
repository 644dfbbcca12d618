"""A checkpoint with encoded experts on disk: which modules are encoded, and by which tool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec import Struct

from ktconv.conversion.plan import plan_checkpoint
from ktconv.errors import CheckpointError, KtconvError, UsageError
from ktconv.families.family import PROJECTIONS, UNGATED
from ktconv.families.names import ExpertModule, expert_module, layer_number
from ktconv.source import (
    Checkpoint,
    ExpertMatrix,
    Projection,
    TensorRef,
    open_checkpoint,
)
from ktconv.source.agreement import Dimensions
from ktconv.source.config import CONFIG_NAME, read_config
from ktconv.source.encodings.base import BIAS
from ktconv.source.model_source import ModelSource
from ktconv.system.regular_files import MAX_CONFIG_BYTES, MissingFileError, read_small
from ktconv.targets.encoded.layouts.base import Layout
from ktconv.targets.encoded.layouts.packed import PACK_QUANTIZED, WITHOUT_SHAPE
from ktconv.targets.encoded.layouts.plain import BF16
from ktconv.targets.encoded.recipe import Recipe, parse_recipe
from ktconv.targets.encoded.scheme import CHANNEL, FORMATS, MIXABLE, MIXED, ROWS, SCHEMES, Scheme
from ktconv.targets.encoded.stacking import (
    LAYOUTS,
    NUMBERED,
    is_flat,
    layout_of,
    open_unstacked,
)
from ktconv.targets.encoded.target import RECIPE, EncodedTarget, Options
from ktconv.targets.expert_sets import others as left
from ktconv.targets.expert_sets import set_of_record
from ktconv.targets.packed.weights import PackedWeights, open_packed
from ktconv.verify.encoded.quantization import (
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
_BLK = re.compile(r"(blk\.[0-9]+)\.ffn_(gate|up|down)_exps\.([0-9]+)")  # of KTransformers' AWQ


class Module(Struct, frozen=True):
    """A packed module and its tensors by the last component of their names."""

    name: str
    parts: Mapping[str, TensorRef]
    where: ExpertModule | None  # None: no routed expert
    layer: int | None
    layout: Layout = PACK_QUANTIZED

    @property
    def whole(self) -> bool:
        return all(part in self.parts for part in self.layout.parts)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parts.values())

    @property
    def at(self) -> dict[str, Any]:
        """The fields of a failure that locate this module."""
        if self.where is None:
            return {}
        return {"layer": self.layer, "expert": self.where.expert, "projection": self.where.proj}


class EncodedOutput(OpenedOutput, frozen=True, kw_only=True):
    quantization: Quantization
    why_not: str | None  # the fault of config.json, if `quantization` is the manifest's
    modules: Mapping[str, Module]
    layers: Mapping[int, Sequence[int]]  # ids of experts with at least one tensor
    method: str  # rtn, gptq or unknown; search: without a manifest, as the scales are
    config: Mapping[str, Any]
    # By our manifest, or by the tensors where there is none; MIXED: `scheme_of` has each matrix's.
    scheme: Scheme | None
    recipe: Recipe | None
    numbers: Mapping[str, int]  # of layers, by the path of their experts
    expert_layout: str  # one of LAYOUTS: by our manifest, or by the tensors where there is none

    @property
    def stacked(self) -> bool:
        """Whether files have one tensor for all experts of a layer."""
        return bool(self.packed.stacked)

    @property
    def layout(self) -> Layout:
        return PACK_QUANTIZED if self.scheme is None else self.scheme.layout

    @property
    def parts(self) -> Sequence[str]:
        """Last components of the names of a module's tensors."""
        return _layout(self.scheme, self.expert_layout).parts

    def scheme_of(self, module: Module) -> Scheme:
        """Scheme of a matrix, by our manifest."""
        assert self.scheme is not None
        return _scheme_of(self.scheme, self.recipe, module.layer, module.where)

    def module(self, name: str) -> Module:
        """The one of that name, or one without tensors."""
        found = self.modules.get(name)
        if found is not None:
            return found
        if self.scheme is None or self.recipe is None:
            return Module(name, {}, None, None, _layout(self.scheme, self.expert_layout))
        where, layer = _place(name, self.numbers)
        scheme = _scheme_of(self.scheme, self.recipe, layer, where)
        return Module(name, {}, None, None, scheme.layout)

    @property
    def described(self) -> dict[str, Any]:
        if self.scheme is not None and self.scheme.row.command == "quantize-cpu":
            about = {"method": self.scheme.name, "numa": None}
            if self.recipe is not None:
                return {**about, "recipe": self.recipe.toml.split("\n")}
            return {**about, "group_size": self.scheme.group_size}
        groups = {(group.scheme, group.group_size) for group in self.quantization.groups}
        scheme, size = next(iter(groups)) if len(groups) == 1 else ("mixed", None)
        if self.scheme is not None:  # a group in config.json has bits, as FP8 and FP4 have too
            scheme = self.scheme.name
        return {"method": self.method, "numa": None, "scheme": scheme, "group_size": size}

    @property
    def source_target(self) -> EncodedTarget | None:
        """Target as which the source would be converted."""
        target = None if self.plan is None else self.plan.target
        return target if isinstance(target, EncodedTarget) else None

    def experts_in(self, layer: int) -> Sequence[int]:
        return self.layers.get(layer, ())

    @property
    def dimensions(self) -> dict[int, Dimensions]:
        """Sizes by the rows of packed matrices; empty with a source, whose config.json is compared
        instead. The number of experts is that of the manifest, if it says how many there are."""
        if self.checkpoint is not None:
            return {}
        recorded = self.manifest.layers if self.manifest else {}
        rows: dict[int, dict[str, int]] = {}
        for (layer, _, proj), module in self.experts.items():
            packed = module.parts.get(module.layout.parts[0])
            if layer is not None and packed and packed.shape:
                count = packed.shape[0 if module.layout.streamed else -1]
                rows.setdefault(layer, {}).setdefault(proj, count)
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
        assert isinstance(target, EncodedTarget)
        return {target.output_name(name): one.matrix for name, one in target.decoded.items()}


def is_gpu_output(directory: Path, has_source: bool = False) -> bool:
    """Whether it is a checkpoint with encoded experts: by its manifest, else by config.json or
    names of tensors, unless it has experts for KTransformers, which keep their source's
    config.json. With a source that it is compared with, also one of plain bf16."""
    manifest = read_manifest(directory)
    if manifest is not None:
        return manifest.options.get("format") in FORMATS
    packed = open_packed(directory)
    if packed.tensors:
        return False
    if any(name.endswith(f".{PACK_QUANTIZED.parts[0]}") for name in packed.others):
        return True
    if unrecorded_scheme(packed.others, has_source) is not None:
        return True
    try:
        return quantization_section_of(read_config(directory).content) is not None
    except KtconvError:
        return False


def unrecorded_scheme(tensors: Mapping[str, TensorRef], has_source: bool) -> Scheme | None:
    """The format of experts without a manifest, by the names, dtypes and shapes of the tensors of
    one; None for packed integers, which config.json describes, and without a source for plain bf16,
    which an output has in common with every checkpoint."""
    parts: dict[str, dict[str, TensorRef]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part != BIAS and is_expert(module):
            parts.setdefault(module, {})[part] = tensor
    left_out = (PACK_QUANTIZED,) if has_source else (PACK_QUANTIZED, BF16)
    rows = [row for row in ROWS if row.layout not in left_out]
    for found in parts.values():  # the first that is whole: some can be damaged
        for row in rows:
            if found.keys() != {*row.layout.parts}:
                continue
            for size in row.groups:
                scheme = Scheme(row.name, size)
                if _fits(scheme, found):
                    return scheme
    return None


def _fits(scheme: Scheme, found: Mapping[str, TensorRef]) -> bool:
    """Whether some matrix of the scheme has these tensors, of which the first shows its size: a
    number of a row in each byte, two of them, or eight inputs in each word."""
    codes = found[scheme.layout.parts[0]]
    if len(codes.shape) != 2:
        return False
    height, width = codes.shape
    shapes = (height, width), (height, 2 * width), (width, 8 * height), (height, 8 * width)
    for rows, cols in shapes:
        for half in (False, True):
            try:
                sizes = scheme.sizes(rows, cols, half)
            except ValueError:  # the format has no such matrix
                continue
            planned = scheme.layout.tensors("", sizes)
            if all(
                (found[part].dtype, found[part].shape) == (one.dtype, one.shape)
                for part, one in zip(scheme.layout.parts, planned, strict=True)
            ):
                return True
    return False


def open_gpu_output(output: Path, source: ModelSource | str | None) -> EncodedOutput:
    """An output and the model that it was converted from, if given.

    Raises CheckpointError for an unsupported checkpoint and for a manifest with another layout of
    experts than the files, UsageError for a checkpoint without packed modules.
    """
    manifest = _usable(read_manifest(output))
    packed = open_unstacked(output)
    layout = layout_of(packed.stacked)
    if manifest is not None and (recorded := _recorded_layout(manifest)) != layout:
        if packed.stacked:
            raise CheckpointError(
                f"{manifest.path} says that experts are {recorded}, and in the files they are "
                f"{layout}",
                "restore it from a copy, or convert again",
            )
        layout = recorded  # files are missing
    scheme = _scheme(manifest)
    if manifest is None and not Journal(output).has_run():
        scheme = unrecorded_scheme(packed.others, source is not None)
    recipe = _recipe(manifest)
    quantization, why_not, config = _quantization(output, manifest, scheme)
    checkpoint = open_checkpoint(source) if source else None
    plan = _plan(checkpoint, manifest, scheme, layout) if checkpoint else None
    numbers = _numbers(checkpoint, manifest)
    modules, others = _sort(packed, numbers, scheme, recipe, layout)
    if not modules and not packed.damaged and manifest is None:
        raise UsageError(f"{output} contains no packed modules", "give an OUTPUT of quantize-gpu")
    return EncodedOutput(
        packed=packed,
        manifest=manifest,
        checkpoint=checkpoint,
        plan=plan,
        quantization=quantization,
        why_not=why_not,
        modules=modules,
        layers=_experts_by_layer(modules),
        others=others,
        method="rtn" if manifest is None and scheme else _method(output, manifest, quantization),
        config=config,
        scheme=scheme,
        recipe=recipe,
        numbers=numbers,
        expert_layout=layout,
    )


def _usable(manifest: Manifest | None) -> Manifest | None:
    """The manifest if it is a valid one of ours, else None."""
    if manifest is None or not manifest.has_source:
        return None
    options = manifest.options
    size, row = options.get("group_size"), SCHEMES.get(str(options.get("scheme")))
    sound = row is not None and type(size) is int and isinstance(options.get("method"), str)
    sound = sound and _recorded_layout(manifest) in LAYOUTS
    if row is MIXED:
        sound = sound and _recipe(manifest) is not None
    return manifest if sound else None


def _recorded_layout(manifest: Manifest) -> str:
    return str(manifest.options.get("expert_layout", NUMBERED))


def _layout(scheme: Scheme | None, expert_layout: str) -> Layout:
    """Layout of the modules; `scheme` None: of packed integers that config.json describes."""
    if scheme is None and is_flat(expert_layout):
        return WITHOUT_SHAPE
    return PACK_QUANTIZED if scheme is None else scheme.layout


def _recipe(manifest: Manifest | None) -> Recipe | None:
    """Recipe of the manifest; None without a valid one."""
    lines = manifest.options.get("recipe") if manifest is not None else None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return None
    try:
        return parse_recipe("\n".join(lines))
    except UsageError:
        return None


def _scheme_of(
    scheme: Scheme, recipe: Recipe | None, layer: int | None, where: ExpertModule | None
) -> Scheme:
    if recipe is None:
        return scheme
    if layer is None or where is None:
        return recipe.method.scheme(scheme.search)
    return recipe.of(layer, where.expert, where.proj).scheme(scheme.search)


def _scheme(manifest: Manifest | None) -> Scheme | None:
    if manifest is None:
        return None
    options = manifest.options
    flat = is_flat(_recorded_layout(manifest))
    return Scheme(options["scheme"], options["group_size"], options.get("scale") == "search", flat)


def _quantization(
    output: Path, manifest: Manifest | None, scheme: Scheme | None
) -> tuple[Quantization, str | None, Mapping[str, Any]]:
    """Quantization by config.json; by our manifest where config.json cannot be used, with the
    reason, or has a form that is compared as a whole."""
    config: Mapping[str, Any] = {}
    try:
        config = read_config(output).content
        if scheme is not None and scheme.layout is not PACK_QUANTIZED:
            return _by_manifest(scheme), None, config
        section = quantization_section_of(config)
        if section is None:
            raise CheckpointError(f"{CONFIG_NAME} has no quantization_config of compressed-tensors")
        return read_quantization(section), None, config
    except CheckpointError as error:
        if manifest is None and Journal(output).has_run():
            raise CheckpointError(
                f"{output} is incomplete",
                "run the same conversion again, which continues it, then verify",
            ) from error
        if scheme is None:
            raise
        return _by_manifest(scheme), str(error), config


def _by_manifest(scheme: Scheme) -> Quantization:
    size = None if scheme.group_size == CHANNEL else scheme.group_size
    target = r"re:.*(\.experts\.[0-9]+\.|_exps\.[0-9]+$)"
    return Quantization([Group("manifest", [target], scheme.bits, size, "")], [])


def _plan(
    checkpoint: Checkpoint, manifest: Manifest | None, scheme: Scheme | None, expert_layout: str
) -> Any:
    """The planned copies, side files and experts. A group size is not that of the output: it is
    checked elsewhere."""
    options = manifest.options if manifest else {}
    selection = None
    counts = {layer.index: len(layer.experts) for layer in checkpoint.layers}
    if options.get("experts"):
        chosen = set_of_record(options["experts"], MANIFEST)
        selection = {index: chosen.of(index) for index in counts}
    elif options.get("exclude_experts"):
        excluded = set_of_record(options["exclude_experts"], MANIFEST)
        selection = left(excluded, counts)
    known = scheme or Scheme("W4A16", CHANNEL)
    if known.row is not MIXED and CHANNEL in known.row.groups:
        # Any size will do, and this one fits; a search changes no name or shape.
        known = Scheme(known.name, CHANNEL)
    ours = Options(
        scheme=known.name,
        group_size=known.group_size,
        mtp=options.get("mtp", True),
        max_shard_size=NO_LIMIT,
        experts_only=bool(options.get("experts_only")),
        requantize=bool(options.get("requantize")),
        allow_activation_mismatch=True,
        recipe="\n".join(options.get("recipe") or ()),
        expert_layout=expert_layout,
    )
    return plan_checkpoint(checkpoint, EncodedTarget(ours, checkpoint), selection)


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
    packed: PackedWeights,
    numbers: Mapping[str, int],
    scheme: Scheme | None,
    recipe: Recipe | None,
    expert_layout: str,
) -> tuple[dict[str, Module], dict[str, TensorRef]]:
    """Encoded modules and all other tensors. Parts that plain weights have too, as `weight`, make a
    module only of an expert."""
    layout = PACK_QUANTIZED if scheme is None else scheme.layout
    telling = layout is PACK_QUANTIZED
    known = (*layout.parts, *(_OTHER_PARTS if telling else ()))
    if recipe is not None:
        known = tuple({part: None for name in MIXABLE for part in SCHEMES[name].layout.parts})
    ends = re.compile(rf"(.+)\.({'|'.join((*known, BIAS))})")
    parts: dict[str, dict[str, TensorRef]] = {}
    others = {}
    for name, tensor in packed.others.items():
        found = ends.fullmatch(name)
        if found and ((telling and found[2] != BIAS) or _where(found[1]) is not None):
            parts.setdefault(found[1], {})[found[2]] = tensor
        else:
            others[name] = tensor
    modules = {}
    for name, tensors in parts.items():
        if tensors.keys() == {BIAS}:  # of an expert that is not encoded
            others[f"{name}.{BIAS}"] = tensors[BIAS]
            continue
        where, layer = _place(name, numbers)
        own = _layout(_scheme_of(scheme, recipe, layer, where) if scheme else None, expert_layout)
        modules[name] = Module(name, tensors, where, layer, own)
    return modules, others


def _place(module: str, numbers: Mapping[str, int]) -> tuple[ExpertModule | None, int | None]:
    """The expert and projection of a module, and the layer's number."""
    where = _where(module)
    return where, numbers.get(where.source, _number_of(where.source)) if where else None


def is_expert(module: str) -> bool:
    """Whether a module of that name is a matrix of a routed expert."""
    return _where(module) is not None


def _where(module: str) -> ExpertModule | None:
    if found := _BLK.fullmatch(module):
        return ExpertModule(found[1], int(found[3]), cast("Projection", found[2]))
    return expert_module(module)


def _number_of(source: str) -> int | None:
    return int(source[4:]) if re.fullmatch(r"blk\.[0-9]+", source) else layer_number(source)


def _experts_by_layer(modules: Mapping[str, Module]) -> dict[int, list[int]]:
    found: dict[int, set[int]] = {}
    for module in modules.values():
        if module.where is not None and module.layer is not None:
            found.setdefault(module.layer, set()).add(module.where.expert)
    return {layer: sorted(found[layer]) for layer in sorted(found)}


def _method(output: Path, manifest: Manifest | None, quantization: Quantization) -> str:
    """Method of rounding, by the manifest or by another tool's recipe."""
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
