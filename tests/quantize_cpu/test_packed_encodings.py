"""What one more row in the table of encodings must be able to say: encodings of this test only,
with packed numbers, two levels of scales, zero points and groups, from headers to packed experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import assert_output, convert, matrices_of
from helpers.families import Tensor, Weights, fp8, fp8_values, raw, simple_config, write_checkpoint
from native.test_stored_units import awq_words, e2m1, pairs, words
from numpy.typing import NDArray

from ktconv import native
from ktconv.checkpoint import Quantization, encodings, open_checkpoint
from ktconv.checkpoint.config import ModelConfig
from ktconv.checkpoint.elements import ELEMENTS, F4_E2M1, U4, U4_AWQ
from ktconv.checkpoint.encodings.base import Encoding, Parts
from ktconv.checkpoint.encodings.grids import load_groups
from ktconv.checkpoint.types import BlockGrid, GroupIndex, OuterScale, TensorRef
from ktconv.checkpoint.views import StoredView
from ktconv.errors import CheckpointError

SOURCE = "model.layers.0.mlp.experts"
HIDDEN, INNER = 256, 384
Stored = tuple[dict[str, Tensor], NDArray[np.float32]]


def groups_of(
    view: StoredView, parts: Parts, name: str, number: str, size: int, per_word: int = 1
) -> BlockGrid:
    """One number per output and `size` inputs: [N, G], or [G, N / per_word] if transposed."""
    outputs, inputs = view.stored_rows, view.stored_cols
    if view.transposed:
        outputs, inputs = inputs, outputs
    strides = (1, outputs // per_word) if view.transposed else (inputs // size, 1)
    start = view.expert * outputs * (inputs // size)
    return BlockGrid(parts[name], number, start, *strides, 1, size, view.row, view.col)


def fp4_grid(outer: str, divides: bool) -> Callable[..., Quantization]:
    def quantization(parts: Parts, view: StoredView, config: ModelConfig) -> Quantization:
        grid = groups_of(view, parts, "weight_scale", "E4M3", 16)
        second = OuterScale(parts[outer], view.expert, divides)
        fields = {name: getattr(grid, name) for name in grid.__slots__}
        return Quantization(BlockGrid(**{**fields, "outer": second}))

    return quantization


def gptq_grids(parts: Parts, view: StoredView, config: ModelConfig) -> Quantization:
    groups = GroupIndex(parts["g_idx"]) if "g_idx" in parts else None
    scale = groups_of(view, parts, "scales", "F16", 64)
    return Quantization(scale, groups_of(view, parts, "qzeros", "U4_ROWS", 64, 8), groups)


def awq_grids(parts: Parts, view: StoredView, config: ModelConfig) -> Quantization:
    scale = groups_of(view, parts, "scales", "F16", 32)
    return Quantization(scale, groups_of(view, parts, "zeros", "I8", 32))


FP4_DIVIDED = Encoding(
    "test-fp4-divided", ("U8",), F4_E2M1, "weight_packed", ("weight_scale", "weight_global_scale"),
    quantization=fp4_grid("weight_global_scale", divides=True),
)  # fmt: skip
FP4_MULTIPLIED = Encoding(
    "test-fp4-multiplied", ("U8",), F4_E2M1, "weight", ("weight_scale", "weight_scale_2"),
    quantization=fp4_grid("weight_scale_2", divides=False),
)  # fmt: skip
GPTQ = Encoding(
    "test-gptq", ("I32",), U4, "qweight", ("scales", "qzeros"), ("g_idx",), transposed=True,
    quantization=gptq_grids,
)  # fmt: skip
AWQ = Encoding(
    "test-awq", ("I32",), U4_AWQ, "qweight", ("scales", "zeros"), transposed=True,
    quantization=awq_grids,
)  # fmt: skip


@pytest.fixture(autouse=True)
def more_encodings(monkeypatch: pytest.MonkeyPatch) -> None:
    more = (*encodings.ENCODINGS, FP4_DIVIDED, FP4_MULTIPLIED, GPTQ, AWQ)
    monkeypatch.setattr(encodings, "ENCODINGS", more)


def nibbles(rng: np.random.Generator, rows: int, cols: int) -> NDArray[np.uint8]:
    return rng.integers(0, 16, (rows, cols), np.uint8)


def fp4_parts(rng: np.random.Generator, rows: int, cols: int, divides: bool) -> Stored:
    codes, scale = nibbles(rng, rows, cols), rng.integers(1, 0x7E, (rows, cols // 16), np.uint8)
    outer = np.float32(rng.uniform(0.5, 200))
    level = fp8_values()[scale]
    both = level / outer if divides else level * outer
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    parts: dict[str, Tensor] = {
        names[0]: pairs(codes), "weight_scale": fp8(scale), names[1]: np.array([outer], np.float32)
    }  # fmt: skip
    return parts, e2m1(codes) * both.repeat(16, axis=1)


def fp4_divided(rng: np.random.Generator, rows: int, cols: int) -> Stored:
    return fp4_parts(rng, rows, cols, True)


def fp4_multiplied(rng: np.random.Generator, rows: int, cols: int) -> Stored:
    return fp4_parts(rng, rows, cols, False)


def gptq(rng: np.random.Generator, rows: int, cols: int, index: NDArray[np.int32] | None) -> Stored:
    codes, zeros = nibbles(rng, rows, cols), nibbles(rng, cols // 64, rows)
    scale = rng.uniform(0.001, 1, (cols // 64, rows)).astype(np.float16)
    parts: dict[str, Tensor] = {
        "qweight": np.ascontiguousarray(words(codes).T).view(np.int32),
        "scales": scale,
        "qzeros": words(zeros).view(np.int32),
    }
    if index is not None:
        parts["g_idx"] = index
    group = np.arange(cols) // 64 if index is None else index
    values = codes.astype(np.float32) - zeros.T[:, group].astype(np.float32)
    return parts, values * scale.T[:, group].astype(np.float32)


def gptq_in_order(rng: np.random.Generator, rows: int, cols: int) -> Stored:
    return gptq(rng, rows, cols, None)


def gptq_by_activation(rng: np.random.Generator, rows: int, cols: int) -> Stored:
    return gptq(rng, rows, cols, rng.permutation(np.arange(cols, dtype=np.int32) // 64))


def awq(rng: np.random.Generator, rows: int, cols: int) -> Stored:
    codes = nibbles(rng, rows, cols)
    scale = rng.uniform(0.001, 1, (cols // 32, rows)).astype(np.float16)
    zeros = rng.integers(-8, 16, scale.shape).astype(np.int8)
    parts: dict[str, Tensor] = {
        "qweight": np.ascontiguousarray(awq_words(codes).T).view(np.int32),
        "scales": scale,
        "zeros": zeros,
    }
    values = codes.astype(np.float32) - zeros.T.astype(np.float32).repeat(32, axis=1)
    return parts, values * scale.T.astype(np.float32).repeat(32, axis=1)


STORED: dict[str, tuple[Encoding, Callable[..., Stored]]] = {
    "fp4 divided": (FP4_DIVIDED, fp4_divided),
    "fp4 multiplied": (FP4_MULTIPLIED, fp4_multiplied),
    "gptq": (GPTQ, gptq_in_order),
    "gptq by activation": (GPTQ, gptq_by_activation),
    "awq": (AWQ, awq),
}


def checkpoint(directory: Path, kind: str, **changes: Any) -> tuple[Path, Weights, int]:
    """A model of two experts, the values that it stands for, and the bytes of its experts."""
    rng = np.random.default_rng(len(kind))
    tensors: dict[str, Tensor] = {}
    stacks = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        rows, cols = (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
        values = []
        for expert in range(2):
            parts, value = STORED[kind][1](rng, rows, cols)
            tensors |= {f"{SOURCE}.{expert}.{name}.{part}": one for part, one in parts.items()}
            values.append(value)
        stacks.append(np.stack(values))
    tensors |= changes
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 2}
    model = write_checkpoint(directory, tensors, simple_config(**sizes))
    return model, Weights(*stacks), sum(len(raw(one).data) for one in tensors.values())


def test_units_are_those_of_the_library() -> None:
    assert {one.name for one in ELEMENTS} == set(native.DTYPES)
    for one in ELEMENTS:
        unit = (one.unit_bytes, one.unit_rows, one.unit_cols)
        assert unit == native.stored_unit(one.name)


@pytest.mark.parametrize(("method", "numa"), [("int4", 1), ("int4", 3), ("int8", 2)])
@pytest.mark.parametrize("kind", STORED)
def test_numbered_experts(kind: str, method: str, numa: int, tmp_path: Path) -> None:
    model, weights, nbytes = checkpoint(tmp_path / "model", kind)
    assert open_checkpoint(model).layers[0].encoding == STORED[kind][0].name
    report = convert(model, tmp_path / "out", method=method, numa=numa)
    assert report.source_bytes == nbytes
    assert_output(tmp_path / "out", matrices_of({0: weights}), {}, method=method, numa=numa)


def test_fused_experts(tmp_path: Path) -> None:
    """Two fused tensors whose columns share bytes, with an outer scale for each expert."""
    rng = np.random.default_rng(5)
    tensors: dict[str, Tensor] = {}
    values = []
    for name, shape in (("gate_up_proj", (2 * INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
        experts = [fp4_multiplied(rng, *shape) for _ in range(2)]
        stored = [{part: raw(one) for part, one in parts.items()} for parts, _ in experts]
        for part, suffix in (("weight", ""), ("weight_scale", "_scale")):
            dtype, size, _ = stored[0][part]
            whole = b"".join(one[part].data for one in stored)
            tensors[f"{SOURCE}.{name}{suffix}"] = type(stored[0][part])(dtype, (2, *size), whole)
        outer = [np.frombuffer(one["weight_scale_2"].data, np.float32) for one in stored]
        tensors[f"{SOURCE}.{name}_scale_2"] = np.concatenate(outer)
        values.append(np.stack([value for _, value in experts]))
    gate, up = np.split(values[0], 2, axis=1)
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 2}
    model = write_checkpoint(tmp_path / "model", tensors, simple_config(**sizes))
    convert(model, tmp_path / "out", method="int4", numa=3)
    truth = matrices_of({0: Weights(gate, up, values[1])})
    assert_output(tmp_path / "out", truth, {}, method="int4", numa=3)


def test_groups_of_a_slice_are_those_of_its_grid() -> None:
    """Numbers in the file count from the tensor's first group, the grid from the slice's."""
    tensor = TensorRef("down_proj.g_idx", Path("model.safetensors"), "I32", (256,), 0, 1024)
    slice_ = BlockGrid(tensor, "F16", 0, 1, 1, 1, 64, 0, 128)
    index = GroupIndex(tensor, 128)
    numbers = np.array([3, 2, 2, 3], "<i4")
    assert load_groups(index, slice_, 2, numbers.tobytes()).tolist() == [1, 0, 0, 1]
    for beyond in (1, 4):
        numbers[1] = beyond
        with pytest.raises(CheckpointError, match="its scales are those of groups 2 to 3"):
            load_groups(index, slice_, 2, numbers.tobytes())


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "reason"),
    [
        ("fp4 divided", "1.up_proj.weight_packed", np.zeros((INNER, 8), np.uint8), "shape"),
        ("fp4 divided", "1.up_proj.weight_global_scale", np.zeros(1, np.float32), "the scale 0.0"),
        (
            "gptq by activation",
            "1.up_proj.g_idx",
            np.full(HIDDEN, 4, np.int32),
            "group numbers 4 to 4",
        ),
        ("awq", "1.up_proj.odd", np.zeros(1, np.float32), "AWQ or GPTQ"),
    ],
)
def test_packed_tensors_that_do_not_fit_are_refused(
    kind: str, name: str, tensor: Tensor, reason: str, tmp_path: Path
) -> None:
    model, _, _ = checkpoint(tmp_path / "model", kind, **{f"{SOURCE}.{name}": tensor})
    with pytest.raises(CheckpointError, match=reason) as error:
        convert(model, tmp_path / "out", method="int8")
    assert f"{SOURCE}.1.up_proj." in str(error.value)
