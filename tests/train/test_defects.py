"""Defects of other programs that fine-tune experts on CPUs, each of which cannot happen here."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
from helpers.training import (  # noqa: E402
    BOUND,
    MATRICES,
    batch,
    check,
    expected,
    gradients,
    lora_experts,
    packed,
    same,
)

from ktconv.errors import UsageError  # noqa: E402
from ktconv.formats import FORMATS  # noqa: E402
from ktconv.runtime import MoELayer, Pool  # noqa: E402
from ktconv.train import LoRAExperts  # noqa: E402
from ktconv.train.reference import Base, as_kernels, reference, relative  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch]


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_the_base_of_a_backward_is_never_missing(method: str, pool: Pool) -> None:
    """Weights packed for the forward are enough for the backward, without files of their own."""
    module = lora_experts(packed(method), pool=pool)
    given = batch(module)
    check(module, given)
    whole, base = (expected(one, given)["x"] for one in (module, LoRAExperts(module.layer, None)))
    assert relative(base, whole) > 0.5 or relative(whole - base, whole) > 0.5


@pytest.mark.parametrize("parts", [5, 6, 8])
def test_gradients_are_of_all_parts(parts: int, pool: Pool) -> None:
    """Not of the first four."""
    whole, cut = (
        lora_experts(packed("bf16", 128, 32 * parts, parts=count), pool=pool)
        for count in (1, parts)
    )
    given = batch(whole)
    one, other = gradients(whole, given), gradients(cut, given)
    assert all(relative(other[name], one[name]) < 0.004 for name in one)


@pytest.mark.parametrize("method", ["bf16", "int8"])
def test_large_gates_have_gradients(isa: str, method: str, pool: Pool) -> None:
    """Beyond the range of the exponential, on either side: 0, and no NaN."""
    module = lora_experts(packed(method, scale=60.0), pool=pool)
    given = batch(module, 9)
    gates = given.x.double() @ _gate(module).T
    assert gates.min() < -100 and gates.max() > 100
    assert all(one.isfinite().all() for one in gradients(module, given).values())
    check(module, given)


def _gate(module: Any) -> Any:
    gate = Base.of(module.layer).gate
    assert gate is not None
    return gate.flatten(0, 1).double()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", ["bf16", "int8", "int4"])
def test_what_is_not_finite_is_seen(isa: str, method: str, bad: float, pool: Pool) -> None:
    """In a gradient of y: in all gradients that it reaches, and in no others."""
    module = lora_experts(packed(method), pool=pool)
    given = batch(module, 7)
    given.ids[1:][given.ids[1:] == 0] = 3
    given.ids[0] = torch.tensor([0, 2])
    clean = gradients(module, given)
    given.dy[0, 5] = bad
    found = gradients(module, given)
    reached = {"x": found["x"][0], "weights": found["weights"][0]}
    reached |= {name: found[name][0] for name in MATRICES}
    for name, one in reached.items():
        assert not one.isfinite().all(), name
    assert torch.equal(found["x"][1:], clean["x"][1:])
    for name in MATRICES:
        assert torch.equal(found[name][[1, 3]], clean[name][[1, 3]])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_inputs_that_are_not_finite_are_seen(bad: float, pool: Pool) -> None:
    for method in ("bf16", "int8"):
        module = lora_experts(packed(method), pool=pool)
        given = batch(module, 6)
        given.x[0, 5] = bad
        found = gradients(module, given)
        for name in ("y", "x", "weights"):
            assert not found[name][0].isfinite().all() and found[name][1:].isfinite().all(), name
        assert all(not found[name].isfinite().all() for name in MATRICES)


@pytest.mark.parametrize("method", ["bf16", "int8", "int4"])
def test_slots_mean_the_same_in_every_pass(method: str, pool: Pool) -> None:
    """A permutation with a replica: forward, backward and matrices go by slots."""
    origins = [2, 0, 2, 1]
    straight = lora_experts(packed(method, origins=range(3)), pool=pool)
    mapped = lora_experts(packed(method, origins=origins), pool=pool)
    with torch.no_grad():
        for name in MATRICES:
            getattr(mapped, name).copy_(getattr(straight, name)[origins])
    given = batch(straight)
    slots = torch.tensor([1, 3, 0])  # of experts 0, 1, 2
    one, other = gradients(straight, given), gradients(mapped, given._replace(ids=slots[given.ids]))
    assert same(one, other, but=("y", "x", *MATRICES))  # sums have another order
    assert all(relative(other[name], one[name]) < 0.004 for name in ("y", "x"))
    assert all(torch.equal(other[name][slots], one[name]) for name in MATRICES)
    assert all(not other[name][2].any() for name in MATRICES)  # the replica's own LoRA


def test_an_expert_twice_in_the_only_token(pool: Pool) -> None:
    for method in ("bf16", "int8"):
        module = lora_experts(packed(method), pool=pool)
        given = batch(module, 1)
        given.ids[0] = torch.tensor([1, 1])
        check(module, given)


def test_no_lora_means_none_of_the_three(pool: Pool) -> None:
    layer = MoELayer(packed("bf16"), pool)
    none, zero = LoRAExperts(layer, None), LoRAExperts(layer, 8)
    given = batch(layer)
    assert same(
        gradients(none, given), {n: gradients(zero, given)[n] for n in ("y", "x", "weights")}
    )


def test_a_short_gradient_is_refused(pool: Pool) -> None:
    """Not completed with values of an earlier call."""
    module = lora_experts(packed("bf16"), pool=pool)
    given = batch(module, 48)
    gradients(module, given)
    y = module(*given[:3])
    with pytest.raises(RuntimeError, match="shape"):
        y.backward(given.dy[:5])


def test_a_forward_between_changes_nothing(pool: Pool) -> None:
    """Two forwards of a layer, then two backwards, the first first."""
    module = lora_experts(packed("int8"), pool=pool)
    first, second = batch(module, 9), batch(module, 9, seed=1)
    alone = [gradients(module, one) for one in (first, second)]
    outputs = [module(*one[:3]) for one in (first, second)]
    for y, given, straight in zip(outputs, (first, second), alone, strict=True):
        module.zero_grad()
        y.backward(given.dy)
        assert all(torch.equal(getattr(module, name).grad, straight[name]) for name in MATRICES)


def test_dropout_rests_in_eval(pool: Pool) -> None:
    module = lora_experts(packed("bf16"), dropout=0.5, pool=pool).eval()
    given = batch(module)
    assert torch.equal(module(*given[:3]), module(*given[:3]))
    with torch.no_grad():
        assert torch.equal(module(*given[:3]), module(*given[:3]))


def test_gradients_of_many_backwards_add_up(pool: Pool) -> None:
    """In the default dtype of parameters, 64 of them are as exact as one."""
    module = lora_experts(packed("bf16"), pool=pool)
    batches = [batch(module, 4, seed=seed) for seed in range(64)]
    module.zero_grad()
    for given in batches:
        module(*given[:3]).backward(given.dy)
    truth = {name: torch.zeros(one.shape).double() for name, one in module.named_parameters()}
    for given in batches:
        for name, one in expected(module, given).items():
            if name in truth:
                truth[name] += one
    summed = {name: one.grad.clone() for name, one in module.named_parameters()}
    assert all(relative(summed[name], truth[name]) < BOUND for name in truth)


def test_layers_of_other_sizes_side_by_side(pool: Pool) -> None:
    """On one pool; results are nobody else's memory."""
    modules = [lora_experts(packed("int8", size, size), pool=pool) for size in (128, 256)]
    first = [gradients(one, batch(one, 6)) for one in modules]
    kept = [{name: one.clone() for name, one in found.items()} for found in first]
    for module in modules:
        gradients(module, batch(module, 6, seed=5))
    assert all(same(a, b) for a, b in zip(first, kept, strict=True))


def test_every_method_that_there_is_trains(pool: Pool) -> None:
    for name in FORMATS:
        module = lora_experts(packed(name), pool=pool)
        check(module, batch(module, 5))


def test_routing_weights_are_not_rounded(pool: Pool) -> None:
    """To bf16, neither forwards nor backwards."""
    module = lora_experts(packed("bf16", 64, 64), pool=pool)
    given = batch(module, 8, 1, dtype=torch.float32)
    given = given._replace(weights=torch.full((8, 1), 1 + 2**-12))
    one = gradients(module, given._replace(weights=torch.ones(8, 1)))
    found = gradients(module, given)
    assert torch.equal(found["y"], one["y"] * (1 + 2**-12))
    assert found["weights"].dtype == torch.float32
    assert relative(found["weights"], found["weights"].bfloat16().float()) > 1e-4


def test_forward_and_backward_have_the_same_weights(pool: Pool) -> None:
    """The gradient of INT4 is that of the forward's codes, from which that of weights rounded anew,
    along columns, is far."""
    module = LoRAExperts(MoELayer(packed("int4"), pool), None)
    given = batch(module)
    check(module, given)
    again = Base._make(one if one is None else _by_columns(one) for one in Base.of(module.layer))
    x = given.x.float().requires_grad_()
    y = reference(x, *given[1:3], again, **as_kernels(module.layer))
    y.backward(given.dy.float())
    assert relative(x.grad, gradients(module, given)["x"]) > 0.05


def _by_columns(weights: Any) -> Any:
    scale = weights.abs().amax(dim=1, keepdim=True) / 7
    return (weights / scale).round() * scale


@pytest.mark.parametrize("top_k", [0, 5, 9])
def test_any_number_of_experts_of_a_token(top_k: int, pool: Pool) -> None:
    """More than there are, with repetitions, and none."""
    module = lora_experts(packed("int8"), pool=pool)
    check(module, batch(module, 5, top_k))


def test_a_mask_of_one_number_is_refused(pool: Pool) -> None:
    module = lora_experts(packed("int8"), pool=pool)
    with pytest.raises(UsageError, match=r"skip must be bool of shape \[4\]"):
        module(*batch(module)[:3], skip=torch.tensor([True]))


def test_steps_in_place_are_seen_by_the_next_forward(pool: Pool) -> None:
    module = lora_experts(packed("bf16"), pool=pool)
    given = batch(module)
    module(*given[:3])
    with torch.no_grad():
        for one in module.parameters():
            one.add_(0.01)
    check(module, given)
