"""Blocks of ggml's types to float32, by the package gguf: nothing in it is of our own decoders."""

from __future__ import annotations

import numpy as np

from ktconv.system.arrays import F32, U8

TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_M",
    "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_NL", "IQ4_XS", "MXFP4",
    "NVFP4", "TQ1_0", "TQ2_0",
)  # fmt: skip


def block_size(name: str) -> tuple[int, int]:
    """Numbers of a block of this type, and its bytes."""
    import gguf

    count, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    return count, nbytes


def block_numbers(name: str, blocks: U8) -> F32:
    """Blocks [..., bytes of a block] of this type to float32 [..., numbers of a block]."""
    import gguf

    flat = np.ascontiguousarray(blocks).reshape(-1, blocks.shape[-1])
    values: F32 = gguf.quants.dequantize(flat, gguf.GGMLQuantizationType[name])
    return values.reshape(*blocks.shape[:-1], -1)
