"""Models whose experts have biases, which most readers of converted weights do not add."""

from __future__ import annotations

from collections.abc import Sequence

from ktconv.errors import CheckpointError
from ktconv.source import MoELayer


def refuse_biases(layers: Sequence[MoELayer], why: str, hint: str) -> None:
    """CheckpointError that names the first bias of an expert, if there is one."""
    for layer in layers:
        if not layer.biased:
            continue
        matrices = (matrix for expert in layer.experts for matrix in expert.values())
        tensor = next(matrix.bias.tensor for matrix in matrices if matrix.bias)
        raise CheckpointError(f"{tensor.name}: the experts of this model have biases; {why}", hint)
