"""Single tokens outside the experts on kernels: the model's own answers, and what stays its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from helpers.family_list import SAVED
from helpers.family_models import build
from helpers.levels import at_level
from helpers.paths import EXAMPLE

from ktconv import native

pytestmark = [pytest.mark.slow, pytest.mark.torch]
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

if not native.dense_is_fast():
    pytest.skip("this machine has no kernels for it", allow_module_level=True)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """The example in transformers, its experts on the kernels."""
    from ktconv.model import load_model, replace_experts

    found, _ = load_model(EXAMPLE)
    with replace_experts(found, EXAMPLE, threads=2) as replaced:
        found.test_pool = replaced.pool
        yield found


def steps(model: Any, prompt: int, count: int, room: int | None) -> Any:
    """Logits [count, V] of random tokens after a random prompt; `room`: for how many tokens there
    is memory, None: a cache of transformers."""
    from ktconv.generate.outside.cache import CACHE, with_room

    generator = torch.Generator().manual_seed(5)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (1, prompt + count), generator=generator)
    found = []
    with torch.inference_mode():
        cache = getattr(model(input_ids=ids[:, :prompt], use_cache=True), CACHE)
        if room is not None:
            with_room(cache, room)
        for at in range(prompt, prompt + count):
            out = model(input_ids=ids[:, at : at + 1], use_cache=True, **{CACHE: cache})
            found.append(out.logits[0, -1].float())
        assert cache.get_seq_length() == prompt + count
    return torch.stack(found)


def patched(model: Any) -> list[Any]:
    return [one for one in model.modules() if "forward" in vars(one)]


@pytest.mark.parametrize("room", [None, 12, 100])
def test_answers_are_the_models_own(model: Any, room: int | None) -> None:
    """Logits of kernels are close to the model's, in whole layers and without them; memory for keys
    grows behind 12 tokens."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from ktconv.generate.outside import on_kernels

    usual, own = ALL_ATTENTION_FUNCTIONS["sdpa"], steps(model, 11, 9, None)
    with on_kernels(model, model.test_pool) as told:
        assert told.all_linear and len(patched(model)) > 15
        assert told.decoder_layers == told.routers == len(model.model.layers)
        found = steps(model, 11, 9, room)
    assert not patched(model) and ALL_ATTENTION_FUNCTIONS["sdpa"] is usual
    assert torch.equal(steps(model, 11, 9, None), own)
    assert (found - own).norm() < 0.03 * own.norm()
    assert (found.argmax(1) == own.argmax(1)).sum() >= 8


def test_whole_layers_give_the_bits_of_their_parts(model: Any) -> None:
    """Both layers in one call a token; without memory for keys each part by itself."""
    from ktconv.generate.outside import on_kernels
    from ktconv.generate.outside.layers import _Forward

    told: list[float] = []
    with on_kernels(model, model.test_pool, told.append):
        layers = [vars(one).get("forward") for one in model.model.layers]
        assert all(isinstance(one, _Forward) and one.member for one in layers)
        parts = steps(model, 11, 5, None)
        assert not told
        assert torch.equal(steps(model, 11, 5, 100), parts)
        assert len(told) == 5 and min(told) > 0


def test_layers_that_do_more_are_left_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that adds something, attention with a cap on its products, and a norm of another
    formula: their own code runs."""
    from ktconv.generate.outside import on_kernels
    from ktconv.generate.outside.layers import _Forward

    layer, other = model.model.layers[:2]
    kind = type(layer)
    usual = kind.forward
    monkeypatch.setattr(
        kind, "forward", lambda self, *a, **k: usual(self, *a, **k) * (1 + (self is layer))
    )
    norm, own = type(other.input_layernorm), type(other.input_layernorm).forward
    monkeypatch.setattr(
        norm,
        "forward",
        lambda self, x: own(self, x) * (1.5 if self is other.input_layernorm else 1),
    )
    expected = steps(model, 7, 4, None)
    with on_kernels(model, model.test_pool):
        assert not any(isinstance(vars(one).get("forward"), _Forward) for one in (layer, other))
        assert other.input_layernorm not in patched(model)
        assert layer.input_layernorm in patched(model)
        found = steps(model, 7, 4, 100)
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_capped_attention_is_not_the_kernels(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktconv.generate.outside import on_kernels
    from ktconv.generate.outside.layers import _Forward

    attention = type(model.model.layers[0].self_attn)
    usual = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda self, *a, **k: usual(self, *a, softcap=9.0, **k)
    )
    with on_kernels(model, model.test_pool):
        assert not any(isinstance(vars(one).get("forward"), _Forward) for one in model.modules())


def test_other_calls_are_the_models_own(model: Any) -> None:
    """Batches, masks, float32 and gradients."""
    from ktconv.generate.outside import on_kernels

    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    with torch.inference_mode():
        own = model(input_ids=ids, attention_mask=mask).logits
        with on_kernels(model, model.test_pool):
            found = model(input_ids=ids, attention_mask=mask).logits
            x = torch.randn(1, 1, model.lm_head.in_features)
            with pytest.raises(RuntimeError):  # PyTorch's own: another dtype than the weights'
                model.lm_head(x)
    assert (found - own).float().norm() < 0.03 * own.float().norm()
    with on_kernels(model, model.test_pool):
        x = torch.randn(1, 1, model.lm_head.in_features).bfloat16().requires_grad_()
        model.lm_head(x).sum().backward()
        assert x.grad is not None and bool(x.grad.any())


def test_without_kernels_nothing_changes(model: Any) -> None:
    from ktconv.generate.outside import OnKernels, on_kernels

    with at_level("scalar"), on_kernels(model, model.test_pool) as told:
        assert told == OnKernels() and not patched(model)


def test_weights_move_once_and_stay_shared() -> None:
    from ktconv.generate.outside.linears import on_huge_pages

    weight = torch.nn.Parameter(torch.randn(40, 64).bfloat16())
    tied, part = weight, torch.randn(8, 4).bfloat16()
    parts = [part[:4], part[4:]]
    before, places = weight.detach().clone(), [one.data_ptr() for one in parts]
    on_huge_pages([weight, tied, *parts])
    assert torch.equal(weight, before) and weight.data_ptr() % 64 == 0
    assert [one.data_ptr() for one in parts] == places


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "granitemoehybrid"])
def test_norms_with_a_gate_are_the_models_own(name: str) -> None:
    """Layers of linear attention have norms that fail without a gate, or answer as others do."""
    from ktconv.generate.outside import on_kernels
    from ktconv.system.pool import Pool

    kinds = ["mamba", "attention"] if "granite" in name else ["linear_attention", "full_attention"]
    model = build(replace(SAVED[name], config={**SAVED[name].config, "layer_types": kinds})).eval()
    own = steps(model, 9, 3, None)
    with Pool(2) as pool, on_kernels(model, pool):
        assert len(patched(model)) > 15
        found = steps(model, 9, 3, 20)
    assert (found - own).norm() < 0.03 * own.norm()


def test_experts_that_answer_with_more_than_a_tensor_are_the_models_own() -> None:
    """Ernie 4.5 VL's block of experts gives the router's logits as well."""
    from ktconv.generate.outside import on_kernels
    from ktconv.system.pool import Pool

    model = build(SAVED["ernie4_5_vl_moe"]).bfloat16().eval()
    with Pool(1) as pool, on_kernels(model, pool) as told:
        assert told.linear_layers and not told.decoder_layers


def test_attention_that_depends_on_positions_is_not_the_kernels(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4's and Mistral's: queries of tokens from some thousands on are larger."""
    from ktconv.generate.outside import on_kernels
    from ktconv.generate.outside.layers import _Forward

    kind = type(model.model.layers[0])
    usual = kind.forward

    def scaled(self: Any, x: Any, position_ids: Any = None, **more: Any) -> Any:
        far = bool((position_ids >= 8192).any())
        return usual(self, x, position_ids=position_ids, **more) * (1.5 if far else 1)

    monkeypatch.setattr(kind, "forward", scaled)
    with on_kernels(model, model.test_pool):
        assert not any(isinstance(vars(one).get("forward"), _Forward) for one in model.modules())
