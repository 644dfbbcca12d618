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

Copy = Callable[..., Path]


def mapped(output: Path, **sizes: Any) -> Any:
    return verify(Request(output, threads=2, **sizes))


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
    with pytest.raises(UsageError, match="--tp 0 is not a number of GPUs"):
        mapped(for_gpu(), tp=[0])


def test_sizes_mean_nothing_for_cpus(converted: Copy) -> None:
    with pytest.raises(UsageError, match="--ep applies to GPU experts"):
        mapped(converted(), ep=[2])


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
