"""Blocks of ggml that the package gguf decodes, because their tables are there."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ktconv.errors import UsageError
from ktconv.system.arrays import F32, U8


@cache
def _package(name: str) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UsageError(
            f"weights of type {name} need the package gguf, which cannot be imported: {error}",
            "install it with: pip install 'ktconv[gguf]'",
        ) from error
    return gguf


def require_package(name: str) -> None:
    """UsageError if it is not installed."""
    _package(name)


def decode_blocks(name: str, blocks: U8) -> F32:
    """Rows of blocks [rows, bytes] of ggml's type `name` as float32 [rows, cols]."""
    gguf = _package(name)
    with np.errstate(all="ignore"):  # what is not finite will be found
        values: F32 = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    return np.ascontiguousarray(values, np.float32)
