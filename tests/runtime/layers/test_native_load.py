"""Layers straight from checkpoints: every number is the source's, in each encoding that can be."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers import encoded
from helpers.encoded import HIDDEN, INNER, KINDS, SOURCE, encoded_model
from helpers.families import (
    Tensor,
    Weights,
    fp8,
    fp8_values,
    fused,
    numbered,
    random_weights,
    simple_config,
    write_checkpoint,
)
from helpers.gguf_files import INNER as GGUF_INNER
from helpers.gguf_files import Blocks as Blocks4
from helpers.gguf_files import around as gguf_around
from helpers.gguf_files import experts as gguf_experts
from helpers.gguf_files import model as gguf_model
from helpers.gguf_files import write_gguf
from helpers.gpt_oss import SIZES as GPT_OSS_SIZES
from helpers.gpt_oss import Blocks
from helpers.kernel_errors import kernel_error
from helpers.levels import at_level
from helpers.nemotron import write_nemotron
from helpers.paths import DOCS
from numpy.typing import NDArray

from ktconv import native
from ktconv.errors import CheckpointError, KtconvError
from ktconv.formats import FORMATS, format_named
from ktconv.native import Activation
from ktconv.runtime.layers import KERNEL_BOUND, Experts, native_experts, native_formats
from ktconv.source import open_checkpoint

pytestmark = pytest.mark.slow

F32 = NDArray[np.float32]

# The format that a layer in each encoding is held in; None: no format has its numbers.
HELD: dict[str, str | None] = {
    "fp8 tensor": "fp8-channel",
    "fp8 tensor, scalar": "fp8-channel",
    "fp8 channel": "fp8-channel",
    "fp8 channel, 1-D": "fp8-channel",
    "fp8 group": None,
    "fp8 block": "fp8",
    "fp8 block, ModelOpt": "fp8",
    "fp8 block, Qwen": "fp8",
    "fp8 block, DeepSeek-V4": "fp8",
    "mxfp8": "mxfp8",
    "mxfp4, DeepSeek-V4": "mxfp4",
    "mxfp4, compressed-tensors": "mxfp4",
    "mxfp4, Quark": "mxfp4",
    "mxfp4, Ling": "mxfp4",
    "mxfp6": "gint8-32",  # eighths of a power of two
    "mxint4, AutoRound": "gint4-32",  # quarters of a power of two
    "nvfp4, compressed-tensors": "nvfp4",
    "nvfp4, ModelOpt": "nvfp4",
    "nvfp4, E5M3": None,
    "int4 packed, group 32": "gint4-32",
    "int4 packed, channel": "gint4-128",  # INT4 has no -8
    "int8 packed, channel": "gint8-128",  # INT8 has no -128
    "int2 packed, asymmetric": "gint4-64",  # no code is more than 3 from its zero point
    "int3 packed, asymmetric": "gint4-64",
    **{f"int{bits} packed, asymmetric": "gint8-64" for bits in range(4, 8)},
    "int8 packed, asymmetric": None,  # up to 255 from its zero point
    **{f"int{bits} packed": "gint4-64" if bits < 4 else "gint8-64" for bits in (2, 3, 5, 6, 7)},
    "int4 packed by activation": None,
    "int4 packed, unused index": "gint4-64",
    "int8 channel": "gint8-128-f32",
    "int8 group": "gint8-64-f32",
    "int4, AngelSlim": "gint4-128-f32",
    "int8, msModelSlim": "gint8-128-f32",
    "int8 asymmetric, msModelSlim": None,
    "int8 asymmetric": None,
    **{f"gptq int4, v{v}": "gint8-64-f32" for v in (1, 2)},
    "gptq int4, v2 by format": "gint8-64-f32",
    **{f"gptq int8, v{v}": None for v in (1, 2)},
    **{f"gptq int{bits}, v{v}": "gint4-64-f32" for bits in (2, 3) for v in (1, 2)},
    "gptq symmetric": "gint4-64-f32",  # its scales are fp16
    "gptq in order": "gint8-64-f32",  # asymmetric, as those below
    "gptq by activation": None,
    "AutoRound": "gint8-64-f32",
    "AutoRound, auto_gptq": "gint8-64-f32",
    "awq": "gint8-64-f32",
    "awq symmetric": "gint4-128-f32",
    "awq, KTransformers": "gint8-64-f32",
    "fp8 group, short last": None,
    "int4 packed, short last": "gint4-32",  # as 32 divides 160
    "int4 packed by activation, short last": None,
    "int3 packed, short last": None,  # groups of 100
    "int8 group, short last": "gint8-32-f32",
    "gptq int2, short last": "gint4-32-f32",
    "gptq int3, short last": None,
    "gptq int4, short last": "gint8-32-f32",
    "gptq int8, short last": None,
    "gptq by activation, short last": None,
    "awq, short last": "gint8-32-f32",
    "awq, KTransformers, short last": "gint8-32-f32",
    "fp8 channel, zero scales": "fp8-channel",
    "fp8 block, zero scales": "fp8",
    "nvfp4, compressed-tensors, zero scales": "nvfp4",
    "nvfp4, ModelOpt, zero scales": "nvfp4",
    "int4 packed, zero scales": "gint4-32",
    "int8 channel, zero scales": "gint8-128-f32",
    "AutoRound, zero scales": "gint4-64-f32",
    "awq, zero scales": "gint8-64-f32",
}


def values_of(experts: Experts, expert: int) -> list[F32]:
    """Gate, where there is one, up and down."""
    return [matrix.values() for matrix in experts.streams(expert) if matrix is not None]


def expect_values(experts: Experts, weights: Weights) -> None:
    # The product of NVFP4's three numbers is rounded once here, twice in the libraries.
    tolerance = 2.0**-22 if experts.format.key == "nvfp4" else 0
    for expert in range(len(weights.up)):
        found = values_of(experts, expert)
        for values, expected in zip(found, (one[expert] for one in weights), strict=True):
            np.testing.assert_allclose(values, expected, tolerance, atol=0)


def test_every_encoding_is_decided() -> None:
    assert HELD.keys() == KINDS.keys()


def test_the_page_says_the_same() -> None:
    """Of floats; integers have a row for several encodings."""
    page = (DOCS / "encodings.md").read_text()
    section = page.split("## Without conversion")[1].split("## GGUF")[0]
    rows = re.findall(r"^\| (`.*) \| `([^`]*)` \|$", section, re.MULTILINE)
    said = {(name, key) for names, key in rows for name in re.findall("`([^`]*)`", names)}
    held = {(KINDS[kind].name, key) for kind, key in HELD.items() if key}
    floats = {(name, key) for name, key in held if "fp" in name or "mx" in name}
    others = {("bf16", "bf16"), ("gguf-mxfp4", "mxfp4"), ("fp8-block", "bf16")}
    assert said == others | floats


@pytest.mark.parametrize("kind", [kind for kind, key in HELD.items() if key])
def test_numbers_are_the_sources(kind: str, tmp_path: Path) -> None:
    model, weights, _ = encoded_model(tmp_path / "model", kind)
    checkpoint = open_checkpoint(model)
    for parts in (1, 2, 3):
        fmt = FORMATS[HELD[kind] or ""]
        if not fmt.multiplies(HIDDEN, INNER, parts):  # 192 columns: fp8, groups of 128
            assert parts == 2
            continue
        method = None if parts == 1 else fmt.key  # which of several it is, is found once
        experts = native_experts(checkpoint, 0, parts=parts, threads=2 - parts % 2, method=method)
        assert (experts.format, experts.parts) == (fmt, parts)
        expect_values(experts, weights)
    assert kernel_error(experts) < KERNEL_BOUND


@pytest.mark.parametrize("kind", [kind for kind, key in HELD.items() if not key])
def test_what_no_format_has_is_refused(kind: str, tmp_path: Path) -> None:
    model, _, _ = encoded_model(tmp_path / "model", kind)
    named = rf"({KINDS[kind].name} \(|{SOURCE}\.0\.gate_proj\.).*"
    reason = r"(which no weight format of the kernels has exactly|has the number|g_idx)"
    with pytest.raises(CheckpointError, match=named + reason) as caught:
        native_experts(model, threads=1)
    assert caught.value.hint is not None
    assert "ktconv quantize-cpu" in caught.value.hint and "MoELayer.pack" in caught.value.hint


# ---- floats ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["numbered", "fused", "transposed"])
def test_bf16_in_each_layout(layout: str, tmp_path: Path) -> None:
    weights, source = random_weights(256, 192, 3), SOURCE
    tensors = {
        "numbered": partial(numbered, source, weights),
        "fused": partial(fused, source, weights, False),
        "transposed": partial(fused, source, weights, True),
    }[layout]()
    config = simple_config(hidden_size=256, moe_intermediate_size=192, num_experts=3)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    for parts in (1, 2, 3):
        experts = native_experts(model, parts=parts)
        assert experts.format.key == "bf16" and experts.activation == Activation()
        expect_values(experts, weights)
    assert kernel_error(experts) < KERNEL_BOUND


@pytest.mark.parametrize(("name", "encode"), [("fp16", np.float16), ("fp32", np.float32)])
def test_other_floats_would_be_rounded(name: str, encode: Any, tmp_path: Path) -> None:
    tensors = numbered(SOURCE, random_weights(), encode=lambda one: one.astype(encode))
    model = write_checkpoint(tmp_path / "model", tensors, simple_config())
    with pytest.raises(CheckpointError, match=rf"are {name} \(.*gate_proj.weight is F"):
        native_experts(model)


def test_transposed_fp8(tmp_path: Path) -> None:
    """Fused experts [in, out], as Qwen3-VL has them, with a scale for each output."""
    rng = np.random.default_rng(5)
    shapes = {"gate_up_proj": (2, 128, 384), "down_proj": (2, 192, 128)}
    tensors: dict[str, Tensor] = {}
    values = {}
    for name, (count, cols, rows) in shapes.items():
        codes = rng.integers(0, 0x7F, (count, cols, rows), np.uint8)
        scale = rng.uniform(0.1, 2, (count, 1, rows)).astype(np.float32)
        tensors |= {f"{SOURCE}.{name}": fp8(codes), f"{SOURCE}.{name}_scale": scale}
        values[name] = (fp8_values()[codes] * scale).swapaxes(1, 2)
    config = simple_config(
        moe_intermediate_size=192, num_experts=2,
        quantization_config={"quant_method": "compressed-tensors"},
    )  # fmt: skip
    experts = native_experts(write_checkpoint(tmp_path / "model", tensors, config), parts=3)
    assert experts.format.key == "fp8-channel"
    gate, up = np.split(values["gate_up_proj"], 2, axis=1)
    expect_values(experts, Weights(gate, up, values["down_proj"]))


def test_stacked_fp8_in_blocks(tmp_path: Path) -> None:
    """Gate and up in one tensor: blocks of up begin where those of gate end."""
    rng = np.random.default_rng(6)
    tensors: dict[str, Tensor] = {}
    values = {}
    for name, rows, cols in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        codes = rng.integers(0, 0x7F, (2, rows, cols), np.uint8)
        scale = rng.uniform(0.1, 2, (2, rows // 128, cols // 128)).astype(np.float32)
        tensors |= {f"{SOURCE}.{name}": fp8(codes), f"{SOURCE}.{name}_scale_inv": scale}
        spread = np.stack([encoded.spread(one, rows, cols) for one in scale])
        values[name] = fp8_values()[codes] * spread
    model = write_checkpoint(tmp_path / "model", tensors, simple_config(**encoded.SIZES))
    gate, up = np.split(values["gate_up_proj"], 2, axis=1)
    for parts in (1, 3):
        experts = native_experts(model, parts=parts)
        assert experts.format.key == "fp8"
        expect_values(experts, Weights(gate, up, values["down_proj"]))


def test_blocks_that_begin_elsewhere_are_refused(tmp_path: Path) -> None:
    """Up begins in the middle of a block of 128 rows, which the format does not have."""
    rng = np.random.default_rng(6)
    tensors: dict[str, Tensor] = {}
    for name, rows, cols in (("gate_up_proj", 2 * 192, HIDDEN), ("down_proj", HIDDEN, 192)):
        scale = rng.uniform(0.1, 2, (2, rows // 128, -(-cols // 128))).astype(np.float32)
        tensors |= {
            f"{SOURCE}.{name}": fp8(np.ones((2, rows, cols), np.uint8)),
            f"{SOURCE}.{name}_scale_inv": scale,
        }
    config = simple_config(**{**encoded.SIZES, "moe_intermediate_size": 192})
    model = write_checkpoint(tmp_path / "model", tensors, config)
    with pytest.raises(CheckpointError, match=r"are fp8-block .* no weight format"):
        native_experts(model)


@pytest.mark.parametrize(
    ("kind", "key"),
    [("BF16", "bf16"), ("MXFP4", "mxfp4"), ("Q4_0", "gint4-32"), ("Q8_0", "gint8-32-f32")],
)
def test_gguf(kind: str, key: str, tmp_path: Path) -> None:
    """Values by the package gguf. Scales of Q4_0 have both signs."""
    model = gguf_model(tmp_path, types=dict.fromkeys(("gate", "up", "down"), kind))
    number = gguf.GGMLQuantizationType[kind]
    weights = Weights(
        *(
            gguf.quants.dequantize(gguf.quants.quantize(one, number), number)
            for one in random_weights(inner=GGUF_INNER)
        )
    )
    for parts in (1, 2, 3):
        experts = native_experts(model, parts=parts)
        assert experts.format.key == key
        expect_values(experts, weights)
        assert kernel_error(experts) < KERNEL_BOUND


@pytest.mark.parametrize(
    ("kind", "size", "key"), [("Q4_0", 18, "gint4-32-f32"), ("Q8_0", 34, "gint8-32-f32")]
)
def test_blocks_of_ggml_at_their_limits(kind: str, size: int, key: str, tmp_path: Path) -> None:
    """Scales of 0, of either sign and those of half precision alone; all codes; a NaN is
    refused."""
    rng = np.random.default_rng(8)
    blocks = rng.integers(0, 256, (4, GGUF_INNER, 4, size), np.uint8)
    assert len(np.unique(blocks[..., 2:])) == 256
    halves = np.array([0, -0.5, 6e-8, -60000, 0.1], np.float16)
    blocks[..., :2] = np.resize(halves, blocks.shape[:-1])[..., None].view(np.uint8)
    tensors = gguf_experts() | gguf_around()
    name = "blk.0.ffn_up_exps.weight"
    stored = Blocks4(kind, blocks.reshape(4, GGUF_INNER, -1))
    types = dict.fromkeys(("ffn_gate_exps", "ffn_down_exps"), kind)
    model = write_gguf(tmp_path / "a.gguf", tensors | {name: stored}, types=types)
    experts = native_experts(model)
    assert experts.format.key == key
    found = [values_of(experts, expert)[1] for expert in range(4)]
    np.testing.assert_array_equal(np.stack(found), stored.values)
    assert kernel_error(experts) < KERNEL_BOUND
    blocks[3, 100, 2, :2] = np.float16(np.nan).reshape(1).view(np.uint8)
    model = write_gguf(tmp_path / "b.gguf", tensors | {name: stored}, types=types)
    with pytest.raises(CheckpointError, match=r"ffn_up_exps\.weight has the scale nan"):
        native_experts(model)


def test_other_blocks_of_ggml_are_refused(tmp_path: Path) -> None:
    model = gguf_model(tmp_path, types=dict.fromkeys(("gate", "up", "down"), "Q5_0"))
    with pytest.raises(CheckpointError, match=r"are gguf-q5_0 .* no weight format"):
        native_experts(model)


def test_all_powers_of_two_are_scales_of_mxfp4(tmp_path: Path) -> None:
    """0 of E8M0 is 2^-127, a denormal; 252 is the last whose weights float32 has, 255 is a NaN."""
    scale = np.resize(np.arange(253, dtype=np.uint8), (INNER, HIDDEN // 32))
    name = f"{SOURCE}.0.up_proj.weight"
    model, _, _ = encoded_model(tmp_path / "all", "mxfp4, Quark", **{f"{name}_scale": scale})
    powers = np.ldexp(1.0, scale.astype(int) - 127).astype(np.float32).repeat(32, axis=1)
    levels = encoded.e2m1(codes_of(model, name))
    np.testing.assert_array_equal(values_of(native_experts(model), 0)[1], levels * powers)
    for code, says in ((253, r"has the scale 8\.5.*e\+37, under which"), (255, "is nan")):
        scale[100, 3] = code
        model, _, _ = encoded_model(
            tmp_path / str(code), "mxfp4, Quark", **{f"{name}_scale": scale}
        )
        with pytest.raises(CheckpointError, match=says):
            native_experts(model)


def codes_of(model: Path, name: str) -> NDArray[np.uint8]:
    """Nibbles of a tensor."""
    from safetensors.numpy import load_file

    stored = load_file(model / "model.safetensors")[name]
    return np.stack([stored & 15, stored >> 4], axis=2).reshape(len(stored), -1)


# ---- gpt-oss, experts without gates, norms ---------------------------------------------


@pytest.mark.parametrize("encoding", ["mxfp4", "bf16"])
def test_gpt_oss(encoding: str, tmp_path: Path) -> None:
    """Outputs of gate and up alternate; all matrices have biases; swiglu is clamped."""
    blocks = Blocks()
    config = simple_config(**GPT_OSS_SIZES, model_type="gpt_oss", num_local_experts=3)
    model = write_checkpoint(tmp_path / "model", getattr(blocks, encoding), config)
    for parts in (1, 2, 3):
        experts = native_experts(model, parts=parts)
        assert experts.format.key == encoding and experts.biased
        assert experts.activation == Activation("swiglu", 1.702, 1.0, 7.0)
        expect_values(experts, blocks.weights)
        gate_up, down = blocks.biases
        for expert in range(3):
            expected = gate_up[expert, 0::2], gate_up[expert, 1::2], down[expert]
            for one, bias in zip(experts.streams(expert), expected, strict=True):
                assert one is not None and one.bias is not None
                np.testing.assert_array_equal(one.bias, bias)
        assert kernel_error(experts) < KERNEL_BOUND


@pytest.mark.parametrize("kind", [None, "fp8 block", "int4 packed, group 32"])
def test_experts_without_gates(kind: str | None, tmp_path: Path) -> None:
    model, matrices = write_nemotron(tmp_path / "model", kind)
    experts = native_experts(model, 1, parts=3)
    assert experts.activation.function == "relu2"
    for expert in range(experts.count):
        for values, proj in zip(values_of(experts, expert), ("up", "down"), strict=True):
            np.testing.assert_array_equal(values, matrices[1, expert, proj])
    assert kernel_error(experts) < KERNEL_BOUND


def test_norms_of_outputs(tmp_path: Path) -> None:
    weights = random_weights()
    norm = np.linspace(0.5, 2, 128).astype(np.float16).astype(np.float32)
    tensors = numbered(SOURCE, weights)
    name = f"{SOURCE}.post_expert_norm.weight"
    config = simple_config(model_type="muse_spark")
    model = write_checkpoint(tmp_path / "with", {**tensors, name: norm}, config)
    experts = native_experts(model)
    assert experts.norm is not None and np.array_equal(experts.norm.weight, norm)
    assert kernel_error(experts) < KERNEL_BOUND
    without = write_checkpoint(tmp_path / "without", tensors, config)
    with pytest.raises(CheckpointError, match="layer 0 has no norm of its experts' outputs"):
        native_experts(without)


# ---- which format ----------------------------------------------------------------------


def integers(low: int, store: Callable[[F32], Tensor]) -> encoded.Kind:
    """INT4 with a scale for each row, of codes from `low` on."""

    def of(rng: np.random.Generator, rows: int, cols: int) -> encoded.Stored:
        codes = rng.integers(low + 8, 16, (rows, cols), np.uint8)
        scale = encoded.truncated(rng.uniform(0.1, 1, (rows, 1)).astype(np.float32))
        parts: dict[str, Tensor] = {
            "weight_packed": encoded.stream(codes, 4).view(np.int32),
            "weight_scale": store(scale),
        }
        return parts, (codes.astype(np.float32) - 8) * scale

    return encoded.Kind("int4-packed", of, {"quant_method": "compressed-tensors"})


@pytest.mark.parametrize(
    ("low", "parts", "key"), [(-7, 1, "int4"), (-8, 1, "gint4-128"), (-7, 2, "gint4-64")]
)
def test_int4_with_a_scale_for_each_row(
    low: int, parts: int, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INT4 itself where it has all codes and allows the shape; a step of it is 16 scales."""
    monkeypatch.setitem(KINDS, "own", integers(low, encoded.halves))
    model, weights, _ = encoded_model(tmp_path / "model", "own")
    experts = native_experts(model, parts=parts)
    assert experts.format.key == key
    expect_values(experts, weights)
    assert kernel_error(experts) < KERNEL_BOUND


def test_int8_with_a_scale_for_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(rng: np.random.Generator, rows: int, cols: int) -> encoded.Stored:
        return encoded.in_int8(rng.standard_normal((rows, cols)).astype(np.float32))

    kind = encoded.Kind("int8", of, {"quant_method": "compressed-tensors"})
    monkeypatch.setitem(KINDS, "own", kind)
    model, weights, _ = encoded_model(tmp_path / "model", "own")
    experts = native_experts(model, parts=2)
    assert experts.format.key == "int8"
    expect_values(experts, weights)
    assert kernel_error(experts) < KERNEL_BOUND


def test_a_method_can_be_chosen(tmp_path: Path) -> None:
    """Scales that more columns share are written for each group."""
    model, weights, _ = encoded_model(tmp_path / "model", "int4 packed, channel")
    for method in ("gint4-32", "gint4-64-f32", "rawint4", "INT8"):
        experts = native_experts(model, method=method)
        assert experts.format is format_named(method)
        expect_values(experts, weights)
    layer = open_checkpoint(model).layers[0]
    assert native_formats(layer)[0] == "int4" and "int8" in native_formats(layer)
    assert native_formats(layer)[-1].startswith("gint8-32")


def test_zero_points_that_are_no_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """msModelSlim stores them as float32."""

    def of(rng: np.random.Generator, rows: int, cols: int) -> encoded.Stored:
        parts, values = encoded.of_msmodelslim(rng, rows, cols)
        parts["weight"] = rng.integers(-90, 90, (rows, cols), np.int8)
        parts["weight_offset"] = np.full((rows, 1), offset, np.float32)
        return parts, values

    monkeypatch.setitem(KINDS, "own", encoded.Kind("int8", of))
    offset = 3.0
    model, _, _ = encoded_model(tmp_path / "whole", "own")
    assert native_experts(model).format.key == "int8"
    offset = 0.5
    model, _, _ = encoded_model(tmp_path / "half", "own")
    with pytest.raises(CheckpointError, match="has zero points that are not integers"):
        native_experts(model)


NO_BF16 = r"gate_proj.scales has the scale 0.[0-9]+, which is not a number in bf16"
NO_EXPERT = "slot 1 is to have expert 2, but the layer has experts 0 to 1"
PARTS = "parts that it allows: 1, 3"


@pytest.mark.parametrize(
    ("kind", "options", "says", "hint"),
    [
        ("gptq symmetric", {"method": "gint4-64"}, NO_BF16, "quantize-cpu"),
        ("int4 packed, channel", {"method": "int4"}, "-8, but int4 has -7 to 7", "MoELayer.pack"),
        (
            "fp8 block",
            {"method": "fp8-channel"},
            "are fp8-block .* not have exactly",
            "give fp8 or",
        ),
        ("fp8 block", {"method": "int5"}, "unknown method 'int5'", "available"),
        ("fp8 block", {"parts": 2}, r"a part 192.*layer 0, fp8-block", PARTS),
        ("fp8 block", {"parts": 5}, "cannot be split into 5 parts", PARTS),
        ("fp8 block", {"parts": 0}, "0 parts", PARTS),
        ("fp8 block", {"layer": 7}, "has no experts of layer 7", "it has [0]"),
        ("fp8 block", {"slots": []}, "a map of slots must be", "give integers"),
        ("fp8 block", {"slots": [0, 2]}, NO_EXPERT, "correct the map"),
        ("fp8 block", {"slots": [0, -1]}, "slot 1 is to have expert -1", "correct the map"),
        ("fp8 block", {"slots": [0.0, 1.0]}, "not float64", "give integers"),
    ],
)
def test_refusals(kind: str, options: dict[str, Any], says: str, hint: str, tmp_path: Path) -> None:
    model, _, _ = encoded_model(tmp_path / "model", kind)
    with pytest.raises(KtconvError, match=says) as caught:
        native_experts(model, **options)
    assert caught.value.hint is not None and hint in caught.value.hint


def test_encodings_that_differ(tmp_path: Path) -> None:
    """Down in FP8 by row, gate and up by block: no format has both."""
    rng = np.random.default_rng(2)
    changes: dict[str, Any] = {}
    for expert in range(2):
        parts, _ = KINDS["fp8 channel"].of(rng, HIDDEN, INNER)
        changes |= {f"{SOURCE}.{expert}.down_proj.{name}": one for name, one in parts.items()}
    model, _, _ = encoded_model(tmp_path / "model", "fp8 block", **changes)
    with pytest.raises(CheckpointError, match=r"are fp8-block and fp8-channel .* no weight format"):
        native_experts(model)


def test_experts_that_are_not_used_need_no_format(tmp_path: Path) -> None:
    parts, _ = KINDS["fp8 group"].of(np.random.default_rng(2), HIDDEN, INNER)
    changes = {f"{SOURCE}.1.down_proj.{name}": one for name, one in parts.items()}
    model, weights, _ = encoded_model(tmp_path / "model", "fp8 tensor", **changes)
    with pytest.raises(CheckpointError, match="fp8-tensor and fp8-group"):
        native_experts(model)
    experts = native_experts(model, slots=[0, 0, 0])
    np.testing.assert_array_equal(values_of(experts, 0)[2], weights.down[0])


# ---- damage ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_bf16_that_is_not_finite(value: float, tmp_path: Path) -> None:
    weights = random_weights(256, 192, 2)
    weights.down[1, 200, 70] = value
    tensors = numbered(SOURCE, weights)
    config = simple_config(hidden_size=256, moe_intermediate_size=192, num_experts=2)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    with pytest.raises(CheckpointError, match=r"1\.down_proj\.weight .* at \[200, 70\]"):
        native_experts(model, parts=2)


def test_fp8_that_is_not_finite(tmp_path: Path) -> None:
    codes = np.zeros((INNER, HIDDEN), np.uint8)
    codes[300, 5] = 0xFF
    changes: dict[str, Any] = {f"{SOURCE}.1.gate_proj.weight": fp8(codes)}
    model, _, _ = encoded_model(tmp_path / "model", "fp8 block", **changes)
    with pytest.raises(CheckpointError, match=r"1\.gate_proj\.weight .* at \[300, 5\]"):
        native_experts(model, parts=3)


# ---- memory and threads ----------------------------------------------------------------


def addresses(experts: Experts) -> dict[tuple[int, int], int]:
    """Of the up matrix of each slot of each part."""
    return {
        (part, slot): expert[1].codes.ctypes.data
        for part, row in enumerate(experts.layer._keep)
        for slot, expert in enumerate(row)
        if expert is not None
    }


def test_slots_share_memory(tmp_path: Path) -> None:
    model, weights, _ = encoded_model(tmp_path / "model", "fp8 block")
    experts = native_experts(model, parts=3, slots=np.array([1, 0, 1, 1]))
    assert experts.count == 4 and experts.origins.tolist() == [1, 0, 1, 1]
    found = addresses(experts)
    assert len(set(found.values())) == 2 * 3
    assert all(found[part, 0] == found[part, 2] == found[part, 3] for part in range(3))
    np.testing.assert_array_equal(values_of(experts, 1)[0], weights.gate[1])
    assert kernel_error(experts) < KERNEL_BOUND


def test_memory_is_bound_before_it_is_written(tmp_path: Path) -> None:
    """What `bind` leaves in it is overwritten."""
    model, weights, _ = encoded_model(tmp_path / "model", "mxfp4, Ling")
    bound: list[tuple[int, range]] = []

    def bind(memory: Any, part: int) -> None:
        start = memory.ctypes.data
        bound.append((part, range(start, start + memory.nbytes)))
        memory[:] = 0xEE

    experts = native_experts(model, parts=2, bind=bind)
    assert [part for part, _ in bound] == [0, 1]
    for (part, _), address in addresses(experts).items():
        assert address in bound[part][1] and address % 64 == 0
    expect_values(experts, weights)


def test_any_number_of_threads_gives_the_same_bytes(tmp_path: Path) -> None:
    model, _, _ = encoded_model(tmp_path / "model", "awq symmetric")
    packed = []
    for threads in (1, 2, 20):
        experts = native_experts(model, threads=threads)
        packed.append(
            [m.codes.tobytes() for row in experts.layer._keep for e in row if e for m in e if m]
        )
    assert packed[0] == packed[1] == packed[2]


def test_kernels_compute_the_same_on_each_level(tmp_path: Path, tiles: Any) -> None:
    model, _, _ = encoded_model(tmp_path / "model", "gptq symmetric")
    experts = native_experts(model)
    for isa in native.kernel_levels(experts.layer.layout):
        with at_level(isa):
            assert kernel_error(experts) < KERNEL_BOUND


def test_bf16_holds_numbers_under_powers_of_two(tmp_path: Path) -> None:
    model, weights, _ = encoded_model(tmp_path / "model", "mxfp8")
    assert native_formats(open_checkpoint(model).layers[0]) == [
        "mxfp8",
        "bf16",
    ]
    expect_values(native_experts(model, method="bf16"), weights)


def test_numbers_beyond_bf16_are_refused(tmp_path: Path) -> None:
    """E4M3 times a power of two has 4 bits, but below 2^-133 bf16 has fewer."""
    model, _, _ = encoded_model(tmp_path / "model", "mxfp8")
    path = next(model.glob("*.safetensors"))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(one for one in header if "scale" in one and "up" in one)
    first, last = (8 + size + at for at in header[name]["data_offsets"])
    path.write_bytes(data[:first] + bytes(last - first) + data[last:])  # 2^-127
    with pytest.raises(CheckpointError, match="has a number that bf16 does not have"):
        native_experts(model, method="bf16")
    assert native_experts(model).format.key == "mxfp8"


def test_a_second_scale_that_is_zero(tmp_path: Path) -> None:
    name = f"{SOURCE}.1.up_proj.weight_scale_2"
    zero = {name: np.zeros(1, np.float32)}
    model, weights, _ = encoded_model(tmp_path / "model", "nvfp4, ModelOpt", **zero)
    weights.up[1] = 0
    expect_values(native_experts(model), weights)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        *itertools.product(
            ("nvfp4, compressed-tensors", "nvfp4, ModelOpt"), (-1.0, np.nan, np.inf)
        ),
        ("nvfp4, compressed-tensors", 0.0),
        ("nvfp4, compressed-tensors", 1e-45),
    ],
)
def test_second_scales_that_are_none(kind: str, factor: float, tmp_path: Path) -> None:
    """Zero and the smallest denormal divide into infinities."""
    part = "weight_global_scale" if "compressed" in kind else "weight_scale_2"
    name = f"{SOURCE}.1.up_proj.{part}"
    model, _, _ = encoded_model(tmp_path / "model", kind, **{name: np.array([factor], np.float32)})
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} has the scale"):
        native_experts(model)
