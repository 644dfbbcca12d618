"""Scales that are zero, negative or none at all, and groups whose last one is shorter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import done, ktconv, refused, run
from helpers.convert import convert, read_json
from helpers.encoded import (
    HIDDEN,
    INNER,
    KINDS,
    SIZES,
    SOURCE,
    encoded_model,
    of_fp8,
    of_gptq,
)
from helpers.families import Tensor, fp8, simple_config, write_checkpoint
from helpers.web_server import serving

from ktconv.conversion import run as conversion
from ktconv.errors import CheckpointError
from ktconv.quantize.encoded.request import Request
from ktconv.quantize.encoded.run import encode
from ktconv.source import open_checkpoint
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.targets.encoded.scheme import group_size_of
from ktconv.targets.encoded.target import Options
from ktconv.verify import Request as VerifyRequest
from ktconv.verify import verify

pytestmark = pytest.mark.slow

UP = f"{SOURCE}.1.up_proj"
# Zeros by kind: of the three matrices of two experts, whose outputs and inputs are 384 and 256, or
# 256 and 384 of down. Two of a grid are zero; of NVFP4 all of a row, and one of every other row.
EACH = {kind: 12 for kind in KINDS if kind.endswith("zero scales")}
GATE_UP, DOWN = INNER - 1 + HIDDEN // 16, HIDDEN - 1 + INNER // 16
NVFP4 = 2 * (2 * GATE_UP + DOWN)
ZEROS = {kind: NVFP4 if kind.startswith("nvfp4") else count for kind, count in EACH.items()}


def options_of(scheme: str) -> Options:
    return Options(scheme=scheme, group_size=group_size_of(scheme))


@pytest.mark.parametrize("kind", ZEROS)
def test_zeros_are_counted(kind: str, tmp_path: Path) -> None:
    """By the plan, the report, the manifest and the card."""
    model, _, _ = encoded_model(tmp_path / "model", kind)
    planned = json.loads(done(model, tmp_path / "out", "--method=int8", "--dry-run", "--json"))
    assert planned["zero_scales"] == ZEROS[kind]
    assert f"zero scales   {ZEROS[kind]:,}, whose" in done(model, tmp_path / "out", "--dry-run")
    reported = json.loads(done(model, tmp_path / "out", "--method=int8", "--json"))
    assert reported["zero_scales"] == ZEROS[kind]
    [unit] = read_json(tmp_path / "out" / "ktconv.json")["units"].values()
    assert unit["zero_scales"] == ZEROS[kind]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"- Zero scales in the source: {ZEROS[kind]:,}, whose weights are all 0\n" in card


def test_where_there_are_none_nothing_is_said(tmp_path: Path) -> None:
    model, _, _ = encoded_model(tmp_path / "model", "fp8 block")
    assert json.loads(done(model, tmp_path / "out", "--dry-run", "--json"))["zero_scales"] == 0
    assert "zero" not in done(model, tmp_path / "out", "--dry-run").replace(str(tmp_path), "")
    assert "Zero scales" not in done(model, tmp_path / "out")
    assert "zero_scales" not in (tmp_path / "out" / "ktconv.json").read_text()
    assert "Zero scales" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("fp8 channel, zero scales", "fp8-channel"),
        ("fp8 block, zero scales", "fp8"),
        ("nvfp4, compressed-tensors, zero scales", "nvfp4"),
        ("nvfp4, ModelOpt, zero scales", "nvfp4"),
        ("int4 packed, zero scales", "int4-g64"),
        ("int4 packed, zero scales", "bf16"),
        ("AutoRound, zero scales", "rawint4"),
        ("awq, zero scales", "awq"),
        ("gptq int4, short last", "mxfp4"),
        ("gptq int3, short last", "bf16"),
        ("int4 packed by activation, short last", "nvfp4"),
    ],
)
def test_checkpoints_of_them_are_proven(kind: str, scheme: str, tmp_path: Path) -> None:
    """Also those whose codes and scales are kept, zeros and signs among them."""
    model, _, _ = encoded_model(tmp_path / "model", kind)
    request = Request(str(model), tmp_path / "out", options_of(scheme), threads=1)
    report = encode(request)
    assert report.zero_scales == ZEROS.get(kind, 0)
    found = verify(VerifyRequest(tmp_path / "out", str(model), level="weights", threads=1))
    assert found.passed, found.failures


def test_a_second_scale_that_is_zero_is_kept(tmp_path: Path) -> None:
    """ModelOpt multiplies by it, and what is written divides: by 1, where all scales are zero."""
    zero = {f"{UP}.weight_scale_2": np.zeros(1, np.float32)}
    model, _, _ = encoded_model(tmp_path / "model", "nvfp4, ModelOpt", **zero)
    report = convert(model, tmp_path / "out", method="int8")
    assert report.zero_scales == INNER * HIDDEN // 16
    encode(Request(str(model), tmp_path / "kept", options_of("nvfp4"), threads=1))
    found = verify(VerifyRequest(tmp_path / "kept", str(model), level="weights", threads=1))
    assert found.passed, found.failures


# ---- what is no scale ------------------------------------------------------------------

BAD: list[tuple[str, str, Tensor, str]] = [
    ("fp8 block", "weight_scale", np.full((3, 2), np.nan, np.float32), "is nan"),
    ("fp8 block", "weight_scale", np.full((3, 2), -0.5, np.float32), "is -0.5"),
    ("nvfp4, ModelOpt", "weight_scale", fp8(np.full((384, 16), 0x7F, np.uint8)), "is nan"),
    ("nvfp4, ModelOpt", "weight_scale", fp8(np.full((384, 16), 0x81, np.uint8)), "is -0.0019"),
    ("nvfp4, ModelOpt", "weight_scale_2", np.full(1, np.inf, np.float32), "scale inf"),
    ("nvfp4, ModelOpt", "weight_scale_2", np.full(1, 3e38, np.float32), "makes a block's scale"),
    ("mxfp4, Quark", "weight_scale", np.full((384, 8), 255, np.uint8), "is nan"),
    ("awq", "scales", np.full((4, 384), -np.inf, np.float16), "is -inf"),
    ("int8, msModelSlim", "weight_offset", np.full((384, 1), np.nan, np.float32), "zero point nan"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: f"{case[0]}: {case[3]}")
def test_bad_scales_are_found_before_anything_is_written(
    case: tuple[str, str, Tensor, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last of the layers, of which no other is written first."""
    kind, part, tensor, phrase = case
    model, _, _ = encoded_model(tmp_path / "model", kind, **{f"{UP}.{part}": tensor})

    def unwanted(*_: Any) -> None:
        raise AssertionError("a layer is converted")

    monkeypatch.setattr(conversion.Conversion, "run_pipeline", unwanted)
    refused(run(model, tmp_path / "out", "--threads=2"), 2, phrase, f"{UP}.")
    assert not (tmp_path / "out").exists()
    refused(run(model, tmp_path / "out", "--dry-run"), 2, phrase, f"{UP}.")


def test_large_scales_are_left_to_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run of a model with many gigabytes of scales ends soon, and says so."""
    nan = {f"{UP}.weight_scale": np.full((3, 2), np.nan, np.float32)}
    model, _, _ = encoded_model(tmp_path / "model", "fp8 block", **nan)
    monkeypatch.setattr(conversion, "SCAN_BYTES", 4 * 36 - 1)
    assert "are checked when the conversion begins" in done(model, tmp_path / "out", "--dry-run")
    assert json.loads(done(model, tmp_path / "out", "--dry-run", "--json"))["zero_scales"] is None
    result = run(model, tmp_path / "out")
    assert "checking 144 " in result.stderr and "of scales" in result.stderr
    assert result.exit_code == 2 and "is nan" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_first_bad_scale_is_named(tmp_path: Path) -> None:
    nan = np.full((3, 2), np.nan, np.float32)
    bad = {f"{SOURCE}.{expert}.gate_proj.weight_scale": nan for expert in (1, 0)}
    model, _, _ = encoded_model(tmp_path / "model", "fp8 block", **bad)
    for _ in range(5):
        refused(
            run(model, tmp_path / "out", "--threads=4"), 2, f"{SOURCE}.0.gate_proj.weight_scale"
        )


@pytest.fixture
def quick_web(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("aiohttp")
    pytest.importorskip("fsspec")
    yield


@pytest.mark.usefixtures("quick_web")
def test_scales_elsewhere_are_looked_at_with_their_weights(tmp_path: Path) -> None:
    """Each small read would be a request. Zeros are counted, and a layer with a bad one is not
    final."""
    kind = "nvfp4, ModelOpt, zero scales"
    model, _, _ = encoded_model(tmp_path / "web" / "good", kind)
    nan = {f"{UP}.weight_scale_2": np.full(1, np.nan, np.float32)}
    encoded_model(tmp_path / "web" / "bad", kind, **nan)
    with serving(tmp_path / "web") as server:
        planned = done(f"{server.url}/good", tmp_path / "out", "--dry-run", "--json")
        assert json.loads(planned)["zero_scales"] is None
        reported = done(f"{server.url}/good", tmp_path / "out", "--method=int8", "--json")
        assert json.loads(reported)["zero_scales"] == ZEROS[kind]
        refused(run(f"{server.url}/bad", tmp_path / "no"), 2, "has the scale nan")
    assert not (tmp_path / "no").exists()
    assert model.is_dir()


# ---- groups ----------------------------------------------------------------------------


def model_of(
    directory: Path, group: int, cols: int, quantization: dict[str, Any]
) -> tuple[Path, np.ndarray[Any, np.dtype[np.float32]]]:
    """GPTQ of 4 bits, whose down has `cols` inputs, and its values."""
    rng = np.random.default_rng(cols)
    tensors: dict[str, Tensor] = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = (HIDDEN, cols) if name == "down_proj" else (cols, HIDDEN)
        parts, values = of_gptq(rng, *shape, 4, True, group=group)
        tensors |= {f"{SOURCE}.0.{name}.{part}": one for part, one in parts.items()}
    sizes = SIZES | {"moe_intermediate_size": cols, "num_experts": 1}
    said = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", **quantization}
    model = write_checkpoint(directory, tensors, simple_config(**sizes, quantization_config=said))
    return model, values


def group_of_down(model: Path) -> int:
    scale = open_checkpoint(model).layers[0].experts[0]["down"].scale
    assert scale is not None
    return scale.block_cols


@pytest.mark.parametrize(
    ("group", "cols", "said", "expected"),
    [
        (128, 704, {"group_size": 128}, 128),  # 704 is no multiple of six groups
        (128, 704, {"dynamic": {"+:.*experts.*": {"group_size": 128}}}, 128),
        (128, 704, {"group_size": 32, "extra_config": {"down": {"group_size": 128}}}, 128),
        (160, 384, {"group_size": 160}, 160),  # 128 would fit, too
        (128, 384, {"group_size": 32}, 128),  # does not fit: the shape counts
        (128, 384, {"group_size": -1}, 128),
        (128, 384, {}, 128),
        (128, 384, {"group_size": 160, "dynamic": {"a": {"group_size": 144}}}, 128),  # undecided
        (704, 704, {"group_size": 128}, 704),  # a scale for each output
    ],
)
def test_config_json_decides_between_groups(
    group: int, cols: int, said: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    model, _ = model_of(tmp_path / "model", group, cols, said)
    assert group_of_down(model) == expected


@pytest.mark.parametrize(
    "said", [{}, {"group_size": 64}, {"group_size": 128, "x": {"group_size": 120}}]
)
def test_groups_that_nothing_decides(said: dict[str, Any], tmp_path: Path) -> None:
    model, _ = model_of(tmp_path / "model", 128, 704, said)
    with pytest.raises(CheckpointError, match="fits no way to scale") as caught:
        open_checkpoint(model)
    assert caught.value.hint is not None
    assert "6 groups of 704 inputs can have 118 to 140 each" in caught.value.hint
    assert "quantization_config.group_size in config.json" in caught.value.hint


@pytest.mark.parametrize("numa", [1, 2, 11])
def test_parts_of_the_inputs(numa: int, tmp_path: Path) -> None:
    """Down of 704 inputs cut into parts that begin and end inside groups of 128; 64 are in the
    last."""
    model, values = model_of(tmp_path / "model", 128, 704, {"group_size": 128})
    if numa == 2:  # 352 columns
        refused(run(model, tmp_path / "out", "--numa=2", "--method=int8"), 2, "352 per part")
        return
    convert(model, tmp_path / "out", method="int8", numa=numa)
    found = verify(VerifyRequest(tmp_path / "out", str(model), level="weights", threads=1))
    assert found.passed, found.failures
    reader = SourceReader([model / "model.safetensors"], [])
    source = MatrixReader(reader, open_checkpoint(model).layers[0].experts[0]["down"])
    buffers = np.empty(1 << 20, np.uint8), np.empty(1 << 20, np.uint8)
    decoded = np.concatenate([rows for _, rows in source.decoded(*buffers)])
    np.testing.assert_array_equal(decoded, values)


@pytest.mark.parametrize("method", ["int4-g128", "gptq-int4", "int8-g128"])
def test_methods_with_groups_refuse_other_inputs(method: str, tmp_path: Path) -> None:
    model, _ = model_of(tmp_path / "model", 128, 704, {"group_size": 128})
    phrase = "has groups of 128, which do not divide the 704 columns of down in layer 0"
    refused(ktconv("quantize-cpu", model, tmp_path / "out", "--method", method), 2, phrase)


def test_dimensions_that_end_inside_a_block(tmp_path: Path) -> None:
    """FP8 of 128 x 128 with 320 outputs and inputs of 192, one block of which is zero."""
    rng = np.random.default_rng(9)
    tensors: dict[str, Tensor] = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        rows, cols = (192, 320) if name == "down_proj" else (320, 192)
        grid = (-(-rows // 128), -(-cols // 128))
        parts, _ = of_fp8(rng, rows, cols, lambda *_, grid=grid: grid, group=128, zeros=True)
        tensors |= {f"{SOURCE}.0.{name}.{part}": one for part, one in parts.items()}
    config = simple_config(
        hidden_size=192, moe_intermediate_size=320, num_experts=1,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )  # fmt: skip
    model = write_checkpoint(tmp_path / "model", tensors, config)
    report = convert(model, tmp_path / "out", method="int8", numa=5)
    assert report.zero_scales == 6
    found = verify(VerifyRequest(tmp_path / "out", str(model), level="weights", threads=1))
    assert found.passed, found.failures
