"""Integers of GPTQ and AWQ, and of AutoRound, which packs as either: weight = (code - z) * scale.

All are stored [in, out]: GPTQ's qweight I32 [K * bits / 32, N] has neighbouring inputs of an output
in a word, AWQ's I32 [K, N / 8] eight outputs of an input, in the order 0, 2, 4, 6, 1, 3, 5, 7.
Zero points are packed along the outputs in both, [G, N * bits / 32]; GPTQ's first version stores
z - 1, modulo 2^bits. Scales are [G, N]; g_idx I32 [K] is the group of each input, where GPTQ
quantized the inputs in another order. KTransformers' export of AWQ turns the codes: `weight` I32
[N, K / 8], neighbouring inputs in a word; `qzeros` has neighbouring outputs in order, `scale` is
[G * N].
"""

from __future__ import annotations

from msgspec.structs import replace

from ktconv.errors import CheckpointError
from ktconv.source import elements
from ktconv.source.config import ModelConfig
from ktconv.source.elements import Element
from ktconv.source.encodings.base import GROUPS, SCALE, ZERO, Companion, Encoding, Roles
from ktconv.source.encodings.shapes import (
    FLOATS,
    grid_with_blocks,
    group_index,
    group_size,
    integer_scales,
)
from ktconv.source.types import BlockGrid, Quantization, TensorRef
from ktconv.source.views import StoredView

_COMPANIONS = (
    Companion(SCALE, ("scales",), tuple(FLOATS)),
    Companion(ZERO, ("qzeros",), ("I32",)),
)
# checkpoint_format of GPTQ and packing_format of AutoRound -> whether zero points are stored as
# they are, and not less one.
_TRUE_ZEROS = {
    "gptq": False,
    "gptq_v2": True,
    "auto_gptq": False,
    "auto_round:auto_gptq": False,
    "auto_round": True,
    "auto_round:gptqmodel": True,
}
_REFUSED = ("gptq_p", "marlin", "qqq", "bitblas", "exl3", "exl2", "gemv", "gemv_fast")


def _format(config: ModelConfig, roles: Roles) -> str:
    """Name of the packing in config.json; CheckpointError for one that is not supported."""
    declared = config.packing
    if declared in _REFUSED:
        raise CheckpointError(
            f"{roles['weight'].name} is packed as {declared!r} (quantization_config in "
            "config.json), which is not supported as an input",
            "Use a version of this model in the format gptq, gptq_v2 or AWQ gemm.",
        )
    return declared


def _quantization(
    roles: Roles, view: StoredView, config: ModelConfig, number: str
) -> Quantization | None:
    scale = integer_scales(roles[SCALE], view, config)
    if scale is None:
        return None
    block = scale.block_rows, scale.block_cols
    zero = grid_with_blocks(roles[ZERO], view, number, block)
    groups = group_index(roles[GROUPS], view) if GROUPS in roles else None
    return None if zero is None else Quantization(scale, zero, groups)


def _gptq(bits: int, element: Element) -> Encoding:
    def quantization(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
        packing = _format(config, roles)
        if packing not in _TRUE_ZEROS:
            said = f"calls the packing {packing!r:.60}" if packing else "has no packing_format"
            raise CheckpointError(
                f"{roles['weight'].name} is GPTQ, but quantization_config in config.json {said}; "
                f"known are {', '.join(_TRUE_ZEROS)}",
                "Correct checkpoint_format (GPTQ) or packing_format (AutoRound) there; zero points "
                "would be read wrongly otherwise.",
            )
        less_one = "" if _TRUE_ZEROS[packing] else "_LESS_ONE"
        return _quantization(roles, view, config, f"U{bits}_ROWS{less_one}")

    return Encoding(
        f"gptq-int{bits}",
        ("I32",),
        element,
        primary="qweight",
        companions=(*_COMPANIONS, Companion(GROUPS, ("g_idx",), ("I32",), optional=True)),
        transposed=True,
        quantization=quantization,
        methods=("gptq", "auto-round", "auto_round"),
    )


def _awq(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    _format(config, roles)
    return _quantization(roles, view, config, "U4_ROWS_AWQ")


def _reordered(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    scale, zero = roles[SCALE], roles[ZERO]
    outputs, inputs = view.outputs_and_inputs
    groups, rest = divmod(scale.shape[0] if len(scale.shape) == 1 else 0, outputs)
    size = group_size(inputs, groups, config)
    if view.experts is not None or rest or size is None or outputs % 8:
        return None
    if zero.shape != (groups, outputs // 8):
        return None
    per: int = size

    def grid(tensor: TensorRef, number: str, width: int) -> BlockGrid:
        return BlockGrid(tensor, number, 0, 1, width, 1, per, view.row, 0)

    scales = replace(grid(scale, FLOATS[scale.dtype], outputs), any_sign=True)
    return Quantization(scales, grid(zero, "U4_ROWS", outputs // 8))


GPTQ = tuple(_gptq(bits, elements.STREAMS[bits]) for bits in (4, 8, 2, 3))
AWQ = Encoding(
    "awq-int4",
    ("I32",),
    elements.U4_AWQ,
    primary="qweight",
    companions=_COMPANIONS,
    transposed=True,
    quantization=_awq,
    methods=("awq", "auto-round", "auto_round"),
)
AWQ_REORDERED = Encoding(
    "awq-reordered",
    ("I32",),
    elements.U4,
    companions=(
        Companion(SCALE, ("scale",), tuple(FLOATS)),
        Companion(ZERO, ("qzeros",), ("I32",)),
    ),
    quantization=_reordered,
)
