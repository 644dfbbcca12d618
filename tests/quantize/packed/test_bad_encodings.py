"""Damaged or inconsistent quantized weights: one sentence names the tensor, nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import refused, run
from helpers.encoded import HIDDEN, INNER, SOURCE, encoded_model
from helpers.families import Raw, Tensor, bf16, e8m0, fp8

pytestmark = pytest.mark.slow

N, K = INNER, HIDDEN  # outputs and inputs of `up`
F32, F16, U8, I8, I32, I64 = np.float32, np.float16, np.uint8, np.int8, np.int32, np.int64
UP = f"{SOURCE}.1.up_proj"


def full(*shape: int, value: float = 1, dtype: Any = F16) -> Tensor:
    return np.full(shape, value, dtype)


def words(*shape: int, value: int = 0) -> Tensor:
    return np.full(shape, value, I32)


# Changes of the up projection of expert 1: the encoding, the tensor and its new content (None:
# removed), and text that the error message contains.
PACKED, ZEROS, ORDER = (
    "int4 packed, group 32",
    "int4 packed, asymmetric",
    "int4 packed by activation",
)
GPTQ, GPTQ_ORDER = "gptq int4, v2", "gptq by activation"
NV, NVC = "nvfp4, ModelOpt", "nvfp4, compressed-tensors"
CASES: list[tuple[str, str, Tensor | None, str]] = [
    (PACKED, "weight_packed", words(N, 50), "shape [384, 50], expected [384, 16] (int2-packed)"),
    (PACKED, "weight_packed", words(N, K // 32), "shape [384, 8], expected"),
    (PACKED, "weight_packed", words(N + 1, K // 8), "shape [385, 32], expected"),
    (PACKED, "weight_packed", None, "up_proj.weight_packed is missing, although"),
    (GPTQ, "qweight", None, "up_proj.qweight is missing, although"),
    (PACKED, "weight_scale", None, "weight_packed is I32, but it has no scale (weight_scale)"),
    (PACKED, "weight_scale", full(N, K // 32, value=np.nan), "scale of block (0, 0) is nan"),
    (PACKED, "weight_scale", full(N, K // 32, value=np.inf), "scale of block (0, 0) is inf"),
    (PACKED, "weight_scale", full(N, 3), "fits no way to scale the 384 x 256 weights"),
    (PACKED, "weight_scale", full(N // 2, K // 32), "fits no way to scale the 384 x 256 weights"),
    (PACKED, "weight_scale", full(N, K // 32, dtype=I64), "is I64, which is not supported next to"),
    (PACKED, "weight_shape", np.array([N, K + 8]), "says [384, 264], but"),
    (PACKED, "weight_shape", np.array([-N, -K]), "says [-384, -256], but"),
    (PACKED, "weight_shape", np.array([1, N, K]), "has shape [3], expected [2]"),
    (PACKED, "weight_shape", np.array([N, K], F32), "is F32, which is not supported next to"),
    (ZEROS, "weight_zero_point", words(N // 8, 3), "weight_zero_point [48, 3]), which fits no way"),
    (ZEROS, "weight_zero_point", words(N, K // 64), "[384, 4]), which fits no way to scale"),
    (ZEROS, "weight_zero_point", full(N // 8, 4, dtype=I8), "is I8, which is not supported"),
    (ORDER, "weight_g_idx", words(K, value=4), "group numbers 4 to 4, but there are only 4"),
    (ORDER, "weight_g_idx", words(K, value=-2), "group numbers -2 to -2"),
    (ORDER, "weight_g_idx", np.r_[words(K - 1), words(1, value=-1)], "group numbers -1 to 0"),
    (ORDER, "weight_g_idx", words(K - 8), "has shape [248], expected [256]"),
    (ORDER, "weight_g_idx", words(K + 8), "has shape [264], expected [256]"),
    (GPTQ_ORDER, "g_idx", words(K - 8), "has shape [248], expected [256]"),
    (GPTQ_ORDER, "g_idx", words(K, 1), "has shape [256, 1], expected [256]"),
    (GPTQ_ORDER, "g_idx", words(K, value=2**31 - 1), "group numbers 2147483647 to 2147483647"),
    (GPTQ, "qweight", words(K // 8 + 1, N), "shape [33, 384], expected [32, 384] (gptq-int4)"),
    (GPTQ, "qzeros", None, "qweight is I32, but it has no zero point (qzeros)"),
    (GPTQ, "qzeros", words(K // 64, N // 4), "qzeros [4, 96]), which fits no way to scale"),
    (GPTQ, "scales", None, "qweight is I32, but it has no scale (scales)"),
    (GPTQ, "scales", full(K // 64, N // 2), "scales has shape [4, 192]"),
    (GPTQ, "scales", full(5, N), "scales has shape [5, 384]"),
    ("awq", "qweight", words(K, N // 8 + 1), "shape [256, 49], expected"),
    ("awq", "scales", full(K // 64, N, value=np.inf), "scale of block (0, 0) is inf"),
    ("awq", "weight", bf16(np.ones((N, K))), "are two ways to store one weight"),
    ("fp8 block", "weight_packed", words(N, K // 8), "are two ways to store one weight"),
    ("fp8 block", "weight_scale_inv", full(3, 2, dtype=F32), "are two of a kind"),
    ("fp8 block", "weight_scale", full(5, 7, dtype=F32), "has shape [5, 7], which fits no way"),
    ("fp8 block", "weight_scale", full(3, 2, 2, dtype=F32), "has shape [3, 2, 2], which fits no"),
    ("fp8 block", "weight_scale", full(0, 2, dtype=F32), "has shape [0, 2], which fits no way"),
    ("fp8 block", "weight_scale", None, "but it has no scale (weight_scale_inv or weight_scale"),
    ("fp8 block", "weight", bf16(np.ones((N, K))), "is BF16 and needs none"),
    ("fp8 block", "weight", Raw("F8_E5M2", (N, K), bytes(N * K)), "dtype F8_E5M2, which is not"),
    ("fp8 block", "weight", fp8(np.zeros((0, K), U8)), "shape [0, 256], expected [384, 256]"),
    ("fp8 block", "weight", fp8(np.zeros((1, N, K), U8)), "shape [1, 384, 256], expected"),
    ("fp8 block", "weights", words(1), "is not a known companion of an expert weight"),
    ("fp8 block", "pre_quant_scale", full(K), "a scale of the inputs"),
    ("fp8 block", "weight_scale", full(3, 2, value=-1, dtype=F32), "not a finite number of 0 or"),
    ("fp8 block, DeepSeek-V4", "scale", e8m0(np.full((3, 2), 255, U8)), "(0, 0) is nan"),
    ("mxfp4, Quark", "weight_scale", full(N, 16, dtype=U8), "only supported in E5M3, which quant"),
    ("mxfp4, Quark", "weight_scale", full(N, 4, dtype=U8), "[384, 4], which fits no way"),
    ("mxfp4, Quark", "weight_scale", full(N, 8, value=255, dtype=U8), "(0, 0) is nan"),
    ("mxfp4, Quark", "weight_scale", full(N, 8, dtype=F32), "weight_scale is F32, which is not"),
    (NV, "weight_scale_2", None, "weight is U8, but it has no outer scale (weight_scale_2)"),
    (NV, "weight_scale_2", bf16(np.ones(1)), "weight_scale_2 is BF16, which is not supported"),
    (NV, "weight_global_scale", full(1, dtype=F32), "weight_global_scale is F32, which is not"),
    (NV, "weight_scale_2", full(1, value=np.nan, dtype=F32), "has the scale nan, not a finite"),
    (NV, "weight_scale_2", full(1, value=-1, dtype=F32), "has the scale -1.0, not a finite"),
    (NV, "weight_scale_2", full(1, value=1e38, dtype=F32), "which makes a block's scale"),
    (NV, "weight_scale_2", full(2, dtype=F32), "weight_scale_2 [2]), which fits no way"),
    (NV, "weight_scale_2", full(0, dtype=F32), "weight_scale_2 [0]), which fits no way"),
    (NVC, "weight_global_scale", full(1, value=0, dtype=F32), "not a finite number above 0"),
    (NVC, "weight_global_scale", full(1, value=np.inf, dtype=F32), "not a finite number above 0"),
    (NV, "weight_scale", fp8(np.full((N, K // 16), 0xB8, U8)), "scale of block (0, 0) is -1.0"),
    ("int8 asymmetric", "weight_zero_point", words(N, 1), "is I32, which is not supported next to"),
    ("int8 asymmetric", "weight_zero_point", full(N, 2, dtype=I8), "[384, 2]), which fits no way"),
    ("int8, msModelSlim", "weight_offset", full(N, 1, value=np.nan, dtype=F32), "zero point nan"),
    ("int8, msModelSlim", "weight_offset", full(N, 1, value=1e6, dtype=F32), "zero point 1000000"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1]}: {case[3]:.25}")
def test_a_damaged_weight(case: tuple[str, str, Tensor | None, str], tmp_path: Path) -> None:
    kind, part, tensor, phrase = case
    model, _, _ = encoded_model(tmp_path / "model", kind, **{f"{UP}.{part}": tensor})
    refused(run(model, tmp_path / "out", "--threads=1"), 2, phrase, f"{UP}.")
    assert not (tmp_path / "out").exists()


STRAYS: dict[str, str] = {
    "foo.weight": "is not a known tensor of numbered experts",
    "odd": "is not a known tensor of numbered experts",
    "-1.gate_proj.weight": "is not a known tensor of numbered experts",
    "1.side_proj.weight": "is not a known tensor of numbered experts",
    "1.gate_proj": "is not a known tensor of numbered experts",
    "gate_up_proj": "are stored in two ways",
    "2.gate_proj.weight": "is expert 2, but config.json has num_experts 2",
    "1.w1.weight": "are the same weight under two names",
    "01.gate_proj.weight": "has leading zeros in the number of its expert",
    "1.gate_proj.weight_scale_inv": "are two of a kind",
    "1.gate_proj.adapter.weight": "is not a known companion",
}


@pytest.mark.parametrize("name", STRAYS)
def test_a_tensor_that_belongs_to_no_weight(name: str, tmp_path: Path) -> None:
    """Every tensor under a layer's experts belongs to exactly one weight."""
    stray = {f"{SOURCE}.{name}": np.ones((3, 2), F32)}
    model, _, _ = encoded_model(tmp_path / "model", "fp8 block", **stray)
    refused(run(model, tmp_path / "out"), 2, STRAYS[name], f"{SOURCE}.{name}")
    assert not (tmp_path / "out").exists()
