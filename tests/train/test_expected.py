"""Expected gradients, made an expert at a time, are those of the whole layer; and what is compared
tells wrong from right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

pytest.importorskip("torch")
import torch

from ktconv.bench.weights import RandomWeights
from ktconv.formats import format_named
from ktconv.native import Activation
from ktconv.runtime.layers import Experts, pack_experts
from ktconv.runtime.layers.experts import OutputNorm
from ktconv.source.reading.streamed import whole
from ktconv.train.gradients import (
    BOUND,
    BOUND_OF_DX,
    MATRICES,
    NAMES,
    Call,
    Expected,
    base_of,
    bounds,
    errors,
    expected,
    matrices_of,
    random_lora,
    rounding_of,
)
from ktconv.train.reference import Base, Lora, as_kernels, reference

pytestmark = [pytest.mark.slow, pytest.mark.torch]

EXPERTS, HIDDEN, INNER, TOKENS, RANK = 4, 64, 128, 7, 3


def packed(method: str = "int8", activation: Activation | None = None) -> Experts:
    chosen = activation or Activation()
    source = RandomWeights(1, HIDDEN, INNER)
    make = source.expert if chosen.gated else source.ungated
    return pack_experts(
        format_named(method), make, range(EXPERTS), HIDDEN, INNER, activation=chosen
    )


def call_of(gated: bool = True) -> Call:
    """Expert 3 has no token, one token has an expert twice, and one has a skipped id."""
    generator = torch.Generator().manual_seed(2)
    x, dy = torch.randn(2, TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(0, EXPERTS - 1, (TOKENS, 2), generator=generator)
    ids[0] = torch.tensor([1, 1])
    ids[1, 0] = -1
    weights = torch.rand(TOKENS, 2, generator=generator)
    return Call(x, ids, weights, dy, random_lora(EXPERTS, HIDDEN, INNER, RANK, generator, gated))


def whole_layer(experts: Experts, call: Call, how: Any) -> dict[str, torch.Tensor]:
    """By autograd through one call of the reference."""
    leaves = {"dx": call.x.float(), "dw": call.weights.clone()}
    leaves |= {name: matrix.float() for name, matrix in matrices_of(call.lora).items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    lora = Lora(**{n: m for n, m in leaves.items() if n in MATRICES}, scale=call.lora.scale)
    y = reference(leaves["dx"], call.ids, leaves["dw"], Base.of(experts), lora, **how)
    y.backward(call.dy.float())
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"y": y.detach(), **gradients}


@pytest.mark.parametrize("activation", [Activation(), Activation("relu2")])
@pytest.mark.parametrize("method", ["bf16", "int8", "gint4-32"])
def test_expert_by_expert_is_the_whole_layer(method: str, activation: Activation) -> None:
    experts, call = packed(method, activation), call_of(activation.gated)
    how = as_kernels(experts)
    found = expected(call, lambda e: base_of(experts.streams(e)), how)
    right = whole_layer(experts, call, how)
    assert found.found.keys() == right.keys()
    assert ("gate_a" in right) == activation.gated
    for name, error in errors(right, found).items():
        assert error < 1e-5, name
    assert not found.found["up_b"][3].any()


def test_biases_are_part_of_the_weights() -> None:
    bias = np.arange(3, dtype=np.float32)
    up = replace(whole(np.ones((3, 2), np.float32)), bias=bias)
    base = base_of((None, up, whole(np.ones((2, 3), np.float32))))
    assert base.up_bias is not None and base.down_bias is None and base.gate is None
    assert base.up_bias.tolist() == [[0.0, 1.0, 2.0]]


def test_outputs_are_normalised_before_the_router_weighs_them() -> None:
    experts, call = packed("bf16"), call_of()
    call = call._replace(ids=call.ids[:, :1].clamp(min=0), weights=call.weights[:, :1])
    norm = OutputNorm(np.linspace(0, 1, HIDDEN, dtype=np.float32), 1e-5)
    found = expected(call, lambda e: base_of(experts.streams(e)), rounding_of(experts), norm).found
    alone = reference(
        call.x.float(), call.ids, torch.ones_like(call.weights), Base.of(experts), call.lora
    )
    right = call.weights.numpy() * norm.of(alone.numpy())
    np.testing.assert_allclose(found["y"].numpy(), right, rtol=1e-4, atol=1e-5)
    # What is normalised does not change with its scale: gradients are at right angles to outputs.
    along = (found["dw"][:, 0] - (call.dy.float() * found["y"]).sum(1) / call.weights[:, 0]).abs()
    assert along.max() < 1e-3


def test_bf16_weights_are_judged_without_any_rounding() -> None:
    assert rounding_of(packed("bf16"))["rounding"] == "none"
    assert rounding_of(packed("fp8-channel"))["rounding"] == "bf16"
    assert rounding_of(packed("int8"))["rounding"] == "int8"


def test_bounds_double_for_few_calls() -> None:
    few = call_of()
    many = few._replace(ids=few.ids.clamp(min=0).repeat(5, 1))
    assert bounds(many) == dict.fromkeys(NAMES, BOUND) | {"dx": BOUND_OF_DX}
    assert bounds(few) == {name: 2 * bound for name, bound in bounds(many).items()}


def test_errors_tell() -> None:
    right = {"y": torch.ones(4), "dx": torch.zeros(3), "dw": torch.tensor([3.0, 4.0])}
    assert errors(right, Expected(right, 1.0)) == {"y": 0.0, "dx": 0.0, "dw": 0.0}
    wrong = {"y": torch.tensor([1.0, 1, 1, 3]), "dx": torch.tensor([0, 0, 0.5])}
    wrong |= {"dw": torch.tensor([3.0, 5.0])}
    assert errors(wrong, Expected(right, 1.0)) == pytest.approx({"y": 1.0, "dx": 0.5, "dw": 0.2})
    assert errors(wrong, Expected(right, 10.0))["dw"] == pytest.approx(0.1)
    for name in right:
        bad = right | {name: torch.full_like(right[name], torch.nan)}
        assert np.isnan(errors(bad, Expected(right, 1.0))[name])


def test_the_norm_of_dw_is_that_of_random_gradients() -> None:
    experts, call = packed("bf16"), call_of()
    found = [
        expected(call._replace(dy=dy), lambda e: base_of(experts.streams(e)), rounding_of(experts))
        for dy in torch.randn(20, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))
    ]
    norms = [float(one.found["dw"].norm()) for one in found]
    assert np.mean(norms) == pytest.approx(np.mean([one.dw_norm for one in found]), rel=0.1)


def test_random_lora_is_that_of_the_seed() -> None:
    one, two = (
        matrices_of(random_lora(2, HIDDEN, INNER, RANK, torch.Generator().manual_seed(5), True))
        for _ in range(2)
    )
    assert tuple(one) == MATRICES
    assert all(torch.equal(one[name], two[name]) for name in MATRICES)
    assert one["gate_a"].abs().max() <= HIDDEN**-0.5
    assert one["down_b"].shape == (2, HIDDEN, RANK)
    assert one["down_b"].float().std() == pytest.approx(0.1, rel=0.2)
