"""Inputs and results on a GPU, which a stand-in is here: nothing is read before it is there."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import EXACT, Make, batch, error, expected, stacks

torch = pytest.importorskip("torch")

from helpers.far import FAR, FarTensor, far_device  # noqa: E402

from ktconv.runtime.staging import fetch  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_are_on_the_device_of_the_input(
    make: Make, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    """The bits are those of the CPU; neither submitting nor synchronizing waits for anything."""
    wrapper, given = make(), batch(6)
    x = given.x.to(dtype)
    near = wrapper.forward(x, *given[1:])
    with far_device(monkeypatch) as device:
        far = x.to(FAR), given.ids.to(FAR), given.weights.to(FAR)
        found = wrapper.forward(*far, 0)
        assert isinstance(found, FarTensor) and found.dtype == dtype and found.shape == x.shape
        wrapper.submit_forward(*far, 0)
        assert device.pinned == 8  # x, ids, weights and the result, twice
        again = wrapper.sync_forward(far[0], 0)
        both = found.to("cpu"), again.to("cpu")
    assert all(torch.equal(one, near) for one in both)
    assert device.waits == 0 and device.driver.launched == 4


def test_ids_and_weights_on_another_device_than_x(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper, given = make(), batch(6)
    near = wrapper.forward(*given)
    with far_device(monkeypatch):
        assert torch.equal(wrapper.forward(given.x.to(FAR), *given[1:]).to("cpu"), near)
        far = given.ids.to(FAR), given.weights.to(FAR)
        assert torch.equal(wrapper.forward(given.x, *far), near)


def test_deferred_experts_of_a_gpu(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    own = [make(layer_idx=n, path=tmp_path, max_deferred_experts_per_token=1) for n in (0, 1)]
    given = batch(6)
    with far_device(monkeypatch):
        far = given.x.float().to(FAR), given.ids.to(FAR), given.weights.to(FAR)
        total = sum(wrapper.forward(*far).to("cpu") for wrapper in own)
    assert error(total, 2 * expected(stacks(), *given)) < EXACT


def test_values_are_read_once_their_copies_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the event's copies, not of later ones."""
    with far_device(monkeypatch) as device:
        fetched = fetch(torch.ones(3).to(FAR), torch.zeros(2))
        later = fetch(torch.ones(4).to(FAR))
        assert device.waits == 0 and later._tensors[0].isnan().all()
        one, zero = fetched.wait()
        assert one.tolist() == [1] * 3 and zero.tolist() == [0] * 2
        assert later._tensors[0].isnan().all()
        assert fetched.wait()[0] is one and later.wait()[0].tolist() == [1] * 4


def test_copies_of_the_cpu_are_made_where_they_are_asked_for() -> None:
    values = torch.ones(3, requires_grad=True)
    same, other = fetch(values).wait()[0], fetch(values, copy=True).wait()[0]
    assert same.data_ptr() == values.data_ptr() != other.data_ptr()
    assert not same.requires_grad and not other.requires_grad
