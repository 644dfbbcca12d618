"""Experts straight from a checkpoint whose numbers the kernels compute with: nothing is rounded.

    experts = native_experts("path/to/model", 3, parts=2)

BF16, FP8, MXFP4 and integers, each where a weight format of the kernels has exactly their numbers.
Codes and scales are only put into the kernels' order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from ktconv import native
from ktconv.errors import CheckpointError, PackedExpertsError, UnknownNamesError, UsageError
from ktconv.formats import PROJECTIONS, Format, Slice, format_named, nvfp4, split
from ktconv.formats.decode import E4M3FN_VALUES
from ktconv.native import PackedMatrix
from ktconv.runtime.layers.experts import Experts, OutputNorm, check_shape
from ktconv.runtime.layers.filling import Bind, Packer, Shape, Wanted, fill_experts
from ktconv.runtime.layers.ggml_blocks import CODED_BLOCKS
from ktconv.runtime.layers.load import expect_gates, kernel_activation
from ktconv.runtime.layers.native_formats import formats_of_layer
from ktconv.runtime.layers.output_norms import output_norm
from ktconv.runtime.layers.plain import NotExactError, PlainReader
from ktconv.runtime.layers.slots import Slots, slot_origins
from ktconv.source import Checkpoint, MoELayer, open_checkpoint
from ktconv.source.model_source import ModelSource
from ktconv.source.naming_map import NamingMap, parse_map
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import MatrixReader, Scales, buffers_of, chunks
from ktconv.source.reading.reader import SourceReader
from ktconv.source.reading.tensors import SourceTensors
from ktconv.system.arrays import F32, U8, Array
from ktconv.targets.packed.weights import not_finished
from ktconv.writer.journal import Journal

_HINT = (
    "convert it with ktconv quantize-cpu, or quantize its weights as they are loaded: MoELayer.pack"
)
_BLOCKS_HINT = f"of GGUF's types they have {', '.join(CODED_BLOCKS)} exactly; {_HINT}"


def native_experts(
    checkpoint: str | Path | Checkpoint,
    layer: int | None = None,
    *,
    parts: int = 1,
    method: str | None = None,
    slots: Slots | None = None,
    bind: Bind | None = None,
    threads: int | None = None,
) -> Experts:
    """The routed experts of one layer (the first that has some, if not told) of a checkpoint, or of
    one that is open already, cut into `parts`.

    `method`: the weight format to hold them in; None: the first of `native_formats` that has their
    numbers exactly. `slots`: see `slot_origins`. The memory of each part is given to `bind`, with
    the part's number, before anything is written to it; `threads` threads fill it (None: one per
    CPU), a few MiB of a source file at a time. Biases, activation and a norm of outputs are the
    model's.

    Raises CheckpointError for weights that no format of the kernels has exactly, for a NaN or an
    infinity, and for an activation that kernels do not have; UsageError for a layer that does not
    exist, for slots, and for a method or number of parts that these weights cannot have.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_stored(checkpoint)
    found = layer_of(opened, layer)
    activation = kernel_activation(found.activation)
    expect_gates(found.gated, activation, f"layer {found.index} of {opened.path}")
    origins = slot_origins(slots, len(found.experts))
    formats = _formats(opened, found, sorted(set(origins)), parts, method)
    norm, reader = norm_of(opened, found), SourceReader(opened.files, opened.sources)
    sizes = found.hidden_size, found.intermediate_size

    def load(fmt: Format) -> Experts:
        shape, packer = Shape(fmt, *sizes, parts, activation), _packer(fmt, reader, found)
        experts = fill_experts(shape, origins, packer, bind, threads, norm)
        experts.weight_on_input = found.activation.weight_on_input
        return experts

    return _first_exact(formats, load)


def expect_formats(checkpoint: Checkpoint, layers: Iterable[MoELayer]) -> None:
    """CheckpointError for the first of these layers whose experts no format of the kernels has
    exactly, by their headers."""
    for layer in layers:
        _formats(checkpoint, layer, list(range(len(layer.experts))), 1, None)


def open_stored(path: str | Path) -> Checkpoint:
    """A checkpoint to compute with: also one of `--method awq`, whose names no model has.
    CheckpointError for an output whose conversion is not finished."""
    if (directory := Path(path)).is_dir() and Journal(directory).has_run():
        raise CheckpointError(*not_finished(directory))
    try:
        return open_checkpoint(path)
    except PackedExpertsError:
        try:
            return open_checkpoint(ModelSource(path, map=_reordered_names()))
        except UnknownNamesError:
            pass  # packed otherwise
        raise


@cache
def _reordered_names() -> NamingMap:
    """Names of KTransformers' export of AWQ (SPEC 7)."""
    lines = (f'{proj} = "blk.{{layer}}.ffn_{proj}_exps.{{expert}}"' for proj in PROJECTIONS)
    return parse_map("\n".join(("[experts]", *lines)), "the map of awq")


def native_formats(layer: MoELayer) -> list[str]:
    """The weight formats that hold a layer's experts exactly, by its headers; the first is the one
    that `native_experts` tries first, and empty is what it refuses."""
    return [fmt.key for fmt in formats_of_layer(layer)]


def layer_of(checkpoint: Checkpoint, layer: int | None) -> MoELayer:
    """The MoE layer of this number, None: the first. UsageError where there is none."""
    layers = {one.index: one for one in checkpoint.layers}
    wanted = next(iter(layers)) if layer is None else layer
    if wanted not in layers:
        raise UsageError(
            f"{checkpoint.path} has no experts of layer {wanted}", f"it has {list(layers)}"
        )
    return layers[wanted]


def _formats(
    checkpoint: Checkpoint, layer: MoELayer, experts: list[int], parts: int, method: str | None
) -> list[Format]:
    """Formats to try, for kernels of this shape; at least one."""
    possible = formats_of_layer(layer, experts)
    where, encoding = f"layer {layer.index} of {checkpoint.path}", _encoding(layer)
    if not possible:
        raise CheckpointError(
            f"the experts in {where} are {encoding}, which no weight format of the kernels has "
            "exactly",
            _BLOCKS_HINT if checkpoint.is_gguf else _HINT,
        )
    if method is not None:
        wanted = format_named(method)
        if wanted not in possible:
            keys = ", ".join(fmt.key for fmt in possible)
            raise UsageError(
                f"the experts in {where} are {encoding}, which {wanted.key} does not have exactly",
                f"give {keys} or no method, or quantize them: MoELayer.pack",
            )
        possible = [wanted]
    sizes = layer.hidden_size, layer.intermediate_size
    able = [fmt for fmt in possible if parts > 0 and fmt.multiplies(*sizes, parts)]
    if not able:
        _refuse_shape(possible[0], layer, parts)
    return able


def _encoding(layer: MoELayer) -> str:
    """Encodings of all experts, in words."""
    first = next(iter(layer.experts[0].values())).tensor
    return f"{' and '.join(layer.encodings)} ({first.name} is {first.dtype})"


def _refuse_shape(fmt: Format, layer: MoELayer, parts: int) -> None:
    sizes = layer.hidden_size, layer.intermediate_size
    try:
        check_shape(fmt, *sizes, parts)
    except UsageError as error:
        allowed = [n for n in fmt.allowed_parts(*sizes) if fmt.multiplies(*sizes, n)]
        hint = f"parts that it allows: {', '.join(map(str, allowed))}" if allowed else _HINT
        raise UsageError(f"{error} (layer {layer.index}, {layer.encoding})", hint) from None


def norm_of(checkpoint: Checkpoint, layer: MoELayer) -> OutputNorm | None:
    """Norm of the experts' outputs, if the model has one."""
    try:
        return output_norm(SourceTensors(checkpoint), checkpoint.config, layer)
    except CheckpointError as error:
        error.hint = error.hint or "download the checkpoint again"
        raise


def _first_exact(formats: Sequence[Format], load: Callable[[Format], Experts]) -> Experts:
    """Experts in the first of these formats that has all numbers; the error of the first, if none
    has."""
    refused: NotExactError | None = None
    for fmt in formats:
        try:
            return load(fmt)
        except NotExactError as error:
            refused = refused or error
    assert refused is not None
    refused.hint = _HINT
    raise refused


def _packer(fmt: Format, reader: SourceReader, layer: MoELayer) -> Callable[[], Packer]:
    """A function that reads and packs matrices of a layer, with buffers of its own."""
    largest = buffers_of(layer.kinds)

    def packer() -> Packer:
        buffers = Buffers(largest)
        return lambda wanted: _pack(fmt, reader, layer, wanted, buffers)

    return packer


def _pack(
    fmt: Format, reader: SourceReader, layer: MoELayer, wanted: Wanted, buffers: Buffers
) -> F32 | None:
    """A matrix in the kernels' order into its places; returns its bias."""
    source = MatrixReader(reader, layer.experts[wanted.expert][wanted.proj])
    sizes, parts = (layer.hidden_size, layer.intermediate_size), len(wanted.places)
    owned = [split(wanted.proj, *sizes, part, parts) for part in range(parts)]
    with source.open() as fd:
        plain = plain_reader(fmt, source)
        for chunk in chunks(source.matrix, owned[0].shape[0]):
            source.read(fd, chunk, buffers.source, buffers.bounce)
            for part, place in zip(owned, wanted.places, strict=True):
                if part.row_start <= chunk.start < part.row_stop:
                    _place(plain, chunk, buffers, part, place)
    return source.load_bias()


def _place(
    plain: PlainReader, chunk: range, buffers: Buffers, part: Slice, place: PackedMatrix
) -> None:
    """The rows of a chunk, which are whole row blocks: neighbours in packed bytes."""
    layout, cols = plain.format.layout, part.shape[1]
    first, last = chunk.start - part.row_start, chunk.stop - part.row_start
    data = buffers.source
    codes, scale = plain.codes(chunk, data, part), plain.scale(chunk, data, part)
    start, stop = layout.weight_size(first, cols), layout.weight_size(last, cols)
    packed = native.pack_weight(layout, len(chunk), cols, codes, scale, place.codes[start:stop])
    if place.scale is not None:
        place.scale[layout.scale_size(first, cols) : layout.scale_size(last, cols)] = packed


_E4M3 = E4M3FN_VALUES[:127]  # those that are not negative


class InnerScaleReader(PlainReader, frozen=True):
    """A row's scale is the second level, which all of a matrix share: where the source divides by
    it, the reciprocal, rounded to float32."""

    factor: float  # `scales` are those of groups alone

    def codes(self, chunk: range, data: U8, part: Slice) -> Array:
        nibbles = PlainReader.codes(self, chunk, data, part)
        grid, scales = self.source.matrix.scale, self.scales
        assert grid is not None and scales is not None
        inner = self._of_grid(grid, scales, chunk, part)
        return nvfp4.plain(nibbles, np.searchsorted(_E4M3, inner).astype(np.uint8))

    def scale(self, chunk: range, data: U8, part: Slice) -> Array | None:
        grid = self.source.matrix.scale
        assert grid is not None
        values = np.full(len(chunk), self.factor, np.float32)
        return self._as_stored(values, (grid.outer or grid).tensor.name)


def plain_reader(fmt: Format, source: MatrixReader) -> PlainReader:
    """A reader of a matrix in the plain form of `fmt`."""
    if not fmt.traits.inner_scales:
        return PlainReader(fmt, source, source.load_scales())
    grid = source.matrix.scale
    if grid is None or grid.outer is None:
        return InnerScaleReader(fmt, source, source.load_scales(), 1.0)
    blocks, factor, divides = source.load_levels()
    factor = float(np.float32(1 / factor)) if divides else factor
    return InnerScaleReader(fmt, source, Scales(blocks), factor)
