"""Slots of w13 and w2, and how many GPUs can share the experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.corrupt import forget_manifest, found
from helpers.gpu_corrupt import edit_config, find, group

from ktconv.errors import UsageError
from ktconv.verify import Request, verify
from ktconv.verify.gpu.mapping import LayerShape, expert_parallel, placed, tensor_parallel
from ktconv.verify.gpu.quantization import Group

Copy = Callable[..., Path]


def mapped(output: Path, **sizes: Any) -> Any:
    return verify(Request(output, threads=2, **sizes))


def layer(intermediate: int, group_size: int | None, bits: int = 4) -> LayerShape:
    return LayerShape(0, range(8), intermediate, Group("", ["Linear"], bits, group_size, ""))


def test_sizes_are_for_information_unless_asked_for(for_gpu: Copy) -> None:
    """Intermediate size 256 in groups of 128, three experts."""
    result = mapped(for_gpu())
    assert result.passed
    about = result.facts["mapping"]
    possible = {row["size"]: row["possible"] for row in about["tensor_parallel"]}
    assert possible == {1: True, 2: True, 4: False, 8: False}
    assert {row["size"] for row in about["expert_parallel"] if row["possible"]} == {1}
    assert about["experts"] == 6


def test_sizes_that_are_asked_for_must_be_possible(for_gpu: Copy) -> None:
    assert mapped(for_gpu(), tp=[1, 2], ep=[1, 3]).passed
    failures = found(mapped(for_gpu(), tp=[2, 4]), "mapping", "tensor parallel")
    assert len(failures) == 1 and "group size 128" in failures[0]["message"]
    failures = found(mapped(for_gpu(), ep=[3, 2]), "mapping", "expert parallel")
    assert "3 experts give GPUs 1-2 each" in failures[0]["message"]
    with pytest.raises(UsageError, match="--tp 0 is no number of GPUs"):
        mapped(for_gpu(), tp=[0])


def test_sizes_mean_nothing_for_cpus(converted: Copy) -> None:
    with pytest.raises(UsageError, match="--ep is about experts for GPUs"):
        mapped(converted(), ep=[2])


@pytest.mark.parametrize(("shape", "size", "reason"), [
    (layer(768, 128), 2, None),
    (layer(768, 128), 4, "192 of the 768 columns of down (w2)"),
    (layer(768, 64), 4, None),
    (layer(768, 64), 5, "intermediate size 768 is not divisible by 5"),
    (layer(768, None), 8, None),  # one scale per row: columns can be cut anywhere
    (layer(72, None), 6, "12 columns of down (w2) of 4 bits do not fill int32 words"),
    (layer(72, None, bits=8), 6, None),
])  # fmt: skip
def test_tensor_parallel(shape: LayerShape, size: int, reason: str | None) -> None:
    facts = tensor_parallel([shape], size)
    assert facts["possible"] == (reason is None)
    assert reason is None or reason in facts["reason"]


def test_expert_parallel() -> None:
    assert placed(range(8), 4, "linear") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert placed(range(8), 4, "round_robin") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert placed(range(8), 3, "linear") == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert placed(range(2), 3, "linear") == [[0], [1], []]
    assert expert_parallel([layer(256, 128)], 4)["possible"]
    assert not expert_parallel([layer(256, 128)], 3)["possible"]
    for size in range(1, 10):
        for placement in ("linear", "round_robin"):
            ranks = placed([1, 4, 5, 9, 12], size, placement)
            assert len(ranks) == size and sorted(expert for rank in ranks for expert in rank) == [
                1,
                4,
                5,
                9,
                12,
            ]


def test_two_names_for_one_slot(copied: Copy) -> None:
    """Expert 2's gate as the w1 of expert 1, which has a gate_proj already."""
    output = copied()
    module = "model.layers.0.mlp.experts"
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        _rename(output, f"{module}.2.gate_proj.{part}", f"{module}.1.w1.{part}")
    result = mapped(output)
    failures = [f.as_dict() for f in result.failures if f.level == "mapping"]
    assert any("both go to w13, first half (w1)" in one["message"] for one in failures)
    assert any("nothing fills w13, first half (w1)" in one["message"] for one in failures)


def _rename(output: Path, old: str, new: str) -> None:
    """A shorter name in a shard's header, with spaces behind it in place of what it lacks."""
    shard = find(output, old).file
    named = json.dumps(old).encode()
    shard.write_bytes(shard.read_bytes().replace(named, json.dumps(new).encode().ljust(len(named))))


def test_engines_ask_by_the_usual_names(copied: Copy) -> None:
    """A target that fits w1 only is of no use to them."""
    output = forget_manifest(copied())  # of ours, the whole section must be what ktconv writes
    edit_config(
        output,
        lambda c: group(c).update(targets=[r"re:.*layers\.0.*_proj", r"re:.*1.*experts.*w[123]"]),
    )
    failures = found(mapped(output), "structure", "config")
    assert {failure["layer"] for failure in failures} == {1}
