"""The readable reference: by hand, by autograd, and by the reference of the inference kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.paths import ROOT

from ktconv.errors import UsageError
from ktconv.formats import FORMATS
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import GATE_FUNCTIONS, Activation
from ktconv.runtime.layers import pack_experts
from ktconv.runtime.layers.experts import gated

torch: Any = pytest.importorskip("torch")
from ktconv.train.reference import (  # noqa: E402
    Base,
    Lora,
    as_kernels,
    middle_of,
    reference,
    relative,
)

pytestmark = [pytest.mark.slow, pytest.mark.torch]

EXPERTS, HIDDEN, INNER, RANK, TOKENS, TOP_K = 4, 64, 32, 3, 9, 3
ALL = [
    Activation(),
    Activation(limit=0.7),
    Activation("swiglu", 1.702, 1.0, 0.9),
    Activation("gelu"),
    Activation("gelu_tanh", limit=1.2),
    Activation("swiglu_clamped", limit=0.3),
    Activation("softcap", 1.5, 2.5),
    Activation("softcap", math.inf, math.inf),
    Activation("relu2"),
    Activation("relu"),
    Activation("ungated_gelu", limit=1.1),
    Activation("ungated_gelu_tanh"),
]


def numbers(*shape: int, seed: int, scale: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def base_of(activation: Activation, biased: bool = False) -> Base:
    gate, up = (numbers(EXPERTS, INNER, HIDDEN, seed=s, scale=0.2) for s in (1, 2))
    down = numbers(EXPERTS, HIDDEN, INNER, seed=3, scale=0.2)
    biases = [numbers(EXPERTS, n, seed=n) for n in (INNER, INNER, HIDDEN)] if biased else [None] * 3
    if not activation.gated:
        gate, biases[0] = None, None
    return Base(gate, up, down, *biases)


def lora_of(activation: Activation) -> Any:
    """B is not 0 here, else most gradients would be."""
    shapes = [(RANK, HIDDEN), (INNER, RANK), (RANK, HIDDEN), (INNER, RANK)]
    shapes += [(RANK, INNER), (HIDDEN, RANK)]
    made = [numbers(EXPERTS, *shape, seed=10 + n, scale=0.3) for n, shape in enumerate(shapes)]
    if not activation.gated:
        made[:2] = None, None
    return Lora._make([*(one if one is None else one.requires_grad_() for one in made), 1.5])


def inputs() -> tuple[Any, Any, Any, Any]:
    """x, ids with a duplicate and some that are no expert's, weights, dy."""
    ids = torch.randint(0, EXPERTS - 1, (TOKENS, TOP_K), generator=torch.Generator().manual_seed(5))
    ids[0] = torch.tensor([1, 1, 2])
    ids[1] = torch.tensor([-1, EXPERTS, 2])
    ids[2] = -1
    x, dy = numbers(TOKENS, HIDDEN, seed=6), numbers(TOKENS, HIDDEN, seed=7)
    return x.requires_grad_(), ids, numbers(TOKENS, TOP_K, seed=8).requires_grad_(), dy


# ---- the vector of a hand calculation -------------------------------------------------------


def test_a_layer_by_hand() -> None:
    """One token, one expert, H = I = 2, r = 1; every figure is derived from the formulas alone."""

    def tensor(values: Any) -> Any:
        return torch.tensor([values], dtype=torch.float64)

    base = Base(tensor([[1, 0], [0, 1]]), tensor([[1, 1], [1, -1]]), tensor([[1, 0], [0, 2]]))
    pairs = [[[1, 0]], [[0.5], [0]], [[0, 1]], [[0], [0.25]], [[1, 1]], [[0.5], [-0.5]]]
    lora = Lora._make([*(tensor(one).requires_grad_() for one in pairs), 2.0])
    x, weights = tensor([1, -1]).requires_grad_(), tensor([0.5]).requires_grad_()
    y = reference(x, torch.zeros(1, 1, dtype=torch.int64), weights, base, lora)
    y.backward(tensor([1, 2]))

    def check(found: Any, *expected: float) -> None:
        assert found.detach().flatten().tolist() == pytest.approx(expected, abs=1e-6)

    check(y, -0.201706, -0.201706)
    check(x.grad, -0.403412, 0.364447)
    check(weights.grad, -1.210236)
    expected = [(0, 0), (0, 0.325483), (-0.201706, 0.201706), (0, 0.806824), (0, 0.201706),
                (-0.403412, -0.806824)]  # fmt: skip
    for matrix, values in zip(lora, expected, strict=False):
        check(matrix.grad, *values)  # type: ignore[union-attr]


# ---- the formulas of the page ---------------------------------------------------------------


def formulas() -> SimpleNamespace:
    """The functions of docs/fine-tuning.md."""
    page = (ROOT / "docs/fine-tuning.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(def .*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"outer": torch.outer, "exp": torch.exp}
    exec("\n".join(code), names)
    return SimpleNamespace(**names)


def by_formulas(
    base: Base, lora: Any, x: Any, ids: Any, weights: Any, dy: Any
) -> tuple[Any, dict[str, Any]]:
    """y and all gradients, one token and expert after the other."""
    page = formulas()
    y, found = torch.zeros_like(x), {"x": torch.zeros_like(x), "weights": torch.zeros_like(weights)}
    names = Lora._fields[:6]
    found |= {name: torch.zeros_like(matrix) for name, matrix in zip(names, lora, strict=False)}
    for token in range(len(x)):
        for slot, expert in enumerate(ids[token].tolist()):
            if not 0 <= expert < EXPERTS:
                continue
            own = [matrix[expert] for matrix in (*base[:3], *lora[:6])]
            keys = ("Wg", "Wu", "Wd", "Ag", "Bg", "Au", "Bu", "Ad", "Bd")
            p = SimpleNamespace(**dict(zip(keys, own, strict=True)), s=lora.scale)
            p.act, p.dact = (lambda g, u: g * torch.sigmoid(g) * u), page.dact
            weight = weights[token, slot]
            y[token] += page.forward(p, x[token], weight)
            dx, dw, *matrices = page.backward(p, x[token], weight, dy[token])
            found["x"][token] += dx
            found["weights"][token, slot] += dw
            for name, gradient in zip(names, matrices, strict=True):
                found[name][expert] += gradient
    return y, found


def gradients(x: Any, weights: Any, lora: Any) -> dict[str, Any]:
    named = {"x": x, "weights": weights, **dict(zip(Lora._fields[:6], lora, strict=False))}
    return {name: tensor.grad for name, tensor in named.items() if tensor is not None}


def test_the_formulas_of_the_page_are_the_gradients() -> None:
    base, lora = base_of(Activation()), lora_of(Activation())
    x, ids, weights, dy = inputs()
    y = reference(x, ids, weights, base, lora)
    y.backward(dy)
    with torch.no_grad():
        expected, found = by_formulas(base, lora, x, ids, weights, dy)
    assert relative(y, expected) < 1e-12
    for name, gradient in gradients(x, weights, lora).items():
        assert relative(found[name], gradient) < 1e-12, name
        assert float(gradient.norm()) > 0.1
    assert not lora.up_a.grad[EXPERTS - 1].any()  # nobody's expert
    assert not x.grad[2].any() and not weights.grad[2].any()
    assert torch.equal(weights.grad[0, 0], weights.grad[0, 1])


# ---- the reference of the inference kernels -------------------------------------------------


def packed_layer(name: str, **more: Any) -> Any:
    def matrices(index: int) -> Any:
        rng = np.random.default_rng([3, index])
        shapes = (256, 128), (256, 128), (128, 256)
        return tuple(rng.standard_normal(s, np.float32) * np.float32(0.1) for s in shapes)

    return pack_experts(FORMATS[name], matrices, range(3), 128, 256, **more)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("int8", 1),
        ("int8", 2),
        ("int4", 2),
        ("gint4-32", 2),
        ("gint8-128", 1),
        ("bf16", 1),
        ("fp8", 1),
        ("mxfp4", 2),
        ("mxfp8", 2),
    ],
)
def test_activations_are_rounded_as_the_kernels_do(name: str, parts: int) -> None:
    experts = packed_layer(name, parts=parts)
    rng = np.random.default_rng(2)
    x = f32_to_bf16(rng.standard_normal((7, experts.hidden), np.float32))
    ids, weights = rng.integers(-1, 4, (7, 2)), rng.random((7, 2), np.float32)
    ids = np.where(ids > 2, -1, ids)
    expected = experts.reference(x, ids, weights, rounded=True)
    given = *map(torch.from_numpy, (bf16_to_f32(x), ids, weights)), Base.of(experts)
    found = reference(*given, **as_kernels(experts))
    unrounded = experts.reference(x, ids, weights)
    lost = relative(expected, unrounded)
    # Sums in another order round a few activations to their other neighbour.
    assert found.dtype == torch.float32 and relative(found, expected) < min(1e-3, lost / 2)
    assert relative(reference(*given), unrounded) < 1e-6


def test_missing_experts_are_not_a_number() -> None:
    experts = packed_layer("bf16")
    experts.origins[1] = -1
    base = Base.of(experts)
    assert base.up[1].isnan().all() and not base.up[[0, 2]].isnan().any()
    experts.origins[:] = -1
    with pytest.raises(UsageError, match="no weights of any expert"):
        Base.of(experts)


@pytest.mark.parametrize("activation", ALL, ids=str)
def test_activations_are_those_of_the_kernels(activation: Activation) -> None:
    gate, up = (1.5 * numbers(40, 32, seed=seed).float() for seed in (1, 2))
    expected = gated(activation, gate.numpy() if activation.gated else None, up.numpy())
    found = middle_of(activation, gate if activation.gated else None, up)
    assert relative(found, expected) < 1e-6


def test_every_function_is_tried() -> None:
    assert {one.function for one in ALL} == GATE_FUNCTIONS.keys()


def test_derivatives_at_limits_and_at_zero() -> None:
    """1 at a limit, 0 beyond; 0 of max(u, 0) at 0."""
    gate = torch.tensor([[0.5, 1.0, 1.5]], dtype=torch.float64, requires_grad=True)
    up = torch.tensor([[-1.0, 1.0, -1.5]], dtype=torch.float64, requires_grad=True)
    middle_of(Activation(limit=1.0), gate, up).sum().backward()
    assert (gate.grad != 0).tolist() == [[True, True, False]]
    assert (up.grad != 0).tolist() == [[True, True, False]]
    zero = torch.zeros(1, 1, requires_grad=True)
    middle_of(Activation("relu"), None, zero).sum().backward()
    assert zero.grad.item() == 0


@pytest.mark.parametrize("activation", ALL, ids=str)
def test_gradients_against_differences(activation: Activation) -> None:
    """In a random direction, for each activation, with biases and dropped elements."""
    base, lora = base_of(activation, biased=True), lora_of(activation)
    x, ids, weights, dy = inputs()
    rng = torch.Generator().manual_seed(9)
    dropped = tuple(
        (torch.rand(TOKENS, TOP_K, n, generator=rng) > 0.25) / 0.75 for n in (HIDDEN, INNER)
    )

    def loss(x: Any, weights: Any, *matrices: Any) -> Any:
        pairs = Lora._make([*matrices, lora.scale])
        more: Any = {"activation": activation, "dropped": dropped}
        return (reference(x, ids, weights, base, pairs, **more) * dy).sum()

    given = [x, weights, *lora[:6]]
    loss(*given).backward()
    there = [one for one in given if one is not None]
    moves = [numbers(*one.shape, seed=40 + n) for n, one in enumerate(there)]
    slope = sum(float((one.grad * move).sum()) for one, move in zip(there, moves, strict=True))
    ends = []
    with torch.no_grad():
        for step in (1e-6, -1e-6):
            moved = iter([one + step * move for one, move in zip(there, moves, strict=True)])
            ends.append(float(loss(*(None if one is None else next(moved) for one in given))))
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)


# ---- edges ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_calls_without_experts_have_gradients_of_zero(tokens: int) -> None:
    base, lora = base_of(Activation()), lora_of(Activation())
    x = numbers(tokens, HIDDEN, seed=1).requires_grad_()
    weights = numbers(tokens, 2, seed=2).requires_grad_()
    y = reference(x, torch.full((tokens, 2), -1), weights, base, lora)
    y.sum().backward()
    assert y.shape == x.shape and not y.any()
    assert all(not one.any() for one in gradients(x, weights, lora).values())


def test_what_is_not_a_number_stays_in_its_token() -> None:
    base = base_of(Activation())
    x, ids, weights, _ = inputs()
    expected = reference(x, ids, weights, base)
    bad = x.detach().clone()
    bad[3, 0], bad[2, 0] = math.nan, math.nan  # token 2 has no expert
    found = reference(bad, ids, weights, base)
    assert found[3].isnan().any()
    others = [token for token in range(TOKENS) if token != 3]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("activation", ALL, ids=str)
def test_what_is_not_a_number_is_seen_in_its_gradients(activation: Activation) -> None:
    """Clamps and max(u, 0) of torch have the derivative 0 there."""
    base, lora = base_of(activation), lora_of(activation)
    x, ids, weights, dy = inputs()
    with torch.no_grad():
        x[3, 0] = math.nan
    reference(x, ids, weights, base, lora, activation=activation).backward(dy)
    others = [token for token in range(TOKENS) if token != 3]
    assert x.grad[3].isnan().all() and x.grad[others].isfinite().all()
    assert weights.grad[3].isnan().all() and lora.up_a.grad[ids[3, 0]].isnan().all()


def test_groups_round_by_themselves() -> None:
    """A large element takes the precision of its own group alone."""
    x = torch.ones(1, HIDDEN)
    x[0, 0] = 1000.0
    identity = torch.eye(HIDDEN)[None]
    base = Base(None, identity, identity)
    ids, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    how: dict[str, Any] = {"activation": Activation("relu")}
    row = reference(x, ids, weights, base, **how, rounding="int8")
    groups = reference(x, ids, weights, base, **how, rounding="group", group=32)
    assert row[0, 1:].eq(0).all() and groups[0, 1:32].eq(0).all()
    assert groups[0, 32:] == pytest.approx(1) and row[0, 0] == pytest.approx(1000)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rounding": "int7"}, "int7"),
        ({"rounding": "group"}, "groups of 0"),
        ({"rounding": "group", "group": 32, "parts": 2}, "groups of 32"),
        ({"parts": 3}, "3 parts"),
        ({"activation": Activation("relu")}, "not those of experts with relu"),
        ({"activation": Activation("swish")}, "not those of experts with swish"),
        ({"x": numbers(TOKENS, 8, seed=1)}, r"x must be \[T, 64\]"),
        ({"x": numbers(2, HIDDEN, seed=1)}, r"x must be \[T, 64\]"),
        ({"weights": numbers(TOKENS, 1, seed=1)}, "ids and weights"),
    ],
    ids=str,
)
def test_bad_arguments(change: dict[str, Any], match: str) -> None:
    x, ids, weights, _ = inputs()
    call: Callable[..., Any] = reference
    given: dict[str, Any] = {"x": x, "ids": ids, "weights": weights, "base": base_of(Activation())}
    with pytest.raises(UsageError, match=match):
        call(**given | change)
