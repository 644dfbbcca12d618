"""The matrices of backward passes by NumPy alone, from docs/formats.md, 2.4."""

from __future__ import annotations

import numpy as np

from helpers import reference
from helpers.convert import Matrices, Rule
from helpers.families import Raw
from helpers.reference import Choice
from helpers.reference.kt_layout import pack_codes
from ktconv.formats import FORMATS
from ktconv.formats.decode import round_to_bf16


def expected_backward(
    matrices: Matrices, method: str, numa: int, compat: bool = False, scale: Rule | None = None
) -> dict[str, Raw]:
    """Every backward tensor of the output, by name. `matrices`: whole ones, as stored."""
    fmt, found = FORMATS[method], {}
    choice = Choice(scale or ("amax" if compat else "search"))
    for (layer, expert, proj), values in matrices.items():
        pieces = np.split(round_to_bf16(values) if compat else values, numa, int(proj == "down"))
        for part, piece in enumerate(pieces):
            codes, scales = reference.quantize(fmt, np.ascontiguousarray(piece.T), choice)
            payload = pack_codes(fmt, codes).tobytes()
            name = f"blk.{layer}.ffn_{proj}_bwd_exps.{expert}.numa.{part}"
            found[f"{name}.weight"] = Raw("I8", (len(payload),), payload)
            found[f"{name}.scale"] = Raw("F32", scales.shape, scales.astype("<f4").tobytes())
    return found
