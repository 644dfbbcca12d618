"""Importance matrices of llama.cpp, read as those that `ktconv stats` records."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.imatrix_files import tensors_of, write_imatrix

from ktconv.errors import UsageError
from ktconv.stats.importance import open_importance, read_importance
from ktconv.stats.importance_file import LayerImportance
from ktconv.stats.origin import Sizes

GATE, UP, DOWN = (f"blk.3.ffn_{one}_exps.weight" for one in ("gate", "up", "down"))


def layer(seed: int, experts: int, hidden: int, intermediate: int) -> LayerImportance:
    """Means of very different sizes; the first expert has no tokens."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 100_000, experts)
    counts[0] = 0
    means = [
        (np.exp(rng.normal(0, 5, (experts, size))) * (counts > 0)[:, None]).astype(np.float32)
        for size in (hidden, intermediate)
    ]
    return LayerImportance(means[0], means[1], counts)


LAYERS = {3: layer(3, 4, 6, 5), 10: layer(10, 2, 6, 3)}
TENSORS = tensors_of(LAYERS)
Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "matrices",
    [
        ("gate", "up", "down"),
        ("down", "gate"),
        ("up", "down"),
        ("gate_up", "down"),
        ("gate_up", "gate", "down"),
    ],
)
def test_sums_become_means(matrices: tuple[str, ...], tmp_path: Path) -> None:
    """Whichever of gate and up are there, under any name of the file."""
    path = write_imatrix(tmp_path / "importance.safetensors", tensors_of(LAYERS, matrices))
    file = open_importance(path)
    assert file.kind == "imatrix" and file.origin is None
    assert dict(file.sizes) == {3: Sizes(4, 6, 5), 10: Sizes(2, 6, 3)}
    assert list(file.sizes) == [3, 10]
    found = read_importance(path)
    assert found.origin is None and list(found.layers) == [3, 10]
    for index, expected in LAYERS.items():
        one = found.layers[index]
        assert one.gate_up.dtype == one.down.dtype == np.float32
        assert one.counts.dtype == np.int64
        np.testing.assert_array_equal(one.counts, expected.counts)
        np.testing.assert_allclose(one.gate_up, expected.gate_up, rtol=2e-7, atol=0)
        np.testing.assert_allclose(one.down, expected.down, rtol=2e-7, atol=0)


def test_gate_and_up_may_differ_by_rounding(tmp_path: Path) -> None:
    tensors = dict(TENSORS)
    tensors[f"{UP}.in_sum2"] = tensors[f"{UP}.in_sum2"] * np.float32(1.0001)
    found = read_importance(write_imatrix(tmp_path / "file", tensors))
    np.testing.assert_allclose(found.layers[3].gate_up, LAYERS[3].gate_up, rtol=2e-7)


# ---- files that are refused ------------------------------------------------------------


def without(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def set_to(name: str, value: Any) -> Change:
    return lambda tensors: tensors.update({name: value})


def element(name: str, value: float, row: int = 1) -> Change:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][row, -1] = value

    return change


def every_count(row: int, value: float) -> Change:
    """In all tensors of layer 3."""
    return lambda tensors: [
        element(f"{one}.counts", value, row)(tensors) for one in (GATE, UP, DOWN)
    ]


def times(name: str, factor: float) -> Change:
    return lambda tensors: tensors.update({name: tensors[name] * np.float32(factor)})


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(f"{DOWN}.in_sum2", f"{DOWN}.counts"), "layer 3 has no sums of inputs of down"),
        (
            without(*(f"{one}.{kind}" for one in (GATE, UP) for kind in ("in_sum2", "counts"))),
            "layer 3 has no sums of inputs of gate and up",
        ),
        (without(f"{GATE}.counts"), f"no tensor {GATE}.counts"),
        (without(f"{UP}.in_sum2"), f"no tensor {UP}.in_sum2"),
        (set_to(f"{UP}.in_sum2", ones(4, 7)), f"{GATE} and {UP} contradict"),
        (set_to(f"{GATE}.in_sum2", ones(3, 6)), r"counts has shape \[4, 1\], not \[3, 1\]"),
        (set_to(f"{GATE}.in_sum2", ones(24)), r"in_sum2 has shape \[24\]"),
        (set_to(f"{GATE}.in_sum2", ones(2, 2, 6)), r"in_sum2 has shape \[2, 2, 6\]"),
        (set_to(f"{GATE}.counts", ones(4)), r"counts has shape \[4\], not \[4, 1\]"),
        (set_to(f"{GATE}.counts", ones(1, 4)), r"counts has shape \[1, 4\], not \[4, 1\]"),
        (set_to(f"{GATE}.in_sum2", np.ones((4, 6), np.float16)), f"{GATE}.in_sum2 is F16, not F32"),
        (
            lambda t: t.update({f"{GATE}.in_sum2": ones(1, 24), f"{GATE}.counts": ones(1, 1)}),
            "one number of tokens for all experts",
        ),
        (
            lambda t: t.update({f"{DOWN}.in_sum2": ones(3, 5), f"{DOWN}.counts": ones(3, 1)}),
            f"{GATE} and {DOWN} contradict",
        ),
        (element(f"{GATE}.in_sum2", float("nan")), "negative or not finite"),
        (element(f"{DOWN}.in_sum2", float("inf")), "negative or not finite"),
        (element(f"{UP}.in_sum2", -1e-30), "negative or not finite"),
        (element(f"{GATE}.in_sum2", 1, row=0), "values of experts without tokens"),
        (times(f"{UP}.in_sum2", 1.1), f"{GATE} and {UP} contradict"),
        (element(f"{UP}.counts", 7), f"{GATE}.counts and {UP}.counts contradict"),
        (element(f"{DOWN}.counts", 7), f"{GATE}.counts and {DOWN}.counts contradict"),
        (every_count(2, 7.5), "counts has values that are no numbers of tokens"),
        (every_count(2, -7), "counts has values that are no numbers of tokens"),
        (every_count(2, 1e30), "counts has values that are no numbers of tokens"),
        (every_count(2, float("inf")), "counts has values that are no numbers of tokens"),
        (every_count(2, float("nan")), "contradict"),
        (
            lambda t: [t.pop(name) for name in list(t) if "exps" in name],
            "without tensors of experts",
        ),
    ],
)
def test_damaged_tensors(change: Change, said: str, tmp_path: Path) -> None:
    tensors = dict(TENSORS)
    change(tensors)
    path = write_imatrix(tmp_path / "bad.gguf", tensors)
    with pytest.raises(UsageError, match=said) as caught:
        read_importance(path)
    assert str(path) in str(caught.value) and caught.value.hint


def test_files_that_are_none(tmp_path: Path) -> None:
    good = write_imatrix(tmp_path / "good", TENSORS).read_bytes()
    for name, content in (("cut", good[:-40]), ("cut header", good[:300]), ("magic", b"GGUF")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=name) as caught:
            read_importance(tmp_path / name)
        assert "llama-imatrix" in str(caught.value.hint)
    model = write_imatrix(tmp_path / "model", TENSORS, general_type="model")
    with pytest.raises(UsageError, match="is a GGUF file, but not an imatrix"):
        read_importance(model)


@pytest.mark.parametrize("name", ["output.weight", "blk.0.ffn_down_exps.weight"])
def test_the_old_form_is_named(name: str, tmp_path: Path) -> None:
    """n; length and name, calls, number of values, values; last chunk, data set."""
    path = tmp_path / "imatrix.gguf"
    entry = struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii3f", 9, 3, 1, 2, 3)
    path.write_bytes(struct.pack("<i", 1) + entry + struct.pack("<ii", 9, 5) + b"prose")
    with pytest.raises(UsageError, match="imatrix in the old binary form") as caught:
        read_importance(path)
    assert "current llama-imatrix" in str(caught.value.hint)
