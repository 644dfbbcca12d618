"""Weights of a layer, from files or tensors, as a method of KTransformers asks for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ktconv.compat.kt.inputs import expect_values
from ktconv.compat.kt.methods import REPACKED, methods_for
from ktconv.compat.kt.settings import Settings
from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import FORMATS
from ktconv.native import Activation
from ktconv.runtime import MoELayer, Pool, sources
from ktconv.runtime.layers import Experts, native_formats
from ktconv.runtime.layers.native_load import layer_of
from ktconv.runtime.layers.plain import NotExactError
from ktconv.source import Checkpoint
from ktconv.source import MoELayer as MoELayerHeaders
from ktconv.system.units import counted


def load_layer(
    settings: Settings,
    source: sources.Source,
    slots: list[int] | None,
    pool: Pool,
    memory: str,
) -> MoELayer:
    """Load a layer of a converted model, whose weights go where `memory` says, or of a checkpoint.
    Raises CheckpointError for weights that the method does not read, UsageError where they
    contradict the settings."""
    if isinstance(source, Checkpoint):
        found = _of_checkpoint(settings, source, slots, pool)
    else:
        found = _of_output(settings, source, slots, pool, memory)
    _check(settings, found)
    return MoELayer(_activated(settings, found), pool)


def pack_layer(
    settings: Settings, stacks: dict[str, Any], slots: list[int] | None, pool: Pool
) -> MoELayer:
    """Pack a layer from gate, up and down in memory, quantized as quantize-cpu does."""
    if not settings.method.formats:
        raise UsageError(
            f"the method {settings.method.name} reads GGUF files, not tensors",
            "use load_weights, or another method",
        )
    inner, hidden = settings.intermediate, settings.hidden
    for name, stack in stacks.items():
        shape = (hidden, inner) if name == "down_proj" else (inner, hidden)
        _check_stack(name, stack, shape)
    gate, up, down = (stack.detach().cpu() for stack in stacks.values())
    found = sources.packed(
        gate, up, down, settings.method.formats[0], settings.activation, None, "search", slots,
        settings.parts, pool,
    )  # fmt: skip
    _check(settings, found)
    return MoELayer(found, pool)


def _check_stack(name: str, stack: Any, shape: tuple[int, ...]) -> None:
    expect_values(name, stack)
    if stack.ndim != 3 or tuple(stack.shape[1:]) != shape:
        rows, cols = shape
        raise UsageError(
            f"{name} must be a tensor [experts, {rows}, {cols}], not {list(stack.shape)}"
        )


def slots_of(mapping: Any, experts: int) -> list[int] | None:
    """A physical-to-logical map as numbers, one for each of `experts` slots; None for none."""
    if mapping is None:
        return None
    found = np.asarray(mapping.detach().cpu() if isinstance(mapping, Tensor) else mapping)
    if found.shape != (experts,) or found.dtype.kind not in "iu":
        raise UsageError(
            f"physical_to_logical_map_cpu must be integers of shape [{experts}], one for each of "
            f"num_experts, not {found.dtype.name} {list(found.shape)}"
        )
    return [int(expert) for expert in found]


def _of_output(
    settings: Settings,
    model: sources.Source,
    slots: list[int] | None,
    pool: Pool,
    memory: str,
) -> Experts:
    found = sources.loaded(model, settings.layer_idx, slots, None, None, pool, memory)
    if found.format.key not in settings.method.formats:
        _refuse_format(settings, [found.format.key])
    if found.parts != settings.parts:
        raise UsageError(
            f"{settings.weight_path} is cut into {counted(found.parts, 'NUMA part')}, but "
            f"threadpool_count is {settings.parts}",
            f"give threadpool_count={found.parts}, or use ktconv reshard",
        )
    return found


def _of_checkpoint(
    settings: Settings, checkpoint: Checkpoint, slots: list[int] | None, pool: Pool
) -> Experts:
    method, number, parts = settings.method, settings.layer_idx, settings.parts
    layer = layer_of(checkpoint, number)
    possible = native_formats(layer)
    if not method.formats and not checkpoint.is_gguf:
        raise UsageError(
            f"the method {method.name} reads GGUF files, and {settings.weight_path} is none",
            _hint(possible),
        )
    wanted = [key for key in possible if key in (method.formats or possible)]
    for key in wanted:
        try:
            return sources.loaded(checkpoint, number, slots, key, parts, pool)
        except NotExactError:
            if key == wanted[-1] and method.formats:
                raise
    if method.formats:
        _refuse_format(settings, possible)
    key = _repacked_as(settings, layer)
    return sources.requantized(checkpoint, number, slots, key, parts, pool)


def _repacked_as(settings: Settings, layer: MoELayerHeaders) -> str:
    """Format for blocks of ggml, whose numbers and scales no kernel reads as they lie."""
    matrices = [matrix for expert in layer.experts for matrix in expert.values()]
    same = all(one.element.name == "MXFP4" and one.scale is None for one in matrices)
    keys = ("mxfp4", *REPACKED) if same else REPACKED  # the same numbers again
    sizes = settings.hidden, settings.intermediate
    able = [key for key in keys if FORMATS[key].multiplies(*sizes, settings.parts)]
    return (able or keys)[0]


def _refuse_format(settings: Settings, keys: list[str]) -> None:
    found = " or ".join(keys) or "in an encoding that no kernel has"
    raise CheckpointError(
        f"the experts in layer {settings.layer_idx} of {settings.weight_path} are {found}, which "
        f"the method {settings.method.name} does not read",
        _hint(keys),
    )


def _hint(keys: list[str]) -> str:
    methods = methods_for(keys)
    if methods:
        return f"use the method {' or '.join(methods)}"
    return "convert it with ktconv quantize-cpu, and use AMXINT4 or AMXINT8"


def _check(settings: Settings, found: Experts) -> None:
    """UsageError where weights have other sizes than the wrapper was told."""
    for name, told, there in (
        ("num_experts", settings.experts, found.count),
        ("hidden_size", settings.hidden, found.hidden),
        ("moe_intermediate_size", settings.intermediate, found.intermediate),
    ):
        if told != there:
            raise UsageError(
                f"{name} is {told}, but the weights of layer {settings.layer_idx} have {there}",
                "give the model's own numbers; num_experts is that of slots where there is a map",
            )


def _activated(settings: Settings, found: Experts) -> Experts:
    """Experts with the limit and alpha that were asked for, where files say nothing of them."""
    wanted = settings.activation
    if wanted in (None, found.activation):
        return found
    assert wanted is not None
    if found.activation != Activation():
        raise UsageError(
            f"swiglu_limit and swiglu_alpha ask for {wanted}, but the model has {found.activation}",
            "leave them out: the model's own is used",
        )
    return found.with_activation(wanted)
