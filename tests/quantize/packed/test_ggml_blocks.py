"""Weights as GGUF files have them, from the tensors of a layer to rows for the packers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import assert_same, convert, read_model
from helpers.families import Tensor, simple_config, write_checkpoint
from helpers.ggml import F32, U8, blocks_of, values_of
from helpers.gguf_files import Blocks, write_gguf
from helpers.harmless import assert_safe, run

from ktconv import native
from ktconv.errors import CheckpointError
from ktconv.families.config import Config
from ktconv.source.config import interpret_config
from ktconv.source.elements import BLOCKS, GRID_BLOCKS
from ktconv.source.encodings import candidates, stored_matrix
from ktconv.source.encodings.gguf import GGUF
from ktconv.source.reading.matrices import MatrixReader, buffer_bytes, chunk_rows
from ktconv.source.reading.reader import BOUNCE_BYTES, SourceReader
from ktconv.source.types import ExpertMatrix, TensorRef
from ktconv.source.views import StoredView

pytestmark = pytest.mark.slow

EXPERTS, ROWS, COLS = 3, 256, 768
CONFIG = interpret_config(Config({"hidden_size": COLS, "moe_intermediate_size": ROWS}))
FLOATS = {"F32": np.float32, "F16": np.float16}


class Stack:
    """A tensor [experts, rows, columns] of one type in a file, with a factor beside it."""

    def __init__(self, folder: Path, name: str, factor: F32 | None = None) -> None:
        rng = np.random.default_rng(len(name))
        stored, self.values = stored_and_values(rng, name)
        self.parts = {"weight": self._tensor(folder, "weight", name, stored, self.values.shape)}
        if factor is not None:
            self.parts["scale"] = self._tensor(folder, "scale", "F32", factor, factor.shape)
            with np.errstate(over="ignore"):
                self.values = self.values * factor.reshape(-1, 1, 1)

    def _tensor(
        self, folder: Path, part: str, dtype: str, stored: Any, shape: tuple[int, ...]
    ) -> TensorRef:
        file = folder / f"{part}.gguf"
        file.write_bytes(bytes(64) + stored.tobytes())
        return TensorRef(f"blk.0.ffn_up_exps.{part}", file, dtype, shape, 64, stored.nbytes)

    def matrix(self, expert: int) -> tuple[str, ExpertMatrix]:
        view = StoredView(ROWS, COLS, ROWS, COLS, EXPERTS, expert)
        found, matrix = stored_matrix(self.parts, lambda _: view, CONFIG, wrong_shape)
        return found.encoding.name, matrix


def stored_and_values(rng: np.random.Generator, name: str) -> tuple[Any, F32]:
    shape = EXPERTS, ROWS, COLS
    if name in FLOATS:
        floats = rng.standard_normal(shape, np.float32).astype(FLOATS[name])
        return floats, floats.astype(np.float32)
    if name == "BF16":
        words = rng.integers(0, 0x7F00, shape, np.uint16)
        return words, (words.astype(np.uint32) << 16).view(np.float32)
    blocks = blocks_of(rng, name, EXPERTS * ROWS, COLS)
    return blocks, values_of(name, blocks).reshape(shape)


def wrong_shape(tensor: TensorRef, expected: str) -> CheckpointError:
    return CheckpointError(f"{tensor.name} {list(tensor.shape)} is not {expected}")


def decoded(matrix: ExpertMatrix) -> F32:
    buffer = np.empty(buffer_bytes(matrix, min(chunk_rows(matrix), matrix.rows)), np.uint8)
    reader = MatrixReader(SourceReader([], []), matrix)
    pieces = reader.decoded(buffer, np.empty(BOUNCE_BYTES, np.uint8))
    return np.concatenate([values.copy() for _, values in pieces])


def packed(source: native.Matrix) -> tuple[U8, F32]:
    found = np.empty(native.packed_size("int4", source.rows, source.cols), np.uint8)
    scale = np.empty(source.rows, np.float32)
    native.quantize_pack("int4", source, found, scale)
    return found, scale


def test_every_type_is_here() -> None:
    names = {one.name for one in GGUF}
    assert names == {
        *(f"gguf-{name.lower()}" for name in (*BLOCKS, *GRID_BLOCKS)),
        *("bf16", "fp16", "fp32", "gguf-bf16", "gguf-fp16", "gguf-fp32"),
    }


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", *BLOCKS, *GRID_BLOCKS])
def test_a_stack_of_experts(name: str, tmp_path: Path) -> None:
    """All rows, and the columns of a part that begins within a block; with and without factors."""
    plain = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}.get(name)
    for factor in (None, np.array([2, -0.3, 0], np.float32), np.array(-0.7, np.float32)):
        stack = Stack(tmp_path, name, factor)
        for expert in (0, 2):
            encoding, matrix = stack.matrix(expert)
            of_floats = plain if factor is None else f"gguf-{plain}"
            assert encoding == (of_floats if plain else f"gguf-{name.lower()}")
            values = stack.values[expert]
            np.testing.assert_array_equal(decoded(matrix), values)
            reader = MatrixReader(SourceReader([], []), matrix)
            buffer = np.empty(buffer_bytes(matrix, 128), np.uint8)
            with reader.open() as fd:
                count = reader.read(fd, range(128, 256), buffer, np.empty(BOUNCE_BYTES, np.uint8))
            assert count == matrix.nbytes(128) == stack.parts["weight"].nbytes // 6
            view = reader.view(range(128, 256), reader.load_scales(), buffer, 384, 384)
            part = np.ascontiguousarray(values[128:, 384:])
            expected = packed(native.Matrix(part.reshape(-1).view(np.uint8), "F32", 128, 384))
            for ours, theirs in zip(packed(view), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["Q4_K", "IQ3_S", "F32"])
def test_a_nan_and_what_a_factor_makes_infinite(name: str, tmp_path: Path) -> None:
    stack = Stack(tmp_path, name, np.array([1, 1, 3e38], np.float32))
    matrix = stack.matrix(2)[1]
    reader = MatrixReader(SourceReader([], []), matrix)
    row, col = np.argwhere(np.abs(stack.values[2]) == np.inf)[0]
    message = str(reader.not_finite(int(row), int(col)))
    assert f"the value at [2, {row}, {col}] times its scale 3e+38 in blk.0.ffn_up" in message
    file = stack.parts["weight"].file
    data = bytearray(file.read_bytes())
    unit = matrix.element.unit_bytes
    first = 64 + matrix.start * unit
    data[first : first + unit] = {"F32": b"\0\0\xc0\x7f"}.get(
        name, b"\1\x7e" + b"\x11" * (unit - 2)
    )
    file.write_bytes(data)
    message = str(reader.not_finite(0, 0))
    assert "blk.0.ffn_up_exps.weight in" in message
    assert "contains a NaN or an infinity at [2, 0, 0]" in message


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (np.array([1, np.inf, 1], np.float32), "of expert 1 is inf, not a finite number"),
        (np.array([1, np.nan, 1], np.float32), "of expert 1 is nan, not a finite number"),
        (np.ones(4, np.float32), r"scale has shape \[4\], which fits no way to scale"),
        (np.ones((3, 2), np.float32), r"scale has shape \[3, 2\], which fits no way to scale"),
    ],
)
def test_factors_that_are_refused(factor: F32, expected: str, tmp_path: Path) -> None:
    stack = Stack(tmp_path, "Q8_0", np.ones(3, np.float32))
    stack.parts["scale"] = stack._tensor(tmp_path, "scale", "F32", factor, factor.shape)
    with pytest.raises(CheckpointError, match=expected):
        MatrixReader(SourceReader([], []), stack.matrix(1)[1]).load_scales()


def test_what_is_beside_blocks_is_named(tmp_path: Path) -> None:
    weight = Stack(tmp_path, "Q8_0").parts["weight"]
    other = TensorRef("blk.0.ffn_up_exps.weight_scale", weight.file, "F32", (3,), 0, 12)
    with pytest.raises(CheckpointError, match=r"ffn_up_exps.weight_scale \(F32\)"):
        candidates({"weight": weight, "weight_scale": other})
    with pytest.raises(CheckpointError, match="weight has dtype I8, which is not supported"):
        candidates({"weight": TensorRef(weight.name, weight.file, "I8", weight.shape, 0, 1)})


def test_a_factor_beside_floats_is_of_gguf_only(tmp_path: Path) -> None:
    weight = Stack(tmp_path, "F32").parts["weight"]
    file = Path("model.safetensors")
    parts = {
        "weight": TensorRef("up_proj.weight", file, "F32", weight.shape, 0, weight.nbytes),
        "scale": TensorRef("up_proj.scale", file, "F32", (3,), 0, 12),
    }
    with pytest.raises(CheckpointError, match="is F32 and needs none"):
        candidates(parts)


def test_all_types_from_a_file_to_packed_experts(tmp_path: Path) -> None:
    """A layer of each type, in parts that cut blocks of a down projection, converts as its values
    in float32 do, and is verified."""
    rng = np.random.default_rng(1)
    kinds = (*BLOCKS, *GRID_BLOCKS)
    tensors: dict[str, Any] = {}
    floats: dict[str, Tensor] = {}
    for layer, kind in enumerate(kinds):
        for word in ("gate", "up", "down"):
            rows, cols = (256, 768) if word == "down" else (768, 256)
            blocks = Blocks(kind, blocks_of(rng, kind, rows, cols).reshape(1, rows, -1))
            tensors[f"blk.{layer}.ffn_{word}_exps.weight"] = blocks
            floats[f"model.layers.{layer}.mlp.experts.0.{word}_proj.weight"] = blocks.values[0]
    sizes = {"expert_count": 1, "expert_used_count": 1}
    config = {"embedding_length": 256, "expert_feed_forward_length": 768, **sizes}
    model = write_gguf(tmp_path / "all.gguf", tensors, {"block_count": len(kinds), **config})
    own = simple_config(
        num_hidden_layers=len(kinds), num_experts=1, hidden_size=256, moe_intermediate_size=768
    )
    reference = write_checkpoint(tmp_path / "reference", floats, own)
    for method, numa in (("int4", 2), ("int8", 4)):
        for source in (model, reference):
            convert(source, tmp_path / f"{source.stem}-{method}", method=method, numa=numa)
        outputs = [read_model(tmp_path / f"{name}-{method}") for name in ("all", "reference")]
        assert_same(*outputs)
    result = run("verify", tmp_path / "all-int4", "--source", model, "--level", "weights")
    assert_safe(result, 0)
