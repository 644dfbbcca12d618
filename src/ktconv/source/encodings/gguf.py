"""Weights of GGUF files: blocks of ggml, which have their scales inside, and floats.

`weight` has the shape of its elements. Next to weights of any type may be `scale`, F32 [E] or one
number: a factor of each expert, or of the weight (NVFP4 has its second level of scales there).
"""

from __future__ import annotations

from msgspec.structs import replace

from ktconv.source.config import ModelConfig
from ktconv.source.elements import BLOCKS, GRID_BLOCKS, Element
from ktconv.source.encodings.base import SCALE, Companion, Encoding, Roles
from ktconv.source.encodings.shapes import grid_with_blocks
from ktconv.source.encodings.unquantized import BF16, FP16, FP32
from ktconv.source.types import Quantization
from ktconv.source.views import StoredView


def _factor(roles: Roles, view: StoredView, config: ModelConfig) -> Quantization | None:
    grid = grid_with_blocks(roles[SCALE], view, "F32", view.outputs_and_inputs)
    return None if grid is None else Quantization(replace(grid, any_sign=True))


def _of_blocks(element: Element) -> Encoding:
    return Encoding(
        f"gguf-{element.name.lower()}",
        (element.name,),
        element,
        companions=(Companion(SCALE, ("scale", "weight.scale"), ("F32",), optional=True),),
        quantization=_factor,
    )


def _with_factor(plain: Encoding) -> Encoding:
    return replace(
        plain,
        name=f"gguf-{plain.name}",
        companions=(Companion(SCALE, ("scale", "weight.scale"), ("F32",)),),
        quantization=_factor,
    )


_FLOATS = (BF16, FP16, FP32)
_BLOCKS = (*BLOCKS.values(), *GRID_BLOCKS.values())
GGUF = (*_FLOATS, *map(_with_factor, _FLOATS), *map(_of_blocks, _BLOCKS))
