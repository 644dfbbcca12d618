"""Experts for GPUs from encoded sources; other quantized weights are decoded in the output."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers.convert import read_model
from helpers.corrupt import check
from helpers.encoded import HIDDEN, KINDS, encoded_model
from helpers.gpu import experts_of, floats, quantize

from ktconv.formats.decode import round_to_bf16

pytestmark = pytest.mark.torch

if find_spec("llmcompressor") is None:  # not imported: each process would, for its list of tests
    pytest.skip("llmcompressor is not installed", allow_module_level=True)

CHOSEN = (
    "mxfp8", "mxfp4, DeepSeek-V4", "nvfp4, ModelOpt", "int3 packed, asymmetric",
    "int8 asymmetric, msModelSlim", "gptq by activation", "awq",
)  # fmt: skip
ATTENTION = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize("kind", CHOSEN)
def test_experts_and_others(kind: str, tmp_path: Path) -> None:
    parts, values = KINDS[kind].of(np.random.default_rng(3), HIDDEN, HIDDEN)
    others = {f"{ATTENTION}.{part}": tensor for part, tensor in parts.items()}
    model, weights, _ = encoded_model(tmp_path / "model", kind, **others)
    quantize(model, tmp_path / "out", scheme="W8A16", group_size=32)

    found = floats(read_model(tmp_path / "out")[f"{ATTENTION}.weight"])
    np.testing.assert_array_equal(found, round_to_bf16(values))
    for module, matrix in experts_of(tmp_path / "out").items():
        expert, proj = module.split(".")[-2:]
        source = getattr(weights, proj.removesuffix("_proj"))[int(expert)]
        assert np.abs(matrix - source).max() <= 0.01 * np.abs(source).max()
    assert check(tmp_path / "out", model).passed
