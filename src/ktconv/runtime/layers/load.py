"""Experts of a converted model, mapped from its shards without a copy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from ktconv import native
from ktconv.errors import CheckpointError, UsageError
from ktconv.families.activations import NAMES
from ktconv.families.config import USUAL_TOP_K
from ktconv.families.family import ExpertActivation
from ktconv.families.names import post_norm_tensors
from ktconv.formats import Kind, Projection, TensorId, kinds_of, parse_tensor_name, scales
from ktconv.formats.decode import bf16_to_f32
from ktconv.native import Activation, Expert, PackedMatrix
from ktconv.native.arrays import aligned_to
from ktconv.runtime.layers.experts import Experts, OutputNorm
from ktconv.runtime.layers.slots import Slots, slot_origins
from ktconv.runtime.layers.unpacked import packed_streams
from ktconv.runtime.memory import Held, Mapped
from ktconv.source import TensorRef
from ktconv.source.activations import of_records
from ktconv.source.config import CONFIG_NAME
from ktconv.source.settings import ModelSettings
from ktconv.system.arrays import F32, Array
from ktconv.system.units import listed
from ktconv.targets.packed.weights import (
    Geometry,
    PackedWeights,
    map_file,
    name_of,
    no_packed_experts,
    open_packed,
)
from ktconv.targets.renaming import output_name
from ktconv.writer.manifest import Manifest, read_run
from ktconv.writer.metadata import read_index

_AGAIN = "restore it, or convert again"

# Puts the tensors of some experts of a layer into memory. Without one they are mapped.
Hold = Callable[[PackedWeights, int, Collection[int]], Held]

# Functions of the gate's outputs, and of up's where there is no gate: what kernels call them.
_GATED = {"silu": "swiglu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
_UNGATED = {
    "relu2": "relu2", "relu": "relu", "gelu": "ungated_gelu", "gelu_tanh": "ungated_gelu_tanh",
}  # fmt: skip


def activation_of(config: ModelSettings, layer: int | None = None) -> Activation:
    """The activation of the routed experts of `layer`, from a model's config.json; see
    `families.activations`. Raises CheckpointError also where kernels do not have it."""
    return kernel_activation(config.activation(layer))


def kernel_activation(found: ExpertActivation) -> Activation:
    """The kernels' name for it. Biases, weights and norms are not part of that."""
    functions = _GATED if found.gated else _UNGATED
    if found.function not in functions:
        where = "" if found.gated else " of experts without a gate"
        raise CheckpointError(
            f"config.json names the activation {found.function!r}{where}, which the kernels "
            "do not support",
            f"supported: {', '.join(sorted(NAMES if found.gated else _UNGATED))}",
        )
    if not found.supported:
        raise CheckpointError(
            f"config.json describes the activation {found}, which the kernels do not support",
            "check hidden_act and the settings whose names begin with swiglu_, mlp_ and "
            "activation_situ_ there",
        )
    if found.alpha is not None:
        return Activation("swiglu", found.alpha, 1.0, found.limit)
    if found.capped:
        return Activation("softcap", found.gate_cap, found.up_cap, found.limit)
    if found.limit_after:
        return Activation("swiglu_clamped", limit=found.limit)
    return Activation(functions[found.function], limit=found.limit)


def expert_activation_of(kernels: Activation) -> ExpertActivation:
    """The inverse of `kernel_activation`."""
    if kernels.function == "softcap":
        return ExpertActivation(gate_cap=kernels.alpha, up_cap=kernels.beta, limit=kernels.limit)
    if kernels.function == "swiglu_clamped":
        return ExpertActivation(limit=kernels.limit, limit_after=True)
    if kernels.beta:
        return ExpertActivation(alpha=kernels.alpha, limit=kernels.limit)
    functions = _GATED if kernels.gated else _UNGATED
    (function,) = (ours for ours, name in functions.items() if name == kernels.function)
    return ExpertActivation(function, kernels.gated, limit=kernels.limit)


def experts_per_token(directory: Path, layer: int | None = None) -> int:
    """The model's top-k (of `layer`, where layers differ); 8 where config.json is missing or does
    not say."""
    return ConvertedModel(directory).config.top_k(layer) or USUAL_TOP_K


def moe_layers(directory: Path) -> list[int]:
    """Layers whose packed experts lie in `directory`."""
    return ConvertedModel(directory).layers


def open_experts(
    directory: Path,
    layer: int | None = None,
    settings: ModelSettings | None = None,
    slots: Slots | None = None,
) -> Experts:
    """One layer's experts (the first that has some, if not told), of shards or layer folders.

    `settings`: those of the model's config.json, where `directory` does not say what experts
    compute. `slots`: see `slot_origins`; slots of the same expert share its memory. Method, sizes
    and number of parts follow from the tensors' sizes. The norm that some models apply to each
    expert's output is not part of it. Raises CheckpointError if tensors are missing, contradict
    each other or have scales that are no numbers, UsageError if there is no such layer, or for
    `slots` that it cannot have.
    """
    return open_layer(directory, layer, settings, slots)[1]


def open_layer(
    directory: Path,
    layer: int | None = None,
    settings: ModelSettings | None = None,
    slots: Slots | None = None,
    hold: Hold | None = None,
) -> tuple[int, Experts]:
    """open_experts, with the layer's number. `hold` puts weights into memory."""
    model = ConvertedModel(directory, settings, layer)
    if not model.layers:  # the error tells the layers that it has
        model = ConvertedModel(directory, settings)
    return model.open_layer(layer, slots, hold)


class ConvertedModel:
    """The packed experts of a directory, with what its manifest and config.json say.

    Each is read once, when it is first needed, for all layers; or, with `layer`, for this one, so
    that other headers are not parsed. `settings`: as for `open_experts`.
    """

    def __init__(
        self,
        directory: Path,
        settings: ModelSettings | None = None,
        layer: int | None = None,
    ) -> None:
        self.directory, self._layer = directory, layer
        self._settings = settings or ModelSettings({})

    @cached_property
    def packed(self) -> PackedWeights:
        """Headers of the packed weights."""
        return open_packed(self.directory, self._layer)

    def other(self, names: Sequence[str]) -> TensorRef | None:
        """The first of these tensors that it has besides the experts."""
        found = self.packed.others
        if self._layer is not None and not any(name in found for name in names):
            found = open_packed(self.directory).others
        return next((found[name] for name in names if name in found), None)

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest without its units; None where another tool wrote the output."""
        return read_run(self.directory)

    @cached_property
    def config(self) -> ModelSettings:
        """Empty where other tools wrote none: then the activation is SiLU, as nearly always."""
        if not (self.directory / CONFIG_NAME).exists():
            return ModelSettings({})
        return ModelSettings.beside(self.directory, self.manifest.tower if self.manifest else None)

    @cached_property
    def _recorded(self) -> Mapping[int, ExpertActivation]:
        return (of_records(self.manifest.geometry) if self.manifest else None) or {}

    @property
    def layers(self) -> list[int]:
        """Numbers of layers with packed experts."""
        return list(self.packed.layers)

    def expect_whole(self) -> None:
        """CheckpointError where a shard that the index names, or a layer that the manifest names,
        is not there."""
        lost: dict[str, set[int]] = {}
        index = (read_index(self.directory) or {}).get("weight_map") or {}
        files = {str(file) for file in index.values()}
        missing_files = {file for file in files if not (self.directory / file).exists()}
        for name, file in index.items():
            if str(file) in missing_files and (tensor := parse_tensor_name(name)) is not None:
                lost.setdefault(str(file), set()).add(tensor.layer)
        for file, layers in sorted(lost.items()):
            raise CheckpointError(
                f"{self.directory} lacks {file}, with experts of {listed('layer', layers)}", _AGAIN
            )
        if missing := set(self.manifest.layers if self.manifest else ()) - set(self.layers):
            raise CheckpointError(
                f"{self.directory} lacks the experts of {listed('layer', missing)}, which its "
                "manifest names",
                _AGAIN,
            )

    def activation(self, layer: int) -> ExpertActivation:
        """Activation by the manifest, since a map of names may have given it; where that does not
        say it by config.json, else by `settings`, else SiLU."""
        stated = (self.config or self._settings).activation(layer)
        return self._recorded.get(layer, stated)

    def expect(self, layer: int) -> int:
        """The number itself. UsageError for a layer that is not here."""
        if layer not in self.layers:
            raise UsageError(
                f"{self.directory} has no experts of layer {layer}", f"it has {self.layers}"
            )
        return layer

    def open_layer(
        self, layer: int | None = None, slots: Slots | None = None, hold: Hold | None = None
    ) -> tuple[int, Experts]:
        """See `open_experts`; with the layer's number."""
        if self.packed.damaged:
            raise CheckpointError(next(iter(self.packed.damaged.values())), "convert it again")
        if not self.layers:
            raise CheckpointError(*no_packed_experts(self.directory))
        wanted = self.expect(self.layers[0] if layer is None else layer)
        activation = kernel_activation(self.activation(wanted))

        def checked(packed: PackedWeights, layer: int, experts: Collection[int]) -> Held:
            held = hold(packed, layer, experts) if hold else Mapped(packed)
            _expect_finite_scales(packed, layer, experts, held)
            return held

        experts = packed_experts(self.packed, wanted, activation, slots=slots, hold=checked)
        return wanted, experts


def _expect_finite_scales(
    packed: PackedWeights, layer: int, experts: Collection[int], held: Held
) -> None:
    """Another one makes its row NaN whenever its expert has a token, and only then."""
    geometry = packed.geometry(layer)
    fmt = geometry.format
    assert fmt is not None  # what geometry() sees to
    small = [
        one for one in geometry.tensors(layer) if one.kind != "weight" and one.expert in experts
    ]
    for tensor, stored in held.read(small):
        if tensor.kind == "bias":
            numbers: Array = stored.view("<f4")
        else:
            numbers = scales.values(fmt, stored.view(fmt.layout.scale_array))
        if not np.isfinite(numbers).all():
            raise CheckpointError(
                f"{name_of(tensor)} of {packed.directory} contains a {tensor.kind} that is not "
                "finite",
                "convert it again",
            )


def packed_experts(
    packed: PackedWeights,
    layer: int,
    activation: Activation,
    norm: OutputNorm | None = None,
    slots: Slots | None = None,
    hold: Hold | None = None,
) -> Experts:
    """One layer of packed weights that are open already. Slots of experts that were left out of it
    have no origin. `hold`: see `Hold`. UsageError for `slots` that it cannot have."""
    geometry = packed.geometry(layer)
    fmt = geometry.format
    assert fmt is not None  # what geometry() sees to
    expect_gates(geometry.gated, activation, f"layer {layer} of {packed.directory}")
    wanted = slot_origins(slots, geometry.experts)
    here = set(wanted) - geometry.elsewhere
    held = hold(packed, layer, here) if hold else Mapped(packed)
    experts = {e: _parts(held, geometry, layer, e) for e in here}
    rows = [
        [experts[e][part] if e in experts else None for e in wanted]
        for part in range(geometry.parts)
    ]
    try:
        made = native.Layer(fmt.layout, activation, geometry.hidden, geometry.intermediate, rows)
    except ValueError as error:
        raise CheckpointError(
            f"layer {layer} of {packed.directory}: {error}", "convert it again"
        ) from None

    sizes = geometry.hidden, geometry.intermediate
    return Experts(
        fmt,
        made,
        activation,
        [e if e in experts else None for e in wanted],
        lambda e: packed_streams(fmt, *sizes, experts[e]),
        release=held.release,
        norm=norm,
        held=held.kind,
        note=held.note,
    )


def expect_gates(gated: bool, activation: Activation, where: str) -> None:
    """CheckpointError unless experts have gates exactly if their activation needs them."""
    if gated == activation.gated:
        return
    raise CheckpointError(
        f"the experts in {where} {'have gates' if gated else 'have no gate'}, but the activation "
        f"{activation.function} {'needs one' if activation.gated else 'has none'}",
        "check that config.json belongs to these weights",
    )


def _parts(held: Held, geometry: Geometry, layer: int, expert: int) -> list[Expert]:
    """The matrices of each part of an expert."""
    fmt = geometry.format
    assert fmt is not None  # what geometry() sees to

    def of(proj: Projection, part: int) -> PackedMatrix:
        found: dict[Kind, Array] = {
            kind: held.get(TensorId(layer, proj, expert, part, kind))
            for kind in kinds_of(proj, part, geometry.biased)
        }
        bias = found.get("bias")
        return PackedMatrix(
            found["weight"],
            aligned_to(found["scale"], fmt.layout.scale_array.itemsize),
            None if bias is None else aligned_to(bias, 4).view(np.float32),
        )

    gated = geometry.gated
    return [
        (of("gate", part) if gated else None, of("up", part), of("down", part))
        for part in range(geometry.parts)
    ]


# ---- with the norm of outputs ----------------------------------------------------------

_VECTORS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def open_converted(
    model: ConvertedModel,
    layer: int | None = None,
    slots: Slots | None = None,
    hold: Hold | None = None,
) -> Experts:
    """Open experts as `open_experts`, and with the norm of their outputs where the model has one.

    Raises CheckpointError also where that norm is not among its tensors.
    """
    number, experts = model.open_layer(layer, slots, hold)
    stated = model.activation(number)
    experts.weight_on_input = stated.weight_on_input
    if stated.post_norm:
        experts.norm = _norm(model, number, experts.hidden)
    return experts


def _norm(model: ConvertedModel, layer: int, hidden: int) -> OutputNorm:
    manifest = model.manifest
    source = manifest.layers.get(layer, {}).get("source") if manifest else None
    names = [output_name(name) for name in post_norm_tensors(str(source))]
    found = model.other(names)
    if found is None or found.dtype not in _VECTORS or found.shape != (hidden,):
        raise CheckpointError(
            f"{model.directory} does not have the norm of experts' outputs in layer {layer}, "
            f"{' or '.join(names)} with {hidden} numbers",
            "convert the model without --experts-only, or use ktconv.model.replace_experts",
        )
    stored = map_file(found.file)[found.offset : found.offset + found.nbytes].tobytes()
    weight = np.frombuffer(stored, _VECTORS[found.dtype])
    values: F32 = bf16_to_f32(weight) if found.dtype == "BF16" else weight.astype(np.float32)
    return OutputNorm(values, model.config.post_norm_epsilon)
