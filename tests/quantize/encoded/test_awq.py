"""AWQ in the order of KTransformers' converter: the reference's own bytes, zero points included."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import read_model
from helpers.corrupt import check
from helpers.encoded import encoded_model
from helpers.families import simple_config, write_checkpoint
from helpers.golden import splitmix64
from helpers.gpu_corrupt import flip
from helpers.paths import ROOT
from helpers.recoded import change_recorded, encode, values_of

pytestmark = pytest.mark.slow

CASES = json.loads((ROOT / "tests/data/golden/golden_public.json").read_text())["awq_cases"]
SOURCE = "model.layers.0.mlp.experts"


def _stream(seed: int, count: int) -> Any:
    return splitmix64(seed, np.arange(1, count + 1, dtype=np.uint64))


def _model(directory: Path, case: dict[str, Any]) -> Path:
    """By the recipe in the file."""
    tensors: dict[str, Any] = {}
    for expert in range(case["E"]):
        for j, proj in enumerate(("gate", "up", "down")):
            inner = proj == "down"
            cols, rows = (case["I"], case["H"]) if inner else (case["H"], case["I"])
            groups, seed = cols // case["group"], case["seed"] + 100 * expert + 10 * j
            words = [_stream(seed + 1, cols * rows // 8), _stream(seed + 2, groups * rows // 8)]
            weight, zeros = ((one >> np.uint64(13)).astype(np.uint32) for one in words)
            scales = 0x2000 + (
                (_stream(seed + 3, groups * rows) >> np.uint64(9)) & np.uint64(0x7FF)
            )
            name = f"{SOURCE}.{expert}.{proj}_proj"
            tensors[f"{name}.qweight"] = weight.view(np.int32).reshape(cols, rows // 8)
            tensors[f"{name}.qzeros"] = zeros.view(np.int32).reshape(groups, rows // 8)
            halves = scales.astype(np.uint16).view(np.float16)
            tensors[f"{name}.scales"] = halves.reshape(groups, rows)
    sizes = {"hidden_size": case["H"], "moe_intermediate_size": case["I"]}
    config = simple_config(
        **sizes,
        num_experts=case["E"],
        quantization_config={"quant_method": "awq", "version": "gemm"},
    )
    return write_checkpoint(directory, tensors, config)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_bytes_are_those_of_the_reference(case: dict[str, Any], tmp_path: Path) -> None:
    model = _model(tmp_path / "model", case)
    encode(model, tmp_path / "out", "awq")
    found = read_model(tmp_path / "out")
    assert found.keys() == case["tensors"].keys()
    for name, wanted in case["tensors"].items():
        assert found[name].shape == tuple(wanted["shape"])
        assert hashlib.sha256(found[name].data).hexdigest() == wanted["sha256"], name
    assert check(tmp_path / "out", model).passed


@pytest.mark.parametrize("kind", ["awq", "awq symmetric"])
def test_values_are_the_sources(kind: str, tmp_path: Path) -> None:
    model, weights, _ = encoded_model(tmp_path / "model", kind)
    encode(model, tmp_path / "out", "awq")
    tensors = read_model(tmp_path / "out")
    for expert in range(2):
        for proj in ("gate", "up", "down"):
            wanted = getattr(weights, proj)[expert]
            found = values_of(tensors, f"blk.0.ffn_{proj}_exps.{expert}", *wanted.shape)
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("part", ["weight", "qzeros", "scale"])
def test_one_wrong_bit_is_found(part: str, tmp_path: Path) -> None:
    model, _, _ = encoded_model(tmp_path / "model", "awq")
    encode(model, tmp_path / "out", "awq")
    name = f"blk.0.ffn_up_exps.1.{part}"

    change_recorded(tmp_path / "out", name, flip)
    failures = check(tmp_path / "out", model).failures
    assert failures and all("ffn_up_exps.1" in str(one.tensor) for one in failures)


def test_requantized_zero_points_are_8(tmp_path: Path) -> None:
    model, _, _ = encoded_model(tmp_path / "model", "awq")
    encode(model, tmp_path / "out", "awq", requantize=True, scale="search")
    zeros = read_model(tmp_path / "out")["blk.0.ffn_up_exps.1.qzeros"]
    assert set(zeros.data) == {0x88}
    assert check(tmp_path / "out", model).passed
