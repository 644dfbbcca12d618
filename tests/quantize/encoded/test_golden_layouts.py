"""Outputs against what other libraries wrote (tests/data/golden/layouts.json): GPTQ by auto-round,
NVFP4 and MXFP8 by ModelOpt, FP8 in blocks by transformers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import read_model
from helpers.families import Raw, bf16, simple_config, write_checkpoint
from helpers.paths import ROOT
from helpers.recoded import encode, values_of

from ktconv import native
from ktconv.source import open_checkpoint
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.targets.encoded.layouts.words import GPTQ
from ktconv.targets.encoded.scheme import Scheme

GOLDEN = json.loads((ROOT / "tests/data/golden/layouts.json").read_text())
DTYPES = {
    "int32": "I32", "float16": "F16", "uint8": "U8", "float32": "F32", "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip
SOURCE = "model.layers.0.mlp.experts"
cases = pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["method"])


def raw(stored: dict[str, Any]) -> Raw:
    data = base64.b64decode(stored["data"])
    return Raw(DTYPES[stored["dtype"]], tuple(stored["shape"]), data)


def values(case: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(raw(case["values"]).data, np.float32).reshape(case["rows"], case["cols"])


def tensors(case: dict[str, Any]) -> dict[str, Raw]:
    return {name: raw(one) for name, one in case["tensors"].items()}


def model(directory: Path, matrix: np.ndarray) -> Path:
    """One expert whose gate and up are the matrix, in bf16, and down ones."""
    rows, cols = matrix.shape
    config = simple_config(hidden_size=cols, moe_intermediate_size=rows, num_experts=1)
    down = np.ones((cols, rows), np.float32)
    stored = {
        f"{SOURCE}.0.{name}_proj.weight": bf16(one)
        for name, one in (("gate", matrix), ("up", matrix), ("down", down))
    }
    return write_checkpoint(directory, stored, config)


def source(case: dict[str, Any]) -> np.ndarray:
    """The matrix that the library was given, as make_layouts.py draws it."""
    shape = case["rows"], case["cols"]
    drawn = np.random.default_rng(GOLDEN["seed"]).standard_normal(shape, np.float32)
    drawn[3] = 0
    bits = drawn.view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    found: np.ndarray = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    return found


@cases
def test_the_librarys_tensors_are_read_as_its_values(case: dict[str, Any], tmp_path: Path) -> None:
    """As a checkpoint of that library, by our reader."""
    sections = {
        "gptq-int4": {
            "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
        },
        "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        "mxfp8": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    rows, cols = case["rows"], case["cols"]
    config = simple_config(
        hidden_size=cols, moe_intermediate_size=rows, num_experts=1,
        quantization_config=sections[case["method"]],
    )  # fmt: skip
    stored: dict[str, Any] = {}
    for name in ("gate", "up"):
        stored |= {f"{SOURCE}.0.{name}_proj.{part}": one for part, one in tensors(case).items()}
    stored[f"{SOURCE}.0.down_proj.weight"] = bf16(np.ones((cols, rows), np.float32))
    write_checkpoint(tmp_path / "model", stored, config)
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    matrix = checkpoint.layers[0].experts[0]["up"]
    reader = MatrixReader(SourceReader(checkpoint.files, checkpoint.sources), matrix)
    buffers = np.empty(1 << 20, np.uint8), np.empty(8 << 20, np.uint8)
    found = np.concatenate([native.decode(view) for _, view in reader.views(*buffers)])
    if case["method"] == "nvfp4":  # the library multiplies in another order
        assert np.allclose(found, values(case), rtol=1e-6, atol=0)
    else:
        assert np.array_equal(found, values(case))


@pytest.mark.parametrize("method", ["nvfp4", "mxfp8", "fp8"])
def test_our_tensors_are_the_librarys(method: str, tmp_path: Path) -> None:
    """Of the same matrix: names, dtypes, shapes and numbers. The row of zeros can have another
    scale and signs, FP8's scales differ in the last bits of binary32, where the library inverts
    twice, and ModelOpt's powers of two are rounded up, so that codes stand for half as much."""
    case = next(one for one in GOLDEN["cases"] if one["method"] == method)
    wanted, ordinary = tensors(case), np.arange(case["rows"]) != 3
    encode(model(tmp_path / "model", source(case)), tmp_path / "out", method)
    written = read_model(tmp_path / "out")
    name = next(one for one in written if ".0.up_proj." in one or ".0.w3." in one)
    module = name.rpartition(".")[0]
    found = {part: written[f"{module}.{part}"] for part in wanted}
    for part, one in wanted.items():
        assert (found[part].dtype, found[part].shape) == (one.dtype, one.shape), part
        if part == "weight_scale_inv" and method == "fp8":
            ours, theirs = (np.frombuffer(x.data, np.float32) for x in (found[part], one))
            assert np.allclose(ours, theirs, rtol=1e-6, atol=0)
        elif method != "mxfp8" and len(one.shape) == 2:
            mine, its = (
                np.frombuffer(x.data, np.uint8).reshape(case["rows"], -1)
                for x in (found[part], one)
            )
            assert np.array_equal(mine[ordinary], its[ordinary]), part
        elif method != "mxfp8":
            assert found[part].data == one.data
    restored = values_of(written, module, case["rows"], case["cols"])
    assert np.allclose(restored, values(case), rtol=1e-6, atol=0)


def test_gptq_words_are_the_librarys() -> None:
    """The same codes and scales in the same words."""
    case = next(one for one in GOLDEN["cases"] if one["method"] == "gptq-int4")
    wanted, shape = tensors(case), (case["rows"], case["cols"])
    scales = np.frombuffer(wanted["scales"].data, np.float16).reshape(wanted["scales"].shape).T
    levels = np.rint(values(case) / scales.astype(np.float32)) + 8
    codes = levels.astype(np.uint8)
    scheme = Scheme("gptq-int4", 128)
    sizes = scheme.sizes(*shape, half=True)
    stored = np.ascontiguousarray(scales).view(np.uint16)
    found = {
        "qweight": GPTQ.whole(codes[:, ::2] | codes[:, 1::2] << np.uint8(4)),
        **GPTQ.others(sizes, stored, 0.0),
    }
    for name, one in wanted.items():
        assert np.ascontiguousarray(found[name]).tobytes() == one.data, name
    planned = {one.name: one for one in GPTQ.tensors("m", sizes)}
    for name, one in wanted.items():
        assert (planned[f"m.{name}"].dtype, planned[f"m.{name}"].shape) == (one.dtype, one.shape)
