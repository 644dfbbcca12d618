"""Where tokens go: distinct experts, fresh routings, recorded ids."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.packages import needs_torch
from safetensors.numpy import save_file

from ktconv.bench.routing import check_replay, check_trace, parse_routing
from ktconv.errors import UsageError

TOKENS, EXPERTS, TOP_K = 50, 16, 4


def drawn(text: str, count: int = 3, seed: int = 0, experts: int = EXPERTS) -> list[Any]:
    return list(islice(parse_routing(text).iterations(TOKENS, experts, TOP_K, seed), count))


@pytest.mark.parametrize("text", ["balanced", "concentrated", "zipf:1.2"])
@pytest.mark.parametrize("experts", [TOP_K, EXPERTS])
def test_tokens_have_distinct_experts_in_range(text: str, experts: int) -> None:
    for ids in drawn(text, experts=experts):
        assert ids.shape == (TOKENS, TOP_K) and ids.dtype == np.int64 and ids.flags.c_contiguous
        assert ids.min() >= 0 and ids.max() < experts
        assert all(len(set(token)) == TOP_K for token in ids.tolist())


@pytest.mark.parametrize("text", ["balanced", "concentrated", "zipf:1.2"])
def test_iterations_are_fresh_and_seeds_repeat(text: str) -> None:
    first, again, other = drawn(text), drawn(text), drawn(text, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], other[0])


def test_concentrated_tokens_share_their_experts() -> None:
    for ids in drawn("concentrated"):
        assert (ids == ids[0]).all()


def test_balanced_and_zipf_loads() -> None:
    balanced, zipf = (
        np.bincount(np.concatenate(drawn(text, 100)).ravel(), minlength=EXPERTS)
        for text in ("balanced", "zipf:1.5")
    )
    mean = 100 * TOKENS * TOP_K / EXPERTS
    assert abs(balanced / mean - 1).max() < 0.1
    assert zipf[0] > 2 * zipf[4] > 2 * zipf[-1] > 0


def save(path: Path, **arrays: Any) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file(arrays, path)
    return path


@pytest.mark.parametrize("name", ["ids.npz", "ids.safetensors"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_a_trace_is_replayed_in_order(name: str, dtype: Any, tmp_path: Path) -> None:
    ids = np.arange(28, dtype=dtype).reshape(7, 4)
    path = save(tmp_path / name, ids=ids, other=np.zeros((7, 4), np.float32))
    routing = parse_routing(f"trace:{path}")
    first, second = islice(routing.iterations(5, 28, 4, 0), 2)
    assert np.array_equal(first, ids[:5])
    assert np.array_equal(second, ids[[5, 6, 0, 1, 2]])


def test_a_trace_of_several_steps_and_skipped_experts(tmp_path: Path) -> None:
    ids = np.array([[[0, -1], [2, 3]], [[1, 0], [-1, -1]]], np.int32)
    routing = parse_routing(f"trace:{save(tmp_path / 'a.npz', any_name=ids)}")
    check_trace(routing, experts=4, top_k=2)
    assert next(routing.iterations(4, 4, 2, 0)).tolist() == ids.reshape(4, 2).tolist()


def test_a_trace_must_fit_the_layer(tmp_path: Path) -> None:
    routing = parse_routing(f"trace:{save(tmp_path / 'a.npz', ids=np.array([[0, 1], [2, 7]]))}")
    check_trace(routing, experts=8, top_k=2)
    with pytest.raises(UsageError, match="token 1 to expert 7, but there are 7"):
        check_trace(routing, experts=7, top_k=2)
    with pytest.raises(UsageError, match="has 2 experts per token, the shape 3"):
        check_trace(routing, experts=8, top_k=3)


@pytest.mark.parametrize(("experts", "top_k"), [(7, 2), (8, 3)])
def test_hints_name_what_was_given(experts: int, top_k: int, tmp_path: Path) -> None:
    """A --model has no --shape."""
    routing = parse_routing(f"trace:{save(tmp_path / 'a.npz', ids=np.array([[0, 1], [2, 7]]))}")
    for of_model in (False, True):
        with pytest.raises(UsageError) as caught:
            check_trace(routing, experts, top_k, of_model=of_model)
        told = f"{caught.value} {caught.value.hint}"
        assert ("shape" in told) is not of_model


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"ids": np.array([[0, -2]])}, "below -1"),
        ({"ids": np.array([[0, 1, -1, -1], [3, 2, 0, 3]])}, "sends token 1 to expert 3 twice"),
        ({"ids": np.zeros((0, 4), np.int64)}, "no usable"),
        ({"ids": np.zeros((4, 0), np.int64)}, "no usable"),
        ({"ids": np.zeros((0, 0), np.int64)}, "no usable"),
        ({"ids": np.zeros((2, 0, 3), np.uint8)}, "no usable"),
        ({"ids": np.array([[0, 2**64 - 1]], np.uint64)}, "too large"),
        ({"ids": np.full((4, 2), 2**64 - 1, np.uint64)}, "too large"),
        ({"ids": np.full((4, 2), -1)}, "only -1: no token goes to an expert"),
        ({"ids": np.zeros((4, 2), np.float32)}, "0 arrays that could be"),
        ({"a": np.zeros((4, 2), np.int64), "b": np.zeros((4, 2), np.int64)}, "2 arrays"),
        ({"ids": np.zeros(4, np.int64)}, "0 arrays"),
    ],
)
@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_what_is_no_trace(name: str, arrays: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        parse_routing(f"trace:{save(tmp_path / name, **arrays)}")


@needs_torch
def test_arrays_beside_the_ids_may_be_of_any_type(tmp_path: Path) -> None:
    """bf16 and FP8 are none of NumPy's, and objects would need pickle."""
    import torch
    from safetensors.torch import save_file as save_torch_file

    ids = torch.tensor([[0, 1], [2, 3]])
    others = {"weights": torch.ones(2, 2, dtype=torch.bfloat16)}
    others["codes"] = torch.ones(2, 2).to(torch.float8_e4m3fn)
    save_torch_file({"ids": ids, **others}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", ids=ids.numpy(), notes=np.array([["a", None]], object))
    for name in ("a.safetensors", "a.npz"):
        routing = parse_routing(f"trace:{tmp_path / name}")
        assert next(routing.iterations(2, 4, 2, 0)).tolist() == ids.tolist()


def test_what_is_replayed_must_name_an_expert(tmp_path: Path) -> None:
    ids = np.full((6, 2), -1)
    ids[4, 1] = 3
    routing = parse_routing(f"trace:{save(tmp_path / 'a.npz', ids=ids)}")
    check_replay(routing, 5)
    check_replay(routing, 1000)
    with pytest.raises(UsageError, match="the first 4 tokens of the trace go to no expert"):
        check_replay(routing, 4)
    check_replay(parse_routing("balanced"), 1)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    for name in ("a.npz", "a.safetensors"):
        (tmp_path / name).write_bytes(b"nothing of that kind")
        with pytest.raises(UsageError, match="damaged or no"):
            parse_routing(f"trace:{tmp_path / name}")
    (tmp_path / "a.txt").write_text("1 2")
    with pytest.raises(UsageError, match="is not a trace file"):
        parse_routing(f"trace:{tmp_path / 'a.txt'}")
    with pytest.raises(UsageError, match="there is no trace file"):
        parse_routing(f"trace:{tmp_path / 'nowhere.npz'}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "uniform",
        "balanced:2",
        "trace:",
        "zipf",
        "zipf:",
        "zipf:x",
        "zipf:0",
        "zipf:-1",
        "zipf:nan",
        "zipf:99",
    ],
)
def test_what_is_no_routing(text: str) -> None:
    with pytest.raises(UsageError, match="routing"):
        parse_routing(text)
