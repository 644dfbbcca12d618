"""Integers as compressed-tensors stores them: weight = (code - zero point) * scale.

`pack-quantized`: weight_packed I32 [N, K * bits / 32], a little-endian stream of bits per row,
whose codes have 2^(bits - 1) added; `int-quantized` and `naive-quantized`: weight I8 [N, K], one
code per byte even of 4 bits. weight_scale is [N, G], [N, 1] or [1]. Zero points of packed codes
are packed down the rows: [N * bits / 32, G].

AngelSlim's w4a8 calls itself int-quantized, but has two signed numbers in a byte: weight_packed I8
[N, K / 2]. msModelSlim has zero points in float32, weight_offset [N, 1].
"""

from __future__ import annotations

from functools import partial

from ktconv.errors import CheckpointError
from ktconv.source import elements
from ktconv.source.config import ModelConfig
from ktconv.source.encodings.base import (
    GROUPS,
    SCALE,
    SHAPE,
    WEIGHT,
    ZERO,
    Companion,
    Encoding,
    Roles,
)
from ktconv.source.encodings.refusals import packed_without_straddling
from ktconv.source.encodings.shapes import (
    FLOATS,
    declared_shape,
    grid_with_blocks,
    group_index,
    integer_scales,
)
from ktconv.source.types import Quantization
from ktconv.source.views import StoredView

_SCALE = Companion(SCALE, ("weight_scale",), tuple(FLOATS))
_SHAPE = Companion(SHAPE, ("weight_shape",), ("I64", "I32"), optional=True)
_IGNORED = ("input_scale", "input_zero_point")
_METHODS = ("compressed-tensors", "auto-round")


def _quantization(
    roles: Roles, view: StoredView, config: ModelConfig, zero_number: str, symmetric: int
) -> Quantization | None:
    """`symmetric`: the code that means 0 where no zero points are stored."""
    scale = integer_scales(roles[SCALE], view, config)
    if scale is None:
        return None
    groups = group_index(roles[GROUPS], view) if GROUPS in roles else None
    declared = declared_shape(roles[SHAPE], view) if SHAPE in roles else None
    if ZERO not in roles and config.asymmetric:
        raise CheckpointError(
            f"{roles[WEIGHT].name} has no zero points (weight_zero_point), but quantization_config "
            "in config.json says symmetric: false",
            "Download the checkpoint again; values would be read wrongly without them.",
        )
    if ZERO not in roles:
        return Quantization(scale, symmetric or None, groups, declared)
    block = scale.block_rows, scale.block_cols
    zero = grid_with_blocks(roles[ZERO], view, zero_number, block)
    return None if zero is None else Quantization(scale, zero, groups, declared)


def _packed(bits: int) -> Encoding:
    def quantization(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
        if bits == 8 and (old := packed_without_straddling(roles[WEIGHT], view, config)):
            raise old
        return _quantization(roles, view, config, f"U{bits}_ROWS", 1 << bits - 1)

    return Encoding(
        f"int{bits}-packed",
        ("I32",),
        elements.STREAMS[bits],
        primary="weight_packed",
        companions=(
            _SCALE,
            Companion(ZERO, ("weight_zero_point",), ("I32",), optional=True),
            Companion(GROUPS, ("weight_g_idx",), ("I32",), optional=True),
            _SHAPE,
        ),
        ignored=_IGNORED,
        quantization=quantization,
        methods=_METHODS,
    )


_plain = partial(_quantization, zero_number="I8", symmetric=0)


def _int8(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    """Scales of INT8, whose weight is [out, in]; of as many outputs as inputs, no shape tells."""
    groups = roles[SCALE].shape[1:] not in ((), (1,))
    if groups and not view.transposed and "quark" in (config.quant_method or "").lower():
        raise CheckpointError(
            f"{roles[WEIGHT].name}: INT8 in groups, which Quark stores [in, out], is not supported "
            "as an input",
            "Use a version of this model with a scale for each channel.",
        )
    return _plain(roles, view, config)


INT8 = Encoding(
    "int8",
    ("I8",),
    elements.I8,
    companions=(_SCALE, Companion(ZERO, ("weight_zero_point",), ("I8",), optional=True), _SHAPE),
    ignored=_IGNORED,
    quantization=_int8,
    methods=(*_METHODS, "modelopt", "quark"),
)
ANGELSLIM = Encoding(
    "int4",
    ("I8",),
    elements.I4,
    primary="weight_packed",
    companions=(_SCALE,),
    ignored=("input_scale",),
    quantization=_plain,
    methods=_METHODS,
)


MSMODELSLIM = Encoding(
    "int8",
    ("I8",),
    elements.I8,
    companions=(_SCALE, Companion(ZERO, ("weight_offset",), ("F32",))),
    ignored=("input_scale", "input_offset", "quant_bias", "deq_scale"),
    quantization=partial(_quantization, zero_number="F32", symmetric=0),
)
# Which of these a weight is follows from how many words its rows take.
PACKED = tuple(_packed(bits) for bits in sorted(elements.STREAMS))
