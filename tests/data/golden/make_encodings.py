#!/usr/bin/env python3
"""Writes encodings.json beside this file: what compressed-tensors makes of matrices of golden.py.

    PYTHONPATH=src:tests python tests/data/golden/make_encodings.py

Needs torch and compressed-tensors, whose version is recorded. The matrices have all magnitudes of
bf16, zeros, denormals and ties, those of floating-point formats fewer; `scale` and `codes` are the
bytes of its tensors in base64.
"""

from __future__ import annotations

import base64
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from helpers.golden import matrix

SEED = 20
# Rows of zeros with signs, of denormals, of weights below 2^-119, and up to the largest bf16: the
# library gives the zeros that codes become another sign, has no smallest FP8 scale, and its MX
# exponents overflow there.
BEYOND = [3, 11, 13, 15, 17, 23]
PACKED = "pack-quantized"


def integers(bits: int, group: int) -> QuantizationArgs:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return QuantizationArgs(num_bits=bits, type="int", symmetric=True, dynamic=False, **strategy)


def preset(name: str) -> QuantizationArgs:
    return preset_name_to_scheme(name, ["Linear"]).weights


CASES = [
    *(("int4", group, PACKED, (32, 256), integers(4, group)) for group in (0, 32, 64, 128)),
    *(("int8", group, PACKED, (32, 256), integers(8, group)) for group in (0, 128)),
    ("fp8", 0, "float-quantized", (32, 128), preset("FP8_DYNAMIC")),
    ("fp8", 128, "float-quantized", (128, 256), preset("FP8_BLOCK")),
    ("mxfp4", 32, "mxfp4-pack-quantized", (32, 128), preset("MXFP4A16")),
    ("mxfp8", 32, "mxfp8-quantized", (32, 128), preset("MXFP8A16")),
    ("nvfp4", 16, "nvfp4-pack-quantized", (32, 128), preset("NVFP4A16")),
]


def groups_of(weight: Any, kind: str, group: int) -> Any:
    rows, cols = weight.shape
    if kind == "fp8" and group:
        blocks = weight.reshape(rows // group, group, cols // group, group).permute(0, 2, 1, 3)
        return blocks.reshape(rows // group, cols // group, -1)
    return weight.reshape(rows, -1, group or cols)


def made(kind: str, group: int, form: str, shape: tuple[int, int], args: Any) -> dict[str, Any]:
    bits = matrix(SEED, *shape)
    if not kind.startswith("int"):
        bits[BEYOND] = bits[1]
    weight = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    if kind == "fp8":
        weight = weight.float()  # for scales in float32, as ktconv stores them
    found = groups_of(weight, kind, group)
    second = generate_gparam(weight.min(), weight.max()) if kind == "nvfp4" else None
    scale, _ = calculate_qparams(found.amin(-1), found.amax(-1), args, global_scale=second)
    state = {"weight": weight, "weight_scale": scale}
    if second is not None:
        state["weight_global_scale"] = second
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    stored = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    codes = stored["weight_packed"] if "weight_packed" in stored else stored["weight"]

    def text(tensor: Any) -> str:
        return base64.b64encode(tensor.contiguous().view(torch.uint8).numpy().tobytes()).decode()

    return {
        "kind": kind, "group": group, "format": form, "rows": shape[0], "cols": shape[1],
        "tensor_scale": 0.0 if second is None else float(second),
        "codes": text(codes), "scale": text(stored["weight_scale"]),
    }  # fmt: skip


def main() -> None:
    library = f"compressed-tensors {version('compressed-tensors')}, torch {torch.__version__}"
    content = {"library": library, "seed": SEED, "cases": [made(*case) for case in CASES]}
    path = Path(__file__).with_name("encodings.json")
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
