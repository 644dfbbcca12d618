"""Packed experts for KTransformers' CPU kernels as the target of a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from msgspec import Struct, field
from msgspec.structs import asdict, force_setattr, replace

from ktconv import __version__
from ktconv.conversion.plan import Plan as AnyPlan
from ktconv.conversion.plan import plan_checkpoint
from ktconv.conversion.target import Target
from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import (
    FORMATS,
    Format,
    Matrix,
    backward_of,
    kinds_of,
    kt_path,
    output_formats,
    packed_shape,
    parse_tensor_name,
    tensor_name,
)
from ktconv.formats.folding import Fold
from ktconv.source import Checkpoint, MoELayer, TensorRef
from ktconv.system.units import counted
from ktconv.targets.consumers import Mismatch, mismatch_of, model_types, notes_of
from ktconv.targets.expert_sets import EXCLUDED, ExpertSet, remaining, set_of_record
from ktconv.targets.renaming import rename_tensors
from ktconv.writer.manifest import MANIFEST
from ktconv.writer.shards import Tensor

# Its loader counts the experts of a layer until one is missing, and reads masked ones too.
NO_KTRANSFORMERS = "KTransformers cannot load an output without all experts"

OutputLayout = Literal["safetensors", "layers"]
ScaleRule = Literal["amax", "search"]
# Of the search for scales (docs/formats.md, 3.8). Conversions write the last; manifests that do not
# name one mean the first.
SEARCH_REVISIONS = (1, 2)


class ImportanceRecord(Struct, frozen=True):
    """Origin of the weights of squared errors: a file, or the model's own weights."""

    file: str  # its name, without directories; empty without a file, as its checksum is
    sha256: str  # of its bytes
    kind: str  # its format: ktconv-importance or imatrix; or weights

    def as_dict(self) -> dict[str, str]:
        """The record in the manifest, without empty fields."""
        return {name: value for name, value in asdict(self).items() if value}


BY_WEIGHTS = ImportanceRecord("", "", "weights")  # `--importance weights`


class CalibrationRecord(Struct, frozen=True):
    """Inputs that codes were calibrated on."""

    name: str  # of the directory or the text that was given
    kind: str  # hessian, or text
    text: str
    text_sha256: str  # of what was read of it
    run: str  # identifies the files' state, tokens, dtype and versions, see stats.origin


class Options(Struct, frozen=True):
    """The options that decide which bytes are written; a resumed run must have the same."""

    method: str = "int4"  # or int8
    numa: int = 1  # parts; 0: one per NUMA node of this machine
    layout: OutputLayout = "safetensors"
    scale: ScaleRule | Literal[""] = (
        ""  # how row scales are chosen; "": amax with compat, else search
    )
    search: int = 0  # revision of the search; 0: the last, or no search
    compat: bool = False  # the reference converter's bytes
    mtp: bool = True  # with layers for multi-token prediction
    experts_only: bool = False  # without all other tensors
    max_shard_size: int = 5_000_000_000  # bytes
    exclude_experts: ExpertSet = field(default_factory=ExpertSet)
    requantize: bool = False  # integers too that could be kept
    # Experts of which KTransformers computes something else are converted all the same.
    allow_activation_mismatch: bool = False
    importance: ImportanceRecord | None = None  # of the errors that the search makes small
    fold: Fold = ""  # what is moved between the matrices of an expert
    calibrate: CalibrationRecord | None = None  # codes make up for one another's errors
    save_backward: bool = False  # transposed matrices too, for backward passes of kt-kernel
    # What other ways to choose codes record, by the names of their options: JSON values.
    ways: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.scale:
            force_setattr(self, "scale", "amax" if self.compat else "search")
        if self.compat and self.scale != "amax":
            raise UsageError(
                "--compat writes the reference converter's bytes, whose scales are those of "
                f"--scale amax, not {self.scale}",
                "omit --compat or --scale",
            )
        searched = (self.search or SEARCH_REVISIONS[-1]) if self.scale == "search" else 0
        force_setattr(self, "search", searched)
        if self.save_backward and self.fold:
            raise UsageError(
                "--save-backward cannot be combined with --fold: an adapter that is trained on "
                "folded experts fits no other copy of the model",
                "omit one of them",
            )

    @property
    def keep_integers(self) -> bool:
        return not (self.requantize or self.compat or self.calibrate)

    @property
    def rule(self) -> str:
        """The rule for scales, as `native.Choice` names it."""
        return "search-1" if self.search == 1 else self.scale

    def as_dict(self) -> dict[str, object]:
        """Names and values, as the manifest records them."""
        record = asdict(self) | {EXCLUDED: self.exclude_experts.as_record()}
        record["importance"] = self.importance.as_dict() if self.importance else None
        record["calibrate"] = asdict(self.calibrate) if self.calibrate else None
        for name in (
            EXCLUDED,
            "requantize",
            "allow_activation_mismatch",
            "importance",
            "fold",
            "calibrate",
            "save_backward",
            "ways",
        ):
            if not record[name]:
                del record[name]
        if self.search <= SEARCH_REVISIONS[0]:
            del record["search"]
        return record


def options_of_record(record: Mapping[str, Any]) -> Options | None:
    """The inverse of `Options.as_dict`; None where a value has another type than here.

    Raises CheckpointError for a malformed set of excluded experts.
    """
    usual = Options(
        requantize=True,
        allow_activation_mismatch=True,
        importance=BY_WEIGHTS,
        calibrate=CalibrationRecord("", "", "", "", ""),
        save_backward=True,
        ways={"name": None},
    ).as_dict()
    usual["fold"] = ""
    values = {name: value for name, value in record.items() if name in usual}
    if any(type(value) is not type(usual[name]) for name, value in values.items()):
        return None
    scale = values.setdefault("scale", "amax")  # the only rule before there was a choice
    if scale not in get_args(ScaleRule) or (scale != "amax" and values.get("compat")):
        return None
    if values.setdefault("search", SEARCH_REVISIONS[0]) not in SEARCH_REVISIONS:
        return None
    for name in _RECORDED.keys() & values.keys():
        values[name] = _RECORDED[name](values[name])
        if values[name] is None:
            return None
    if values.get("fold") and (values.get("compat") or values.get("save_backward")):
        return None
    searched = [name for name in ("importance", "calibrate") if name in values]
    if len(searched) > 1 or (searched and scale != "search"):
        return None
    return Options(**values, exclude_experts=set_of_record(record.get(EXCLUDED, {}), MANIFEST))


def _importance(record: Mapping[str, Any]) -> ImportanceRecord | None:
    """None for what no conversion records."""
    if record == BY_WEIGHTS.as_dict():
        return BY_WEIGHTS
    found = _record(ImportanceRecord, record)
    return None if found is not None and found.kind == BY_WEIGHTS.kind else found


R = TypeVar("R", ImportanceRecord, CalibrationRecord)


def _record(kind: type[R], record: Mapping[str, Any]) -> R | None:
    """A record of strings; None for anything else."""
    names = set(kind.__struct_fields__)
    if record.keys() != names or not all(type(value) is str for value in record.values()):
        return None
    return kind(**record)


# Records of ways to choose codes, by fields of Options; None for what no conversion records.
_RECORDED: Mapping[str, Callable[[Any], Any]] = {
    "fold": lambda record: record if record == "up-down" else None,
    "importance": _importance,
    "calibrate": lambda record: _record(CalibrationRecord, record),
}


def make_plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan the conversion of `checkpoint`.

    Raises CheckpointError or UsageError for dimensions that the format cannot represent, and for
    excluded experts that the model does not have or that are all of a layer's.
    """
    excluded = options.exclude_experts
    layers = checkpoint.converted(options.mtp)
    target = target_for(checkpoint, layers, options)
    selection = remaining(excluded, layers) if excluded else None
    plan = plan_checkpoint(checkpoint, target, selection)
    notes = [*plan.notes, *target.notes]
    if not excluded:
        return replace(plan, notes=notes)
    left_out = f"{excluded.in_words}: --exclude-experts"
    note = f"{NO_KTRANSFORMERS}: this one is for ktconv's own runtime (docs/hot-experts.md)"
    return replace(plan, skipped=[*plan.skipped, left_out], notes=[*notes, note])


def target_for(
    checkpoint: Checkpoint, layers: Sequence[MoELayer], options: Options, backward: bool = False
) -> KTransformersTarget:
    """The target for these layers. That a mismatch of activations is allowed is recorded only
    where there is one. `backward`: whether matrices of backward passes are there that the options
    do not record."""
    mismatch = mismatch_of(layers, f"AMX{FORMATS[options.method].name}", model_types(checkpoint))
    if mismatch is None:
        options = replace(options, allow_activation_mismatch=False)
    return KTransformersTarget(options, backward, mismatch)


class KTransformersTarget(Target):
    """Packed weights and row scales, cut into NUMA parts (docs/formats.md)."""

    options: Options

    def __init__(
        self, options: Options, backward: bool = False, mismatch: Mismatch | None = None
    ) -> None:
        self.options = options
        self.mismatch = mismatch  # between what experts compute and what KTransformers does
        self.notes = notes_of(mismatch)
        self.backward = backward or options.save_backward  # matrices for backward passes too
        self.readings = 1 + options.save_backward
        self.has_index = options.layout == "safetensors"

    @property
    def format(self) -> Format:
        return FORMATS[self.options.method]

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def description(self) -> str:
        backward = ", backward matrices too" if self.backward else ""
        return f"{self.name}, {counted(self.options.numa, 'NUMA part')}{backward}"

    def facts(self) -> dict[str, object]:
        backward = {"backward": True} if self.backward else {}
        return {"method": self.options.method, "numa": self.options.numa, **backward}

    def serving(self) -> str | None:
        options = self.options
        if options.exclude_experts or options.allow_activation_mismatch:
            return None
        method = f"--kt-method AMX{self.name} --kt-threadpool-count {options.numa}"
        return f"{method} --kt-weight-path"

    def check(self, layers: Sequence[MoELayer]) -> None:
        """Refuse activations that KTransformers does not compute, unless that is allowed; sizes and
        NUMA counts that the format cannot represent."""
        fmt, numa = self.format, self.options.numa
        if self.mismatch is not None and not self.options.allow_activation_mismatch:
            raise CheckpointError(self.mismatch.sentence, self.mismatch.hint)
        if not self.has_index and any(layer.biased for layer in layers):
            raise UsageError(
                "--layout layers has no files for biases of experts",
                "use --layout safetensors",
            )
        for layer in layers:
            hidden, intermediate = layer.hidden_size, layer.intermediate_size
            reason = fmt.check(hidden, intermediate, numa)
            if reason is None:
                continue
            if allowed := fmt.allowed_parts(hidden, intermediate):
                numbers = ", ".join(map(str, allowed))
                raise UsageError(
                    f"{fmt.name} cannot split layer {layer.index} into --numa {numa}: {reason}",
                    f"possible values of --numa for this model: {numbers}",
                )
            others = [
                f.key for f in output_formats().values() if f.allowed_parts(hidden, intermediate)
            ]
            raise CheckpointError(
                f"{fmt.name} cannot represent layer {layer.index}: "
                f"{fmt.check(hidden, intermediate, 1)}",
                f"use --method {others[0]}"
                if others
                else "no method of ktconv supports these dimensions",
            )

    def sections(self, layer: MoELayer, experts: Sequence[int]) -> Sequence[Iterator[Tensor]]:
        """Forward matrices, then those for backward passes if there are."""
        forward = self._packed(layer, experts, layer.projections)
        if not self.backward:
            return [forward]
        return [forward, self._packed(layer, experts, backward_of(layer.projections))]

    def _packed(
        self, layer: MoELayer, experts: Sequence[int], matrices: Sequence[Matrix]
    ) -> Iterator[Tensor]:
        """Part by part, so that the bytes of a NUMA node are contiguous."""
        fmt, numa = self.format, self.options.numa
        shapes = {
            proj: packed_shape(proj, layer.hidden_size, layer.intermediate_size, numa)
            for proj in matrices
        }
        stored = {
            (proj, kind): fmt.stored(kind, *shape)
            for proj, shape in shapes.items()
            for kind in kinds_of(proj, 0, layer.biased)
        }
        for part in range(numa):
            for expert in experts:
                for proj in matrices:
                    for kind in kinds_of(proj, part, layer.biased):
                        name = tensor_name(layer.index, proj, expert, part, kind)
                        yield Tensor(name, *stored[proj, kind])

    def metadata(self) -> dict[str, str]:
        return {
            "format": "pt",
            "ktconv_version": __version__,
            "ktconv_method": FORMATS[self.options.method].name,
            "ktconv_numa": str(self.options.numa),
        }

    def left_out(self) -> str | None:
        if self.options.experts_only:
            return "--experts-only"
        return None if self.has_index else "--layout layers contains experts only"

    def rename(self, tensors: Sequence[TensorRef]) -> list[tuple[TensorRef, str]]:
        return rename_tensors(tensors)

    def folder(self, layer: MoELayer) -> str | None:
        return f"_layer_{layer.index}" if self.options.layout == "layers" else None

    def folder_files(
        self, layer: MoELayer, experts: Sequence[int]
    ) -> Mapping[str, tuple[str, int]]:
        files = {}
        for tensor in self.tensors(layer, experts):
            name = parse_tensor_name(tensor.name)
            assert name is not None  # just built
            path = kt_path(
                self.name, name.layer, name.proj, name.expert, name.part, name.kind, tensor.nbytes
            )
            files[tensor.name] = path, tensor.nbytes
        return files


Plan: TypeAlias = AnyPlan[KTransformersTarget]
