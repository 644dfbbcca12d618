"""Weights of layers to call: of a converted model, of a checkpoint as they are, or packed now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ktconv import native
from ktconv.checkpoint import Checkpoint, open_checkpoint
from ktconv.errors import UsageError
from ktconv.formats import FORMATS, format_named
from ktconv.moe import Experts, native_experts, native_formats, pack_online
from ktconv.moe.converted import open_converted
from ktconv.moe.load import ConvertedModel
from ktconv.moe.native_load import layer_of
from ktconv.moe.requantized import requantized_experts
from ktconv.native import Activation
from ktconv.packed.weights import may_hold_packed
from ktconv.runtime.arrays import kind_of
from ktconv.system.arrays import Array
from ktconv.system.pool import Pool

Slots = Sequence[int] | Array | None


Source = ConvertedModel | Checkpoint


def opened(path: Path) -> Source:
    """What `path` has, from headers alone: packed experts, or else a checkpoint."""
    if path.is_dir() and may_hold_packed(path):
        converted = ConvertedModel(path)
        if converted.layers:
            return converted
    return open_checkpoint(path)


def loaded(
    source: Source,
    layer: int | None,
    slots: Slots,
    method: str | None,
    parts: int | None,
    pool: Pool,
) -> Experts:
    """One layer, see `MoELayer.load`."""
    if isinstance(source, Checkpoint):
        return _native(source, layer, slots, method, parts, pool)
    return _converted(source, layer, slots, method, parts)


def loaded_all(
    source: Source, method: str | None, parts: int | None, pool: Pool
) -> Iterator[tuple[int, Experts]]:
    """Every layer."""
    for one in source.layers:
        number = one if isinstance(one, int) else one.index
        yield number, loaded(source, number, None, method, parts, pool)


def requantized(
    checkpoint: Checkpoint, layer: int, slots: Slots, method: str, parts: int, pool: Pool
) -> Experts:
    """One layer of a checkpoint in another format than its own."""
    bind = _binder(parts, pool)
    made = requantized_experts(checkpoint, layer, method, parts=parts, slots=slots, bind=bind)
    made.weight_on_input = layer_of(checkpoint, layer).activation.weight_on_input
    return made


def packed(
    gate: Any,
    up: Any,
    down: Any,
    method: str,
    activation: Activation | None,
    biases: tuple[Any, Any, Any] | None,
    scale: str,
    slots: Slots,
    parts: int | None,
    pool: Pool,
) -> Experts:
    """Of weights in memory, see `MoELayer.pack`."""
    key = format_named(method).key
    matrices = [_stack(name, one) for name, one in (("gate", gate), ("up", up), ("down", down))]
    added = None if biases is None else tuple(_stack("biases", one) for one in biases)
    rows = matrices[1][0] if matrices[1] is not None and len(matrices[1]) else np.empty((0, 0))
    inner, hidden = rows.shape if rows.ndim == 2 else (0, 0)
    cut = _parts(parts, [key], hidden, inner, pool)
    gates, ups, downs = matrices
    return pack_online(
        gates,
        ups,
        downs,
        key,
        parts=cut,
        activation=activation,
        biases=added,
        scale=scale,
        slots=slots,
        bind=_binder(cut, pool),
    )


def _converted(
    model: ConvertedModel,
    layer: int | None,
    slots: Slots,
    method: str | None,
    parts: int | None,
) -> Experts:
    """Mapped. UsageError where it has another method or number of parts than was asked for."""
    experts = open_converted(model, layer, slots)
    key = None if method is None else format_named(method).key
    for what, wanted, found, command in (
        ("method", key, experts.format.key, "quantize-cpu"),
        ("number of parts", parts, experts.parts, "reshard"),
    ):
        if wanted not in (None, found):
            raise UsageError(
                f"the {what} of {model.directory} is {found}, not {wanted}",
                f"leave it out, or change it with ktconv {command}",
            )
    return experts


def _native(
    checkpoint: Checkpoint,
    layer: int | None,
    slots: Slots,
    method: str | None,
    parts: int | None,
    pool: Pool,
) -> Experts:
    """Copied into the kernels' order, each part to the node of its threads."""
    found = next((one for one in checkpoint.layers if layer in (None, one.index)), None)
    keys = native_formats(found) if found else []
    sizes = (found.hidden_size, found.intermediate_size) if found else (0, 0)
    cut = _parts(parts, keys if method is None else [format_named(method).key], *sizes, pool)
    bind = _binder(cut, pool)
    return native_experts(checkpoint, layer, parts=cut, method=method, slots=slots, bind=bind)


def _parts(parts: int | None, keys: Sequence[str], hidden: int, inner: int, pool: Pool) -> int:
    """`parts`; by default one for each node of the pool, or one where formats do not allow it."""
    if parts is not None:
        return parts
    able = all(FORMATS[key].multiplies(hidden, inner, pool.nodes) for key in keys)
    return pool.nodes if able else 1


def _binder(parts: int, pool: Pool) -> Callable[[Array, int], None]:
    """Memory of a part goes to the node whose threads compute it."""

    def bind(memory: Array, part: int) -> None:
        try:
            node = native.part_node(part, parts, pool)
        except ValueError as error:
            raise UsageError(str(error), "give a pool that is open") from None
        pool.bind(memory, node)

    return bind


def _stack(name: str, matrices: Any) -> Any:
    """Arrays or tensors as NumPy sees them, bf16 as uint16."""
    if matrices is None:
        return None
    if isinstance(matrices, list | tuple):
        return [kind_of(name, one).stored(name, one) for one in matrices]
    return kind_of(name, matrices).stored(name, matrices)
