"""Routers to call: vectors computed by hand from vLLM's and Hugging Face's rules, and refusals."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from helpers.paths import ROOT
from msgspec.structs import replace

from ktconv.errors import UsageError
from ktconv.families.family import RouterSpec
from ktconv.formats.decode import f32_to_bf16
from ktconv.runtime import route
from ktconv.system.arrays import F32
from ktconv.system.pool import Pool

LOGITS = np.array([[2, 1, 0, -1, 1.5, 1.4, -2, 3]], np.float32)
BIAS = np.array([0, 0.3, 0, 0, 0, 0, 0, -0.5], np.float32)


def a_batch(tokens: int = 20, experts: int = 32) -> F32:
    return np.random.default_rng(0).standard_normal((tokens, experts)).astype(np.float32)


@pytest.mark.parametrize(
    ("router", "k", "options", "ids", "weights"),
    [
        (route.softmax, 2, {"renormalise": False}, [7, 0], [0.499231, 0.183657]),
        (route.softmax, 2, {}, [7, 0], [0.731059, 0.268941]),
        (route.sigmoid, 2, {"renormalise": False}, [7, 0], [0.952574, 0.880797]),
        (route.sigmoid, 2, {}, [7, 0], [0.519575, 0.480425]),
        (route.sigmoid, 2, {"bias": BIAS}, [1, 0], [0.453551, 0.546449]),
        (route.sigmoid, 2, {"bias": BIAS, "scale": 2.5}, [1, 0], [1.133877, 1.366123]),
        (route.softmax, 3, {"groups": 4, "keep": 2}, [7, 0, 1], [0.665241, 0.244728, 0.090031]),
        (
            route.sigmoid,
            3,
            {"bias": BIAS, "groups": 4, "keep": 2, "scale": 2.5},
            [1, 0, 4],
            [0.752294, 0.906382, 0.841323],
        ),
        (route.softmax, 2, {"by_logits": True}, [7, 0], [0.731059, 0.268941]),
        (route.sigmoid, 1, {"by_logits": True, "renormalise": False}, [7], [0.952574]),
    ],
)
def test_vectors(
    router: route.ScoredRouter, k: int, options: Any, ids: list[int], weights: list[float]
) -> None:
    found_weights, found_ids = router(LOGITS, k, **options)
    assert found_ids.dtype == np.int64 and found_weights.dtype == np.float32
    assert found_ids.tolist() == [ids]
    np.testing.assert_allclose(found_weights, [weights], atol=6e-7)


def test_grouped_is_the_router_of_deepseek() -> None:
    weights, ids = route.grouped(LOGITS, 3, 4, 2, bias=BIAS, scale=2.5)
    assert ids.tolist() == [[1, 0, 4]]
    np.testing.assert_allclose(weights, [[0.752294, 0.906382, 0.841323]], atol=6e-7)
    weights, ids = route.grouped(LOGITS, 3, 4, 2, scoring="softmax", renormalise=False)
    assert ids.tolist() == [[7, 0, 1]]
    np.testing.assert_allclose(weights, [[0.499231, 0.183657, 0.067563]], atol=6e-7)
    best = route.grouped(LOGITS, 1, 2, 1, group_score="top2")[1]
    assert best.tolist() == [[7]]


def test_masked_groups_are_never_chosen() -> None:
    """Not even where a negative bias makes all others worse than a mask of 0 would be."""
    logits = np.array([[3, 2.9, -3, -3.1, -3.2, -3.3, -3.4, -3.5]], np.float32)
    bias = np.full(8, -2, np.float32)
    weights, ids = route.sigmoid(logits, 2, bias=bias, groups=4, keep=1)
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.501244, 0.498756]], atol=6e-7)
    zero = RouterSpec("sigmoid", 2, correction=True, n_group=4, topk_group=1, masked=0.0)
    assert route.by_spec(zero, logits, bias=bias)[1].tolist() == [[2, 3]]  # where a family does so


def test_sqrtsoftplus_and_a_table_of_tokens() -> None:
    table = np.array([[3, 1], [0, 2], [1, 1]])
    tokens = np.array([1, 0, 1])
    logits = a_batch(3, 4)
    weights, ids = route.sqrtsoftplus(logits, 2, table=table, tokens=tokens, scale=1.5)
    assert ids.tolist() == [[0, 2], [3, 1], [0, 2]]
    scores = np.sqrt(np.log1p(np.exp(np.take_along_axis(logits, ids, 1))))
    np.testing.assert_allclose(weights, 1.5 * scores / scores.sum(1, keepdims=True), rtol=1e-6)


def test_the_factor_is_applied_once_and_last() -> None:
    for options in ({"renormalise": False}, {}, {"groups": 4, "keep": 2}, {"by_logits": True}):
        plain = route.softmax(a_batch(), 4, **options)[0]
        assert np.array_equal(route.softmax(a_batch(), 4, scale=2.0, **options)[0], 2 * plain)


def test_all_experts() -> None:
    weights, ids = route.softmax(a_batch(), 32, renormalise=False)
    assert (np.sort(ids, axis=1) == np.arange(32)).all()
    assert (np.diff(weights, axis=1) <= 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


def test_no_tokens() -> None:
    weights, ids = route.sigmoid(a_batch(0), 4, bias=a_batch(1)[0], groups=2, keep=1)
    assert weights.shape == ids.shape == (0, 4)
    table = np.zeros((3, 2), np.int64)
    assert route.softmax(a_batch(0), 2, table=table, tokens=ids[:, 0])[1].shape == (0, 2)


def test_threads() -> None:
    spec = RouterSpec("sigmoid", 4, correction=True)
    bias = a_batch(1)[0]
    with Pool(2) as pool:
        found = route.by_spec(spec, a_batch(500), bias=bias, pool=pool)
    expected = route.by_spec(spec, a_batch(500), bias=bias)
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


def test_scales_of_a_spec() -> None:
    spec = RouterSpec("softmax", 2, stored_scale=True, expert_scale=True)
    each = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.float32)
    weights, ids = route.by_spec(spec, LOGITS, scale=np.array([0.5], np.float32), expert_scale=each)
    plain = route.softmax(LOGITS, 2)[0]
    np.testing.assert_allclose(weights, plain * each[ids] / 2, rtol=1e-6)


def test_the_examples_of_the_page() -> None:
    page = (ROOT / "docs/routers.md").read_text(encoding="utf-8")
    config = {"model_type": "glm4_moe", "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1}
    known = {
        "logits": a_batch(20, 64),
        "bias": a_batch(1, 64)[0],
        "tid2eid": np.zeros((9, 6), np.int64),
        "tokens": np.zeros(20, np.int64),
        "config": config,
        "layer": 3,
    }
    blocks = page.split("```python\n")[1:]
    assert len(blocks) == 2
    for block in blocks:
        exec(block.split("```")[0], known)
    ids: Any = known["ids"]
    assert ids.shape == (20, 4)


# ---- weights ---------------------------------------------------------------------------


def test_identity_experts_are_taken_out() -> None:
    """Renormalised with the others; expert 0 gets no phantom load."""
    ids, weights = np.array([[1, 5], [4, 3]]), np.array([[0.6, 0.4], [0.3, 0.7]], np.float32)
    left, added = route.identity_experts(ids, weights, 4)
    assert left.tolist() == [[1, -1], [-1, 3]]
    np.testing.assert_array_equal(added, np.array([0.4, 0.3], np.float32))
    assert left.dtype == np.int64 and added.dtype == np.float32
    assert ids.tolist() == [[1, 5], [4, 3]]
    none = route.identity_experts(ids.astype(np.int32), weights, 6)
    assert none[0].tolist() == ids.tolist() and none[1].tolist() == [0, 0]


def test_a_weight_on_the_input() -> None:
    """An expert whose weights are all 1, with SiLU: silu(.5) * .5, not silu(1) * .5."""
    x, weights = route.weight_on_input(np.ones((1, 1), np.float32), np.array([[0.5]], np.float32))
    assert weights.tolist() == [[1]]
    assert x / (1 + np.exp(-x)) * x == pytest.approx(0.155615, abs=6e-7)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_weight_on_the_input_is_torchs_product(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((50, 64), generator=generator).to(kind)
    weights = torch.rand((50, 1), generator=generator)
    scaled, ones = route.weight_on_input(x, weights)
    assert scaled.dtype == kind and torch.equal(scaled, x * weights.to(kind))
    assert torch.equal(ones, torch.ones(50, 1))
    narrow = {"bf16": lambda: x.view(torch.int16).numpy().view(np.uint16)}.get(dtype, x.numpy)()
    found = route.weight_on_input(narrow, weights.numpy())[0]
    assert found.dtype == narrow.dtype
    assert found.tobytes() == scaled.view(torch.uint8).numpy().tobytes()


# ---- kinds of arrays -------------------------------------------------------------------


def test_tensors_give_tensors() -> None:
    torch = pytest.importorskip("torch")
    logits = torch.from_numpy(a_batch())
    weights, ids = route.sigmoid(logits, 4, bias=torch.from_numpy(a_batch(1)[0]))
    own = route.sigmoid(a_batch(), 4, bias=a_batch(1)[0])
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    assert np.array_equal(weights.numpy(), own[0]) and np.array_equal(ids.numpy(), own[1])
    left, added = route.identity_experts(ids.int(), weights, 30)
    expected = route.identity_experts(own[1], own[0], 30)
    assert np.array_equal(left.numpy(), expected[0]) and np.array_equal(added.numpy(), expected[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_logits_are_widened(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    logits = torch.from_numpy(a_batch()).to(getattr(torch, dtype))
    wide = route.softmax(logits.float(), 4)
    assert all(torch.equal(*pair) for pair in zip(route.softmax(logits, 4), wide, strict=True))


def test_narrow_numpy_logits() -> None:
    """uint16 are bits of bf16."""
    halves = a_batch().astype(np.float16)
    for narrow, wide in (
        (halves, halves.astype(np.float32)),
        (f32_to_bf16(LOGITS), f32_to_bf16(LOGITS).astype(np.uint32).__lshift__(16).view("f4")),
        (np.asfortranarray(a_batch()), a_batch()),
        (a_batch(40)[::2], a_batch(40)[::2].copy()),
    ):
        found, expected = route.softmax(narrow, 4), route.softmax(wide, 4)
        assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


def test_torch_is_not_imported_for_numpy() -> None:
    code = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
import numpy as np
from ktconv.runtime import route
assert route.softmax(np.zeros((1, 4), np.float32), 2)[1].tolist() == [[0, 1]]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"groups": 3, "keep": 2}, "32 experts cannot be routed to by 2 of 3 groups"),
        ({"groups": 64, "keep": 1}, "32 experts cannot be routed to by 1 of 64 groups"),
        ({"groups": 4, "keep": 5}, "by 5 of 4 groups"),
        ({"k": 33}, "33 experts per token are more than the 32"),
        ({"k": 9, "groups": 4, "keep": 1}, "9 experts per token are more than the 8"),
        ({"k": 0}, "k must be 1 or more, not 0"),
        ({"k": True}, "k must be an integer, not True"),
        ({"k": 2.0}, "k must be an integer, not 2.0"),
        ({"groups": 0}, "groups must be 1 or more, not 0"),
        ({"keep": -1}, "keep must be 1 or more, not -1"),
        ({"logits": a_batch()[0]}, r"logits must be \[tokens, experts\], got \[32\]"),
        ({"logits": a_batch().astype(np.float64)}, "logits must be fp32, bf16 or fp16"),
        ({"logits": [[1.0, 2.0]]}, "neither a NumPy array nor a torch tensor"),
        ({"logits": np.zeros((1, 4097), np.float32)}, "4097 logits of a token are more than"),
        ({"bias": np.zeros(31, np.float32)}, "bias must be .* of shape"),
        ({"bias": np.zeros((1, 32), np.float32)}, "bias must be .* of shape"),
        ({"table": np.zeros((5, 2), np.int64), "tokens": np.zeros(20, np.int64)}, "table must be"),
        ({"table": np.zeros((5, 4), np.int64)}, "needs the token of each row"),
        ({"table": np.zeros((5, 4), np.int64), "tokens": np.full(20, 5)}, "from 0 to 4"),
        ({"table": np.full((5, 4), 32), "tokens": np.zeros(20, int)}, "but there are 32"),
        ({"tokens": np.zeros(20, np.int64)}, "tokens are for a table"),
        ({"group_score": "sum"}, "group_score 'sum' of a router is none of max, top2"),
        ({"scale": np.nan}, "routed_scaling_factor of a router cannot be nan"),
        ({"epsilon": -1.0}, "epsilon of a router cannot be -1.0"),
    ],
)
def test_refusals(changes: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"logits": a_batch(), "k": 4} | changes
    with pytest.raises(UsageError, match=says):
        route.sigmoid(**given)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (RouterSpec("softmax", 2, sinks=1), "a softmax router has no sinks"),
        (RouterSpec("sigmoid", 2, jitter=0.1), "sparsemixer chooses by softmax alone"),
        (RouterSpec("softmax", 2, jitter=-0.1), "jitter of a router cannot be -0.1"),
        (RouterSpec("softmax", 2, p_norm=0.0), "p_norm of a router cannot be 0.0"),
        (RouterSpec("softmax", 2, least_sum=np.nan), "least_sum of a router cannot be nan"),
        (RouterSpec("softmax", 2, masked=np.nan), "masked of a router cannot be nan"),
        (RouterSpec("softmax", 2, correction=True), "has no correction bias"),
        (RouterSpec("sigmoid", 2, sinks=40), "than the"),
    ],
)
def test_specs_that_no_router_can_have(spec: RouterSpec, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        route.by_spec(spec, a_batch())
    with pytest.raises(UsageError, match="must not have a correction bias"):
        route.by_spec(RouterSpec("softmax", 2), a_batch(), bias=a_batch(1)[0])
    sparse = replace(RouterSpec("softmax", 2), jitter=0.1)
    assert route.by_spec(sparse, a_batch())[0].shape == (20, 2)


def test_refused_calls_of_the_rest() -> None:
    x, weights = a_batch(), np.ones((20, 2), np.float32)
    with pytest.raises(UsageError, match="weights of 2 experts per token"):
        route.weight_on_input(x, weights)
    with pytest.raises(UsageError, match="weights must be"):
        route.weight_on_input(x, weights[:3, :1])
    with pytest.raises(UsageError, match="ids must be int"):
        route.identity_experts(weights, weights, 4)
    with pytest.raises(UsageError, match="weights must be"):
        route.identity_experts(np.zeros((20, 2), np.int64), weights[:3], 4)
    with pytest.raises(UsageError, match="scoring 'tanh' of a router is none of softmax"):
        route.grouped(x, 2, 4, 1, scoring="tanh")  # type: ignore[arg-type]


def test_a_gradient_is_refused() -> None:
    torch = pytest.importorskip("torch")
    logits = torch.zeros((2, 4), requires_grad=True)
    with pytest.raises(UsageError, match="gradient"):
        route.softmax(logits, 2)
    with torch.no_grad():
        assert route.softmax(logits, 2)[1].tolist() == [[0, 1], [0, 1]]
