"""FP8 with block scales: any block size, ragged ends, fused slices, every scale dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import (
    Raw,
    Tensor,
    bf16,
    e8m0,
    fp8,
    fp8_values,
    read_matrix,
    simple_config,
    write_checkpoint,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktconv.errors import CheckpointError
from ktconv.source import PROJECTIONS, open_checkpoint
from ktconv.source.encodings.grids import load_block_scale, scale_grid_shape

SOURCE = "model.layers.0.mlp.experts"
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def expand(scales: Any, block: tuple[int, int], rows: int, cols: int) -> Any:
    """One scale per element from one per block, the plain way."""
    whole = np.kron(scales, np.ones(block, np.float32))
    return whole[..., :rows, :cols]


def draw_fp8(rng: np.random.Generator, *shape: int) -> Any:
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where(codes & 127 == 127, 0, codes).astype(np.uint8)


def grid_of(block: tuple[int, int], rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // block[0]), -(-cols // block[1])


def config(hidden: int, inner: int, block: Any, **changes: Any) -> dict[str, Any]:
    quantization = {"quant_method": "fp8", "weight_block_size": block}
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": 2}
    return simple_config(**sizes, quantization_config=quantization, **changes)


SIZES = st.sampled_from([32, 48, 64, 96, 100, 128, 160])
BLOCKS = st.sampled_from([16, 32, 48, 64, 128, 200])
QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@QUICK
@given(hidden=SIZES, inner=SIZES, rows=BLOCKS, cols=BLOCKS, seed=st.integers(0, 99))
def test_numbered(tmp_path: Path, hidden: int, inner: int, rows: int, cols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    expected = {}
    for expert in range(2):
        for projection, name in NAMES.items():
            shape = (hidden, inner) if projection == "down" else (inner, hidden)
            codes = draw_fp8(rng, *shape)
            scales = rng.random(grid_of((rows, cols), *shape), np.float32) + 0.1
            tensors[f"{SOURCE}.{expert}.{name}.weight"] = fp8(codes)
            tensors[f"{SOURCE}.{expert}.{name}.weight_scale_inv"] = scales
            values = fp8_values()[codes] * expand(scales, (rows, cols), *shape)
            expected[expert, projection] = values
    write_checkpoint(tmp_path, tensors, config(hidden, inner, [rows, cols]))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layers[0].encoding == "fp8-block"
    assert checkpoint.other_tensors == []
    for (expert, projection), values in expected.items():
        matrix = checkpoint.layers[0].experts[expert][projection]  # type: ignore[index]
        np.testing.assert_array_equal(read_matrix(matrix), values)


@QUICK
@given(
    hidden=SIZES,
    inner=SIZES,
    block=BLOCKS,
    transposed=st.booleans(),
    suffix=st.sampled_from(["_scale_inv", ".weight_scale_inv"]),
    seed=st.integers(0, 99),
)
def test_fused(
    tmp_path: Path, hidden: int, inner: int, block: int, transposed: bool, suffix: str, seed: int
) -> None:
    """up starts within a block where I is not a multiple of the block size."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    values = {}
    for name, (rows, cols) in {
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
    }.items():
        stored = (cols, rows) if transposed else (rows, cols)
        codes = draw_fp8(rng, 2, *stored)
        scales = rng.random((2, *grid_of((block, block), *stored)), np.float32) + 0.1
        tensors[f"{SOURCE}.{name}" + (".weight" if suffix[0] == "." else "")] = fp8(codes)
        tensors[f"{SOURCE}.{name}{suffix}"] = scales
        whole = fp8_values()[codes] * np.stack(
            [expand(grid, (block, block), *stored) for grid in scales]
        )
        values[name] = whole.transpose(0, 2, 1) if transposed else whole
    write_checkpoint(tmp_path, tensors, config(hidden, inner, [block, block]))
    [layer] = open_checkpoint(tmp_path).layers
    gate, up = np.split(values["gate_up_proj"], 2, axis=1)
    expected = {"gate": gate, "up": up, "down": values["down_proj"]}
    for expert, matrices in enumerate(layer.experts):
        for projection in PROJECTIONS:
            found = read_matrix(matrices[projection])
            np.testing.assert_array_equal(found, expected[projection][expert])


def fp8_checkpoint(directory: Path, scales: Tensor | None, **changes: Any) -> Path:
    """Experts of 128 x 128 with blocks of 64 x 64; expert 1's up has the given scales."""
    tensors: dict[str, Tensor] = {}
    for expert in range(2):
        for name in NAMES.values():
            tensors[f"{SOURCE}.{expert}.{name}.weight"] = fp8(np.full((128, 128), 0x38, np.uint8))
            tensors[f"{SOURCE}.{expert}.{name}.weight_scale_inv"] = np.ones((2, 2), np.float32)
    odd = f"{SOURCE}.1.up_proj.weight_scale_inv"
    if scales is None:
        del tensors[odd]
    else:
        tensors[odd] = scales
    return write_checkpoint(directory, tensors, {**config(128, 128, [64, 64]), **changes})


def test_scale_dtypes(tmp_path: Path) -> None:
    exponents = np.array([[0, 1], [127, 254]], np.uint8)
    powers = np.ldexp(np.float64(1), exponents.astype(int) - 127).astype(np.float32)
    assert powers[0, 0] == 2.0**-127
    scales: tuple[Tensor, ...] = (e8m0(exponents), exponents, powers, bf16(powers))
    for scale in scales:
        fp8_checkpoint(tmp_path, scale)
        matrix = open_checkpoint(tmp_path).layers[0].experts[1]["up"]
        assert matrix.scale is not None
        stored = matrix.scale.tensor
        data = stored.file.read_bytes()[stored.offset : stored.offset + stored.nbytes]
        grid = load_block_scale(matrix.scale, 128, 128, data)
        assert grid.dtype == np.float32
        assert grid.flags.c_contiguous
        assert grid.shape == scale_grid_shape(matrix.scale, 128, 128) == (2, 2)
        np.testing.assert_array_equal(grid.view(np.uint32), powers.view(np.uint32))


def test_bad_scale_of_a_fused_expert(tmp_path: Path) -> None:
    """up of expert 1 starts in its third row of blocks; the error counts from the tensor's."""
    scales = np.ones((2, 4, 2), np.float32)
    scales[1, 3, 1] = np.inf
    tensors: dict[str, Tensor] = {
        f"{SOURCE}.gate_up_proj": fp8(np.zeros((2, 256, 128), np.uint8)),
        f"{SOURCE}.down_proj": fp8(np.zeros((2, 128, 128), np.uint8)),
        f"{SOURCE}.gate_up_proj_scale_inv": scales,
        f"{SOURCE}.down_proj_scale_inv": np.ones((2, 2, 2), np.float32),
    }
    write_checkpoint(tmp_path, tensors, config(128, 128, [64, 64]))
    experts = open_checkpoint(tmp_path).layers[0].experts
    for expert, projection in ((0, "up"), (1, "gate"), (1, "down")):
        read_matrix(experts[expert][projection])  # type: ignore[index]
    with pytest.raises(CheckpointError) as caught:
        read_matrix(experts[1]["up"])
    assert "gate_up_proj_scale_inv: the scale of block (3, 1) of expert 1 is inf" in str(
        caught.value
    )


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, -np.inf])
def test_impossible_scales(tmp_path: Path, value: float) -> None:
    scales = np.ones((2, 2), np.float32)
    scales[1, 0] = value
    matrix = open_checkpoint(fp8_checkpoint(tmp_path, scales)).layers[0].experts[1]["up"]
    with pytest.raises(CheckpointError) as caught:
        read_matrix(matrix)
    assert f"{SOURCE}.1.up_proj.weight_scale_inv: the scale of block (1, 0) is" in str(caught.value)


def test_e8m0_nan(tmp_path: Path) -> None:
    scales = e8m0(np.array([[127, 255], [127, 127]], np.uint8))
    matrix = open_checkpoint(fp8_checkpoint(tmp_path, scales)).layers[0].experts[1]["up"]
    with pytest.raises(CheckpointError, match=r"block \(0, 1\) is nan"):
        read_matrix(matrix)


@pytest.mark.parametrize(
    ("scales", "changes", "reason"),
    [
        (
            np.ones((1, 2), np.float32),
            {},
            "has shape [1, 2], which fits no way to scale",
        ),
        (np.ones((2, 2), np.float64), {}, "weight_scale_inv is F64, which is not supported"),
        (Raw("F8_E4M3", (2, 2), b"0000"), {}, "weight_scale_inv is F8_E4M3, which is not"),
        (None, {}, "up_proj.weight is F8_E4M3, but it has no scale (weight_scale_inv or"),
        (np.ones((2, 2), np.float32), {"quantization_config": {}}, "has shape [2, 2], which fits"),
        (
            np.ones((2, 2), np.float32),
            {"quantization_config": {"weight_block_size": [128, 128]}},
            "0.gate_proj.weight_scale_inv has shape [2, 2], which fits no way to scale",
        ),
    ],
)
def test_bad_grid(
    tmp_path: Path, scales: Tensor | None, changes: dict[str, Any], reason: str
) -> None:
    fp8_checkpoint(tmp_path, scales, **changes)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert reason in str(caught.value)
    assert SOURCE in str(caught.value)


def test_oblong_blocks_of_transposed_weights(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        f"{SOURCE}.gate_up_proj": fp8(np.zeros((2, 128, 256), np.uint8)),
        f"{SOURCE}.down_proj": fp8(np.zeros((2, 128, 128), np.uint8)),
        f"{SOURCE}.gate_up_proj_scale_inv": np.ones((2, 2, 2), np.float32),
        f"{SOURCE}.down_proj_scale_inv": np.ones((2, 2, 1), np.float32),
    }
    write_checkpoint(tmp_path, tensors, config(128, 128, [64, 128]))
    with pytest.raises(CheckpointError, match=r"block size \[64, 128\] is not supported"):
        open_checkpoint(tmp_path)


def test_minimax_m2_as_on_the_hub(tmp_path: Path) -> None:
    """w1, w3, w2 in FP8 under block_sparse_moe, with the expert size in intermediate_size."""
    source = "model.layers.0.block_sparse_moe.experts"
    rng = np.random.default_rng(1)
    tensors: dict[str, Tensor] = {}
    for expert in range(2):
        for name in ("w1", "w2", "w3"):
            rows, cols = (256, 128) if name == "w2" else (128, 256)
            tensors[f"{source}.{expert}.{name}.weight"] = fp8(draw_fp8(rng, rows, cols))
            grid = grid_of((128, 128), rows, cols)
            tensors[f"{source}.{expert}.{name}.weight_scale_inv"] = np.full(grid, 0.5, np.float32)
    settings_of_model = {
        "model_type": "minimax_m2",
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_local_experts": 2,
        "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    write_checkpoint(tmp_path, tensors, settings_of_model)
    [layer] = open_checkpoint(tmp_path).layers
    assert (layer.source, layer.encoding, layer.intermediate_size) == (source, "fp8-block", 128)
    name = layer.experts[1]["up"].tensor.name
    assert name == f"{source}.1.w3.weight"
