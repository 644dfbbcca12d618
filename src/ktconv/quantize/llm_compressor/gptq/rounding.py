"""llm-compressor's GPTQ of matrices, and their packed form.

Everything is computed by the functions that its `GPTQModifier` uses, with the modifier's defaults.
Matrices with the same inputs are rounded as one that has the rows of all of them: rows do not
depend on each other, and the Hessian is inverted once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# isort: split
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationScheme,
    fake_quantize,
)
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, make_empty_hessian
from llmcompressor.observers import Observer
from torch import Tensor, nn


class Hessian:
    """Hessian of matrices with that number of columns: the mean over samples of 2 X^T X, in
    float32."""

    def __init__(self, columns: int, device: str) -> None:
        self._linear = nn.Linear(columns, 1, bias=False, device="meta")  # only its shape is used
        self._sum = make_empty_hessian(self._linear, torch.device(device))
        self._samples = torch.zeros((), device=device)

    def add(self, rows: Tensor) -> None:
        """The inputs [M, columns] of a sample."""
        accumulate_hessian(rows, self._linear, self._sum, self._samples)

    @property
    def mean(self) -> Tensor:
        found: Tensor = self._sum / self._samples
        return found


class Rounded(NamedTuple):
    """A matrix [rows, cols] as level x scale; the parts of its packed form by name: weight_packed
    int32, weight_scale in the dtype of the matrix [rows, groups], weight_shape int64 [2]."""

    tensors: Mapping[str, Tensor]
    fell_back: bool  # to rounding to nearest, as the Hessian could not be inverted


class Rounding:
    """Rounds matrices; `dampening` is the fraction of the mean of a Hessian's diagonal that is
    added to it."""

    def __init__(self, weights: QuantizationArgs, dampening: float) -> None:
        self._weights, self._dampening = weights, dampening
        # What GPTQModifier makes of settings without an order.
        self._ordered = weights.model_copy(update={"actorder": ActivationOrdering.STATIC})
        self._scheme = QuantizationScheme(targets=[], weights=weights, format="pack-quantized")

    def alike(self, matrices: Sequence[Tensor], inputs: Hessian) -> list[Rounded]:
        """Round matrices with the same inputs."""
        return self._round([matrices], [inputs])

    def each(self, matrices: Sequence[Tensor], inputs: Sequence[Hessian]) -> list[Rounded]:
        """Round matrices of the same shape with their own inputs."""
        return self._round([[matrix] for matrix in matrices], inputs)

    def _round(
        self, groups: Sequence[Sequence[Tensor]], inputs: Sequence[Hessian]
    ) -> list[Rounded]:
        """`groups` have as many rows each."""
        observed = [[self._observed(matrix) for matrix in group] for group in groups]
        joined = {
            name: torch.stack([torch.cat([one[name] for one in group]) for group in observed])
            for name in ("scale", "zero_point")
        }
        found, _, fell_back = quantize_weight(
            weights=torch.stack([torch.cat(list(group)).float() for group in groups]),
            hessians=torch.stack([hessian.mean for hessian in inputs]),
            scale=joined["scale"],
            zero_point=joined["zero_point"],
            global_scale=None,
            quant_args=self._ordered,
            percdamp=self._dampening,
        )
        return [
            Rounded(self._packed(matrix.to(original.dtype), own), back)
            for group, values, given, back in zip(
                groups, found, observed, fell_back.tolist(), strict=True
            )
            for original, matrix, own in zip(
                group, values.split([len(matrix) for matrix in group]), given, strict=True
            )
        ]

    def _observed(self, matrix: Tensor) -> Mapping[str, Any]:
        """Scales and zero points [rows, groups] by the range of each group."""
        observer = Observer.load_from_registry(
            "memoryless_minmax", base_name="weight", args=self._ordered
        )
        observer(matrix)
        found: Mapping[str, Any] = observer.get_qparams()
        return found

    def _packed(self, matrix: Tensor, observed: Mapping[str, Any]) -> dict[str, Tensor]:
        packed = PackedQuantizationCompressor.compress(
            {
                "weight": matrix,
                "weight_scale": observed["scale"].to(matrix.dtype),
                "weight_zero_point": observed["zero_point"].to(self._weights.zp_dtype),
            },
            self._scheme,
        )
        return {name: packed[name].contiguous() for name in sorted(packed)}

    def values(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The matrix [rows, cols] of a packed form, in the dtype of its scales."""
        found: Tensor = PackedQuantizationCompressor.decompress(dict(tensors), self._scheme)[
            "weight"
        ]
        return found

    def nearest(self, matrix: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """A matrix rounded to nearest with the scales of its packed form."""
        scale = tensors["weight_scale"]
        found: Tensor = fake_quantize(matrix, scale, torch.zeros_like(scale), self._weights)
        return found.to(matrix.dtype)
