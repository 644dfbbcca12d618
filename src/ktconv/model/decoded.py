"""The weights of a checkpoint under the names that an unquantized safetensors one has.

transformers takes them as a state dict. It asks for a tensor when it puts it into the model, as it
does with the slices of safetensors files, and only then is the tensor read and decoded. So what is
in memory is the decoded model, and never the encoded one as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ktconv.errors import CheckpointError
from ktconv.families.family import Projection
from ktconv.source import (
    Checkpoint,
    ExpertMatrix,
    ModelSource,
    MoELayer,
    TensorRef,
    open_checkpoint,
)
from ktconv.source.encodings.base import BLOCKS, WEIGHT, Parts
from ktconv.source.fused import fused_name
from ktconv.source.gguf.as_hub import hub_names_of
from ktconv.source.gguf.file import float32_bytes
from ktconv.source.others import OtherWeights, primary
from ktconv.source.reading.matrices import MatrixReader, source_bytes
from ktconv.source.reading.reader import SourceReader
from ktconv.source.settings import ModelSettings
from ktconv.system.arrays import U8
from ktconv.system.opened import LOCAL, store_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from ktconv.model.sites import Site

_FLOATS = ("BF16", "F16", "F32", "F64")
_NOT_WEIGHTS = ("BOOL", "I16", "I32", "I64")  # of buffers and tables; packed numbers are weights
_DTYPES = {  # as PyTorch calls what safetensors files contain
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "BOOL": "bool",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_FLOAT_BYTES = {"float32": 4, "float64": 8}  # of an element; all others have 2


class _Piece(NamedTuple):
    """A matrix, and its place in the tensor that contains it: the expert, its outputs, and whether
    these are columns."""

    matrix: ExpertMatrix
    expert: int | None = None
    outputs: slice = slice(None)
    transposed: bool = False


class Weight(Struct, frozen=True):
    """A tensor of an unquantized checkpoint: one of the files as it is, or what `pieces` are
    decoded to."""

    shape: tuple[int, ...]
    stored: TensorRef | None = None
    pieces: Callable[[], Sequence[_Piece]] = tuple

    @property
    def nbytes(self) -> int:
        """Size in the source, with scales."""
        if self.stored is not None:
            return self.stored.nbytes
        return sum(source_bytes(piece.matrix) for piece in self.pieces())

    @property
    def tensors(self) -> list[TensorRef]:
        """The tensors in the source that it is read from, without scales."""
        if self.stored is not None:
            return [self.stored]
        return [piece.matrix.tensor for piece in self.pieces()]


class SourceWeights:
    """All weights of a checkpoint by their unquantized names.

    Raises as `hub_names_of` for a GGUF model whose names are not known.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.weights: dict[str, Weight] = {}
        if not checkpoint.is_gguf:  # their experts have no such names
            for layer in checkpoint.layers:
                self.weights |= _experts(layer)
        self.weights |= self.others()

    @property
    def counts(self) -> Mapping[int, int]:
        """The number of experts of each layer; empty where all have the same."""
        return different_counts(self._checkpoint.layers)

    def others(self) -> dict[str, Weight]:
        """Weights that are no expert's."""
        checkpoint, others = self._checkpoint, OtherWeights(self._checkpoint)
        found = {
            name: weight for _, parts in others.modules() for name, weight in _other(others, parts)
        }
        return _under_hub_names(checkpoint, found) if checkpoint.is_gguf else found

    def biases(self) -> dict[str, Weight]:
        """Biases of experts."""
        return {
            matrix.bias.tensor.name: Weight(matrix.bias.tensor.shape, matrix.bias.tensor)
            for layer in self._checkpoint.layers
            for expert in layer.experts
            for matrix in expert.values()
            if matrix.bias is not None
        }

    @property
    def encoded(self) -> bool:
        """Whether any of them is not stored as it is."""
        return any(weight.stored is None for weight in self.weights.values())

    @property
    def nbytes(self) -> int:
        """Bytes in memory, with two or four for a decoded number as config.json says."""
        size = _FLOAT_BYTES.get(str(self._checkpoint.config.dtype or ""), 2)
        return sum(
            one.stored.nbytes if one.stored is not None else size * prod(one.shape)
            for one in self.weights.values()
        )

    def state_dict(self, dtype: torch.dtype, model: nn.Module | None = None) -> StateDict:
        """Weights for transformers to load, decoded ones in `dtype`. `model`: what they are loaded
        into, without weights; it has the names of experts that transformers does not know as the
        checkpoint has them."""
        weights = dict(self.weights)
        for layer, experts in _renamed(self._checkpoint.layers, model):
            for name, _ in _experts(layer):
                del weights[name]
            weights |= experts
        return StateDict(self._checkpoint, weights, dtype)


class StateDict(dict[str, Any]):
    """Objects that are read, or decoded, as `weight[...]`.

    `error` is the first that reading raised, since transformers keeps only its words. `read` gets
    the number of bytes that were read.
    """

    error: Exception | None = None

    def __init__(
        self, checkpoint: Checkpoint, weights: Mapping[str, Weight], dtype: torch.dtype
    ) -> None:
        super().__init__({name: _Lazy(self, weight) for name, weight in weights.items()})
        self.dtype = dtype
        self.read: Callable[[int], None] = lambda _: None
        self.reader = SourceReader(checkpoint.files, checkpoint.sources)
        self._mapped: set[Path] = set()

    def mapped(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor that stays in its file; None if it is not stored as `dtype`, or not here."""
        import torch

        stored = self[name].weight.stored
        if stored is None or _torch_dtype(stored) != dtype or not stored.nbytes:
            return None
        if store_of(stored.file) is not LOCAL:
            return None
        with self.reader.open(stored.file):  # as it was
            # "c": a tensor that cannot be written to warns
            data = np.memmap(stored.file, np.uint8, "c", stored.offset, (stored.nbytes,))
        self._mapped.add(stored.file)
        return torch.from_numpy(data).view(dtype).reshape(self[name].weight.shape)

    def check_mapped(self) -> None:
        """SourceChangedError where what is mapped may not be what it was."""
        for file in self._mapped:
            with self.reader.open(file):
                pass


class _Lazy:
    """Read or decoded when `[...]` asks for all of it, in any thread."""

    def __init__(self, owner: StateDict, weight: Weight) -> None:
        self._owner, self.weight = owner, weight

    def get_dtype(self) -> str:
        """Dtype, named as by a slice of a safetensors file."""
        return "BF16" if self.weight.stored is None else self.weight.stored.dtype

    def get_shape(self) -> list[int]:
        """Shape, as a slice of a safetensors file gives it."""
        return list(self.weight.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        try:
            stored = self.weight.stored
            return (self._decoded() if stored is None else self._stored(stored))[index]
        except Exception as error:
            self._owner.error = self._owner.error or error
            raise

    def _stored(self, tensor: TensorRef) -> torch.Tensor:
        import torch

        owner, dtype = self._owner, _torch_dtype(tensor)
        target = torch.empty(self.weight.shape, dtype=dtype)
        if tensor.nbytes:
            raw: U8 = target.reshape(-1).view(torch.uint8).numpy()
            with owner.reader.open(tensor.file) as fd:
                owner.reader.read(fd, tensor, raw.data, 0)
            owner.read(tensor.nbytes)
        return target

    def _decoded(self) -> torch.Tensor:
        import torch

        target = torch.empty(self.weight.shape, dtype=self._owner.dtype)
        for piece in self.weight.pieces():
            part = target if piece.expert is None else target[piece.expert]
            part = part.T if piece.transposed else part
            self._decode(piece.matrix, part[piece.outputs])
            self._owner.read(source_bytes(piece.matrix))
        return target

    def _decode(self, matrix: ExpertMatrix, target: torch.Tensor) -> None:
        import torch

        source = MatrixReader(self._owner.reader, matrix)
        for chunk, values in source.decoded():
            found = source.finite(values, chunk.start)
            target[chunk.start : chunk.stop] = torch.from_numpy(found)


def _torch_dtype(tensor: TensorRef) -> torch.dtype:
    """CheckpointError for one that PyTorch does not have."""
    import torch

    found = getattr(torch, _DTYPES.get(tensor.dtype, ""), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{tensor.name} is {tensor.dtype}, which is not supported")
    return found


def _under_hub_names(checkpoint: Checkpoint, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Weights of a GGUF model by the names of the safetensors checkpoint; others are left out."""
    names = hub_names_of(checkpoint)
    assert names is not None, "a GGUF model"
    return {
        found: replace(weight, shape=names.shape(name, weight.shape))
        for name, weight in weights.items()
        if (found := names.find(name)) is not None
    }


def encoded_weights(checkpoint: Checkpoint) -> SourceWeights | None:
    """The weights of a safetensors checkpoint that has encoded ones, layers with different numbers
    of experts, adapters added to its weights, or tensors that transformers, which disregards the
    index, would take from other shards; else None."""
    if checkpoint.is_gguf:
        return None
    weights = SourceWeights(checkpoint)
    needed = weights.encoded or weights.counts or checkpoint.index_decides or checkpoint.adapters
    return weights if needed else None


def different_counts(layers: Sequence[MoELayer]) -> Mapping[int, int]:
    """The number of experts of each layer; empty where all have the same."""
    counts = {layer.index: len(layer.experts) for layer in layers}
    return counts if len(set(counts.values())) > 1 else {}


def open_encoded(directory: Path, adapters: Sequence[str] = ()) -> SourceWeights | None:
    """`encoded_weights` of the checkpoint in a directory, with adapters added to its weights.

    Raises CheckpointError for a quantized checkpoint that cannot be read. One that is not quantized
    may have a structure that only transformers knows.
    """
    try:
        return encoded_weights(open_checkpoint(ModelSource(directory, adapter=tuple(adapters))))
    except CheckpointError:
        if adapters or _says_quantized(directory):
            raise
        return None


def loaded_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the weights of a checkpoint once transformers has loaded them."""
    if checkpoint.is_gguf:
        return float32_bytes(checkpoint.path)
    weights = encoded_weights(checkpoint)
    return checkpoint.nbytes if weights is None else weights.nbytes


def _says_quantized(directory: Path) -> bool:
    try:
        return ModelSettings.beside(directory).is_quantized
    except CheckpointError:
        return False


# ---- experts ---------------------------------------------------------------------------


def _experts(layer: MoELayer) -> Iterator[tuple[str, Weight]]:
    """Each expert's matrices, or the stacked tensors, and their biases."""
    first = layer.experts[0]
    if len(first["up"].tensor.shape) == 3:
        yield from _stacked(layer)
    else:
        for expert in layer.experts:
            for matrix in expert.values():
                yield _numbered(matrix)
    for expert in layer.experts:
        for matrix in expert.values():
            if matrix.bias is not None:
                tensor = matrix.bias.tensor
                yield tensor.name, Weight(tensor.shape, tensor)


def _numbered(matrix: ExpertMatrix) -> tuple[str, Weight]:
    tensor = matrix.tensor
    if _is_plain(matrix):
        return tensor.name, Weight(tensor.shape, tensor)
    name = f"{tensor.name.rpartition('.')[0]}.{WEIGHT}"
    return name, Weight((matrix.rows, matrix.cols), pieces=lambda: [_Piece(matrix)])


def _stacked(layer: MoELayer) -> Iterator[tuple[str, Weight]]:
    """Stacked weights in the orientation in which they are stored, gate and up in the order in
    which they are; gpt-oss's blocks are stored [out, in], and unquantized experts of it [in,
    out]."""
    first = layer.experts[0]
    groups: list[tuple[Projection, ...]] = [(projection,) for projection in layer.projections]
    if layer.gated and first["gate"].tensor.name == first["up"].tensor.name:
        groups = [("gate", "up"), ("down",)]
    for projections in groups:
        matrix = first[projections[0]]
        tensor = matrix.tensor
        if _is_plain(matrix):
            yield tensor.name, Weight(tensor.shape, tensor)
            continue
        transposed = matrix.col_stride != 1 or tensor.name.endswith(BLOCKS)
        sizes = (len(projections) * matrix.rows, matrix.cols)
        shape = (len(layer.experts), *(sizes[::-1] if transposed else sizes))
        alternating = len(projections) > 1 and _every_second(matrix)
        pieces = partial(_pieces, layer, projections, transposed, alternating)
        yield fused_name(layer.source, tensor), Weight(shape, pieces=pieces)


def _pieces(
    layer: MoELayer,
    projections: Sequence[Projection],
    transposed: bool,
    alternating: bool,
) -> list[_Piece]:
    """The matrices of all experts in one tensor, whose outputs alternate or follow each other."""
    found = []
    for number, expert in enumerate(layer.experts):
        for place, projection in enumerate(projections):
            matrix = expert[projection]
            if len(projections) == 1:
                outputs = slice(None)
            elif alternating:
                outputs = slice(place, None, 2)
            else:
                outputs = slice(place * matrix.rows, (place + 1) * matrix.rows)
            found.append(_Piece(matrix, number, outputs, transposed))
    return found


def _every_second(matrix: ExpertMatrix) -> bool:
    """Whether its outputs alternate with those of another matrix."""
    adjacent = matrix.cols // matrix.element.unit_cols if matrix.col_stride == 1 else 1
    return matrix.row_stride == 2 * adjacent


def _renamed(
    layers: Sequence[MoELayer], model: nn.Module | None
) -> Iterator[tuple[MoELayer, dict[str, Weight]]]:
    """Layers whose experts transformers would not find under their names, and these experts as the
    parameters of `model`: w13_weight of Hy4, numbered ones of Gemma-4."""
    if model is None:
        return
    from ktconv.model.sites import find_experts

    takes, sites = _names_taken(model), None
    for layer in layers:
        if takes(next(name for name, _ in _experts(layer))):
            continue
        if sites is None:
            try:
                sites = find_experts(model)
            except CheckpointError:  # what is missing is reported when the weights are loaded
                return
        site = sites.get(layer.index)
        if site is not None and (experts := _as_parameters(layer, site)):
            yield layer, experts


def _as_parameters(layer: MoELayer, site: Site) -> dict[str, Weight]:
    """The experts of a layer as those of a model; nothing where they do not fit into it."""
    own, first = site.stored, layer.experts[0]
    ours = len(layer.experts), first["up"].rows, first["up"].cols, layer.gated
    biased = any(matrix.bias is not None for matrix in first.values())
    if biased or ours != (own.count, own.intermediate, own.hidden, own.gated):
        return {}
    return {
        f"{site.path}.{name}": Weight(
            tuple(tensor.shape),
            pieces=partial(_pieces, layer, projections, own.transposed, own.alternating),
        )
        for name, tensor, projections in own.parameters
    }


def _names_taken(model: Any) -> Callable[[str], bool]:
    """Whether a tensor of this name goes into `model`, after transformers has renamed it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    changes = get_model_conversion_mapping(model)
    converters = [one for one in changes if isinstance(one, WeightConverter)]
    renamings: list[Any] = [one for one in changes if not isinstance(one, WeightConverter)]
    places = model.state_dict()

    def takes(name: str) -> bool:
        found, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, places)
        return found in places or name in places

    return takes


def _is_plain(matrix: ExpertMatrix) -> bool:
    return matrix.quantization is None and matrix.tensor.dtype in _FLOATS


# ---- other weights ---------------------------------------------------------------------


def _other(others: OtherWeights, parts: Parts) -> Iterator[tuple[str, Weight]]:
    """A weight as it is, or decoded; and tensors next to it that are none."""
    weight = primary(parts)
    if weight is None or _is_stored(parts, weight):
        for tensor in parts.values():
            yield tensor.name, Weight(tensor.shape, tensor)
        return
    module, _, part = weight.name.rpartition(".")
    name = f"{module}.{WEIGHT}" if parts.get(part) is weight else weight.name

    def pieces() -> list[_Piece]:
        return [_Piece(others.matrix(parts).matrix)]

    yield name, Weight(others.weight(parts).shape, pieces=pieces)


def _is_stored(parts: Parts, weight: TensorRef) -> bool:
    if parts.get(WEIGHT) is not weight:
        return False
    return weight.dtype in (*_FLOATS, *_NOT_WEIGHTS) or (
        len(parts) == 1 and not weight.name.endswith(f".{WEIGHT}")
    )
