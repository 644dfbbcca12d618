"""Experts of a checkpoint in another weight format than its own, quantized while they are loaded.

    experts = requantized_experts(checkpoint, 3, "int8")

For encodings that no kernel has. A matrix at a time is decoded, by each thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from ktconv.runtime.layers.experts import Experts
from ktconv.runtime.layers.filling import Bind
from ktconv.runtime.layers.load import expect_gates, kernel_activation
from ktconv.runtime.layers.native_load import layer_of, norm_of
from ktconv.runtime.layers.online import pack_online
from ktconv.runtime.layers.slots import Slots
from ktconv.source import Checkpoint, ExpertMatrix, Projection
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.system.arrays import F32


def requantized_experts(
    checkpoint: Checkpoint,
    layer: int | None,
    method: str,
    *,
    parts: int = 1,
    slots: Slots | None = None,
    bind: Bind | None = None,
) -> Experts:
    """The routed experts of one layer (None: the first) of an opened checkpoint in any weight
    format, whatever theirs is; arguments as for `pack_online`. Biases, activation and a norm of
    outputs are the model's.

    Raises CheckpointError for damaged weights, a NaN or an infinity, and for an activation that
    kernels do not have, UsageError for a layer that does not exist and for what `pack_online`
    refuses.
    """
    found, reader = layer_of(checkpoint, layer), SourceReader(checkpoint.files, checkpoint.sources)
    activation = kernel_activation(found.activation)
    expect_gates(found.gated, activation, f"layer {found.index} of {checkpoint.path}")

    def stack(projection: Projection) -> Any:
        return [_Decoded(reader, expert[projection]) for expert in found.experts]

    def biases(projection: Projection) -> Any:
        own = [MatrixReader(reader, expert[projection]).load_bias() for expert in found.experts]
        return None if own[0] is None else own

    added = biases("gate") if found.gated else None, biases("up"), biases("down")
    made = pack_online(
        stack("gate") if found.gated else None,
        stack("up"),
        stack("down"),
        method,
        parts=parts,
        activation=activation,
        biases=added,
        slots=slots,
        bind=bind,
    )
    made.norm, made.weight_on_input = norm_of(checkpoint, found), found.activation.weight_on_input
    return made


class _Decoded(Struct, frozen=True):
    """A matrix of a checkpoint that becomes an array of float32 where NumPy wants one."""

    reader: SourceReader
    matrix: ExpertMatrix
    dtype = np.dtype(np.float32)
    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.rows, self.matrix.cols

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> F32:
        values = np.empty(self.shape, np.float32)
        source = MatrixReader(self.reader, self.matrix)
        for chunk, rows in source.decoded():
            values[chunk.start : chunk.stop] = source.finite(rows, chunk.start)
        return values
