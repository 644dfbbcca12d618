"""LoRAExperts as a module of torch: parameters, arguments, devices, copies, what is refused."""

from __future__ import annotations

import copy
import math
import os
import pickle
from typing import Any, cast

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
from helpers.far import FAR, FarTensor, far_device  # noqa: E402
from helpers.forked import forked  # noqa: E402
from helpers.training import MATRICES, Batch, batch, called, gradients, lora_experts, packed, same  # noqa: E402

from ktconv.errors import UsageError  # noqa: E402
from ktconv.native import Activation  # noqa: E402
from ktconv.runtime import MoELayer, Pool  # noqa: E402
from ktconv.runtime.layers.experts import OutputNorm  # noqa: E402
from ktconv.train import LoRAExperts  # noqa: E402
from ktconv.train.reference import relative  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch]

# ---- what a new module is -------------------------------------------------------------------


def test_parameters_begin_as_those_of_peft(layer: MoELayer) -> None:
    """A uniform within 1 / sqrt(columns), B zero: y is that of the packed weights."""
    torch.manual_seed(0)
    new: Any = LoRAExperts(layer, 16, 32)
    shapes = {name: tuple(one.shape) for name, one in new.named_parameters()}
    assert shapes == {
        "gate_a": (4, 16, 256), "gate_b": (4, 256, 16), "up_a": (4, 16, 256),
        "up_b": (4, 256, 16), "down_a": (4, 16, 256), "down_b": (4, 256, 16),
    }  # fmt: skip
    for name, one in new.named_parameters():
        if name.endswith("_b"):
            assert not one.any()
        else:
            assert 0.99 / 16 < one.abs().max() <= 1 / 16
            assert one.std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.05)
    given = batch(new)
    assert torch.equal(new(*given[:3]), layer(*given[:3]))
    torch.manual_seed(0)
    assert torch.equal(LoRAExperts(layer, 16).gate_a, new.gate_a)
    assert new.scale == 2 and LoRAExperts(layer, 16).scale == 1 and new.up_a.dtype == torch.float32


def test_targets_have_parameters_and_others_none(layer: MoELayer) -> None:
    only: Any = LoRAExperts(layer, 4, targets=["down", "gate"], dtype=torch.bfloat16)
    there = [name for name, _ in only.named_parameters()]
    assert there == ["gate_a", "gate_b", "down_a", "down_b"] and only.up_a is None
    assert only.targets == ("gate", "down") and only.gate_a.dtype == torch.bfloat16
    assert only.lora.up_a is None and only.lora.gate_a is only.gate_a
    ungated = MoELayer(packed("bf16", activation=Activation("relu2")), layer.pool)
    assert LoRAExperts(ungated, 4).targets == ("up", "down")
    with pytest.raises(UsageError, match="no matrix of the experts, up, down"):
        LoRAExperts(ungated, 4, targets="gate")


def test_nothing_is_trained_without_a_rank(layer: MoELayer) -> None:
    """The bits are those of the layer, and gradients pass."""
    none = LoRAExperts(layer, None)
    assert not list(none.parameters()) and not none.state_dict() and none.lora is None
    given = batch(none)
    found = gradients(none, given)
    assert torch.equal(found["y"], layer(*given[:3]))
    assert found.keys() == {"y", "x", "weights"} and found["x"].any() and found["weights"].any()


def test_it_says_what_it_is(module: Any, layer: MoELayer) -> None:
    assert "4 experts of int8, hidden 256, intermediate 256, gate+up+down, rank=8" in repr(module)
    assert "nothing trained" in repr(LoRAExperts(layer, None))


# ---- arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_have_the_shape_and_dtype_of_x(module: Any, dtype: Any) -> None:
    given = batch(module, 12, dtype=dtype)
    flat = gradients(module, given)
    assert flat["y"].dtype == flat["x"].dtype == dtype
    shaped = gradients(module, Batch(*(one.reshape(3, 4, -1) for one in given)))
    for name, one in shaped.items():
        assert torch.equal(one.reshape(flat[name].shape), flat[name])
    assert shaped["y"].shape == (3, 4, 256) and shaped["weights"].shape == (3, 4, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_other_dtypes(module: Any, dtype: Any) -> None:
    given = batch(module)
    short = given._replace(weights=given.weights.to(dtype))
    found = gradients(module, short)
    wide = gradients(module, short._replace(weights=short.weights.float()))
    assert same(found, wide, but=["weights"]) and found["weights"].dtype == dtype
    assert torch.equal(found["weights"], wide["weights"].to(dtype))


def test_views_and_broadcast_gradients(module: Any) -> None:
    given = batch(module)
    plain = gradients(module, given)
    x = given.x.t().contiguous().t().requires_grad_()
    weights = given.weights.repeat_interleave(2, dim=1)[:, ::2].requires_grad_()
    module.zero_grad()
    y = module(x, given.ids.to(torch.int32), weights)
    y.backward(given.dy.t().contiguous().t())
    assert torch.equal(y, plain["y"]) and torch.equal(x.grad, plain["x"])
    assert torch.equal(weights.grad, plain["weights"])
    assert torch.equal(module.up_b.grad, plain["up_b"])
    ones = gradients(module, given._replace(dy=torch.ones_like(given.dy)))
    x, weights, y = called(module, given)
    module.zero_grad()
    y.sum().backward()  # an expanded 1
    assert torch.equal(x.grad, ones["x"]) and torch.equal(module.down_a.grad, ones["down_a"])


def test_skipped_experts(module: Any) -> None:
    given, skip = batch(module), torch.tensor([False, True, False, True])
    found = gradients(module, given, skip)
    masked = given._replace(ids=torch.where(skip[given.ids], -1, given.ids))
    assert same(found, gradients(module, masked))
    assert not found["up_a"][skip].any() and found["up_a"][~skip].any()


def test_experts_that_are_not_here(pool: Pool) -> None:
    module = lora_experts(packed("int8", origins=[0, None, 2, 3]), pool=pool)
    given = batch(module)
    with pytest.raises(UsageError, match="expert") as caught:
        gradients(module, given)
    assert "skip" in str(caught.value.hint)
    missing = torch.tensor([False, True, False, False])
    found = gradients(module, given, missing)
    assert found["y"].isfinite().all() and not found["gate_a"][1].any()


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (5, 0), (0, 0)])
def test_calls_of_nothing(module: Any, tokens: int, top_k: int) -> None:
    given = batch(module, tokens, top_k)
    found = gradients(module, given)
    assert found["y"].shape == given.x.shape and found["weights"].shape == (tokens, top_k)
    assert all(one is not None and not one.any() for one in found.values())
    assert not module(*given[:3]).any()


def test_an_adapter_of_another_dtype_gives_gradients_of_it(layer: MoELayer) -> None:
    """The same, rounded once."""
    wide, short = (lora_experts(layer, dtype=d) for d in (torch.float32, torch.bfloat16))
    given = batch(wide)
    exact, rounded = gradients(wide, given), gradients(short, given)
    for name in MATRICES:
        assert rounded[name].dtype == torch.bfloat16
        assert torch.equal(rounded[name], exact[name].bfloat16())
    assert same(exact, rounded, but=MATRICES)


# ---- modules and devices --------------------------------------------------------------------


def test_dropout_is_of_training_alone(layer: MoELayer) -> None:
    """And of torch's random numbers."""
    module, plain = lora_experts(layer, dropout=0.5), lora_experts(layer)
    given = batch(module)
    assert torch.equal(module.eval()(*given[:3]), plain(*given[:3]))
    module.train()
    torch.manual_seed(1)
    first, second = module(*given[:3]), module(*given[:3])
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(module(*given[:3]), first)
    state = torch.get_rng_state()
    plain(*given[:3])
    module.eval()(*given[:3])
    assert torch.equal(torch.get_rng_state(), state)


def test_copies_and_states(module: Any, layer: MoELayer) -> None:
    """A copy shares packed weights, and nothing else; a state has parameters alone."""
    given = batch(module)
    before = gradients(module, given)
    other = copy.deepcopy(module)
    assert other.layer.packed is layer.packed and other.layer.pool is layer.pool
    with torch.no_grad():
        other.up_b.zero_()
    assert same(gradients(module, given), before)
    assert not torch.equal(other(*given[:3]), module(*given[:3]))
    state = module.state_dict()
    assert sorted(state) == sorted(MATRICES)
    other.load_state_dict(state)
    assert torch.equal(other(*given[:3]), module(*given[:3]))
    with pytest.raises(RuntimeError, match="size mismatch"):
        LoRAExperts(layer, 4).load_state_dict(state)
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(module)


def test_parameters_of_a_caller(module: Any) -> None:
    """functional_call, as of ensembles and second orders of optimizers."""
    given = batch(module)
    doubled = {name: 2 * one.detach() for name, one in module.named_parameters()}
    found = torch.func.functional_call(module, doubled, given[:3])
    module.load_state_dict(doubled)
    assert torch.equal(found, module(*given[:3]))


def ddp_of_one() -> None:
    """Gradients of a process group with one member are those without it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    module = lora_experts(MoELayer(packed("int8"), Pool(1)))
    given = batch(module)
    given = given._replace(ids=torch.zeros_like(given.ids))
    alone = gradients(module, given)
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    module.zero_grad()
    wrapped(*given[:3]).backward(given.dy)
    assert all(torch.equal(getattr(module, name).grad, alone[name]) for name in MATRICES)


def test_ddp_sees_every_parameter() -> None:
    """Those of experts without tokens have gradients of zero, so that no process waits.

    In a process that ends at once: gloo's destructor can wait for a thread that waits for Python's
    lock."""
    assert forked(ddp_of_one) == 0


def test_training_reduces_a_loss(layer: MoELayer) -> None:
    """With an optimizer of torch, whose steps the next forward sees."""
    torch.manual_seed(0)
    module = LoRAExperts(layer, 8, 16)
    given = batch(module, 24)
    target = layer(*given[:3]).float() + 0.1 * torch.randn(24, 256)
    optimizer, losses = torch.optim.AdamW(module.parameters(), 3e-3), []
    for _ in range(12):
        loss = (module(*given[:3]).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and losses == sorted(losses, reverse=True)


def test_parameters_stay_on_the_cpu(layer: MoELayer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the weights are, when a model is moved to a GPU; dtypes change."""
    module = torch.nn.Sequential(lora_experts(layer), torch.nn.Linear(4, 4))
    values = module[0].up_a.detach().clone()
    with far_device(monkeypatch):
        module.to(FAR)
        assert isinstance(module[1].weight.data, FarTensor)
        assert module[0].up_a.is_cpu and torch.equal(module[0].up_a, values)
    assert module[0].bfloat16().up_a.dtype == torch.bfloat16
    with torch.device("meta"):
        made: Any = LoRAExperts(layer, 2)
    assert made.up_a.is_cpu


@pytest.mark.parametrize("where", ["x", "ids and weights", "all"])
def test_activations_of_another_device(
    module: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Bits are those of the CPU, and each gradient is where its tensor is."""
    given, skip = batch(module), torch.tensor([False, True, False, False])
    near = gradients(module, given, skip)
    with far_device(monkeypatch) as device:
        moved = [one.to(FAR) for one in (given.x, given.ids, given.weights, skip, given.dy)]
        if where == "x":
            moved[1:4] = given.ids, given.weights, skip
        elif where == "ids and weights":
            moved[0], moved[3], moved[4] = given.x.clone(), skip, given.dy
        x, ids, weights, mask, dy = cast(Any, moved)
        x.requires_grad_()
        weights = weights.detach().requires_grad_()
        module.zero_grad()
        y = module(x, ids, weights, skip=mask)
        y.backward(dy)
        assert y.device == x.device and y.dtype == x.dtype
        for gradient, tensor in ((x.grad, x), (weights.grad, weights)):
            assert isinstance(gradient, FarTensor) == isinstance(tensor, FarTensor)
        device.synchronize()
        found = [one.to("cpu") for one in (y.detach(), x.grad, weights.grad)]
    assert all(torch.equal(a, near[n]) for a, n in zip(found, ("y", "x", "weights"), strict=True))
    assert all(torch.equal(getattr(module, name).grad, near[name]) for name in MATRICES)


# ---- models with something around their experts ---------------------------------------------


def test_weights_on_inputs(pool: Pool) -> None:
    """As Llama 4 has them: y = expert(w x), with gradients of both factors."""
    experts = packed("bf16")
    plain = lora_experts(experts, pool=pool)
    given = batch(plain, top_k=1)
    scaled = given._replace(x=(given.x * given.weights).float(), weights=torch.ones(13, 1))
    inner = gradients(plain, scaled._replace(dy=given.dy.float()))
    around = packed("bf16")
    around.weight_on_input = True
    module = lora_experts(around, pool=pool)
    found = gradients(module, given._replace(x=given.x.float()))
    assert relative(found["x"], inner["x"] * given.weights) < 0.004
    assert relative(found["weights"], (inner["x"] * given.x).sum(1, keepdim=True)) < 0.004
    assert relative(found["up_a"], inner["up_a"]) < 0.004
    with pytest.raises(UsageError, match="one expert per token, not 2"):
        module(*batch(module)[:3])


def test_norms_of_outputs(pool: Pool) -> None:
    """Against the reference's experts one by one, normalised by torch."""
    experts: Any = packed("bf16")
    experts.norm = OutputNorm(np.linspace(-0.5, 0.5, 256, dtype=np.float32), 1e-6)
    module = lora_experts(experts, pool=pool)
    base = LoRAExperts(module.layer, None)
    given = batch(module, dtype=torch.float32)
    given = given._replace(ids=torch.where(given.ids == 3, -1, given.ids))
    assert relative(base(*given[:3]), module.layer(*given[:3])) < 1e-6
    found = gradients(module, given)
    plain = lora_experts(packed("bf16"), pool=pool)

    def normed(x: Any, weights: Any) -> Any:
        total = torch.zeros_like(given.x)
        for slot in range(2):
            ids = given.ids[:, slot : slot + 1]
            alone = plain(x.bfloat16(), ids, torch.ones(13, 1)).float()
            scaled = alone * (1 + torch.from_numpy(experts.norm.weight))
            root = (scaled.square().mean(1, keepdim=True) + 1e-6).sqrt()
            total = total + scaled / root * weights[:, slot : slot + 1]
        return total

    x, weights = (one.clone().requires_grad_() for one in (given.x, given.weights))
    y = normed(x, weights)
    y.backward(given.dy)
    truth = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
    truth |= {name: one.grad for name, one in plain.named_parameters()}
    assert all(relative(found[name], truth[name]) < 0.006 for name in truth)


# ---- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rank": 0}, "rank must be 1 or more"),
        ({"rank": -3}, "rank must be 1 or more"),
        ({"rank": 1025}, "rank must be at most 1024"),
        ({"rank": 1.5}, "rank must be an integer"),
        ({"alpha": 0}, "alpha must be above 0"),
        ({"alpha": -1}, "alpha must be above 0"),
        ({"alpha": math.nan}, "alpha must be above 0, not nan"),
        ({"alpha": math.inf}, "alpha must be above 0, not inf"),
        ({"alpha": 1e300}, "not 1e.300, and alpha / rank within float32"),
        ({"alpha": 1e-300}, "alpha must be above 0"),
        ({"alpha": 1e38, "rank": 1, "dropout": 0.9}, "alpha / rank within float32"),
        ({"alpha": "much"}, "alpha must be a number"),
        ({"dropout": 1}, "dropout must be at least 0 and below 1"),
        ({"dropout": 1 - 1e-12}, "dropout must be at least 0 and below 1, not 1"),
        ({"dropout": -0.1}, "dropout must be at least 0"),
        ({"dropout": math.nan}, "dropout must be at least 0"),
        ({"targets": ["up", "q_proj"]}, "'q_proj' is none of gate, up, down"),
        ({"targets": 3}, "3 is none of gate, up, down"),
        ({"targets": []}, "no matrix of the experts"),
        ({"dtype": torch.float16}, "float32 or bfloat16, not torch.float16"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(layer: MoELayer, change: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        LoRAExperts(layer, **{"rank": 4, **change})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": torch.zeros(13, 255)}, r"x must have the shape \[..., 256\]"),
        ({"x": torch.zeros(13, 256, dtype=torch.float64)}, "x must be bf16, fp16 or fp32"),
        ({"x": torch.zeros(13, 256, device="meta")}, "on meta"),
        ({"x": torch.zeros(12, 256)}, "ids must have the shape"),
        ({"x": np.zeros((13, 256), np.float32)}, "x must be a tensor of torch, not ndarray"),
        ({"ids": [[0, 1]] * 13}, "ids must be a tensor of torch, not list"),
        ({"weights": None}, "weights must be a tensor of torch, not NoneType"),
        ({"ids": torch.zeros(13, 2)}, "ids must be int32"),
        ({"weights": torch.zeros(13, 3)}, r"weights must be .* \[13, 2\]"),
        ({"weights": torch.zeros(13, 2, dtype=torch.int64)}, "weights must be"),
        ({"skip": torch.zeros(3, dtype=torch.bool)}, r"skip must be bool of shape \[4\]"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(module: Any, change: Any, match: str) -> None:
    given: Any = dict(zip(("x", "ids", "weights"), batch(module), strict=False))
    with pytest.raises(UsageError, match=match):
        module(**given | change)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (lambda one: one[:, :4], r"up_a is \[4, 4, 256\], but must be \[4, 8, 256\]"),
        (lambda one: one.to("meta"), "up_a is on meta"),
        (lambda one: one.transpose(0, 1).contiguous().transpose(0, 1), "up_a is not contiguous"),
        (lambda one: one.half(), "float16 and torch.float32"),
        (lambda one: one.bfloat16(), "bfloat16 and torch.float32"),
    ],
)
def test_parameters_that_do_not_fit(module: Any, values: Any, match: str) -> None:
    module.up_a = torch.nn.Parameter(values(module.up_a.detach()))
    with pytest.raises(UsageError, match=match):
        module(*batch(module)[:3])


def test_a_closed_pool(layer: MoELayer) -> None:
    pool = Pool(1)
    module = lora_experts(layer.packed, pool=pool)
    given = batch(module)
    y = module(*given[:3])
    pool.close()
    for use in (lambda: module(*given[:3]), lambda: y.backward(given.dy)):
        with pytest.raises(UsageError, match="pool is closed"):
            use()
