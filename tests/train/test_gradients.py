"""Every gradient of the kernels, against autograd in float64 on the weights' exact values."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
from helpers.training import (  # noqa: E402
    BOUND,
    MATRICES,
    Batch,
    batch,
    check,
    double,
    dropped_by,
    errors,
    gradients,
    lora_experts,
    packed,
    same,
)

from ktconv import native  # noqa: E402
from ktconv.errors import UsageError  # noqa: E402
from ktconv.formats import FORMATS  # noqa: E402
from ktconv.native import Activation  # noqa: E402
from ktconv.runtime import MoELayer, Pool, workspace  # noqa: E402
from ktconv.train import LoRAExperts, function  # noqa: E402
from ktconv.train.reference import Base, as_kernels, reference, relative  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch]

OF_FORMATS = [name for name in FORMATS if not name.endswith("-f32")]
# Derivatives jump at a limit, which none of the numbers that a forward saves may cross. One of
# bf16, and one between two of them.
LIMIT, BETWEEN = 1.25, 1.2345

FUNCTIONS = [
    Activation(limit=LIMIT),
    Activation("swiglu", 1.702, 1.0, LIMIT),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation(limit=BETWEEN),
    Activation("swiglu_clamped", limit=LIMIT),
    Activation("swiglu_clamped", limit=BETWEEN),
    Activation("softcap", 2.0, 3.0),
    Activation("relu2"),
    Activation("relu"),
    Activation("ungated_gelu"),
    Activation("ungated_gelu_tanh", limit=LIMIT),
]


@pytest.mark.parametrize("method", OF_FORMATS)
def test_formats(isa: str, method: str, pool: Pool) -> None:
    """At every level, in two parts where sizes allow it."""
    parts = 2 if FORMATS[method].multiplies(256, 256, 2) else 1
    module = lora_experts(packed(method, parts=parts), 8, 16, pool=pool)
    given = batch(module, 11)
    given.ids[0] = torch.tensor([2, 2])
    given.ids[1] = torch.tensor([-1, 4])
    check(module, given)


def test_levels_agree(pool: Pool) -> None:
    """Gradients at different levels differ by the order of sums alone."""
    module = lora_experts(packed("bf16"), pool=pool)
    given, before, found = batch(module), native.isa(), {}
    levels = [level for level in native.isa_available() if level != "amx"]
    try:
        for level in levels:
            native.use_isa(level)
            found[level] = gradients(module, given)
    finally:
        native.use_isa(before)
    for level in levels[1:]:
        for name, one in found[level].items():
            assert relative(one, found[levels[0]][name]) < 0.002, (level, name)


@pytest.mark.parametrize("rank", [1, 5, 8, 16, 33, 64])
def test_ranks(rank: int, pool: Pool) -> None:
    for method in ("bf16", "int8"):
        module = lora_experts(packed(method), rank, pool=pool)
        check(module, batch(module))


def test_a_large_rank(pool: Pool) -> None:
    module = lora_experts(packed("bf16", 64, 64), 1024, 64, pool=pool)
    check(module, batch(module, 24))


@pytest.mark.parametrize("parts", range(1, 9))
def test_parts(parts: int, pool: Pool) -> None:
    for method, width in (("bf16", 32), ("int8", 64), ("mxfp4", 32)):
        experts = packed(method, 128, width * parts, range(3), parts=parts)
        module = lora_experts(experts, pool=pool)
        check(module, batch(module))


@pytest.mark.parametrize("activation", FUNCTIONS, ids=str)
def test_activations(activation: Activation, pool: Pool) -> None:
    module = lora_experts(packed("bf16", activation=activation), pool=pool)
    check(module, batch(module))


def test_biases(pool: Pool) -> None:
    """Of gpt-oss, for example; that of down counts in the gradient of the router's weights."""
    generator = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    gate, up, down = drawn(3, 128, 64) / 8, drawn(3, 128, 64) / 8, drawn(3, 64, 128) / 11
    biases = drawn(3, 128), drawn(3, 128), drawn(3, 64)
    for parts in (1, 2):
        layer = MoELayer.pack(gate, up, down, "int8", biases=biases, parts=parts, pool=pool)
        module = lora_experts(layer)
        check(module, batch(module))


@pytest.mark.parametrize("top_k", [1, 4, 8])
def test_top_k(top_k: int, pool: Pool) -> None:
    """The gradient of x is summed in fp32: many experts do not make it worse."""
    for method in ("bf16", "int4"):
        module = lora_experts(packed(method, origins=[*range(3)] * 3), pool=pool)
        found = check(module, batch(module, 9, top_k))
        assert found["x"] <= 0.005


@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 2100])
def test_tokens(tokens: int, pool: Pool) -> None:
    """From one to more than a batch of the kernels."""
    sizes = (64, 64) if tokens > 100 else (256, 256)
    for method in ("bf16", "int8"):
        module = lora_experts(packed(method, *sizes), pool=pool)
        check(module, batch(module, tokens))


def test_masks_repetitions_and_experts_without_tokens(pool: Pool) -> None:
    module = lora_experts(packed("int8", origins=range(6)), pool=pool)
    given = batch(module, 12, 3)
    given.ids[given.ids == 5] = 4  # nobody's; some tokens have 4 twice
    given.ids[3], given.ids[4, 1], given.ids[5, 0] = -1, 99, -7
    check(module, given)
    found = gradients(module, given)
    assert not found["x"][3].any() and not found["weights"][3].any()
    assert found["weights"][4, 1] == 0 and found["weights"][5, 0] == 0
    assert all(not found[name][5].any() and found[name][4].any() for name in MATRICES)
    given.ids[:] = -1
    assert not any(one.any() for one in gradients(module, given).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_dtypes(dtype: Any, parameters: Any, pool: Pool) -> None:
    module = lora_experts(packed("int8"), dtype=parameters, pool=pool)
    check(module, batch(module, dtype=dtype))


def test_parameters_between_numbers_of_bf16(pool: Pool) -> None:
    """Are rounded where they are multiplied, and nowhere else."""
    module = lora_experts(packed("bf16"), pool=pool)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for one in module.parameters():
            one *= 1 + 2**-9 * torch.rand(one.shape, generator=generator)
    check(module, batch(module))


@pytest.mark.parametrize("targets", [["gate"], ["up"], ["down"], ["gate", "down"]], ids=str)
def test_targets(targets: list[str], pool: Pool) -> None:
    for method in ("bf16", "int8"):
        module = lora_experts(packed(method), targets=targets, pool=pool)
        assert len(check(module, batch(module))) == 3 + 2 * len(targets)


def test_without_lora(pool: Pool) -> None:
    for method in OF_FORMATS:
        layer = MoELayer(packed(method), pool)
        module = LoRAExperts(layer, None)
        given = batch(module)
        check(module, given)
        assert torch.equal(module(*given[:3]), layer(*given[:3])), method


def test_an_alpha(pool: Pool) -> None:
    layer = MoELayer(packed("bf16"), pool)
    check(lora_experts(layer, 8, 0.5), batch(layer))
    check(lora_experts(layer, 8, 64), batch(layer))


@pytest.mark.parametrize("activation", [Activation(), Activation("relu2")], ids=str)
@pytest.mark.parametrize(("rank", "parts"), [(None, 1), (8, 3)])
def test_weights_of_bf16(
    isa: str, activation: Activation, rank: int | None, parts: int, pool: Pool
) -> None:
    """Their own gradients, which nothing but a caller uses."""
    experts = packed("bf16", 128, 192, parts=parts, activation=activation)
    module = lora_experts(experts, rank, pool=pool)
    given = batch(module, 20)
    given.ids[given.ids == 3] = 1
    given.ids[0] = -1
    base = double(Base.of(module.layer))
    there = {name: one for name, one in base._asdict().items() if one is not None}
    for one in there.values():
        one.requires_grad_()
    lora = module.lora and type(module.lora)._make(
        [one if one is None else one.double() for one in module.lora[:6]] + [module.scale]
    )
    y = reference(
        given.x, given.ids, given.weights, base, lora, **as_kernels(module.layer, trained=True)
    )
    y.backward(given.dy.double())
    found = module.base_gradients(*given)
    assert found.keys() == there.keys()
    for name, one in found.items():
        assert one.dtype == torch.float32 and relative(one, there[name].grad) <= BOUND, name
        assert not one[3].any()


def test_weights_of_other_formats_have_no_gradients(pool: Pool) -> None:
    module = lora_experts(packed("int8"), pool=pool)
    with pytest.raises(UsageError, match="weights of int8 have no gradients"):
        module.base_gradients(*batch(module))


@pytest.mark.parametrize(
    ("method", "parts", "tokens", "size"),
    [
        ("bf16", 1, 12, 320),
        ("int8", 4, 12, 256),
        ("gint4-32", 2, 12, 256),
        ("gint8-64", 2, 12, 256),
        ("int8", 1, 2100, 64),
    ],
)
def test_dropout(
    method: str, parts: int, tokens: int, size: int, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element of x, of a token and one of its experts, and each of the middle on its own; also
    in the second batch of the kernels."""
    module = lora_experts(packed(method, size, size, parts=parts), dropout=0.25, pool=pool)
    given = batch(module, tokens)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(12345))
    dropped = dropped_by(12345, 0.25, tokens, 2, size, size)
    assert float((dropped[0] == 0).double().mean()) == pytest.approx(0.25, abs=0.02)
    check(module, given, dropped=dropped)
    undropped = errors(module, given)
    assert all(undropped[name] > 0.1 for name in MATRICES)


@pytest.mark.parametrize("method", ["bf16", "int8", "gint4-32"])
def test_threads_do_not_matter(method: str) -> None:
    """All bits are the same for any number of them, and from call to call."""
    experts, found = packed(method, parts=2), []
    given = batch(lora_experts(experts), 40, 3)
    for threads in (1, 2, 3, 2):
        with Pool(threads) as pool:
            found.append(gradients(lora_experts(experts, pool=pool), given))
    assert all(same(found[0], other) for other in found[1:])


@pytest.mark.parametrize("method", ["bf16", "int4"])
def test_other_tokens_do_not_matter(isa: str, method: str, pool: Pool) -> None:
    """For y, dx and dw; gradients of matrices are sums over all. Products of bf16 with AMX have
    another loop for few tokens."""
    module = lora_experts(packed(method), pool=pool)
    given = batch(module, 32)
    whole, part = (gradients(module, one) for one in (given, Batch(*(one[7:9] for one in given))))
    for name in ("y", "x", "weights"):
        error = relative(part[name], whole[name][7:9])
        assert error <= (0.004 if isa == "amx" else 0), (name, error)


@pytest.mark.parametrize("scale", [1e-30, 1e20])
def test_extreme_gradients(scale: float, pool: Pool) -> None:
    """Scale with the gradient of y, as loss scalers want it."""
    module = lora_experts(packed("int8"), pool=pool)
    given = batch(module, dtype=torch.float32)
    check(module, given._replace(dy=given.dy * scale))


def test_memory_that_is_kept(pool: Pool) -> None:
    """As docs/fine-tuning.md has it, in bytes for each token and each of its experts."""
    kept: list[int] = []

    def pack(one: Any) -> Any:
        kept.append(one.nbytes if one.dtype == torch.uint8 else 0)
        return one

    for method, parts in (("bf16", 1), ("int8", 2)):
        del kept[:]
        module = lora_experts(packed(method, parts=parts), 16, pool=pool)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            module(*batch(module, 100, 4)[:3])
        codes = 256 + 4 * parts if method == "int8" else 0
        stated = 100 * 4 * (4 * 256 + (8 + 4 * parts) * 16 + codes)
        assert stated <= sum(kept) <= stated + 4 * 64


@pytest.mark.parametrize("method", ["bf16", "int8", "gint4-32"])
@pytest.mark.parametrize(
    "targets", [("up",), ("gate", "down"), ("gate", "up", "down")], ids="+".join
)
def test_memory_of_earlier_calls_does_not_matter(
    isa: str,
    method: str,
    targets: tuple[str, ...],
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Working memory and what is saved begin with NaN of earlier calls, or with zeros."""
    module = lora_experts(packed(method, parts=2), 5, targets=targets, dropout=0.25, pool=pool)
    given = batch(module, 11)
    given.ids[0] = torch.tensor([2, -1])
    take, aligned = workspace.take, function._aligned

    def found(value: int) -> dict[str, Any]:
        def filled(memory: Any) -> Any:
            memory[:] = value
            return memory

        monkeypatch.setattr(workspace, "take", lambda *of: filled(take(*of)))
        monkeypatch.setattr(function, "_aligned", lambda size: filled(aligned(size)))
        torch.manual_seed(3)
        return gradients(module, given)

    assert same(found(0), found(0xFF))
