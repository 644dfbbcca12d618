"""Experts from codes and scales in memory, which are packed as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ktconv import native
from ktconv.compat.kt.settings import Settings
from ktconv.errors import UsageError
from ktconv.formats import FORMATS
from ktconv.formats.specs import kernel_of
from ktconv.native import Activation, PackedMatrix
from ktconv.runtime.layers import Experts
from ktconv.runtime.layers.slots import slot_origins
from ktconv.runtime.layers.unpacked import packed_streams
from ktconv.system.arrays import Array
from ktconv.system.units import counted

_GROUP, _BLOCK = 32, 128
_MATRICES = ("gate", "up", "down")


def raw_layer(
    kind: str,
    settings: Settings,
    weights: dict[str, Any],
    slots: list[int] | None,
    group: int = _GROUP,
) -> Experts:
    """Experts of `weights`: codes as "gate", "up" and "down" of each expert, scales as "gate_scale"
    and so on; see `SFTWrapper`. `group`: columns that share a scale of RAWINT4. UsageError for
    tensors that do not fit."""
    fmt = FORMATS[_format_of(kind, settings, group)]
    hidden, parts = settings.hidden, settings.parts
    inner = settings.intermediate
    if not fmt.multiplies(hidden, inner, parts):
        raise UsageError(f"{kind} does not allow sizes {hidden} and {inner} in {parts} parts")
    width = inner // parts
    origins = slot_origins(slots, settings.experts)
    made: dict[int, list[Any]] = {}
    for expert in sorted(set(origins)):
        rows: list[list[PackedMatrix]] = [[] for _ in range(parts)]
        for name in _MATRICES:
            shape = (hidden, inner) if name == "down" else (inner, hidden)
            codes, scales = _checked(kind, name, weights, expert, settings.experts, shape, group)
            for part in range(parts):
                cut = range(part * width, (part + 1) * width)
                columns = name == "down"
                own = (
                    _cut(codes, cut, columns, shape),
                    None if scales is None else _cut(scales, cut, columns, shape),
                )
                size = (hidden, width) if columns else (width, hidden)
                rows[part].append(_packed(fmt, size, *own))
        made[expert] = [tuple(row) for row in rows]
    table = [[made[origin][part] for origin in origins] for part in range(parts)]
    activation = settings.activation or Activation()
    layer = native.Layer(fmt.layout, activation, hidden, inner, table)
    return Experts(
        fmt, layer, activation, origins,
        lambda origin: packed_streams(fmt, hidden, inner, made[origin]),
    )  # fmt: skip


def _format_of(kind: str, settings: Settings, group: int) -> str:
    if kind != "RAWINT4":
        return settings.method.formats[0]
    found = kernel_of("int4", group)
    if found is None:
        raise UsageError(f"no kernel computes with INT4 in groups of {group}", "use 32, 64 or 128")
    return found


def _checked(
    kind: str,
    name: str,
    weights: dict[str, Any],
    expert: int,
    count: int,
    shape: tuple[int, int],
    group: int,
) -> tuple[Array, Array | None]:
    """Plain codes and scales of a matrix, as kt_pack wants them."""
    rows, cols = shape
    grouped = (torch.uint8, (rows, cols // 2)), (torch.bfloat16, (rows, cols // group))
    tensors = {
        "RAWINT4": grouped,
        "MXFP4": grouped,
        "MXFP8": (
            (torch.float8_e4m3fn, shape),
            (torch.uint8, (rows, cols // FORMATS["mxfp8"].group)),
        ),
        "FP8": (
            (torch.float8_e4m3fn, shape),
            (torch.float32, (rows // _BLOCK, cols // _BLOCK)),
        ),
        "FP8_PERCHANNEL": ((torch.float8_e4m3fn, shape), (torch.float32, (rows, 1))),
        "BF16": ((torch.bfloat16, shape),),
    }[kind]
    found: list[Tensor] = []
    for key, (dtype, own_shape) in zip((name, f"{name}_scale"), tensors, strict=False):
        stack = weights.get(key)
        if stack is None or len(stack) != count:
            raise UsageError(
                f"{kind} weights must have {key} of each of {counted(count, 'expert')}"
            )
        one = stack[expert]
        if not isinstance(one, Tensor) or one.dtype != dtype or tuple(one.shape) != own_shape:
            raise UsageError(f"{key} of expert {expert} must be {dtype} {list(own_shape)}")
        found.append(one.detach().cpu().contiguous())
    if len(found) == 1:
        bits: Array = found[0].view(torch.int16).numpy().view(np.uint16)
        if ((bits & 0x7F80) == 0x7F80).any():
            raise UsageError(f"{name} of expert {expert} has a NaN or an infinity")
        return bits, None
    codes, scales = found
    return codes.view(torch.uint8).numpy(), _scales(kind, name, expert, scales)


def _scales(kind: str, name: str, expert: int, scales: Tensor) -> Array:
    """Numbers, and of MXFP4 and MXFP8 the exponents of powers of two."""
    infinite = scales == 255 if kind == "MXFP8" else ~torch.isfinite(scales.float())
    if infinite.any():
        raise UsageError(f"{name}_scale of expert {expert} has a NaN or an infinity")
    if scales.dtype in (torch.float32, torch.uint8):
        return scales.numpy()
    bits: Array = scales.view(torch.int16).numpy().view(np.uint16)
    if kind == "RAWINT4":
        return bits
    if (bits & 0x807F).any():
        raise UsageError(f"{name}_scale of expert {expert} has a number that is no power of two")
    return (bits >> 7).astype(np.uint8)


def _cut(array: Array, cut: range, columns: bool, shape: tuple[int, int]) -> Array:
    """Rows or columns `cut` of a matrix of this shape, of codes or scales that lie for several."""
    axis = 1 if columns else 0
    if array.shape[axis] == 1:
        return array  # a scale for all of a row
    each = shape[axis] // array.shape[axis]
    own = slice(cut.start // each, cut.stop // each)
    return np.ascontiguousarray(array[:, own] if columns else array[own])


def _packed(fmt: Any, size: tuple[int, int], codes: Array, scales: Array | None) -> PackedMatrix:
    rows, cols = size
    layout = fmt.layout
    packed = native.aligned_bytes(layout.weight_size(rows, cols))
    if scales is None:
        native.pack_weight(layout, rows, cols, codes, None, packed)
        return PackedMatrix(packed)
    shaped = scales.reshape(layout.scale_shape(rows, cols)).astype(layout.scale_array, copy=False)
    scale = native.pack_weight(layout, rows, cols, codes, shaped, packed)
    return PackedMatrix(packed, scale)
