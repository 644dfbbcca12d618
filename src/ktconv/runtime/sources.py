"""Weights of layers to call: of a converted model, of a checkpoint as they are, or packed now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats import FORMATS, format_named
from ktconv.native import Activation
from ktconv.runtime.arrays import kind_of
from ktconv.runtime.layers import Experts, native_experts, native_formats, open_stored, pack_online
from ktconv.runtime.layers.load import ConvertedModel, Hold, open_converted
from ktconv.runtime.layers.requantized import requantized_experts
from ktconv.runtime.memory import Held, Say, check_memory, held_weights, layer_needs, warn
from ktconv.runtime.memory.needs import Needs, expect_room
from ktconv.source import Checkpoint
from ktconv.system.arrays import Array
from ktconv.system.numbers import whole
from ktconv.system.pool import Pool
from ktconv.targets.packed.weights import PackedWeights, may_hold_packed

Slots = Sequence[int] | Array | None


Source = ConvertedModel | Checkpoint


def opened(path: Path, layer: int | None = None) -> Source:
    """Open `path` by headers alone: packed experts, or else a checkpoint. Of packed experts those
    of one layer are enough where it has this one."""
    if path.is_dir() and may_hold_packed(path):
        if layer is not None:
            alone = ConvertedModel(path, layer=whole("layer", layer))
            if alone.layers:
                return alone
        converted = ConvertedModel(path)
        if converted.layers:
            return converted
    return open_stored(path)


def first_layer(source: Source) -> int:
    """The number of the layer that is meant where none is given."""
    one = source.layers[0]
    return one if isinstance(one, int) else one.index


def loaded(
    source: Source,
    layer: int | None,
    slots: Slots,
    method: str | None,
    parts: int | None,
    pool: Pool,
    memory: str = "auto",
) -> Experts:
    """One layer, see `MoELayer.load`."""
    layer = None if layer is None else whole("layer", layer)
    if check_memory(memory) in ("map", "shared") and isinstance(source, Checkpoint):
        raise UsageError(
            f'memory "{memory}" is for converted models: weights of {source.path} are put into '
            "another order",
            "convert it with ktconv quantize-cpu, or leave memory out",
        )
    if isinstance(source, Checkpoint):
        return _native(source, layer, slots, method, parts, pool)
    return _converted(source, layer, slots, method, parts, holder(pool, memory))


def holder(pool: Pool, memory: str, say: Say = warn) -> Hold:
    """Puts weights where the threads of `pool` compute them, as `memory` wants it. `say` gets what
    could not be done as asked."""
    check_memory(memory)

    def hold(packed: PackedWeights, layer: int, experts: Collection[int]) -> Held:
        return held_weights(packed, layer, experts, pool, memory, say)

    return hold


def needs(source: Source, layer: int | None, memory: str, pool: Pool) -> Needs:
    """See `MoELayer.plan_load`."""
    check_memory(memory)
    if isinstance(source, Checkpoint):
        raise UsageError(
            f"what {source.path} takes in memory depends on the format that it is held in",
            "load it, and ask weight_bytes",
        )
    chosen = source.layers if layer is None else [source.expect(whole("layer", layer))]
    found: Counter[int | None] = Counter()
    for number in chosen:
        geometry = source.packed.geometry(number)
        found.update(layer_needs(source.packed, number, set(geometry.here), pool))
    return found


def loaded_all(
    source: Source,
    method: str | None,
    parts: int | None,
    pool: Pool,
    memory: str = "auto",
) -> Iterator[tuple[int, Experts]]:
    """Every layer. Memory for copies of all is looked for first. CheckpointError for an output of
    which shards or layers are missing."""
    if not isinstance(source, Checkpoint):
        source.expect_whole()
    if check_memory(memory) == "copy" and not isinstance(source, Checkpoint):
        expect_room(needs(source, None, memory, pool), str(source.directory))
    for one in source.layers:
        number = one if isinstance(one, int) else one.index
        yield number, loaded(source, number, None, method, parts, pool, memory)


def requantized(
    checkpoint: Checkpoint, layer: int, slots: Slots, method: str, parts: int, pool: Pool
) -> Experts:
    """One layer of a checkpoint in another format than its own."""
    bind = _binder(parts, pool)
    return requantized_experts(checkpoint, layer, method, parts=parts, slots=slots, bind=bind)


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
    """Experts from weights in memory, see `MoELayer.pack`."""
    key = format_named(method).key
    ups = _stack("up", up)
    inner, hidden = ups[0].shape if len(ups) and ups[0].ndim == 2 else (0, 0)
    cut = _parts(parts, [key], hidden, inner, pool)
    return pack_online(
        None if gate is None else _stack("gate", gate),
        ups,
        _stack("down", down),
        key,
        parts=cut,
        activation=activation,
        biases=_biases(biases),
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
    hold: Hold,
) -> Experts:
    """UsageError where it has another method or number of parts than was asked for."""
    experts = open_converted(model, layer, slots, hold)
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
        return whole("parts", parts, 1)
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
    if isinstance(matrices, list | tuple):
        return [kind_of(name, one).stored(name, one) for one in matrices]
    found = kind_of(name, matrices).stored(name, matrices)
    if not found.ndim:
        raise UsageError(f"{name} is a single number, not an array for each expert")
    return found


def _biases(biases: Any) -> tuple[Any, Any, Any] | None:
    if biases is None:
        return None
    if not isinstance(biases, list | tuple) or len(biases) != 3:
        raise UsageError("biases must be those of gate, up and down", "None for a missing one")
    gate, up, down = (None if one is None else _stack("biases", one) for one in biases)
    return gate, up, down
