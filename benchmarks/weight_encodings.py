"""Tensors of one weight in every encoding that checkpoints have, for make_checkpoint.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

ITEM_BYTES = {
    "BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8,
}  # fmt: skip
FP8_BLOCK = 128
MX_GROUP, NV_GROUP, PACKED_GROUP, GPTQ_GROUP = 32, 16, 32, 128


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: everything known but its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: str = "weights"  # scales, codes, eights, shape: see Pool.pieces

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * ITEM_BYTES[self.dtype]


TensorsOf = Callable[[str, int, int], Iterator[Tensor]]


def plain(dtype: str, name: str, rows: int, cols: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", dtype, (rows, cols))


def fp8(
    block: tuple[int, int], scale: str, dtype: str, name: str, rows: int, cols: int
) -> Iterator[Tensor]:
    """Blocks of 0 are as large as the weight."""
    yield Tensor(f"{name}.weight", "F8_E4M3", (rows, cols))
    grid = (-(-rows // (block[0] or rows)), -(-cols // (block[1] or cols)))
    yield Tensor(f"{name}.{scale}", dtype, grid, "scales")


def mxfp4(name: str, rows: int, cols: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", "I8", (rows, cols // 2), "codes")
    yield Tensor(f"{name}.scale", "F8_E8M0", (rows, cols // MX_GROUP), "scales")


def nvfp4(name: str, rows: int, cols: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight_packed", "U8", (rows, cols // 2), "codes")
    yield Tensor(f"{name}.weight_scale", "F8_E4M3", (rows, cols // NV_GROUP), "scales")
    yield Tensor(f"{name}.weight_global_scale", "F32", (1,), "scales")


def int8(name: str, rows: int, cols: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", "I8", (rows, cols), "symmetric codes")
    yield Tensor(f"{name}.weight_scale", "F32", (rows, 1), "scales")


def packed(bits: int, group: int, name: str, rows: int, cols: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight_packed", "I32", (rows, cols * bits // 32), "codes")
    yield Tensor(f"{name}.weight_scale", "BF16", (rows, cols // (group or cols)), "scales")
    yield Tensor(f"{name}.weight_shape", "I64", (2,), f"shape {rows} {cols}")


def gptq(bits: int, name: str, rows: int, cols: int, zeros: str = "codes") -> Iterator[Tensor]:
    groups = cols // GPTQ_GROUP
    yield Tensor(f"{name}.qweight", "I32", (cols * bits // 32, rows), "codes")
    yield Tensor(f"{name}.scales", "F16", (groups, rows), "scales")
    yield Tensor(f"{name}.qzeros", "I32", (groups, rows * bits // 32), zeros)


def awq(name: str, rows: int, cols: int, zeros: str = "codes") -> Iterator[Tensor]:
    groups = cols // GPTQ_GROUP
    yield Tensor(f"{name}.qweight", "I32", (cols, rows // 8), "codes")
    yield Tensor(f"{name}.scales", "F16", (groups, rows), "scales")
    yield Tensor(f"{name}.qzeros", "I32", (groups, rows // 8), zeros)


@dataclass(frozen=True)
class Encoding:
    """A generator of one weight's tensors, and the quantization_config of such a model."""

    tensors: TensorsOf
    other: str = "BF16"  # dtype of tensors that are not experts
    config: Mapping[str, object] = field(default_factory=dict)


_COMPRESSED = {"quant_method": "compressed-tensors"}
_PACKED = {**_COMPRESSED, "format": "pack-quantized"}
_BLOCK_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}
_GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "group_size": GPTQ_GROUP}
_AWQ = {"quant_method": "awq", "version": "gemm"}

ENCODINGS: dict[str, Encoding] = {
    "bf16": Encoding(partial(plain, "BF16")),
    "fp16": Encoding(partial(plain, "F16"), "F16"),
    "fp32": Encoding(partial(plain, "F32"), "F32"),
    "fp8": Encoding(
        partial(fp8, (FP8_BLOCK, FP8_BLOCK), "weight_scale_inv", "F32"), config=_BLOCK_CONFIG
    ),
    "fp8-tensor": Encoding(partial(fp8, (0, 0), "weight_scale", "F32"), config=_COMPRESSED),
    "fp8-channel": Encoding(partial(fp8, (1, 0), "weight_scale", "F32"), config=_COMPRESSED),
    "mxfp8": Encoding(
        partial(fp8, (1, MX_GROUP), "weight_scale_inv", "U8"),
        config={"quant_method": "mxfp8", "weight_block_size": [1, MX_GROUP]},
    ),
    "mxfp4": Encoding(mxfp4, config={**_BLOCK_CONFIG, "expert_dtype": "fp4"}),
    "nvfp4": Encoding(nvfp4, config=_COMPRESSED),
    "int8": Encoding(int8, config=_COMPRESSED),
    "int8-packed": Encoding(partial(packed, 8, 0), config=_PACKED),
    **{
        f"int{bits}-packed": Encoding(partial(packed, bits, PACKED_GROUP), config=_PACKED)
        for bits in (2, 3, 4, 5, 6, 7)
    },
    **{f"gptq-int{bits}": Encoding(partial(gptq, bits), config=_GPTQ) for bits in (2, 3, 4, 8)},
    "gptq-symmetric": Encoding(partial(gptq, 4, zeros="eights"), config=_GPTQ),
    "awq-int4": Encoding(awq, config=_AWQ),
    "awq-symmetric": Encoding(partial(awq, zeros="eights"), config=_AWQ),
}
