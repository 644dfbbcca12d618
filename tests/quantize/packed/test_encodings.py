"""Source encodings end to end: FP8 blocks of any size, FP16 and FP32, fused and numbered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import Rule, assert_output, convert, matrices_of, read_model
from helpers.families import (
    Raw,
    Tensor,
    Weights,
    bf16,
    e8m0,
    fp8,
    fp8_values,
    fused,
    numbered,
    random_weights,
    raw,
    simple_config,
    write_checkpoint,
)
from numpy.typing import NDArray

from ktconv.conversion import tasks
from ktconv.formats.decode import round_to_bf16
from ktconv.source.reading import matrices as matrix_reader

pytestmark = pytest.mark.slow

SOURCE = "model.layers.0.mlp.experts"
Floats = NDArray[np.float32]


def draw_codes(rng: np.random.Generator, *shape: int) -> NDArray[np.uint8]:
    """Any E4M3 bytes but NaN."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where(codes & 127 == 127, 1, codes).astype(np.uint8)


def scales_f32(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Floats]:
    values = (rng.random(shape, np.float32) + np.float32(0.01)) * np.float32(0.01)
    return values, values


def scales_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Floats]:
    tensor = bf16(scales_f32(rng, shape)[1])
    return tensor, (np.frombuffer(tensor.data, "<u2").astype("u4") << 16).view("f4").reshape(shape)


def scales_e8m0(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Floats]:
    codes = rng.integers(100, 140, shape, dtype=np.uint8)
    codes.flat[0] = 0  # 2^-127, a float32 denormal
    return e8m0(codes), np.ldexp(np.float64(1), codes.astype(int) - 127).astype(np.float32)


def scales_u8(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Floats]:
    tensor, values = scales_e8m0(rng, shape)
    return Raw("U8", shape, raw(tensor).data), values


SCALES: dict[str, Callable[..., tuple[Tensor, Floats]]] = {
    "F32": scales_f32,
    "BF16": scales_bf16,
    "F8_E8M0": scales_e8m0,
    "U8": scales_u8,
}


def expand(scales: Floats, block: tuple[int, int], shape: tuple[int, int]) -> Floats:
    """One scale per element from one per block; the last block may be ragged."""
    whole = scales.repeat(block[0], axis=-2).repeat(block[1], axis=-1)
    return whole[..., : shape[0], : shape[1]]


def grid(block: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def fp8_config(hidden: int, inner: int, block: tuple[int, int]) -> dict[str, Any]:
    return simple_config(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=2,
        quantization_config={"quant_method": "fp8", "weight_block_size": list(block)},
    )


def numbered_fp8(
    hidden: int, inner: int, block: tuple[int, int], kind: str
) -> tuple[dict[str, Tensor], Weights]:
    """Two experts and the values that they stand for."""
    rng = np.random.default_rng(hidden + inner + sum(block))
    tensors: dict[str, Tensor] = {}
    stacks = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = (hidden, inner) if name == "down_proj" else (inner, hidden)
        values = []
        for expert in range(2):
            codes = draw_codes(rng, *shape)
            tensor, scales = SCALES[kind](rng, grid(block, shape))
            tensors[f"{SOURCE}.{expert}.{name}.weight"] = fp8(codes)
            tensors[f"{SOURCE}.{expert}.{name}.weight_scale_inv"] = tensor
            values.append(fp8_values()[codes] * expand(scales, block, shape))
        stacks.append(np.stack(values))
    return tensors, Weights(*stacks)


def fused_fp8(
    hidden: int, inner: int, block: int, transposed: bool
) -> tuple[dict[str, Tensor], Weights]:
    rng = np.random.default_rng(hidden + inner + block)
    tensors: dict[str, Tensor] = {}
    values = []
    for name, shape in (("gate_up_proj", (2 * inner, hidden)), ("down_proj", (hidden, inner))):
        stored = shape[::-1] if transposed else shape
        codes = draw_codes(rng, 2, *stored)
        tensor, scales = scales_f32(rng, (2, *grid((block, block), stored)))
        tensors[f"{SOURCE}.{name}"] = fp8(codes)
        tensors[f"{SOURCE}.{name}_scale_inv"] = tensor
        whole = fp8_values()[codes] * expand(scales, (block, block), stored)
        values.append(whole.transpose(0, 2, 1) if transposed else whole)
    gate, up = np.split(values[0], 2, axis=1)
    return tensors, Weights(gate, up, values[1])


BLOCKS = [(128, 128), (64, 64), (1, 128), (128, 1), (100, 48), (48, 200), (512, 512)]


@pytest.mark.parametrize(
    ("method", "numa", "scale"),
    [("int4", 1, "amax"), ("int4", 3, "search"), ("int8", 2, "amax"), ("int8", 6, "amax")],
)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block[0]}x{block[1]}")
def test_converting_fp8_blocks(
    block: tuple[int, int], method: str, numa: int, scale: Rule, tmp_path: Path
) -> None:
    """Rows that are no multiple of the block; parts that cut through blocks, of rows for gate
    and up, of columns for down."""
    tensors, weights = numbered_fp8(256, 384, block, "F32")
    model = write_checkpoint(tmp_path / "model", tensors, fp8_config(256, 384, block))
    report = convert(model, tmp_path / "out", method=method, numa=numa, scale=scale)
    assert report.source_bytes == sum(len(raw(tensor).data) for tensor in tensors.values())
    truth = matrices_of({0: weights})
    assert_output(tmp_path / "out", truth, {}, method=method, numa=numa, scale=scale)


@pytest.mark.parametrize("kind", SCALES)
def test_fp8_scale_dtypes(kind: str, tmp_path: Path) -> None:
    """E8M0 scales (also as U8) down to 2^-127, which is a denormal."""
    tensors, weights = numbered_fp8(128, 256, (64, 64), kind)
    model = write_checkpoint(tmp_path / "model", tensors, fp8_config(128, 256, (64, 64)))
    for method in ("int4", "int8"):
        output = tmp_path / method
        convert(model, output, method=method, numa=2)
        assert_output(output, matrices_of({0: weights}), {}, method=method, numa=2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [128, 64, 96, 40])
def test_fused_fp8(block: int, transposed: bool, tmp_path: Path) -> None:
    """Up starts inside a block where I is no multiple of the block size."""
    tensors, weights = fused_fp8(128, 384, block, transposed)
    model = write_checkpoint(tmp_path / "model", tensors, fp8_config(128, 384, (block, block)))
    for method, numa in (("int4", 3), ("int8", 2)):
        output = tmp_path / method
        convert(model, output, method=method, numa=numa)
        assert_output(output, matrices_of({0: weights}), {}, method=method, numa=numa)


def test_fp8_with_compat(tmp_path: Path) -> None:
    """The reference rounds the dequantized values to bf16 first."""
    tensors, weights = numbered_fp8(128, 128, (64, 64), "F32")
    model = write_checkpoint(tmp_path / "model", tensors, fp8_config(128, 128, (64, 64)))
    for compat in (False, True):
        output = tmp_path / str(compat)
        convert(model, output, method="int8", compat=compat)
        truth = matrices_of({0: weights})
        assert_output(output, truth, {}, method="int8", numa=1, compat=compat)


ENCODERS: dict[str, Callable[[Floats], Tensor]] = {
    "fp16": lambda values: values.astype(np.float16),
    "fp32": lambda values: values.astype(np.float32),
}


@pytest.mark.parametrize("method", ["int4", "int8"])
@pytest.mark.parametrize("encoding", ENCODERS)
def test_quantized_from_fp32(encoding: str, method: str, tmp_path: Path) -> None:
    """Values between two bf16 ones keep their place; only --compat moves them."""
    rng = np.random.default_rng(5)
    weights = Weights(
        rng.standard_normal((2, 256, 128), np.float32),
        rng.standard_normal((2, 256, 128), np.float32),
        rng.standard_normal((2, 128, 256), np.float32),
    )
    encode = ENCODERS[encoding]
    weights = Weights(*(np.asarray(encode(stack), np.float32) for stack in weights))
    model = write_checkpoint(
        tmp_path / "model",
        numbered(SOURCE, weights, encode=encode),
        simple_config(num_experts=2, moe_intermediate_size=256),
    )
    convert(model, tmp_path / "plain", method=method, numa=2)
    assert_output(tmp_path / "plain", matrices_of({0: weights}), {}, method=method, numa=2)
    convert(model, tmp_path / "compat", method=method, numa=2, compat=True)
    rounded = Weights(*map(round_to_bf16, weights))
    truth = matrices_of({0: rounded})
    assert_output(tmp_path / "compat", truth, {}, method=method, numa=2, scale="amax")
    assert read_model(tmp_path / "plain") != read_model(tmp_path / "compat")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 256), (256, 128), (128, 128), (384, 128)])
def test_fused_orientations(hidden: int, inner: int, transposed: bool, tmp_path: Path) -> None:
    """2I = H and I = H, where one of the two tensors is square, too."""
    weights = random_weights(hidden, inner)
    model = write_checkpoint(
        tmp_path / "model",
        fused(SOURCE, weights, transposed),
        simple_config(hidden_size=hidden, moe_intermediate_size=inner),
    )
    for method in ("int4", "int8"):
        convert(model, tmp_path / method, method=method)
        assert_output(tmp_path / method, matrices_of({0: weights}), {}, method=method, numa=1)


# ---- more than one chunk ---------------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one row block, so that tiny matrices have several."""
    monkeypatch.setattr(matrix_reader, "CHUNK_BYTES", 1)
    monkeypatch.setattr(matrix_reader, "STRIDED_CHUNK_BYTES", 1)
    monkeypatch.setattr(tasks, "COPY_BYTES", 100)


@pytest.mark.parametrize("method", ["int4", "int8"])
@pytest.mark.parametrize("style", ["numbered", "out-in", "in-out"])
def test_several_chunks(style: str, method: str, small_chunks: None, tmp_path: Path) -> None:
    weights = random_weights(384, 640, 2)
    transposed = style == "in-out"
    tensors = numbered(SOURCE, weights)
    tensors = tensors if style == "numbered" else fused(SOURCE, weights, transposed)
    tensors["model.embed_tokens.weight"] = np.arange(1234, dtype=np.int64)
    config = simple_config(hidden_size=384, moe_intermediate_size=640, num_experts=2)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    others = {"embed_tokens.weight": raw(tensors["model.embed_tokens.weight"])}
    for numa in (1, 5):
        output = tmp_path / str(numa)
        convert(model, output, method=method, numa=numa)
        assert_output(output, matrices_of({0: weights}), others, method=method, numa=numa)


@pytest.mark.parametrize("transposed", [False, True])
def test_chunks_cut_through_scale_blocks(
    transposed: bool, small_chunks: None, tmp_path: Path
) -> None:
    tensors, weights = fused_fp8(384, 384, 80, transposed)
    model = write_checkpoint(tmp_path / "model", tensors, fp8_config(384, 384, (80, 80)))
    convert(model, tmp_path / "out", numa=3, threads=2)
    assert_output(tmp_path / "out", matrices_of({0: weights}), {}, method="int4", numa=3)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("method", "hidden"), [("int4", 3712), ("int8", 3648)])
def test_more_columns_than_a_block(
    method: str, hidden: int, chunked: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """K > 3584: the row blocks of the format show in the bytes; chunks must respect them."""
    if chunked:
        request.getfixturevalue("small_chunks")
    weights = random_weights(hidden, 256, 1)
    config = simple_config(hidden_size=hidden, moe_intermediate_size=256, num_experts=1)
    model = write_checkpoint(tmp_path / "model", numbered(SOURCE, weights), config)
    convert(model, tmp_path / "out", method=method)
    assert_output(tmp_path / "out", matrices_of({0: weights}), {}, method=method, numa=1)


def test_layers_of_different_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MTP layer may be stored otherwise than the decoder; buffers must fit both."""
    monkeypatch.setattr(matrix_reader, "CHUNK_BYTES", 1)
    weights = {0: random_weights(256, 512, 2, seed=1), 1: random_weights(256, 512, 2, seed=2)}
    tensors = numbered("model.layers.0.mlp.experts", weights[0])
    tensors |= fused("mtp.layers.0.mlp.experts", weights[1], transposed=True)
    config = simple_config(hidden_size=256, moe_intermediate_size=512, num_experts=2)
    model = write_checkpoint(tmp_path / "model", tensors, config)
    monkeypatch.setattr(tasks, "COPY_BYTES", 1)
    convert(model, tmp_path / "out")
    assert_output(tmp_path / "out", matrices_of(weights), {}, method="int4", numa=1)
