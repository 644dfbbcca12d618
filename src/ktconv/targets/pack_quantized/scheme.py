"""The weight formats of compressed-tensors' pack-quantized layout that GPU experts can have.

A matrix [rows, cols] becomes three tensors: `weight_packed` int32 [rows, cols * bits / 32], each
level q stored as q + 2^(bits-1), first column in the lowest bits; `weight_scale`
[rows, cols / group_size]; `weight_shape` int64 [2]. The value is level x scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ktconv.checkpoint import MoELayer
from ktconv.errors import UsageError
from ktconv.writer.shards import Tensor

if TYPE_CHECKING:
    from ktconv.native import Encoding

BITS = {"W4A16": 4, "W8A16": 8}
CHANNEL = -1  # --group-size: one scale per row
GROUP_SIZES = (32, 64, 128)  # what engines have kernels for
PARTS = ("weight_packed", "weight_scale", "weight_shape")
_INT32 = 32


@dataclass(frozen=True, slots=True)
class Scheme:
    """Bits per weight, and how many weights of a row share a scale."""

    name: str = "W4A16"
    group_size: int = 128

    @property
    def bits(self) -> int:
        return BITS[self.name]

    def check(self, layers: Sequence[MoELayer]) -> None:
        """UsageError for a group size that does not divide the columns of every matrix."""
        if self.name not in BITS:
            raise UsageError(f"--scheme {self.name} is unknown", f"available: {', '.join(BITS)}")
        if self.group_size not in (*GROUP_SIZES, CHANNEL):
            raise UsageError(
                f"--group-size {self.group_size} is not supported by inference engines",
                f"use {', '.join(map(str, GROUP_SIZES))}, or {CHANNEL} for one scale per row",
            )
        for layer in layers:
            wide = "gate and up" if layer.gated else "up"
            columns = {wide: layer.hidden_size, "down": layer.intermediate_size}
            for matrix, cols in columns.items():
                if self.group_size != CHANNEL and cols % self.group_size:
                    raise UsageError(
                        f"--group-size {self.group_size} does not divide the {cols} columns of "
                        f"{matrix} in layer {layer.index}",
                        _fitting(layers),
                    )

    def tensors(self, module: str, rows: int, cols: int, scale_dtype: str) -> list[Tensor]:
        """What a matrix becomes; `module` is its name without ".weight"."""
        words = -(-cols * self.bits // _INT32)
        groups = self.groups(cols)
        return [
            Tensor(f"{module}.weight_packed", "I32", (rows, words), 4 * rows * words),
            Tensor(f"{module}.weight_scale", scale_dtype, (rows, groups), 2 * rows * groups),
            Tensor(f"{module}.weight_shape", "I64", (2,), 16),
        ]

    def groups(self, cols: int) -> int:
        return 1 if self.group_size == CHANNEL else cols // self.group_size

    def encoding(self, half: bool) -> Encoding:
        """What the C library calls it; `half`: weights and scales are binary16, not bf16."""
        from ktconv.native import Encoding

        return Encoding(f"int{self.bits}", max(self.group_size, 0), half)

    def weight_arguments(self) -> dict[str, Any]:
        """compressed-tensors' QuantizationArgs, as in config.json."""
        channel = self.group_size == CHANNEL
        return {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if channel else "group",
            "group_size": None if channel else self.group_size,
            "dynamic": False,
        }


def _fitting(layers: Sequence[MoELayer]) -> str:
    """A hint: the group sizes that these layers can have."""
    cols = {size for layer in layers for size in (layer.hidden_size, layer.intermediate_size)}
    fitting = [size for size in GROUP_SIZES if not any(n % size for n in cols)]
    return (
        "possible values of --group-size for this model: "
        f"{', '.join(map(str, [*fitting, CHANNEL]))}"
    )
