"""The interface of KTMoEWrapper: arguments, masks, calls and what is refused."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ktconv.errors import UsageError

from .conftest import EXACT, EXPERTS, HIDDEN, INNER, TOP_K, Make, batch, error, expected, stacks

torch = pytest.importorskip("torch")

from ktconv.compat.kt import KTMoEWrapper, generate_gpu_experts_masks  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch]

# Names, order and defaults of kt_kernel 0.7.2's factory; "-": none.
ARGUMENTS = {
    "layer_idx": "-", "num_experts": "-", "num_experts_per_tok": "-", "hidden_size": "-",
    "moe_intermediate_size": "-", "gpu_experts_mask": "-", "cpuinfer_threads": "-",
    "threadpool_count": "-", "weight_path": "-", "chunked_prefill_size": "-", "cpu_save": False,
    "max_deferred_experts_per_token": None, "method": "AMXINT4", "numa_nodes": None,
    "mode": "inference", "num_gpu_experts": 0, "lora_rank": 16, "lora_alpha": 32.0,
    "lora_dropout": 0.0, "max_cache_depth": 1, "group_size": 128, "zero_point": True,
    "full_weight_grad": False, "swiglu_limit": 0.0, "swiglu_alpha": 0.0,
}  # fmt: skip
METHODS = {
    "load_weights": ["physical_to_logical_map_cpu"],
    "load_weights_from_tensors": ["gate_proj", "up_proj", "down_proj",
                                  "physical_to_logical_map_cpu"],
    "submit_forward": ["hidden_states", "topk_ids", "topk_weights", "cuda_stream"],
    "sync_forward": ["hidden_states", "cuda_stream"],
    "forward": ["hidden_states", "topk_ids", "topk_weights", "cuda_stream"],
}  # fmt: skip


def test_arguments_have_the_names_order_and_defaults_of_kt_kernel() -> None:
    parameters = inspect.signature(KTMoEWrapper).parameters.values()
    found = {one.name: "-" if one.default is one.empty else one.default for one in parameters}
    assert list(found.items()) == list(ARGUMENTS.items())
    assert all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
    for name, wanted in METHODS.items():
        assert list(inspect.signature(getattr(KTMoEWrapper, name)).parameters)[1:] == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than the 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be 1 or more, not 0"),
        ({"num_experts": 10**12}, "num_experts must be at most 1000000"),
        ({"num_experts": -1}, "num_experts must be 1 or more"),
        ({"hidden_size": 2.5}, "hidden_size must be an integer, not 2.5"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must be an integer"),
        ({"layer_idx": -1}, "layer_idx must be 0 or more"),
        ({"cpuinfer_threads": 0}, "cpuinfer_threads must be 1 or more"),
        ({"threadpool_count": 0}, "threadpool_count must be 1 or more"),
        ({"numa_nodes": [0, 1]}, "numa_nodes has 2 numbers for threadpool_count 1"),
        ({"numa_nodes": 0}, "numa_nodes must be a list of integers, not 0"),
        ({"numa_nodes": [99]}, "the machine has no NUMA node 99"),
        ({"max_deferred_experts_per_token": -1}, "max_deferred_experts_per_token must be 0"),
        ({"swiglu_limit": -1.0}, "swiglu_limit must be 0"),
        ({"swiglu_alpha": float("nan")}, "swiglu_alpha must be 0"),
        ({"mode": "sft"}, "'BF16' cannot be used with mode='sft'"),
        ({"mode": "train"}, "the mode 'train' is unknown"),
        ({"method": "SYCL_GPTQ_INT4"}, "no code for SYCL"),
        ({"method": "AMXINT2"}, "'AMXINT2' cannot be used: unknown"),
        ({"method": None}, "not a string"),
        ({"gpu_experts_mask": torch.zeros(3, dtype=torch.bool)}, r"\[8\].* not \[3\]"),
        ({"gpu_experts_mask": torch.zeros(1, dtype=torch.bool)}, r"\[8\].* not \[1\]"),
        ({"gpu_experts_mask": torch.zeros(EXPERTS)}, "not torch.float32"),
        ({"gpu_experts_mask": [False] * EXPERTS}, "not list"),
        (
            {"gpu_experts_mask": torch.zeros(EXPERTS, dtype=torch.bool, device="meta")},
            "gpu_experts_mask is on the device meta",
        ),
    ],
)
def test_arguments_that_are_refused(make: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(own=None, **changes)


def test_an_unknown_method_is_answered_with_the_list(make: Make) -> None:
    with pytest.raises(UsageError) as refused:
        make(own=None, method="SYCL_GPTQ_INT4")
    assert refused.value.hint == (
        "supported: AMXINT4, AMXINT8, RAWINT4, GPTQ_INT4, FP8, FP8_PERCHANNEL, MXFP4, MXFP8, "
        "NVFP4, BF16, LLAMAFILE, MOE_INT4, MOE_INT8"
    )


# Errors with each weight format of the same numbers, against float32: those of the formats.
@pytest.mark.parametrize(
    ("method", "bound"),
    [
        ("AMXINT4", 0.25), ("MOE_INT4", 0.25), ("AMXINT8", 0.025), ("MOE_INT8", 0.025),
        ("BF16", EXACT), ("FP8", 0.05), ("FP8_PERCHANNEL", 0.05), ("RAWINT4", 0.22),
        ("GPTQ_INT4", 0.22), ("MXFP4", 0.26), ("MXFP8", 0.05),
        ("NVFP4", 0.2),
    ],
)  # fmt: skip
def test_every_method_packs_tensors(make: Make, method: str, bound: float) -> None:
    wrapper, given = make(method=method), batch(7)
    y = wrapper.forward(*given, 0)
    assert y.dtype == torch.bfloat16 and y.shape == given.x.shape
    assert error(y, expected(stacks(), *given)) < bound


def test_a_mask_and_ids_of_no_expert(make: Make) -> None:
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[[1, 4]] = True
    wrapper, given = make(gpu_experts_mask=mask), batch(16)
    assert wrapper.num_gpu_experts == 2
    for outside in (-1, EXPERTS, 99, 1 << 40):
        given.ids[3, 0] = outside
        y = wrapper.forward(*given, 0)
        assert error(y, expected(stacks(), *given, skip=mask)) < EXACT
    given.ids[5] = torch.tensor([1, 4, 1])
    assert not wrapper.forward(*given, 0)[5].any()
    assert mask is not wrapper.gpu_experts_mask  # a copy: changes of the caller's do nothing


@contextmanager
def held(wrapper: KTMoEWrapper) -> Iterator[None]:
    """What is submitted meanwhile begins afterwards."""
    go = threading.Event()
    wrapper.layer.pool.submit(go.wait)
    try:
        yield
    finally:
        go.set()


def test_writing_the_mask_takes_effect_at_the_next_call(make: Make) -> None:
    wrapper, given = make(), batch(9)
    with held(wrapper):
        wrapper.submit_forward(*given, 0)
        wrapper.gpu_experts_mask[2] = True
    before, after = wrapper.sync_forward(given.x, 0), wrapper.forward(*given, 0)
    assert error(before, expected(stacks(), *given)) < EXACT
    skip = wrapper.gpu_experts_mask
    assert error(after, expected(stacks(), *given, skip=skip)) < EXACT
    assert wrapper.num_gpu_experts == 1
    wrapper.gpu_experts_mask = None
    assert skip is wrapper.gpu_experts_mask and wrapper.num_gpu_experts == 0
    assert torch.equal(wrapper.forward(*given, 0), before)
    with pytest.raises(UsageError, match=r"\[8\]"):
        wrapper.gpu_experts_mask = torch.zeros(2, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("background", [False, True])
def test_results_are_like_the_input(make: Make, dtype: Any, background: bool) -> None:
    wrapper, given = make(), batch(6)
    x = given.x.to(dtype).reshape(2, 3, HIDDEN)
    if background:
        wrapper.submit_forward(x, given.ids, given.weights)
        y = wrapper.sync_forward(x)
    else:
        y = wrapper.forward(x, given.ids, given.weights)
    assert y.dtype == dtype and y.shape == x.shape
    assert error(y.reshape(6, HIDDEN), expected(stacks(), *given)) < EXACT


def test_shapes_and_dtypes_of_ids_and_weights(make: Make) -> None:
    wrapper, given = make(), batch(6)
    y = wrapper.forward(*given)
    x = given.x.reshape(3, 2, HIDDEN)
    each = given.ids.reshape(3, 2, TOP_K).int(), given.weights.reshape(3, 2, TOP_K).double()
    assert torch.equal(wrapper.forward(x, *each).reshape(y.shape), y)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16):
        assert torch.equal(wrapper.forward(given.x, given.ids.to(dtype), given.weights), y)
    apart = given.x.t().contiguous().t(), given.ids.t().contiguous().t(), given.weights
    assert torch.equal(wrapper.forward(*apart), y)
    nothing = wrapper.forward(given.x[:0], given.ids[:0], given.weights[:0])
    assert nothing.shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g._replace(x=g.x[:, :5]), r"hidden_states must have the shape \[..., 256\]"),
        (lambda g: g._replace(x=g.x.tolist()), "hidden_states must be a tensor, not a list"),
        (lambda g: g._replace(x=g.x.int()), "must be floating point, not int32"),
        (lambda g: g._replace(ids=g.ids[:4]), "topk_ids must have 3 numbers for each of the 5"),
        (lambda g: g._replace(ids=g.ids[:, :1]), "topk_ids must have 3 numbers"),
        (lambda g: g._replace(ids=g.ids.float()), "topk_ids must be integers, not float32"),
        (lambda g: g._replace(weights=g.weights[:, :2]), "topk_weights must have 3 numbers"),
        (lambda g: g._replace(weights=g.ids), "must be floating point"),
        (lambda g: g._replace(x=g.x.to("meta")), "the device meta"),
        (lambda g: g._replace(x=g.x.to_sparse()), "hidden_states has the layout torch.sparse_coo"),
        (lambda g: g._replace(x=g.x.float().requires_grad_()), "needs a gradient"),
    ],
)
def test_calls_that_are_refused(make: Make, change: Any, message: str) -> None:
    wrapper, given = make(), batch()
    calls: tuple[Any, ...] = wrapper.forward, wrapper.submit_forward
    for call in calls:
        with pytest.raises(UsageError, match=message):
            call(*change(given), 0)
    with pytest.raises(UsageError, match="nothing to wait for"):
        wrapper.sync_forward(given.x)  # what was refused was not submitted


def test_gradients_are_not_asked_for_under_no_grad(make: Make) -> None:
    wrapper, given = make(), batch()
    given = given._replace(x=given.x.float().requires_grad_())
    with torch.no_grad():
        y = wrapper.forward(*given)
        wrapper.submit_forward(*given)
        assert torch.equal(wrapper.sync_forward(given.x), y) and not y.requires_grad


def test_defaults_of_torch_change_nothing(make: Make, tmp_path: Any) -> None:
    """As they are while other programs build models."""
    given, deferred = batch(), {"path": tmp_path, "max_deferred_experts_per_token": 2}
    found = []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                own = [make(layer_idx=n, **deferred) for n in (0, 1)]
                assert not own[0].gpu_experts_mask.is_meta
                found.append([wrapper.forward(*given) for wrapper in own])
        finally:
            torch.set_default_dtype(torch.float32)
        del own
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_submissions_come_back_in_order(make: Make) -> None:
    wrapper, many = make(), [batch(tokens) for tokens in (3, 5, 5, 1)]
    for given in many:
        wrapper.submit_forward(*given)
    between = wrapper.forward(*many[1])
    assert error(between, expected(stacks(), *many[1])) < EXACT
    with pytest.raises(UsageError, match=r"\[5, 256\], but what was submitted .* is \[3, 256\]"):
        wrapper.sync_forward(many[1].x)
    for given in many:
        assert error(wrapper.sync_forward(given.x), expected(stacks(), *given)) < EXACT


def test_inputs_may_change_once_they_are_submitted(make: Make) -> None:
    wrapper, given = make(), batch()
    reference = expected(stacks(), *given)
    with held(wrapper):
        wrapper.submit_forward(*given)
        for tensor in given:
            tensor.zero_()
    assert error(wrapper.sync_forward(given.x), reference) < EXACT


def test_errors_of_the_background_travel_to_who_waits(make: Make) -> None:
    wrapper, given = make(), batch()
    wrapper.submit_forward(*given)
    wrapper.sync_forward(given.x)
    wrapper._layer = lambda *_, **__: (_ for _ in ()).throw(UsageError("no luck"))  # type: ignore
    wrapper._layer.pool = wrapper._pool  # type: ignore
    wrapper.submit_forward(*given)
    with pytest.raises(UsageError, match="no luck"):
        wrapper.sync_forward(given.x)


def test_threads_with_wrappers_of_their_own(make: Make) -> None:
    """Of other sizes, on two pools: every result is that of the wrapper alone."""
    own = [make(cpuinfer_threads=1 + n % 2, layer_idx=n, own=stacks(n)) for n in range(4)]
    alone = [wrapper.forward(*batch(9, n)) for n, wrapper in enumerate(own)]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(20):
            own[n].submit_forward(*batch(9, n))
            if not torch.equal(own[n].sync_forward(batch(9, n).x), alone[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_masks_from_statistics() -> None:
    used = torch.tensor([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])
    masks = generate_gpu_experts_masks(used, 3)
    assert masks.dtype == torch.bool
    assert masks.tolist() == [[False, True, False, True], [False, False, True, False]]
    assert not generate_gpu_experts_masks(used, -2).any()
    assert generate_gpu_experts_masks(used, 99).all()
    ties = generate_gpu_experts_masks(torch.ones(2, 3, dtype=torch.int64), 4)
    assert ties.tolist() == [[True, True, True], [True, False, False]]
    refused: tuple[Any, ...] = used[0], used * float("nan"), [[1.0]], used.to("meta")
    for wrong in refused:
        with pytest.raises(UsageError):
            generate_gpu_experts_masks(wrong, 1)
    for number in ("1", None, 2.5, [1]):
        with pytest.raises(UsageError, match="num_gpu_experts must be an integer"):
            generate_gpu_experts_masks(used, number)  # type: ignore[arg-type]


def test_capture_batch_sizes() -> None:
    KTMoEWrapper.set_capture_batch_sizes([1, 2, 4])
    found = KTMoEWrapper.get_capture_batch_sizes()
    found.append(8)  # not ours
    assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2, 4]
    for sizes in ([0], 5, None):
        with pytest.raises(UsageError, match="capture_bs must be"):
            KTMoEWrapper.set_capture_batch_sizes(sizes)  # type: ignore[arg-type]
    assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2, 4]
    KTMoEWrapper.set_capture_batch_sizes([])


PROGRAM = """
import torch
from kt_kernel import KTMoEWrapper, generate_gpu_experts_masks

mask = generate_gpu_experts_masks(torch.tensor([[0.9, 0.1, 0.2, 0.0]]), num_gpu_experts=1)[0]
wrapper = KTMoEWrapper(
    layer_idx=0, num_experts=4, num_experts_per_tok=2, hidden_size=256, moe_intermediate_size=128,
    gpu_experts_mask=mask, cpuinfer_threads=1, threadpool_count=1, weight_path="/nowhere",
    chunked_prefill_size=64, method="AMXINT8", max_deferred_experts_per_token=0,
)
KTMoEWrapper.set_capture_batch_sizes([1, 2])
weights = [torch.full((4, 128, 256), 0.01), torch.full((4, 128, 256), 0.02)]
down = torch.full((4, 256, 128), 0.03)
wrapper.load_weights_from_tensors(
    *(tensor.to(torch.bfloat16) for tensor in (*weights, down)), torch.arange(4)
)
x = torch.ones(2, 256, dtype=torch.bfloat16)
ids, scores = torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5)
wrapper.submit_forward(x, ids, scores, 0)
y = wrapper.sync_forward(x, 0)
KTMoEWrapper.clear_buffer_cache()
print(wrapper.num_gpu_experts, y.shape, round(float(y[1, 0] / y[0, 0]), 3))
"""


def test_a_program_for_kt_kernel_runs_with_another_import() -> None:
    text = PROGRAM.replace("from kt_kernel", "from ktconv.compat.kt")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "torch.Size([2,", "256])", "2.0"]


def test_an_activation_that_is_asked_for(make: Make) -> None:
    own, given = stacks(), batch()
    own = own._replace(gate=own.gate * 4, up=own.up * 4)
    y = make(own, swiglu_limit=1.5, swiglu_alpha=1.702).forward(*given)
    x, reference = given.x.float(), torch.zeros(given.x.shape)
    for t, (ids, weights) in enumerate(zip(given.ids, given.weights, strict=True)):
        for e, w in zip(ids, weights, strict=True):
            gate = (own.gate[e].float() @ x[t]).clamp(max=1.5)
            up = (own.up[e].float() @ x[t]).clamp(-1.5, 1.5)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            reference[t] += w * (own.down[e].float() @ inner)
    assert error(y, reference) < EXACT
    assert own.up.shape[1] == INNER
