"""The output of inspect --explain for checkpoints of known families, and maps guessed for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.family_list import MADE
from helpers.family_models import write

from ktconv.inspect.explanation import explain, lines_of
from ktconv.source import ModelSource, open_checkpoint
from ktconv.source.map_guess import guess_map
from ktconv.source.naming_map import parse_map
from ktconv.source.reading.reader import SourceReader
from ktconv.source.shards import read_shards, select_shards
from ktconv.verify.second_reader import SecondReader

# One of each way to store experts: numbered, stacked, together, apart, turned, encoded.
STORED = {
    "Kimi-K3": "each expert has tensors of its own",
    "Qwen3-VL": "all experts in one tensor, gate and up in one tensor, gate first, "
    "stored [in, out]",
    "gpt-oss MXFP4": "all experts in one tensor, gate and up in one tensor, interleaved",
    "Step-3.5 FP8": "all experts in one tensor",
    "Nemotron-3, stacked": "all experts in one tensor, without a gate",
    "Mistral-Small-4 FP8": "all experts in one tensor, gate and up in one tensor, gate first",
}


@pytest.mark.parametrize("name", STORED)
def test_every_tensor_is_explained(tmp_path: Path, name: str) -> None:
    write(MADE[name], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    tensors = list(read_shards(select_shards(tmp_path)).tensors)
    found = explain(checkpoint)
    assert {group["stored"] for group in found["experts"]} == {STORED[name]}
    experts = sum(one["tensors"] for group in found["experts"] for one in group["patterns"])
    others = sum(one["tensors"] for one in found["other_patterns"])
    assert experts + others == len(tensors)
    assert "router" in {one["what"] for one in found["beside_experts"]}
    assert found["config_used"] and found["family_row"]
    assert not found["router"].startswith("not known")
    assert all(str(line).isprintable() for line in lines_of(found))

    # The same names, as if nobody knew them: the guess finds the same weights.
    guess = guess_map(tensors, checkpoint.config.checked, "model")
    assert guess.map is not None
    text = guess.map
    if "interleaved" in STORED[name]:
        text = text.replace('order = "gate first"', 'order = "interleaved"')
    mapped = open_checkpoint(ModelSource(tmp_path, map=parse_map(text, "guess")))
    readers = [
        SecondReader(one, SourceReader(one.files, one.sources)) for one in (checkpoint, mapped)
    ]
    assert [one.index for one in mapped.layers] == [one.index for one in checkpoint.layers]
    for first, second in zip(checkpoint.layers, mapped.layers, strict=True):
        assert (first.encoding, first.projections) == (second.encoding, second.projections)
        last = len(first.experts) - 1
        for projection in first.projections:
            mine, other = first.experts[last][projection], second.experts[last][projection]
            assert (mine.tensor, mine.start, mine.row_stride, mine.quantization) == (
                other.tensor, other.start, other.row_stride, other.quantization
            )  # fmt: skip
            usual, again = (
                reader.expert(layer, last, projection).values(range(mine.rows), range(mine.cols))
                for reader, layer in zip(readers, (first, second), strict=True)
            )
            np.testing.assert_array_equal(usual, again)
