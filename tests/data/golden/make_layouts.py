#!/usr/bin/env python3
"""Writes layouts.json beside this file: what other libraries make of a matrix.

    PYTHONPATH=src:tests python tests/data/golden/make_layouts.py

Needs torch, transformers, auto-round (GPTQ) and nvidia-modelopt (NVFP4, MXFP8), whose versions are
recorded. `tensors` are the bytes of the library's tensors in base64, `values` the float32 numbers
that it makes of them again.
"""

from __future__ import annotations

import base64
import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

SEED, ROWS, COLS = 7, 32, 128


def weights(rows: int = ROWS, cols: int = COLS) -> Any:
    """Normal, bf16, with a row of zeros."""
    values = np.random.default_rng(SEED).standard_normal((rows, cols), np.float32)
    values[3] = 0
    return torch.from_numpy(values).to(torch.bfloat16)


def text(tensor: Any) -> dict[str, Any]:
    data = tensor.detach().contiguous().cpu()
    raw = data.reshape(-1).view(torch.uint8) if data.numel() else data
    return {
        "dtype": str(data.dtype).removeprefix("torch."),
        "shape": list(data.shape),
        "data": base64.b64encode(raw.numpy().tobytes()).decode(),
    }


def case(method: str, library: str, tensors: dict[str, Any], values: Any) -> dict[str, Any]:
    return {
        "method": method,
        "library": f"{library} {version(library)}, torch {torch.__version__}",
        "rows": values.shape[0],
        "cols": values.shape[1],
        "tensors": {name: text(one) for name, one in tensors.items()},
        "values": text(values.float()),
    }


def gptq() -> dict[str, Any]:
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    weight = weights().to(torch.float16).float()
    grouped = weight.reshape(ROWS, COLS // 128, 128)
    scale = (grouped.abs().amax(-1) / 7.5).to(torch.float16).float()
    codes = torch.where(scale[..., None] > 0, grouped / scale[..., None], 0).round().clamp(-8, 7)
    exact = (codes * scale[..., None]).reshape(ROWS, COLS)
    linear = torch.nn.Linear(COLS, ROWS, bias=False)
    linear.weight.data = exact
    packed = QuantLinear(4, 128, COLS, ROWS, bias=False)
    packed.pack(
        linear, torch.where(scale > 0, scale, 1.0), torch.full_like(scale, 8.0), None, "cpu"
    )
    names = ("qweight", "qzeros", "scales", "g_idx")
    tensors = {name: getattr(packed, name) for name in names if hasattr(packed, name)}
    return case("gptq-int4", "auto-round", tensors, exact)


def nvfp4() -> dict[str, Any]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    found, scale, second = NVFP4QTensor.quantize(weights(), 16)
    values = found.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
    tensors = {"weight": found._quantized_data, "weight_scale": scale, "weight_scale_2": second}
    return case("nvfp4", "nvidia-modelopt", tensors, values)


def mxfp8() -> dict[str, Any]:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    found, scale = MXFP8QTensor.quantize(weights())
    values = found.dequantize(torch.float32, scale=scale)
    tensors = {"weight": found._quantized_data, "weight_scale_inv": scale}
    return case("mxfp8", "nvidia-modelopt", tensors, values)


def fp8() -> dict[str, Any]:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=None)
    quantizer = SimpleNamespace(quantization_config=config)
    made = Fp8Quantize(quantizer)._quantize_one("m.weight", weights(128, 128))
    tensors = {name.removeprefix("m."): one for name, one in made.items()}
    values = tensors["weight"].float() * tensors["weight_scale_inv"]
    return case("fp8", "transformers", tensors, values)


def main() -> None:
    content = {"seed": SEED, "cases": [gptq(), nvfp4(), mxfp8(), fp8()]}
    path = Path(__file__).with_name("layouts.json")
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
