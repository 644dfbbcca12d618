"""FP4 (E2M1) in groups of inputs: MXFP4 with a power of two for 32, NVFP4 with an E4M3 scale for
16 and a second one for the matrix. Element 2j is in the low half of byte j. MXFP6 (E2M3) has the
groups of MXFP4, and four elements in three bytes, the first in the lowest bits.

MXINT4 of AutoRound has groups like MXFP4, and a magnitude in quarters; only data_type in
config.json tells the two apart.

NVFP4's second scale divides where compressed-tensors writes it, and multiplies in ModelOpt's.
AutoRound's NVFP4 with E5M3 scales has none; config.json says that they are E5M3.
"""

from __future__ import annotations

from functools import partial
from math import prod

from msgspec.structs import replace

from ktconv.errors import CheckpointError
from ktconv.source.config import ModelConfig
from ktconv.source.elements import F4_E0M3, F4_E2M1, F6_E2M3
from ktconv.source.encodings.base import BLOCKS, OUTER, SCALE, Companion, Encoding, Roles
from ktconv.source.encodings.shapes import POWERS, grid_with_blocks
from ktconv.source.types import OuterScale, Quantization, TensorRef
from ktconv.source.views import StoredView

_MX_GROUP, _NV_GROUP = 32, 16


def _mx(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    tensor = roles[SCALE]
    grid = grid_with_blocks(tensor, view, POWERS[tensor.dtype], (1, _MX_GROUP))
    return None if grid is None else Quantization(grid)


def _mx_6(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    """Scales of MXFP6 of compressed-tensors: of other tools it may be E3M2, which has the same
    size."""
    said = (config.quant_method or "").lower()
    return _mx(roles, view, config) if said.startswith("compressed") else None


def _mx_int(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    kinds = {"mx_int" in name for name in config.data_types if name.startswith("mx_")}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{roles['weight'].name} may be MXINT4 or MXFP4: quantization_config in config.json "
            f"has the data types {', '.join(sorted(config.data_types))}",
            "Use a version of this model whose weights of 4 bits all have the same data_type.",
        )
    return _mx(roles, view, config) if kinds == {True} else None


def _nv(
    roles: Roles, view: StoredView, config: ModelConfig, *, divides: bool
) -> Quantization | None:
    grid = grid_with_blocks(roles[SCALE], view, "E4M3", (1, _NV_GROUP))
    outer = roles[OUTER]
    index = _outer_index(outer, view)
    if grid is None or index is None:
        return None
    return Quantization(replace(grid, outer=OuterScale(outer, index, divides)))


def _nv_e5m3(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    grid = grid_with_blocks(roles[SCALE], view, "UE5M3", (1, _NV_GROUP))
    return Quantization(grid) if grid is not None and config.e5m3_scales else None


def _outer_index(outer: TensorRef, view: StoredView) -> int | None:
    """Index of the matrix's second scale: of one for all, one for each expert, or where gate and up
    are fused one for each of both, gate's first. None if there are others."""
    count, experts = prod(outer.shape), view.experts or 1
    if count == 1:
        return 0
    if count == experts:
        return view.expert
    halves = view.step == 1 and view.outputs_and_inputs[0] == 2 * view.rows
    if halves and outer.shape in ((experts, 2), (experts, 2, 1)):
        return 2 * view.expert + (view.first_output > 0)
    return None


_POWERS = tuple(POWERS)
# DeepSeek-V4 (scale), Quark, ModelOpt and MiMo (weight_scale), Ling (weight_scale_inv).
MXFP4 = Encoding(
    "mxfp4",
    ("I8", "U8", "F4"),
    F4_E2M1,
    companions=(Companion(SCALE, ("scale", "weight_scale", "weight_scale_inv"), _POWERS),),
    ignored=("input_scale",),
    quantization=_mx,
)
MXFP4_PACKED = replace(
    MXFP4,
    dtypes=("U8",),
    primary="weight_packed",
    companions=(Companion(SCALE, ("weight_scale",), _POWERS),),
    ignored=("weight_shape", "input_scale", "input_global_scale"),
)
MXINT4 = replace(
    MXFP4_PACKED,
    name="mxint4",
    element=F4_E0M3,
    quantization=_mx_int,
    methods=("auto-round", "auto_round"),
)
MXFP6_PACKED = replace(MXFP4_PACKED, name="mxfp6", element=F6_E2M3, quantization=_mx_6)
# gpt-oss: [E, N, K / 32, 16], whose last two axes fused.py makes one.
MXFP4_BLOCKS = replace(
    MXFP4,
    dtypes=("U8",),
    primary=BLOCKS,
    companions=(Companion(SCALE, ("scales",), _POWERS),),
    ignored=(),
)
NVFP4_PACKED = Encoding(
    "nvfp4",
    ("U8",),
    F4_E2M1,
    primary="weight_packed",
    companions=(
        Companion(SCALE, ("weight_scale",), ("F8_E4M3",)),
        Companion(OUTER, ("weight_global_scale",), ("F32",)),
    ),
    ignored=("input_global_scale", "weight_shape"),
    quantization=partial(_nv, divides=True),
)
NVFP4_E5M3 = replace(
    NVFP4_PACKED,
    name="nvfp4-e5m3",
    companions=(Companion(SCALE, ("weight_scale",), ("U8",)),),
    quantization=_nv_e5m3,
)
NVFP4_MODELOPT = replace(
    NVFP4_PACKED,
    primary="weight",
    companions=(
        Companion(SCALE, ("weight_scale",), ("F8_E4M3",)),
        Companion(OUTER, ("weight_scale_2",), ("F32",)),
    ),
    ignored=("input_scale",),
    quantization=partial(_nv, divides=False),
)
