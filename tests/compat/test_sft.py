"""KTMoEWrapper with mode "sft": which methods it has, and what they compute."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ktconv.errors import UsageError

from .conftest import EXPERTS, HIDDEN, INNER, Make, batch, error, stacks

torch = pytest.importorskip("torch")

from ktconv.compat.kt import KTMoEWrapper  # noqa: E402
from ktconv.compat.kt.sft import SFTWrapper  # noqa: E402
from ktconv.train.reference import Base, Lora, as_kernels, reference  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch]

RANK, ALPHA = 6, 12.0
LORA = ["gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b"]
CALL = ["hidden_states", "expert_ids", "weights"]
MAP = "physical_to_logical_map_cpu"
# Public methods and properties of fine-tuning in kt_kernel 0.7.2, with the names of arguments.
METHODS: dict[str, list[str] | None] = {
    "authoritative_optimizer_grads": None,
    "checkpoint_cache_state": None,
    "register_authoritative_optimizer_grad": ["name", "parameter", "grad_view"],
    "validate_authoritative_optimizer_grad_state": [],
    "release_authoritative_optimizer_grads": [],
    "init_full_weight_grad_buffers": ["gate_proj", "up_proj", "down_proj"],
    "update_base_weights": [],
    "load_weights": [MAP],
    "load_rawint4_weights": ["weights", MAP],
    "load_block_fp8_weights": ["weights", MAP],
    "load_mxfp4_weights": ["experts_data", MAP],
    "save_backward_weights_from_tensors": [
        "gate_proj", "up_proj", "down_proj", "physical_to_logical_map", "output_path",
    ],
    "init_lora_weights": [*LORA, *(f"grad_{name}" for name in LORA)],
    "update_lora_weights": [],
    "forward": [*CALL, "save_for_backward", "output_device"],
    "submit_forward": [*CALL, "save_for_backward"],
    "sync_forward": ["output_device"],
    "backward": ["grad_output", "output_device", "optimizer_grad_scale"],
    "submit_backward_async": ["grad_output", "output_device", "optimizer_grad_scale"],
    "sync_backward": [],
    "submit_backward_repack": [],
    "wait_backward_repack": [],
    "submit_forward_inference": [*CALL, "cuda_stream"],
    "sync_forward_inference": ["cuda_stream"],
    "poison_checkpoint_output": ["error"],
    "validate_checkpoint_output": ["qlen"],
    "validate_checkpoint_cache_empty": [],
    "cache_checkpoint_output": ["output_cpu", "qlen"],
    "get_checkpoint_output": ["qlen", "output_device"],
    "clear_checkpoint_output": [],
    "clear_sft_buffer_cache": [],
}  # fmt: skip
# Attributes that programs read or set.
ATTRIBUTES = [
    "share_backward_bb", "reuse_checkpoint_forward", "lora_rank", "lora_alpha", "lora_dropout",
    "lora_scaling", "max_cache_depth", "method", "layer_idx", "num_experts", "hidden_size",
    "moe_intermediate_size", "num_experts_per_tok", "num_gpu_experts", "chunked_prefill_size",
    "gate_proj_buf", "up_proj_buf", "down_proj_buf", "group_size", "zero_point",
]  # fmt: skip


@pytest.fixture
def sft(make: Make) -> Any:
    usual = stacks()

    def made(own: Any = usual, method: str = "AMXBF16_SFT", **more: Any) -> Any:
        options = {"lora_rank": RANK, "lora_alpha": ALPHA, "mode": "sft"}
        return make(own, method=method, **options | more)

    return made


def matrices(seed: int = 0, parameters: bool = False) -> list[Any]:
    """LoRA matrices in the order of init_lora_weights."""
    made = torch.Generator().manual_seed(seed)
    shapes = [(RANK, HIDDEN), (INNER, RANK)] * 2 + [(RANK, INNER), (HIDDEN, RANK)]
    found = [(torch.randn(EXPERTS, *s, generator=made) / 10).bfloat16() for s in shapes]
    return [torch.nn.Parameter(one) for one in found] if parameters else found


def buffers() -> list[Any]:
    return [torch.full_like(one, 7) for one in matrices()]


def wanted(wrapper: Any, given: Any, lora: list[Any] | None, dy: Any = None) -> Any:
    """y, or with dy gradients of x, weights and the six matrices, by autograd in fp32."""
    layer = wrapper.layer
    x = given.x.float().requires_grad_()
    weights = given.weights.clone().requires_grad_()
    leaves = [one.detach().clone().float().requires_grad_() for one in lora or ()]
    scale = ALPHA / RANK
    y = reference(
        x, given.ids, weights, Base.of(layer), Lora._make([*leaves, scale]) if lora else None,
        **as_kernels(layer, trained=bool(lora)),
    )  # fmt: skip
    if dy is None:
        return y.detach()
    return torch.autograd.grad(y, [x, weights, *leaves], dy.float())


def test_the_wrapper_has_what_kt_kernel_has(sft: Any) -> None:
    wrapper = sft()
    assert type(wrapper) is SFTWrapper and isinstance(wrapper, KTMoEWrapper)
    for name, arguments in METHODS.items():
        found = inspect.getattr_static(type(wrapper), name)
        if arguments is None:
            assert isinstance(found, property), name
        else:
            own = list(inspect.signature(getattr(wrapper, name)).parameters)
            assert own == arguments, name
    for name in ATTRIBUTES:
        assert hasattr(wrapper, name), name
    assert wrapper.lora_scaling == ALPHA / RANK


@pytest.mark.parametrize("method", ["AMXBF16_SFT", "AMXINT8_SFT", "INT8_SFT", "AMXINT4_SFT"])
def test_a_step(sft: Any, method: str) -> None:
    wrapper, given, lora, grads = sft(method=method), batch(20), matrices(), buffers()
    wrapper.init_lora_weights(*lora, *grads)
    y = wrapper.forward(*given)
    assert y.dtype == torch.bfloat16 and error(y, wanted(wrapper, given, lora)) < 0.006
    dy = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    dx, dw = wrapper.backward(dy)
    assert dx.dtype == torch.bfloat16 and dw.dtype == torch.float32
    for found, one in zip((dx, dw, *grads), wanted(wrapper, given, lora, dy), strict=True):
        assert error(found, one) < 0.012
    with pytest.raises(UsageError, match="no forward to go back from"):
        wrapper.backward(dy)


def test_gradients_of_parameters_add_up_until_they_are_released(sft: Any) -> None:
    wrapper, given, lora, grads = sft(), batch(9), matrices(parameters=True), buffers()
    wrapper.init_lora_weights(*lora, *grads)
    assert wrapper.validate_authoritative_optimizer_grad_state() == "closed"
    dy = torch.ones(9, HIDDEN).bfloat16()

    def step(scale: float = 1.0) -> Any:
        wrapper.forward(*given)
        wrapper.backward(dy, optimizer_grad_scale=scale)
        assert all(one.grad is grad for one, grad in zip(lora, grads, strict=True))
        assert wrapper.validate_authoritative_optimizer_grad_state() == "open"
        return [one.float().clone() for one in grads]

    once, twice = step(), step()
    assert all(error(two, 2 * one) < 0.005 for one, two in zip(once, twice, strict=True))
    wrapper.release_authoritative_optimizer_grads()
    assert all(one.grad is None for one in lora)
    assert all(error(half, one / 2) < 0.005 for one, half in zip(once, step(0.5), strict=True))
    assert len(wrapper.authoritative_optimizer_grads) == 6
    lora[0].grad = None
    with pytest.raises(UsageError, match="some parameters of the experts"):
        wrapper.validate_authoritative_optimizer_grad_state()


def test_serving_is_training_without_dropout(sft: Any) -> None:
    wrapper, given, lora = sft(method="AMXINT8_SFT", lora_dropout=0.5), batch(7), matrices()
    wrapper.init_lora_weights(*lora, *buffers())
    exact = wanted(wrapper, given, lora)

    def served() -> Any:
        wrapper.submit_forward_inference(*given, 0)
        return wrapper.sync_forward_inference(0)

    first = served()
    assert error(first, exact) < 0.006 and torch.equal(served(), first)
    assert error(wrapper.forward(*given, save_for_backward=False), exact) < 0.006
    lora[1].zero_()  # as an optimizer would: seen at once, and after update_lora_weights
    changed = served()
    assert error(changed, wanted(wrapper, given, lora)) < 0.006 and not torch.equal(changed, first)
    wrapper.update_lora_weights()
    assert torch.equal(served(), changed)
    with pytest.raises(UsageError, match="nothing to wait for"):
        wrapper.sync_forward_inference(0)


def test_maps_and_masks(sft: Any) -> None:
    """Matrices are those of slots; experts below num_gpu_experts run elsewhere."""
    mapping = torch.tensor([3, 1, 0, 2, 7, 6, 3, 4])  # expert 3 twice, with LoRA of their own
    wrapper, lora, given = sft(mapping=mapping, num_gpu_experts=2), matrices(), batch(12)
    wrapper.init_lora_weights(*lora, *buffers())
    assert wrapper.num_gpu_experts == 2
    hidden = given._replace(ids=torch.where(given.ids < 2, -1, given.ids))
    exact = wanted(wrapper, hidden, lora)
    assert error(wrapper.forward(*given), exact) < 0.006
    wrapper.submit_forward_inference(*given, None)
    assert error(wrapper.sync_forward_inference(None), exact) < 0.006


def test_the_last_forward_that_saved_counts(sft: Any) -> None:
    wrapper, lora, grads = sft(), matrices(), buffers()
    wrapper.init_lora_weights(*lora, *grads)
    first, second = batch(5), batch(5, seed=1)
    wrapper.submit_forward(*first)
    wrapper.submit_forward(*second)
    one, two = wrapper.sync_forward(), wrapper.sync_forward()
    assert error(one, wanted(wrapper, first, lora)) < 0.006
    assert error(two, wanted(wrapper, second, lora)) < 0.006
    wrapper.forward(*first, save_for_backward=False)
    dy = torch.ones(5, HIDDEN).bfloat16()
    wrapper.submit_backward_repack()
    wrapper.wait_backward_repack()
    wrapper.submit_backward_async(dy)
    with pytest.raises(UsageError, match="under way"):
        wrapper.submit_backward_async(dy)
    dx, _ = wrapper.sync_backward()
    assert error(dx, wanted(wrapper, second, lora, dy)[0]) < 0.012
    with pytest.raises(UsageError, match="no backward is under way"):
        wrapper.sync_backward()
    wrapper.forward(*first)
    with pytest.raises(UsageError, match=r"grad_output is \[4, 256\]"):
        wrapper.backward(dy[:4])


def test_no_backward_follows_a_forward_that_failed(
    sft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it was of other tokens."""
    wrapper, given = sft(), batch(3)
    wrapper.init_lora_weights(*matrices(), *buffers())
    y = wrapper.forward(given.x, given.ids, given.weights)
    module = type(wrapper._trained())

    def fail(*_: Any, **__: Any) -> None:
        raise UsageError("it failed")

    with monkeypatch.context() as patched:
        patched.setattr(module, "forward", fail)
        wrapper.submit_forward(given.x, given.ids, given.weights)
        with pytest.raises(UsageError, match="it failed"):
            wrapper.sync_forward()
    with pytest.raises(UsageError, match="has no forward to go back from"):
        wrapper.backward(y)


def test_factors_and_objects_that_are_refused(sft: Any) -> None:
    wrapper, given = sft(), batch(3)
    wrapper.init_lora_weights(*matrices(), *buffers())
    y = wrapper.forward(given.x, given.ids, given.weights)
    for scale in ("half", None, 0, float("nan")):
        with pytest.raises(UsageError, match="optimizer_grad_scale must be a number"):
            wrapper.backward(y, optimizer_grad_scale=scale)
    raw = sft(None, "RAWINT4_SFT")
    with pytest.raises(UsageError, match="RAWINT4 weights must have gate of each of"):
        raw.load_rawint4_weights(SimpleNamespace(up_proj=[]))


def test_base_weights_alone(sft: Any) -> None:
    wrapper, given, grads = sft(method="AMXINT8_SFT_SkipLoRA"), batch(6), buffers()
    wrapper.init_lora_weights(*matrices(), *grads)
    dy = torch.ones(6, HIDDEN).bfloat16()
    assert error(wrapper.forward(*given), wanted(wrapper, given, None)) < 0.006
    for found, one in zip(wrapper.backward(dy), wanted(wrapper, given, None, dy), strict=True):
        assert error(found, one) < 0.012
    assert all((one == 7).all() for one in grads)  # not touched


def test_weights_that_are_trained(sft: Any) -> None:
    own, given = stacks(), batch(6)
    wrapper = sft(own, lora_rank=0, full_weight_grad=True)
    wrapper.init_full_weight_grad_buffers(*own)
    before = wrapper.forward(*given)
    wrapper.backward(torch.ones(6, HIDDEN).bfloat16())
    gradient = wrapper.grad_down_proj_buf
    assert wrapper.down_proj_buf.grad is gradient and gradient.abs().sum() > 0
    with torch.no_grad():
        wrapper.down_proj_buf -= 0.01 * gradient
    wrapper.update_base_weights()
    after = wrapper.forward(*given, save_for_backward=False)
    assert after.float().sum() < before.float().sum()  # the sum is what was made smaller


def test_raw_weights(sft: Any) -> None:
    """Codes and scales are packed as they are."""
    made = torch.Generator().manual_seed(4)

    def integers(shape: Any) -> Any:
        codes = torch.randint(0, 256, (EXPERTS, shape[0], shape[1] // 2), generator=made)
        codes = codes.to(torch.uint8)
        scales = torch.rand(EXPERTS, shape[0], shape[1] // 32, generator=made).bfloat16() / 50
        pairs = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(EXPERTS, *shape)
        values = (pairs.float() - 8) * scales.float().repeat_interleave(32, dim=2)
        return codes, scales, values

    def blocks(shape: Any) -> Any:
        codes = torch.randn(EXPERTS, *shape, generator=made).to(torch.float8_e4m3fn)
        scales = torch.rand(EXPERTS, shape[0] // 128, shape[1] // 128, generator=made) / 10
        wide = scales.repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
        return codes, scales, codes.float() * wide

    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])

    def floats(shape: Any) -> Any:
        codes = torch.randint(0, 256, (EXPERTS, shape[0], shape[1] // 2), generator=made)
        codes = codes.to(torch.uint8)
        powers = torch.randint(-7, -3, (EXPERTS, shape[0], shape[1] // 32), generator=made)
        scales = (2.0**powers).bfloat16()
        pairs = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(EXPERTS, *shape)
        return codes, scales, table[pairs.long()] * scales.float().repeat_interleave(32, dim=2)

    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    for method, numbers in (("RAWINT4", integers), ("AMXFP8", blocks), ("MXFP4", floats)):
        found = {name: numbers(shape) for name, shape in shapes.items()}
        wrapper = sft(None, method=f"{method}_SFT", swiglu_limit=0.0)
        if method == "MXFP4":
            listed = {name: list(one[0]) for name, one in found.items()}
            listed |= {f"{name}_scale": list(one[1]) for name, one in found.items()}
            wrapper.load_mxfp4_weights(listed, None)
        else:
            given = {f"{name}_proj": one[0] for name, one in found.items()}
            given |= {f"{name}_scale": one[1] for name, one in found.items()}
            load = (
                wrapper.load_rawint4_weights if method == "RAWINT4"
                else wrapper.load_block_fp8_weights
            )  # fmt: skip
            load(SimpleNamespace(**given), torch.arange(EXPERTS))
        for expert in range(EXPERTS):
            for index, name in enumerate(shapes):
                stored = wrapper.layer.packed.streams(expert)[index].values()
                assert torch.equal(torch.from_numpy(stored), found[name][2][expert]), (method, name)
        wrapper.init_lora_weights(*matrices(), *buffers())
        exact = wanted(wrapper, batch(4), matrices())
        assert error(wrapper.forward(*batch(4)), exact) < 0.006
        with pytest.raises(UsageError, match="cannot be loaded by"):
            other = "load_mxfp4_weights" if method != "MXFP4" else "load_rawint4_weights"
            getattr(wrapper, other)({} if method != "MXFP4" else SimpleNamespace(**{
                f"{n}_{k}": None for n in shapes for k in ("proj", "scale")}), None)  # fmt: skip


def test_outputs_of_checkpointing(sft: Any) -> None:
    wrapper, y = sft(), torch.arange(12.0).reshape(4, 3)
    assert wrapper.checkpoint_cache_state == "EMPTY"
    wrapper.validate_checkpoint_cache_empty()
    wrapper.cache_checkpoint_output(y, 3)
    assert wrapper.checkpoint_cache_state == "READY"
    assert torch.equal(wrapper.get_checkpoint_output(3), y[:3])
    for wrong in (
        lambda: wrapper.validate_checkpoint_output(4),
        lambda: wrapper.cache_checkpoint_output(y, 3),
        wrapper.validate_checkpoint_cache_empty,
    ):
        with pytest.raises(UsageError):
            wrong()
    wrapper.clear_checkpoint_output()
    assert wrapper.checkpoint_cache_state == "EMPTY"
    wrapper.poison_checkpoint_output(ValueError("lost"))
    with pytest.raises(UsageError, match="lost"):
        wrapper.get_checkpoint_output(3)


def test_files_of_backwards_are_not_needed(sft: Any, tmp_path: Path) -> None:
    wrapper, own = sft(), stacks()
    wrapper.share_backward_bb = True
    wrapper.save_backward_weights_from_tensors(*own, torch.arange(EXPERTS), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    KTMoEWrapper.clear_sft_buffer_cache()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "AMXINT4_1_SFT"}, "'AMXINT4_1_SFT' cannot be used with mode='sft'"),
        ({"method": "AMXINT4"}, "'AMXINT4' cannot be used with mode='sft'"),
        ({"lora_rank": 0}, "lora_rank must be 1 or more, not 0"),
        ({"num_gpu_experts": 9}, "num_gpu_experts is 9, more than the 8"),
        ({"full_weight_grad": True, "method": "AMXINT8_SFT"}, "full_weight_grad is for AMXBF16"),
        ({"mode": "training"}, "the mode 'training' is unknown"),
    ],
)
def test_arguments_that_are_refused(sft: Any, changes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sft(None, **changes)


def test_matrices_that_are_refused(sft: Any) -> None:
    wrapper, lora, given = sft(), matrices(), batch(3)
    with pytest.raises(UsageError, match="has no matrices of LoRA"):
        wrapper.forward(*given)
    for index, wrong, message in (
        (0, lora[0][:, :3], r"gate_lora_a must be a tensor \[8, 6, 256\]"),
        (3, lora[3].float(), "up_lora_b must be contiguous, in bf16"),
        (5, torch.nn.Parameter(lora[5]), "must all be nn.Parameters, or none"),
    ):
        changed = [*lora[:index], wrong, *lora[index + 1 :]]
        with pytest.raises(UsageError, match=message):
            wrapper.init_lora_weights(*changed, *buffers())
    for scale in (0.0, float("nan")):
        wrapper.init_lora_weights(*lora, *buffers())
        wrapper.forward(*given)
        with pytest.raises(UsageError, match="optimizer_grad_scale"):
            wrapper.backward(torch.ones(3, HIDDEN).bfloat16(), None, scale)
