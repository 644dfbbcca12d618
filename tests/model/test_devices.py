"""Experts on the CPU of a model whose other parts are elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.family_list import SAVED
from helpers.family_models import build, reading_text

from ktconv.errors import CheckpointError, UsageError
from ktconv.formats.decode import round_to_bf16
from ktconv.model import expert_device, move_non_experts, replace_experts
from ktconv.model.forms import packed_class
from ktconv.model.sites import Site, find_experts
from ktconv.runtime import layer as runtime_layer
from ktconv.runtime.arguments import Arguments

pytestmark = [pytest.mark.slow, pytest.mark.torch]

ROUND = {"phimoe", "deepseek_v4, resaved"}  # whose untrained routers give all experts the same


def built(name: str, torch: Any) -> Any:
    """A tiny model of a family in float32."""
    if not hasattr(pytest.importorskip("transformers"), SAVED[name].saved_by):
        pytest.skip(f"transformers has no {SAVED[name].saved_by} yet")
    return build(SAVED[name]).float().requires_grad_(False).eval()


def tensors(model: Any) -> list[Any]:
    """Parameters and buffers, each once."""
    return [*model.parameters(), *model.buffers()]


def nbytes(some: Any) -> int:
    return sum(one.numel() * one.element_size() for one in some)


# ---- every family ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SAVED)
def test_all_but_experts_of_a_family_move(name: str, torch: Any) -> None:
    model = built(name, torch)
    experts = [one for site in find_experts(model).values() for one in site.own.weights]
    numbers = {id(one) for one in experts}
    others = [one for one in tensors(model) if id(one) not in numbers]
    assert len(experts) == len(numbers) and expert_device(model) == torch.device("cpu")
    moved = move_non_experts(model, "meta")
    assert (moved.moved, moved.there) == (nbytes(others), 0)
    assert moved.experts == nbytes(experts) > 0
    stayed = [one for one in tensors(model) if not one.is_meta]
    assert {id(one) for one in stayed} == numbers
    assert len(tensors(model)) == len(others) + len(experts)  # tied ones still are
    assert expert_device(model) == torch.device("cpu")


class Asked:
    """Packed experts without weights that are called beside a model's own."""

    def __init__(self, site: Site) -> None:
        own = site.own
        asked: Any = SimpleNamespace(
            count=own.count, hidden=own.hidden, origins=np.arange(own.count), asked=self
        )
        self.count, self.call, self.module = own.count, own.call, own.module
        self.packed = packed_class(own)(asked, None, own)
        self.expected: Any = None
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, *arguments: Any) -> Any:
        """Both are called, and the model's own experts answer."""
        self.expected = self.packed.routing(self.module, arguments)
        self.packed(*arguments)
        return type(self.module).forward(self.module, *arguments)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps ids and weights that they would get."""

    def keep(packed: Any, _: Any, call: Arguments) -> None:
        assert (call.ids.dtype, call.weights.dtype) == ("int64", "fp32")
        ids, weights = call.ids.owner.numpy().copy(), call.weights.owner.numpy().copy()
        packed.asked.calls.append((ids, weights))
        call.y.owner.zero_()

    monkeypatch.setattr(runtime_layer, "compute", keep)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("name", SAVED)
def test_kernels_get_the_models_own_routing(name: str, torch: Any) -> None:
    """Bit for bit what its router decided, with weights in float32."""
    model = built(name, torch)
    asked = {layer: Asked(site) for layer, site in find_experts(model).items()}
    for one in asked.values():
        one.module.forward = one.__call__
    ids = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        reading_text(model)(input_ids=ids, use_cache=False)
    assert sorted(asked) == list(SAVED[name].layers)
    for one in asked.values():
        expected, (found, weights) = one.expected, one.calls[0]
        chosen = expected.ids.reshape(18, -1).numpy()
        if SAVED[name].post_norm:  # each expert of a token is called alone, and weighed behind it
            chosen = chosen.reshape(-1, 1)
            assert (weights == 1).all()
        elif one.call == "sorted":
            chosen, weights = np.sort(chosen), weights[found >= 0]
            found = np.sort(np.where(found < 0, -1, found).reshape(-1, 18).T)[:, -chosen.shape[1] :]
            assert (weights == 1).all()
        else:
            here = found >= 0
            expected_weights = expected.weights.float().reshape(18, -1).numpy()
            assert np.array_equal(weights[here], expected_weights[here])
            assert name in ROUND or (round_to_bf16(weights[here]) != weights[here]).any()
        assert np.array_equal(found, np.where(chosen < one.count, chosen, -1))


# ---- moving ----------------------------------------------------------------------------


def test_tied_tensors_stay_tied(model: Any, torch: Any) -> None:
    """To devices for which new parameters are made, too."""
    model.lm_head.weight = model.model.embed_tokens.weight
    rotary = model.model.rotary_emb.inv_freq
    model.model.layers[0].register_buffer("frequencies", rotary)
    before = nbytes(tensors(model))
    moved = move_non_experts(model, "meta")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].frequencies is model.model.rotary_emb.inv_freq
    assert moved.moved + moved.experts == before


def test_parameters_stay_the_same_objects(model: Any, int8: Path, torch: Any) -> None:
    replace_experts(model, int8, threads=1)
    before = list(model.parameters())
    packed: Any = find_experts(model)[0].module
    moved = move_non_experts(model, torch.device("cpu"))
    assert (moved.moved, moved.there) == (0, nbytes(tensors(model)))
    assert moved.experts == 2 * packed.nbytes == 2 * 8 * packed.experts.expert_bytes
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_nothing_moves_where_something_cannot(model: Any, torch: Any) -> None:
    model.model.norm.to("meta")
    for device, says in (
        ("cpu", r"model\.norm\.weight has no values"),
        ("cuda:7" if not torch.cuda.is_available() else "nowhere", "cannot be used"),
        ("nowhere", "the device nowhere cannot be used"),
    ):
        with pytest.raises(UsageError, match=says):
            move_non_experts(model, device)
    assert sum(one.is_meta for one in tensors(model)) == 1
    with pytest.raises(CheckpointError, match="no experts were found"):
        move_non_experts(torch.nn.Linear(2, 2), "cpu")
    with pytest.raises(CheckpointError, match="no experts were found"):
        expert_device(torch.nn.Linear(2, 2))


def test_experts_on_two_devices_are_named(model: Any, int8: Path, torch: Any) -> None:
    find_experts(model)[1].module.to("meta")
    with pytest.raises(CheckpointError, match=r"cpu \(layers 0\), meta \(layers 1\)"):
        expert_device(model)
    replace_experts(model, int8, threads=1)
    assert expert_device(model) == torch.device("cpu")


# ---- crossing --------------------------------------------------------------------------


def test_a_model_on_a_gpu(
    model: Any, int8: Path, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts run on the CPU, and the answer is the same, bit for bit."""
    from helpers.far import FAR, FarTensor, far_device

    model.requires_grad_(False)
    ids = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    replace_experts(model, int8, threads=1)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        with far_device(monkeypatch) as device:
            moved = move_non_experts(model, "cuda")
            assert {one.device for one in tensors(model)} == {FAR}
            assert expert_device(model) == torch.device("cpu")
            found = model(input_ids=ids.to(FAR), use_cache=False).logits
            assert isinstance(found, FarTensor) and device.waits == 2
            assert torch.equal(found.to("cpu"), expected)
            again = move_non_experts(model, FAR)
    assert (again.moved, again.there, again.experts) == (0, moved.moved, moved.experts)


def test_copies_are_waited_for_once(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.far import FAR, FarTensor, far_device

    from ktconv.runtime.staging import on_cpu, on_device

    values, ids = torch.randn(3, 4), torch.arange(6).reshape(2, 3).T
    with far_device(monkeypatch) as device:
        far = [one.to(FAR) for one in (values, ids)]
        found = on_cpu(*far, values)
        assert (device.pinned, device.waits) == (2, 1)
        assert torch.equal(found[0], values) and torch.equal(found[1], ids)
        assert found[2] is values
        back = on_device(found[0].bfloat16(), far[0])
        assert isinstance(back, FarTensor) and back.dtype == torch.float32
        assert device.pinned == 3
        assert torch.equal(back.to("cpu"), values.bfloat16().float())
        with torch.device("cuda"):  # as torch.set_default_device does
            (again,) = on_cpu(far[1])
        assert not isinstance(again, FarTensor) and torch.equal(again, ids)
    same = on_device(values, torch.zeros(1, dtype=torch.float16))
    assert torch.equal(same, values.half())


def test_a_stand_in_that_is_strict(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must find what a GPU would."""
    from helpers.far import FAR, far_device

    with far_device(monkeypatch) as device:
        far = torch.ones(3).to(FAR)
        with pytest.raises(RuntimeError, match="two devices"):
            far + torch.ones(3)
        early = torch.empty(3).copy_(far, non_blocking=True)
        assert early.isnan().all()
        device.synchronize()
        assert early.tolist() == [1, 1, 1]
