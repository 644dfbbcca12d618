"""Defects of kt_kernel 0.7.2 that concern inference, each with what happens here instead.

Numbers are those of docs/kt-wrapper.md. Maps (5), deferral (8) and files (12) have tests of their
own in test_loading.py and test_deferred.py.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

from ktconv.errors import UsageError

from .conftest import (
    EXACT,
    EXPERTS,
    HIDDEN,
    INNER,
    TOP_K,
    Make,
    Stacks,
    batch,
    error,
    expected,
    stacks,
)

pytestmark = [pytest.mark.slow, pytest.mark.torch]

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("method", "parts"), [("BF16", 1), ("BF16", 2), ("BF16", 4), ("AMXINT8", 1), ("AMXINT8", 2)]
)
def test_d2_all_parts_are_summed(make: Make, method: str, parts: int) -> None:
    """Also where a machine has fewer NUMA nodes."""
    wrapper, given = make(method=method, threadpool_count=parts), batch(6)
    assert wrapper.layer.parts == parts
    bound = EXACT if method == "BF16" else 0.025
    assert error(wrapper.forward(*given), expected(stacks(), *given)) < bound


def test_d2_more_than_four_parts(make: Make) -> None:
    """There kt_kernel's backward leaves parts out; the forward here has eight."""
    made = torch.Generator().manual_seed(3)
    wide, tall = (4, 1024, HIDDEN), (4, HIDDEN, 1024)
    own = Stacks(*(torch.randn(s, generator=made).bfloat16() / 16 for s in (wide, wide, tall)))
    given = batch(3)
    ids = given.ids % 4
    for parts in (5, 6, 8):
        more: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 1024}
        if 1024 % parts:
            with pytest.raises(UsageError, match="part"):
                make(own, threadpool_count=parts, **more)
            continue
        y = make(own, threadpool_count=parts, **more).forward(given.x, ids, given.weights)
        assert error(y, expected(own, given.x, ids, given.weights)) < EXACT


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "AMXINT4"])
def test_d6_an_expert_twice_in_a_token(make: Make, method: str, tokens: int) -> None:
    """As often as it is named, for one token as for many."""
    wrapper, given = make(method=method), batch(tokens)
    given.ids[:, 1] = given.ids[:, 0]
    bound = {"BF16": EXACT, "AMXINT8": 0.025, "AMXINT4": 0.25}[method]
    found = wrapper.forward(*given)
    assert error(found, expected(stacks(), *given)) < bound
    once = given.weights.clone()
    once[:, 0], once[:, 1] = given.weights[:, 0] + given.weights[:, 1], 0
    same = wrapper.forward(given.x.float(), given.ids, once)
    assert error(wrapper.forward(given.x.float(), *given[1:]), same) < 1e-5


def test_d12_each_wrapper_has_the_threads_that_it_asks_for(make: Make) -> None:
    """Not those of the process's first; wrappers of the same settings share theirs."""
    one, two, again = (make(cpuinfer_threads=n, layer_idx=n) for n in (1, 2, 1))
    assert [wrapper.layer.pool.threads for wrapper in (one, two, again)] == [1, 2, 1]
    assert one.layer.pool is again.layer.pool is not two.layer.pool
    given = batch(7)
    assert torch.equal(one.forward(*given), two.forward(*given))


def test_d12_layers_of_other_sizes_share_no_buffers(make: Make) -> None:
    """The same batch size and parity of the layer, another hidden size and top-k."""
    given, wide = batch(4), batch(4, hidden=512, top_k=2)
    small = make()
    large = make(stacks(1, hidden=512), hidden_size=512, num_experts_per_tok=2, layer_idx=2)
    first = small.forward(*given)
    second = large.forward(*wide)
    assert second.shape == (4, 512)
    assert error(second, expected(stacks(1, hidden=512), *wide)) < EXACT
    assert error(first, expected(stacks(), *given)) < EXACT


@pytest.mark.parametrize("background", [False, True])
def test_d12_results_do_not_alias(make: Make, background: bool) -> None:
    """Of calls of one layer, of layers of one parity, and of what was captured or cleared."""
    one, two, given = make(), make(stacks(1), layer_idx=2), batch(4)

    def run(wrapper: Any, x: Any) -> Any:
        if not background:
            return wrapper.forward(x, *given[1:])
        wrapper.submit_forward(x, *given[1:])
        return wrapper.sync_forward(x)

    one.set_capture_batch_sizes([4])
    found = [run(one, given.x), run(one, -given.x), run(two, given.x), run(one, given.x)]
    one.clear_buffer_cache()
    one.set_capture_batch_sizes([])
    assert len({y.data_ptr() for y in found}) == 4
    kept = found[0].clone()
    for other in found[1:]:
        other.zero_()
    assert torch.equal(found[0], kept) and error(kept, expected(stacks(), *given)) < EXACT


def test_d12_capture_sizes_change_no_result(make: Make) -> None:
    wrapper = make()
    for tokens in (1, 2, 1, 4, 2):
        wrapper.set_capture_batch_sizes([1, 2])
        given = batch(tokens, seed=tokens)
        assert error(wrapper.forward(*given), expected(stacks(), *given)) < EXACT
    wrapper.set_capture_batch_sizes([])


def test_d16_weights_keep_their_precision(make: Make) -> None:
    """fp32 weights are not rounded to bf16 on their way."""
    wrapper, given = make(), batch(6)
    x, close = given.x.float(), given.weights * (1 + 2**-12)
    ratio = wrapper.forward(x, given.ids, close) / wrapper.forward(x, *given[1:])
    assert float((ratio - 1 - 2**-12).abs().median()) < 2**-20


def test_d18_a_call_before_weights_are_loaded(make: Make) -> None:
    wrapper, given = make(None), batch()
    calls: tuple[Any, ...] = wrapper.forward, wrapper.submit_forward
    for call in calls:
        with pytest.raises(UsageError, match="layer 0 has no weights yet") as refused:
            call(*given)
    assert "load_weights" in str(refused.value.hint)


def test_d18_torch_without_cuda_will_do(make: Make) -> None:
    """No pinned memory is asked for where no GPU is involved."""
    y = make().forward(*batch())
    assert y.device.type == "cpu"


@pytest.mark.parametrize("chunk", [50, 64, 0, -1])
def test_a_batch_beyond_the_chunk_is_computed(make: Make, chunk: int) -> None:
    """Bit for bit as in pieces; the size needs no multiple of 32."""
    wrapper, given = make(chunked_prefill_size=chunk, method="AMXINT8"), batch(150)
    whole = wrapper.forward(*given)
    pieces = [
        wrapper.forward(*(one[start : start + 37] for one in given)) for start in range(0, 150, 37)
    ]
    assert torch.equal(whole, torch.cat(pieces))


def test_a_token_does_not_depend_on_its_neighbours(make: Make) -> None:
    for method in ("AMXINT4", "AMXINT8", "BF16", "FP8", "MXFP4", "RAWINT4"):
        wrapper, given = make(method=method), batch(33)
        together = wrapper.forward(*given)
        alone = [wrapper.forward(*(one[n : n + 1] for one in given)) for n in (0, 7, 32)]
        assert torch.equal(torch.cat(alone), together[[0, 7, 32]])


def test_a_row_that_is_no_number_stays_its_own(make: Make) -> None:
    """NaN goes where it belongs, and nowhere else; zeros give zeros."""
    for method in ("AMXINT4", "AMXINT8", "BF16"):
        wrapper, given = make(method=method), batch(4)
        sound = wrapper.forward(*given)
        given.x[1], given.x[2] = float("nan"), 0
        y = wrapper.forward(*given)
        assert y[1].isnan().all() and not y[2].any()
        assert torch.equal(y[[0, 3]], sound[[0, 3]])


def test_masked_slots_are_not_spread_over_the_others(make: Make) -> None:
    """Weights are not normalised anew: what a GPU computes is added."""
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[::2] = True
    given = batch(12)
    here, there = make(gpu_experts_mask=mask), make(gpu_experts_mask=~mask)
    x = given.x.float()
    total = here.forward(x, *given[1:]) + there.forward(x, *given[1:])
    assert error(total, expected(stacks(), *given)) < EXACT


def test_sizes_are_checked_before_anything_is_packed(make: Make) -> None:
    """In words that name the multiple; formats differ."""
    made = torch.Generator().manual_seed(0)
    hidden, inner = 320, 96
    wide, tall = (EXPERTS, inner, hidden), (EXPERTS, hidden, inner)
    own = Stacks(*(torch.randn(s, generator=made).bfloat16() / 10 for s in (wide, wide, tall)))
    given, sizes = batch(3, hidden=hidden), {"hidden_size": hidden, "moe_intermediate_size": inner}
    assert error(make(own, **sizes).forward(*given), expected(own, *given)) < EXACT
    for method, multiple in (("AMXINT8", 64), ("AMXINT4", 128), ("FP8", 128)):
        with pytest.raises(UsageError, match=f"must be a multiple of {multiple}"):
            make(own, method=method, **sizes)


def test_weights_go_with_their_wrapper(make: Make) -> None:
    """Nothing of the process keeps a layer."""
    import weakref

    wrapper = make()
    wrapper.forward(*batch())
    layer = weakref.ref(wrapper.layer)
    del wrapper
    gc.collect()
    assert layer() is None


def test_tensors_are_not_needed_once_they_are_packed(make: Make) -> None:
    own, given = Stacks(*(stack.clone() for stack in stacks())), batch()
    for method in ("BF16", "AMXINT8"):
        wrapper = make(own, method=method)
        before = wrapper.forward(*given)
        for stack in own:
            stack.zero_()
        assert torch.equal(wrapper.forward(*given), before)
        own = Stacks(*(stack.clone() for stack in stacks()))
    assert (own.up.shape[1], given.ids.shape[1]) == (INNER, TOP_K)
