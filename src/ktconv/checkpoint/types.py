"""What a source checkpoint consists of: headers only, no weight is read here.

Every object is a view: where the bytes lie, never the bytes themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconv.families.family import PROJECTIONS, Projection

__all__ = [
    "PROJECTIONS", "BlockScale", "Checkpoint", "ExpertMatrix", "MoELayer", "Projection",
    "SourceFile", "TensorRef",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor of one safetensors file."""

    name: str
    file: Path
    dtype: str  # as safetensors spells it: BF16, F16, F32, F8_E4M3, U8, F8_E8M0 ...
    shape: tuple[int, ...]
    offset: int  # of the first byte, from the start of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockScale:
    """Scales of a block-quantized matrix: one per `block_rows` x `block_cols`.

    Element (n, k) of the matrix is multiplied by grid entry
    ((row_origin + n) // block_rows, (col_origin + k) // block_cols), which lies
    `start + row * row_stride + col * col_stride` elements into `tensor`.
    The origins are not zero where a matrix is a slice of a fused tensor.
    """

    tensor: TensorRef
    start: int
    row_stride: int
    col_stride: int
    block_rows: int
    block_cols: int
    row_origin: int
    col_origin: int


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One projection of one expert as a strided [rows, cols] view (PyTorch [out, in]).

    Element (n, k) lies `start + n * row_stride + k * col_stride` elements into
    `tensor`. One of the strides is 1: `col_stride` for weights stored [out, in],
    `row_stride` for fused weights stored [in, out].
    """

    tensor: TensorRef
    rows: int
    cols: int
    start: int
    row_stride: int
    col_stride: int
    scale: BlockScale | None


@dataclass(frozen=True, slots=True)
class MoELayer:
    """The routed experts of one layer."""

    index: int  # L of blk.{L}; MTP layers follow num_hidden_layers
    source: str  # the key prefix they were found under, e.g. "model.layers.3.mlp.experts"
    is_mtp: bool
    hidden_size: int
    intermediate_size: int
    encoding: str  # a name of checkpoint.encodings: bf16, fp16, fp32, fp8-block
    experts: Sequence[Mapping[Projection, ExpertMatrix]]  # by expert id


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The state of one input file when its checkpoint was opened."""

    name: str  # as valid Unicode, see text.path_text
    nbytes: int
    mtime_ns: int | None  # None: `sha256` covers the whole file, so the time adds nothing
    sha256: str  # of a shard's header (without the length), of all of config.json


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its config, tensors and MoE layers."""

    path: Path
    config: Mapping[str, Any]
    files: Sequence[Path]  # safetensors shards, in name order
    layers: Sequence[MoELayer]  # ascending index
    other_tensors: Sequence[TensorRef]  # everything that is not a routed expert
    notes: Sequence[str]  # what a user should know: MTP layers, config oddities
    sources: Sequence[SourceFile] = ()  # what source_identity() tells
