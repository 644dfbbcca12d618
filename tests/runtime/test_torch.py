"""Calls with torch tensors: every state that a tensor can be in computes right or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktconv.errors import UsageError
from ktconv.runtime import DeferredExperts, MoELayer, split_deferred

from .conftest import EXPERTS, HIDDEN, batch

pytestmark = pytest.mark.torch

Make = Callable[..., MoELayer]
torch: Any = pytest.importorskip("torch")


@pytest.fixture
def layer(make_layer: Make) -> MoELayer:
    return make_layer()


def tensors(tokens: int = 5, seed: int = 0) -> tuple[Any, Any, Any]:
    x, ids, weights = (torch.from_numpy(array) for array in batch(tokens, seed))
    return x, ids, weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_bits_are_those_of_numpy(layer: MoELayer, dtype: str) -> None:
    x, ids, weights = tensors()
    given = x.to(getattr(torch, dtype))
    bits = given.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else given.numpy()
    y, expected = layer(given, ids, weights), layer(bits, ids.numpy(), weights.numpy())
    assert y.dtype == given.dtype and y.shape == given.shape and not y.requires_grad
    found = y.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else y.numpy()
    assert np.array_equal(found, expected)


def test_other_dtypes_of_ids_and_weights(layer: MoELayer) -> None:
    x, ids, weights = tensors()
    half = weights.half()
    expected = layer(x, ids, half.float())
    for name in ("int8", "uint8", "int16", "int32", "int64"):
        assert torch.equal(layer(x, ids.to(getattr(torch, name)), half), expected)
    short = weights.bfloat16()
    assert torch.equal(layer(x, ids, short), layer(x, ids, short.float()))


def padded(tensor: Any) -> Any:
    """The same values, with others between rows."""
    wide = torch.full((len(tensor), 2 * tensor.shape[1]), 99, dtype=tensor.dtype)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def strided(tensor: Any) -> Any:
    return tensor.repeat_interleave(2, dim=1)[:, ::2]


def transposed(tensor: Any) -> Any:
    return tensor.t().contiguous().t()


def negated(tensor: Any) -> Any:
    """Negated when it is read, and not in memory."""
    view = torch._neg_view(-tensor)
    assert view.is_neg() and torch.equal(view, tensor)
    return view


@pytest.mark.parametrize("view", [padded, strided, transposed, negated])
def test_views(layer: MoELayer, view: Callable[[Any], Any]) -> None:
    x, ids, weights = tensors()
    add, skip = tensors(seed=1)[0], torch.arange(EXPERTS) % 3 == 0
    expected = layer(x, ids, weights, skip=skip, add_to=add)
    assert torch.equal(layer(view(x), ids, weights, skip=skip, add_to=add), expected)
    assert torch.equal(layer(x, ids, view(weights), skip=skip, add_to=view(add)), expected)
    with pytest.raises(UsageError, match="out must be contiguous"):
        layer(x, ids, weights, out=view(torch.ones_like(x)))
    if view is not negated:  # nothing negates integers
        assert torch.equal(layer(x, view(ids), weights, skip=skip, add_to=add), expected)


def test_expanded_views(layer: MoELayer) -> None:
    """Whose rows are one in memory."""
    x, ids, weights = tensors(1)
    once = layer(x, ids, weights)
    wide = [tensor.expand(7, -1) for tensor in (x, ids, weights)]
    assert torch.equal(layer(*wide), once.expand(7, -1))
    add = torch.tensor(2.0).expand(7, HIDDEN)
    assert torch.equal(layer(*wide, add_to=add), layer(*wide, add_to=add.contiguous()))
    mask = torch.tensor(True).expand(EXPERTS)
    assert not layer(*wide, skip=mask).any()
    with pytest.raises(UsageError, match="out must be contiguous"):
        layer(*wide, out=torch.empty(1, HIDDEN).expand(7, -1))


def test_slices_of_larger_tensors(layer: MoELayer) -> None:
    """At places that are aligned to their elements alone."""
    x, ids, weights = tensors()
    expected = layer(x.bfloat16(), ids, weights)
    moved = []
    for tensor in (x.bfloat16(), ids, weights):
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        moved.append(room[1:].view(tensor.shape).copy_(tensor))
    assert torch.equal(layer(*moved), expected)


def unaligned(tensor: Any) -> Any:
    """As a file without padding has it: one byte beside its place."""
    room = bytearray(1) + tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return torch.frombuffer(room, dtype=tensor.dtype, offset=1).view(tensor.shape)


def test_tensors_that_are_not_aligned(layer: MoELayer) -> None:
    x, ids, weights = tensors()
    add, expected = torch.ones_like(x), layer(x, ids, weights)
    assert torch.equal(layer(unaligned(x), unaligned(ids), unaligned(weights)), expected)
    summed = layer(x, ids, weights, add_to=add)
    assert torch.equal(layer(x, ids, weights, add_to=unaligned(add)), summed)
    with pytest.raises(UsageError, match="out is not aligned to its fp32"):
        layer(x, ids, weights, out=unaligned(x))


def test_traced_tensors_are_refused(layer: MoELayer) -> None:
    with pytest.raises(UsageError, match="x has no memory"):
        torch.vmap(layer)(*tensors())


def test_gradients_are_refused_and_never_lost(layer: MoELayer) -> None:
    x, ids, weights = tensors()
    expected = layer(x, ids, weights)
    for name, changed in (
        ("x", {"x": torch.nn.Parameter(x.clone())}),
        ("weights", {"weights": weights.clone().requires_grad_()}),
        ("add_to", {"add_to": x.clone().requires_grad_()}),
        ("out", {"out": x.clone().requires_grad_()}),
    ):
        given = {"x": x, "ids": ids, "weights": weights, **changed}
        with pytest.raises(UsageError, match=f"{name} needs a gradient") as refusal:
            layer(**given)
        assert "no_grad" in str(refusal.value)
        with torch.no_grad():
            assert not layer(**given).requires_grad or name == "out"
    frozen = torch.nn.Parameter(x.clone(), requires_grad=False)
    assert torch.equal(layer(frozen, ids, weights), expected)
    with torch.no_grad():
        found = layer(torch.nn.Parameter(x.clone()), ids, weights)
    assert torch.equal(found, expected) and type(found) is torch.Tensor


def test_inference_mode(layer: MoELayer) -> None:
    x, ids, weights = tensors()
    expected = layer(x, ids, weights)
    with torch.inference_mode():
        inner = x.clone()
        assert torch.equal(layer(torch.nn.Parameter(x.clone()), ids, weights), expected)
        out = torch.empty_like(x)
    assert torch.equal(layer(inner, ids, weights, out=out), expected)


def test_the_callers_default_device(layer: MoELayer) -> None:
    """As engines set it to a GPU; a result there would be written to by the CPU."""
    x, ids, weights = tensors()
    expected, wide = layer(x, ids, weights), padded(x)
    with torch.device("meta"):
        found, of_copy = layer(x, ids, weights), layer(wide, ids, weights)
        with DeferredExperts(1) as deferred:
            deferred(layer, x, ids, weights)
            sums = deferred.flush()
    assert found.is_cpu and of_copy.is_cpu and sums.is_cpu
    assert torch.equal(found, expected) and torch.equal(of_copy, expected)


def freed(tensor: Any) -> Any:
    """As sharded models free parameters."""
    empty = tensor.clone()
    empty.untyped_storage().resize_(0)
    return empty


@pytest.mark.parametrize(
    ("match", "change"),
    [
        (r"{} is on meta: copy it to the CPU", lambda tensor: tensor.to("meta")),
        (r"{} has the layout torch.sparse_coo", lambda tensor: tensor.to_sparse()),
        (r"{} has a shape but no memory", freed),
        (r"{} must be .*complex", lambda tensor: tensor.to(torch.complex64)),
        (r"{} must be .*float8", lambda tensor: tensor.to(torch.float8_e4m3fn)),
        (r"{} must be .*float64", lambda tensor: tensor.double()),
        (r"{} is neither", lambda tensor: Listed(tensor.tolist(), tensor.shape)),
    ],
)
def test_what_no_argument_may_be(layer: MoELayer, match: str, change: Any) -> None:
    x, ids, weights = tensors()
    given = {"x": x, "ids": ids, "weights": weights, "add_to": x, "out": x.clone()}
    given["skip"] = torch.zeros(EXPERTS, dtype=torch.bool)
    for name, tensor in given.items():
        with pytest.raises(UsageError, match=match.format(name)):
            layer(**given | {name: change(tensor)})


class Listed(list[Any]):
    """Numbers in lists that have a shape."""

    def __init__(self, rows: Any, shape: Any) -> None:
        super().__init__(rows)
        self.shape, self.dtype = shape, "list"


def test_out_may_be_x_or_the_sum(layer: MoELayer) -> None:
    x, ids, weights = tensors()
    add = tensors(seed=1)[0]
    expected = layer(x, ids, weights, add_to=add)
    assert layer(x, ids, weights, add_to=add, out=add) is add
    assert torch.equal(add, expected)
    mine = x.clone()
    assert layer(mine, ids, weights, out=mine) is mine
    assert torch.equal(mine, layer(x, ids, weights))
    double = x.clone()
    layer(double, ids, weights, add_to=double, out=double)
    assert torch.equal(double, layer(x, ids, weights, add_to=x))


def test_out_that_overlaps_otherwise(layer: MoELayer) -> None:
    """Would be written before it is read."""
    x, ids, weights = tensors()
    room = torch.zeros(6, HIDDEN)
    room[:5] = x
    kept = room.clone()
    halves = room.view(torch.bfloat16).view(-1)[: x.numel()].view(x.shape)
    for out in (room[1:], halves):
        with pytest.raises(UsageError, match="out overlaps x in memory"):
            layer(room[:5], ids, weights, out=out)
        with pytest.raises(UsageError, match="out overlaps add_to in memory"):
            layer(x, ids, weights, add_to=room[:5], out=out)
    for name, given in (("ids", ids), ("weights", weights)):
        base = torch.zeros(5 * HIDDEN, dtype=given.dtype)
        inside = base[: given.numel()].view(given.shape).copy_(given)
        arguments = {"x": x, "ids": ids, "weights": weights} | {name: inside}
        out = base.view(torch.float32)[: x.numel()].view(x.shape)
        with pytest.raises(UsageError, match=f"out overlaps {name} in memory"):
            layer(**arguments, out=out)
    assert torch.equal(room, kept)
    # What is converted is copied first, and neighbours do not overlap.
    short = x.bfloat16()
    layer(x, ids, weights, add_to=short, out=short)
    layer(room[:3], ids[:3], weights[:3], out=room[3:])
    assert torch.equal(room[3:], layer(x[:3], ids[:3], weights[:3]))


def test_out_of_another_dtype(layer: MoELayer) -> None:
    x, ids, weights = tensors()
    exact = layer(x, ids, weights)
    for name in ("bfloat16", "float16", "float32"):
        out = torch.empty(x.shape, dtype=getattr(torch, name))
        assert layer(x, ids, weights, out=out) is out
        assert torch.equal(out, exact.to(out.dtype))


def test_kinds_may_be_mixed(layer: MoELayer) -> None:
    x, ids, weights = tensors()
    expected = layer(x, ids, weights)
    mixed = layer(x, ids.numpy(), weights, skip=np.zeros(EXPERTS, bool))
    assert torch.equal(mixed, expected)
    found = layer(x.numpy(), ids, weights.numpy())
    assert isinstance(found, np.ndarray) and np.array_equal(found, expected.numpy())
    out = np.empty((5, HIDDEN), np.float32)
    assert layer(x, ids, weights, out=out) is out and np.array_equal(out, found)


def test_extreme_values(layer: MoELayer) -> None:
    """NaN and infinity stay in the row that has them, whose skipped experts do not see them."""
    x, ids, weights = tensors(4)
    expected = layer(x, ids, weights)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    found = layer(x, ids, weights)
    assert found[1].isnan().any() and not found[2].isfinite().all()
    assert torch.equal(found[[0, 3]], expected[[0, 3]])
    ids[1:3] = -1
    weights[1:3] = torch.nan
    assert not layer(x, ids, weights)[1:3].any()
    assert torch.equal(layer(x, ids, weights)[[0, 3]], expected[[0, 3]])


def test_splitting_tensors() -> None:
    ids, weights = torch.tensor([[3, 1, 2]]), torch.tensor([[0.2, 0.5, 0.3]])
    for dtype in (torch.int32, torch.int64):
        now, later = split_deferred(ids.to(dtype), weights.bfloat16(), 1)
        assert now.dtype == later.dtype == dtype
        assert now.tolist() == [[-1, 1, -1]] and later.tolist() == [[3, -1, 2]]
    now, later = split_deferred(ids.to(torch.uint8), weights.requires_grad_(), 2)
    assert now.dtype == later.dtype == torch.int64
    assert now.tolist() == [[-1, 1, 2]] and later.tolist() == [[3, -1, -1]]
    with pytest.raises(UsageError, match="ids cannot be read"):
        split_deferred(ids.to_sparse(), weights, 1)
    with pytest.raises(UsageError, match="weights must not be int64"):
        split_deferred(ids, ids, 1)
