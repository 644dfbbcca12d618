"""`kt_kernel_ext` under the alias: layers by addresses compute what wrappers compute."""

from __future__ import annotations

from typing import Any

import pytest

from ktconv.errors import UsageError

from .conftest import EXACT, EXPERTS, HIDDEN, TOP_K, batch, error, expected, stacks
from .test_gpu_buffers import NAMES, WIDTH, raw, wanted

torch = pytest.importorskip("torch")

from ktconv.compat.kt import moe  # noqa: E402
from ktconv.compat.kt.cpu_infer import CPUInfer, WorkerPoolConfig  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch]

IDENTITY = torch.arange(EXPERTS)


def configured(queue: CPUInfer, inner: int, **more: Any) -> Any:
    config = moe.MOEConfig(EXPERTS, TOP_K, HIDDEN, inner, more.pop("mask", 0))
    config.pool, config.max_len = queue.backend_, 64
    for name, value in more.items():
        setattr(config, name, value)
    return config


def loaded(queue: CPUInfer, name: str, config: Any, mapping: Any = IDENTITY) -> Any:
    layer = getattr(moe, name)(config)
    queue.submit(layer.load_weights_task(mapping.data_ptr()))
    queue.submit(layer.warm_up_task())
    queue.sync()
    return layer


def computed(queue: CPUInfer, layer: Any, tokens: int = 5, y: Any = None) -> tuple[Any, Any]:
    own = batch(tokens)
    size = torch.tensor([tokens], dtype=torch.int32)
    out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16) if y is None else y
    queue.submit(
        layer.forward_task(
            size.data_ptr(), TOP_K, own.ids.data_ptr(), own.weights.data_ptr(), own.x.data_ptr(),
            out.data_ptr(), y is not None,
        )
    )  # fmt: skip
    queue.sync()
    return own, out


def addresses(own: Any) -> dict[str, int]:
    return {f"{name}_proj": stack.data_ptr() for name, stack in zip(NAMES, own, strict=True)}


@pytest.mark.parametrize(
    ("name", "bound"), [("AMXInt4_MOE", 0.25), ("AMXInt8_MOE", 0.03), ("AMXBF16_MOE", EXACT)]
)
def test_stacks_are_read_by_their_addresses(name: str, bound: float) -> None:
    queue, own = CPUInfer(2), stacks(3)
    config = configured(queue, own.up.shape[1], **addresses(own))
    layer = loaded(queue, name, config, IDENTITY.flip(0).contiguous())
    given, y = computed(queue, layer)
    reference = expected(own, given.x, EXPERTS - 1 - given.ids, given.weights)
    assert error(y, reference) < bound
    once = y.float().clone()
    computed(queue, layer, y=y)
    assert error(y, 2 * once) < EXACT


def test_masked_experts_add_nothing() -> None:
    queue, own = CPUInfer(1), stacks(4)
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    config = configured(queue, own.up.shape[1], mask=mask.data_ptr(), **addresses(own))
    layer = loaded(queue, "AVX2BF16_MOE", config)
    mask[1::2] = True  # seen by the next call
    given, y = computed(queue, layer)
    assert error(y, expected(own, given.x, given.ids, given.weights, mask)) < EXACT


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("FP8", "AMXFP8_MOE"), ("FP8_PERCHANNEL", "AMXFP8PerChannel_MOE"),
        ("RAWINT4", "AMXInt4_KGroup_MOE"), ("MXFP4", "AMXFP4_KGroup_MOE"),
        ("MXFP8", "AMXMXFP8_KGroup_MOE"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("each", [False, True])
def test_stored_codes_are_read_by_their_addresses(kind: str, name: str, each: bool) -> None:
    config = WorkerPoolConfig(2, [0, 0], [1, 1])
    queue, own = CPUInfer(config), raw(kind)
    parts = queue.parts
    assert parts == 2
    own = {key: [(one.float() / 64).to(one.dtype) if "scale" in key and one.is_floating_point()
                 else one for one in tensors]
           for key, tensors in own.items()}  # fmt: skip
    fields: dict[str, Any] = {}
    kept = []
    for key, tensors in own.items():
        field = key if key.endswith("scale") else f"{key}_proj"
        if each:
            fields[f"{field}s"] = [[one.data_ptr() for one in tensors]]
        else:
            bytes_ = [one.contiguous().view(torch.uint8) for one in tensors]
            kept.append(torch.stack(bytes_))
            fields[field] = kept[-1].data_ptr()
    layer = loaded(queue, name, configured(queue, WIDTH, **fields))
    dense = [
        torch.stack(
            [torch.from_numpy(layer.layer.packed.streams(e)[n].values()) for e in range(EXPERTS)]
        )
        for n in range(3)
    ]
    given, y = computed(queue, layer)
    reference = expected(type(stacks())(*dense), given.x, given.ids, given.weights)
    assert error(y, reference) < 0.03
    (w13, w2), = wanted(own, 6, 1)  # fmt: skip
    (s13, s2), = wanted(own, 6, 1, "_scale")  # fmt: skip
    buffers = [torch.zeros(len(one), dtype=torch.uint8) for one in (w13, s13, w2, s2)]
    pointers = [[one.data_ptr()] for one in buffers]
    queue.submit(layer.write_weight_scale_to_buffer_task(1, 6, *pointers))
    queue.sync()
    assert [bytes(one.numpy()) for one in buffers] == [w13, s13, w2, s2]


def test_what_is_missing_is_named() -> None:
    queue = CPUInfer(1)
    with pytest.raises(UsageError, match=r"MOEConfig\.pool is not set"):
        moe.CLASSES["AMXInt4_MOE"](moe.MOEConfig(EXPERTS, TOP_K, HIDDEN, 128))
    layer = moe.CLASSES["AMXInt4_MOE"](configured(queue, 128))
    with pytest.raises(UsageError, match="MOEConfig has no gate_proj"):
        layer.load_weights()
    with pytest.raises(UsageError, match="no weights yet"):
        layer.warm_up()
    with pytest.raises(UsageError, match="the address of a tensor is 0"):
        layer.forward(0, TOP_K, 0, 0, 0, 0)
    short = configured(queue, 128, gate_projs=[[1, 2]])
    with pytest.raises(UsageError, match="gate_projs must have one list of 8 addresses"):
        moe.CLASSES["AMXInt8_MOE"](short).load_weights()
    grouped = configured(queue, 128, gate_projs=[[1] * EXPERTS])
    grouped.quant_config.group_size = 48
    with pytest.raises(UsageError):
        moe.CLASSES["AMXInt4_KGroup_MOE"](grouped).load_weights()
    assert not hasattr(moe, "AMXInt4_1_MOE")
    with pytest.raises(AttributeError, match="zero points"):
        moe.AMXInt4_1_MOE  # noqa: B018
    with pytest.raises(AttributeError, match='mode="sft"'):
        moe.AMXInt8_SFT_MOE  # noqa: B018


def test_the_queue_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    queue, done = CPUInfer(1), []
    queue.submit_with_cuda_stream(0, lambda: done.append(1))  # no CUDA here: at once
    queue.submit(lambda: done.append(2))
    queue.sync_with_cuda_stream(0)
    assert done == [1, 2]
    with pytest.raises(UsageError, match="not a int"):
        queue.submit(3)  # type: ignore[arg-type]
    queue.submit(lambda: 1 // 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        queue.sync()
    with pytest.raises(UsageError, match="subpool_thread_count has 1 numbers"):
        CPUInfer(WorkerPoolConfig(2, [0, 0], [1]))
    with pytest.raises(UsageError, match="threads must be 1 or more"):
        CPUInfer(0)
