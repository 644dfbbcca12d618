"""Conversions that hypothesis makes up: whatever goes in, the truth comes out."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import (
    all_files,
    assert_output,
    assert_same,
    convert,
    expected_experts,
    matrices_of,
    read_header,
)
from helpers.families import (
    Raw,
    Tensor,
    Weights,
    bf16,
    fp8,
    fp8_values,
    fused,
    numbered,
    raw,
    simple_config,
    write_checkpoint,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ktconv.source import PROJECTIONS
from ktconv.source.reading import matrices as matrix_reader

pytestmark = pytest.mark.slow

Floats = NDArray[np.float32]
SOURCE = "model.layers.{}.mlp.experts"
TILE = {"int4": 128, "int8": 64}
STYLES = ("gate_proj", "w1", "out-in", "in-out")


def draw_values(rng: np.random.Generator, *shape: int) -> Floats:
    """Rows of any magnitude, some zero, some with denormals or one large value."""
    values = rng.standard_normal(shape).astype(np.float32)
    values *= np.exp2(rng.integers(-30, 30, (*shape[:-1], 1))).astype(np.float32)
    kind = rng.integers(0, 8, shape[:-1])
    values[kind == 0] = 0
    values[kind == 1] *= np.float32(2.0**-120)
    values[kind == 2, rng.integers(shape[-1])] = np.float32(3e38)
    return np.where(np.isfinite(values), values, np.float32(1))


def draw_weights(rng: np.random.Generator, experts: int, hidden: int, inner: int) -> Weights:
    wide = (experts, inner, hidden)
    return Weights(
        draw_values(rng, *wide), draw_values(rng, *wide), draw_values(rng, experts, hidden, inner)
    )


def as_f16(values: Floats) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        return np.clip(values, -65504, 65504).astype(np.float16)


def truncated(values: Floats) -> Floats:
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def store(
    source: str, weights: Weights, encoding: str, style: str
) -> tuple[dict[str, Tensor], Weights]:
    """The tensors of a layer, and the values that they stand for."""
    encode: Any = {"bf16": bf16, "fp16": as_f16, "fp32": np.ascontiguousarray}[encoding]
    decoded = {
        "bf16": truncated,
        "fp16": lambda values: as_f16(values).astype(np.float32),
        "fp32": lambda values: values,
    }[encoding]
    if style in ("out-in", "in-out"):
        tensors = fused(source, weights, style == "in-out", encode=encode)
    else:
        names = ("w1", "w3", "w2") if style == "w1" else ("gate_proj", "up_proj", "down_proj")
        tensors = numbered(source, weights, names, encode)
    return tensors, Weights(*map(decoded, weights))


def store_fp8(
    source: str, rng: np.random.Generator, sizes: tuple[int, int, int], block: tuple[int, int]
) -> tuple[dict[str, Tensor], Weights]:
    experts, hidden, inner = sizes
    tensors: dict[str, Tensor] = {}
    stacks = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = (hidden, inner) if name == "down_proj" else (inner, hidden)
        stack = np.empty((experts, *shape), np.float32)
        for expert in range(experts):
            codes = rng.integers(0, 256, shape, dtype=np.uint8)
            codes[codes & 127 == 127] = 0
            grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
            scales = np.exp2(rng.uniform(-20, 5, grid)).astype(np.float32)
            whole = scales.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]
            tensors[f"{source}.{expert}.{name}.weight"] = fp8(codes)
            tensors[f"{source}.{expert}.{name}.weight_scale_inv"] = scales
            stack[expert] = fp8_values()[codes] * whole
        stacks.append(stack)
    return tensors, Weights(*stacks)


OTHERS: dict[str, tuple[str, Tensor]] = {  # source name: output name, tensor
    "model.embed_tokens.weight": ("embed_tokens.weight", np.arange(300, dtype=np.int64)),
    "model.norm.weight": ("norm.weight", bf16(np.ones(3))),
    "model.layers.1.flag": ("blk.1.flag", np.array(True)),
    "empty": ("empty", np.empty((0, 5), np.float16)),
    "größe.重み.🙂": ("größe.重み.🙂", fp8(np.arange(7, dtype=np.uint8))),
}


def others_of(case: dict[str, Any]) -> dict[str, tuple[str, Tensor]]:
    """OTHERS, and a router of each layer, whose shape has to be that of the experts."""
    router = np.ones((case["experts"], case["hidden"]), np.float32)
    routers = {
        f"model.layers.{index}.mlp.gate.weight": (f"blk.{index}.mlp.gate.weight", router)
        for index in range(case["layers"])
    }
    return {**OTHERS, **routers}


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    method = draw(st.sampled_from(sorted(TILE)))
    numa, tiles = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1)]))
    case: dict[str, Any] = {
        "method": method,
        "numa": numa,
        "scale": draw(st.sampled_from(["amax", "search"])),
        "hidden": TILE[method] * draw(st.integers(1, 3)),
        "inner": TILE[method] * numa * tiles,
        "experts": draw(st.integers(1, 3)),
        "layers": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "layout": draw(st.sampled_from(["safetensors", "safetensors", "layers"])),
        "experts_only": draw(st.booleans()),
        "max_shard_size": draw(st.sampled_from([0, 1, 2, 5, 100])),
        "threads": draw(st.integers(1, 3)),
        "verify": draw(st.booleans()),
        "chunk": draw(st.sampled_from([1, 20_000, 4 << 20])),
        "shards": draw(st.integers(1, 3)),
    }
    case["encoding"] = draw(st.sampled_from(["bf16", "fp16", "fp32", "fp8"]))
    if case["encoding"] == "fp8":
        case["block"] = draw(st.tuples(*[st.sampled_from([1, 32, 48, 64, 100, 128, 300])] * 2))
    else:
        case["style"] = draw(st.sampled_from(STYLES))
    return case


def build(case: dict[str, Any], root: Path) -> tuple[Path, dict[int, Weights]]:
    """Write the checkpoint; the values of its layers."""
    rng = np.random.default_rng(case["seed"])
    sizes = case["experts"], case["hidden"], case["inner"]
    tensors: dict[str, Tensor] = {name: tensor for name, (_, tensor) in others_of(case).items()}
    layers = {}
    for index in range(case["layers"]):
        source = SOURCE.format(index)
        if case["encoding"] == "fp8":
            stored, layers[index] = store_fp8(source, rng, sizes, case["block"])
        else:
            weights = draw_weights(rng, *sizes)
            stored, layers[index] = store(source, weights, case["encoding"], case["style"])
        tensors |= stored
    config = simple_config(
        num_experts=case["experts"],
        hidden_size=case["hidden"],
        moe_intermediate_size=case["inner"],
        num_hidden_layers=case["layers"],
        quantization_config={"weight_block_size": list(case["block"])} if "block" in case else None,
    )
    return write_checkpoint(root / "model", tensors, config, case["shards"]), layers


def largest(experts: dict[str, Raw], case: dict[str, Any]) -> int:
    """The smallest --max-shard-size that leaves room for each tensor and its header."""
    tensors = [*experts.values(), *(raw(tensor) for _, tensor in others_of(case).values())]
    return max(len(tensor.data) for tensor in tensors) + 1024


def check_elements_aligned(output: Path) -> None:
    """Every tensor starts where its element type may lie, packed weights at 64 bytes."""
    items = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "BOOL": 1, "F8_E4M3": 1, "I8": 64}
    for shard in output.glob("*.safetensors"):
        start, header = read_header(shard)
        del header["__metadata__"]
        for name, entry in header.items():
            assert (start + entry["data_offsets"][0]) % items[entry["dtype"]] == 0, name


@settings(max_examples=36, deadline=None)
@given(cases())
def test_anything(case: dict[str, Any]) -> None:
    event(f"{case['encoding']} {case.get('style', '')}")
    with tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as folder:
        root = Path(folder)
        model, layers = build(case, root)
        matrices = matrices_of(layers)
        experts = expected_experts(matrices, case["method"], case["numa"], scale=case["scale"])
        options = {key: case[key] for key in ("method", "numa", "scale", "layout", "experts_only")}
        if case["max_shard_size"]:
            options["max_shard_size"] = largest(experts, case) * case["max_shard_size"]
        before = matrix_reader.CHUNK_BYTES, matrix_reader.STRIDED_CHUNK_BYTES
        matrix_reader.CHUNK_BYTES = matrix_reader.STRIDED_CHUNK_BYTES = case["chunk"]
        try:
            convert(model, root / "out", **options, threads=case["threads"], verify=case["verify"])
        finally:
            matrix_reader.CHUNK_BYTES, matrix_reader.STRIDED_CHUNK_BYTES = before
        kept = {} if case["experts_only"] else others_of(case)
        others = {new: raw(tensor) for new, tensor in kept.values()}
        limits = {key: case[key] for key in ("method", "numa", "scale", "layout")}
        limit = options.get("max_shard_size", 0)
        assert_output(root / "out", matrices, others, **limits, max_shard_size=limit)
        check_elements_aligned(root / "out")
        convert(model, root / "again", **options, threads=1, max_memory=64 << 30)
        assert_same(all_files(root / "out"), all_files(root / "again"))
        manifest = json.loads((root / "out" / "ktconv.json").read_text())
        assert len(manifest["units"]) >= case["layers"]
        assert {proj for _, _, proj in matrices} == set(PROJECTIONS)
