"""How every encoding of experts is cut: numbers beside weights stay with their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import gguf_files
from helpers.encoded import HIDDEN, INNER, KINDS, encoded_model
from helpers.families import simple_config, write_checkpoint
from helpers.gpt_oss import SIZES as GPT_OSS
from helpers.gpt_oss import Blocks
from helpers.nemotron import write_nemotron

from ktconv.plan.cuts import Expert, cut_bytes, grains, grids_of, shard_of, slices
from ktconv.plan.placement.parallel import why_not_cut
from ktconv.source import ExpertMatrix, open_checkpoint
from ktconv.source.reading.matrices import source_bytes

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
SIZES = (1, 2, 3, 4, 6, 12)


def possible(expert: Expert) -> list[int]:
    return [tp for tp in SIZES if not why_not_cut(INNER, tp, grains(expert))]


def index(listed: list[Any]) -> tuple[Any, ...]:
    return tuple(slice(*one) if isinstance(one, list) else one for one in listed)


def spread(grid: Array, block: tuple[int, int], shape: tuple[int, int]) -> Array:
    """The number of each element: of a grid that begins at the first element of a matrix."""
    if not grid.shape:
        return np.full(shape, grid)
    rows, cols = (np.arange(size) // step for size, step in zip(shape, block, strict=True))
    return grid[np.minimum(rows, len(grid) - 1)][:, np.minimum(cols, grid.shape[1] - 1)]


def check_parts(matrix: ExpertMatrix, cut: dict[str, Any], half: int, tp: int) -> None:
    """Each GPU's elements meet the numbers that they met in the whole matrix."""
    names = dict(grids_of(matrix))
    assert cut.keys() - {"g_idx"} == {"weight", *names}
    weights = np.arange(matrix.rows * matrix.cols).reshape(matrix.rows, matrix.cols)
    for rank in range(tp):
        at = index(cut["weight"][rank]["source"])
        part = weights[at]
        parameter = np.full(cut["weight"][rank]["shape"], -1)
        parameter[index(cut["weight"][rank]["destination"])] = part
        top = half * (len(parameter) // 2) if len(parameter) > len(part) else 0
        assert (parameter[top : top + len(part)] == part).all()
        for name, grid in names.items():
            block = (grid.block_rows, grid.block_cols)
            counts = [-(-size // step) for size, step in zip(weights.shape, block, strict=True)]
            numbers = np.arange(counts[0] * counts[1]).reshape(counts)
            if not cut[name][rank]["source"]:
                numbers = numbers.reshape(())
            found = numbers[index(cut[name][rank]["source"])]
            if "g_idx" in cut and name in ("scale", "zero_point"):
                of_input = np.arange(matrix.cols) * counts[1] // matrix.cols
                groups = of_input[index(cut["g_idx"][rank]["source"])]
                assert found.shape[1] == counts[1]  # whole: any input may have any group
                assert (found[:, groups] == numbers[:, of_input][at]).all()
            else:
                whole = spread(numbers, block, weights.shape)
                assert (spread(found, block, part.shape) == whole[at]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_encoding(kind: str, tmp_path: Path) -> None:
    layer = open_checkpoint(encoded_model(tmp_path, kind)[0]).layers[0]
    for expert in layer.experts:
        sizes = possible(expert)
        cuts_groups = "short last" in kind and "activation" not in kind
        assert 1 in sizes and (3 in sizes) != cuts_groups  # 128 columns each
        assert cut_bytes(expert, 1) == sum(map(source_bytes, expert.values()))
        for tp in sizes:
            cut = slices(expert, tp)
            assert list(cut) == ["w1", "w3", "w2"]
            for proj, matrix in expert.items():
                check_parts(matrix, cut[shard_of(proj, True)], int(proj == "up"), tp)
            # Nothing is lost, and only what all GPUs need is there several times.
            assert tp * cut_bytes(expert, tp) >= cut_bytes(expert, 1)
            again = tp * cut_bytes(expert, tp) - cut_bytes(expert, 1)
            assert again <= (tp - 1) * sum(
                source_bytes(one) - one.nbytes(one.rows) for one in expert.values()
            )


@pytest.mark.parametrize(("kind", "words"), [
    ("fp8 block", {"the block size 128"}),
    ("int4 packed, group 32", {"the group size 32", "the 8 weights that U4 stores together"}),
    ("fp8 channel", set()),
    ("gptq by activation", {
        "the 8 weights that U4 stores together", "the 8 rows whose zero points are stored together",
    }),
])  # fmt: skip
def test_what_a_cut_must_not_divide(kind: str, words: set[str], tmp_path: Path) -> None:
    layer = open_checkpoint(encoded_model(tmp_path, kind)[0]).layers[0]
    assert {grain.words for grain in grains(layer.experts[0])} == words


def test_bytes_of_cut_tensors(tmp_path: Path) -> None:
    """FP8 with blocks of 128: codes, and a float32 for each block."""
    layer = open_checkpoint(encoded_model(tmp_path, "fp8 block")[0]).layers[0]
    numbers, blocks = 3 * HIDDEN * INNER, 3 * (HIDDEN // 128) * (INNER // 128)
    assert cut_bytes(layer.experts[0], 1) == numbers + 4 * blocks
    assert cut_bytes(layer.experts[0], 3) == (numbers + 4 * blocks) // 3


def test_bytes_that_every_gpu_has(tmp_path: Path) -> None:
    """Scales of the rows of down, one for each output."""
    layer = open_checkpoint(encoded_model(tmp_path, "fp8 channel")[0]).layers[0]
    numbers, gate_up = 3 * HIDDEN * INNER, 2 * INNER
    assert cut_bytes(layer.experts[0], 2) == (numbers + 2 * gate_up) // 2 + 2 * HIDDEN


def test_blocks_of_ggml(tmp_path: Path) -> None:
    path = gguf_files.model(tmp_path, types={"down_exps": "Q4_0", "up_exps": "Q8_0"})
    expert = open_checkpoint(path).layers[0].experts[0]
    # Those of up are along its inputs, which are not cut.
    assert [one.words for one in grains(expert)] == ["the 32 weights that Q4_0 stores together"]
    assert list(slices(expert, 2)) == ["w1", "w3", "w2"]
    rows, cols = expert["down"].rows, expert["down"].cols
    whole = 4 * rows * cols + rows * cols // 32 * (34 + 18)
    assert cut_bytes(expert, 2) == whole // 2


def test_experts_without_a_gate(tmp_path: Path) -> None:
    write_nemotron(tmp_path)
    expert = open_checkpoint(tmp_path).layers[0].experts[0]
    cut = slices(expert, 2)
    assert list(cut) == ["w1", "w2"]
    up = expert["up"]
    assert cut["w1"]["weight"][1] == {
        "source": [[up.rows // 2, up.rows], [0, up.cols]],
        "destination": [[0, up.rows // 2], [0, up.cols]],
        "shape": [up.rows // 2, up.cols],
    }


def test_biases_count(tmp_path: Path) -> None:
    """Those of gate and up are cut, that of down is not."""
    config = simple_config(model_type="gpt_oss", **GPT_OSS)
    model = write_checkpoint(tmp_path, Blocks().mxfp4, config)
    expert = open_checkpoint(model).layers[0].experts[0]
    bias = sum(4 * matrix.rows for proj, matrix in expert.items() if proj != "down")
    down = 4 * expert["down"].rows
    rest = cut_bytes(expert, 1) - bias - down
    assert cut_bytes(expert, 2) == (rest + bias) // 2 + down
    cut = slices(expert, 2)
    rows, width = expert["up"].rows, expert["down"].rows
    assert cut["w3"]["bias"][1]["source"] == [[rows // 2, rows]]
    assert cut["w3"]["bias"][1]["destination"] == [[rows // 2, rows]]
    assert cut["w2"]["bias"][1]["source"] == [[0, width]]
