"""Decoder layers that one call computes for a token: the bits of their parts, whatever lies between
the layers, and how many calls that takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import EXAMPLE

from ktconv import native

pytestmark = [pytest.mark.slow, pytest.mark.torch]
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

if not native.dense_is_fast():
    pytest.skip("this machine has no kernels for it", allow_module_level=True)

LAYERS, PROMPT, TOKENS = 5, 7, 4
Change = Callable[[Any], None]


@contextmanager
def made(directory: Path, **settings: Any) -> Iterator[Any]:
    """The example with random weights and more layers, its experts on the kernels."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from ktconv.model import replace_experts

    config = json.loads((EXAMPLE / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "layer_types": None, **settings}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).bfloat16().eval()
    model.save_pretrained(directory)
    with replace_experts(model, directory, threads=2) as replaced:
        model.test_pool = replaced.pool
        yield model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with made(tmp_path_factory.mktemp("five")) as found:
        yield found


class Ran:
    """Outputs of a model on the kernels, token by token behind a prompt: logits [TOKENS, V], what
    each layer gives, and the number of calls for each token. `whole`: with memory for
    keys, which whole layers need. `change` is called with the cache before the tokens."""

    def __init__(self, model: Any, whole: bool, change: Change | None = None) -> None:
        from ktconv.generate.outside import on_kernels
        from ktconv.generate.outside.cache import with_room

        told: list[float] = []
        self.calls: list[int] = []
        self.hidden: list[Any] = []
        logits, states = [], list[Any]()
        generator = torch.Generator().manual_seed(5)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(vocabulary, (1, PROMPT + TOKENS), generator=generator)
        with ExitStack() as stack:
            for layer in model.model.layers:
                handle = layer.register_forward_hook(lambda _, given, y: states.append(y.clone()))
                stack.callback(handle.remove)
            stack.enter_context(on_kernels(model, model.test_pool, told.append))
            stack.enter_context(torch.inference_mode())
            self.cache = model(input_ids=ids[:, :PROMPT], use_cache=True).past_key_values
            if whole:
                with_room(self.cache, PROMPT + 2)
            if change is not None:
                change(self.cache)
            for at in range(PROMPT, PROMPT + TOKENS):
                before = len(told)
                states.clear()
                given = {"past_key_values": self.cache, "use_cache": True}
                logits.append(model(input_ids=ids[:, at : at + 1], **given).logits[0, -1])
                self.calls.append(len(told) - before)
                self.hidden.append(torch.stack(states))
        self.logits = torch.stack(logits)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Ran)
        kept = zip(self.cache.layers, other.cache.layers, strict=True)
        return (
            torch.equal(self.logits, other.logits)
            and torch.equal(torch.stack(self.hidden), torch.stack(other.hidden))
            and all(torch.equal(a.keys, b.keys) for a, b in kept)
            and self.cache.get_seq_length() == PROMPT + TOKENS
        )


def test_a_token_takes_one_call(model: Any) -> None:
    """Keys and values grow on the way, and hooks of layers see what each of them gives."""
    whole, parts = Ran(model, True), Ran(model, False)
    assert whole == parts
    assert whole.calls == [1] * TOKENS and parts.calls == [0] * TOKENS


def test_a_dense_layer_parts_them(tmp_path: Path) -> None:
    with made(tmp_path, mlp_only_layers=[2]) as model:
        whole = Ran(model, True)
        assert whole == Ran(model, False) and whole.calls == [2] * TOKENS


def test_a_model_that_asks_for_router_logits(tmp_path: Path) -> None:
    """Transformers would make a loss of answers of routers that are not called."""
    with made(tmp_path, output_router_logits=True) as model:
        whole = Ran(model, True)
        assert whole.calls == [1] * TOKENS and model.config.output_router_logits
        assert whole == Ran(model, False)


def test_a_cache_of_another_kind_parts_them(model: Any) -> None:
    from transformers.cache_utils import DynamicLayer

    def change(cache: Any) -> None:
        other = DynamicLayer()
        other.update(*(one.clone() for one in (cache.layers[2].keys, cache.layers[2].values)))
        cache.layers[2] = other

    whole = Ran(model, True, change)
    assert whole == Ran(model, False) and whole.calls == [2] * TOKENS


def larger(module: Any, given: Any) -> Any:
    return (given[0] * 1.5, *given[1:])


def larger_in_place(module: Any, given: Any) -> None:
    given[0].mul_(1.5)


@pytest.mark.parametrize("hook", [larger, larger_in_place])
def test_a_hook_between_layers_is_met(model: Any, hook: Any) -> None:
    """Layers behind a hook are computed ahead for the first token, dropped, and then left apart."""
    handle = model.model.layers[3].register_forward_pre_hook(hook)
    try:
        whole, parts = Ran(model, True), Ran(model, False)
    finally:
        handle.remove()
    assert whole == parts and whole.calls == [2] * TOKENS
    assert not torch.equal(whole.logits, Ran(model, True).logits)


def test_experts_that_become_more_are_asked_themselves(model: Any) -> None:
    """LoRA put into a layer whose kernels are known already."""
    experts = model.model.layers[1].mlp.experts

    def change(_: Any) -> None:
        experts.lora = lambda x, ids, weights: 0.5 * x

    try:
        whole = Ran(model, True, change)
        experts.lora = None
        parts = Ran(model, False, change)
    finally:
        experts.lora = None
    assert whole == parts and whole.calls == [2] * TOKENS


def test_a_token_that_is_left_halfway(model: Any) -> None:
    """Layers that were not asked keep no keys of it, and the next token is computed anew."""
    from ktconv.generate.outside import on_kernels
    from ktconv.generate.outside.cache import with_room

    def stop(*_: Any) -> None:
        raise InterruptedError

    told: list[float] = []
    ids = torch.tensor([[3, 4, 5]])
    with on_kernels(model, model.test_pool, told.append), torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        with_room(cache, 9)
        handle = model.model.layers[2].register_forward_pre_hook(stop)
        try:
            with pytest.raises(InterruptedError):
                model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        finally:
            handle.remove()
        assert [one.count for one in cache.layers] == [4, 4, 3, 3, 3]
        other = model(input_ids=ids, use_cache=True).past_key_values
        with_room(other, 9)
        found = model(input_ids=ids[:, :1], past_key_values=other, use_cache=True).logits
        assert len(told) == 2
        expected = model(
            input_ids=ids[:, :1],
            past_key_values=model(input_ids=ids, use_cache=True).past_key_values,
            use_cache=True,
        ).logits
        assert torch.equal(found, expected)
