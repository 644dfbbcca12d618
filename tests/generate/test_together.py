"""Decoder layers that one call computes for a token: the bits of their parts, whatever lies between
the layers, how many calls that takes, and how many layers the model calls for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.family_list import SAVED
from helpers.family_models import build
from helpers.paths import EXAMPLE

from ktconv import native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.filterwarnings("error::FutureWarning"),  # of words that transformers takes back
]
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

if not native.dense_is_fast():
    pytest.skip("this machine has no kernels for it", allow_module_level=True)

LAYERS, PROMPT, TOKENS = 5, 7, 4
NUMBERS = range(LAYERS)
Change = Callable[[Any], None]


@contextmanager
def made(directory: Path, **settings: Any) -> Iterator[Any]:
    """The example with random weights and more layers, its experts on the kernels."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = json.loads((EXAMPLE / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "layer_types": None, **settings}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).bfloat16().eval()
    with on_experts(model, directory):
        yield model


@contextmanager
def on_experts(model: Any, directory: Path) -> Iterator[None]:
    from ktconv.model import replace_experts

    model.save_pretrained(directory)
    with replace_experts(model, directory, threads=2) as replaced:
        model.test_pool = replaced.pool
        yield


@contextmanager
def counted(layers: Any) -> Iterator[list[Any]]:
    """Modules among `layers`, as they are called."""
    found = list[Any]()
    kind = type(layers[0])
    own = kind.__call__

    def call(self: Any, *given: Any, **named: Any) -> Any:
        found.append(self)
        return own(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__call__", call)
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with made(tmp_path_factory.mktemp("five")) as found:
        yield found


def cache_of(model: Any, ids: Any) -> Any:
    from ktconv.generate.outside.cache import CACHE

    return getattr(model(input_ids=ids, use_cache=True), CACHE)


class Ran:
    """Outputs of a model on the kernels, token by token behind a prompt: logits [TOKENS, V], what
    each layer gives, and the numbers of calls and of layers that were called for each token.
    `whole`: with memory for keys, which whole layers need. `change` is called with the cache
    before the token `at`. `heard`: hooks of layers note what those give."""

    def __init__(
        self,
        model: Any,
        whole: bool,
        change: Change | None = None,
        *,
        at: int = 0,
        heard: bool = True,
        **named: Any,
    ) -> None:
        from ktconv.generate.outside import on_kernels
        from ktconv.generate.outside.cache import CACHE, with_room

        told: list[float] = []
        self.calls: list[int] = []
        self.visits: list[int] = []
        self.hidden: list[Any] = []
        logits, states = [], list[Any]()
        layers = model.get_decoder().layers
        generator = torch.Generator().manual_seed(5)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(vocabulary - 1, (1, PROMPT + TOKENS), generator=generator)
        with ExitStack() as stack:
            for layer in layers if heard else ():
                handle = layer.register_forward_hook(lambda _, given, y: states.append(y.clone()))
                stack.callback(handle.remove)
            stack.enter_context(on_kernels(model, model.test_pool, told.append))
            stack.enter_context(torch.inference_mode())
            visited = stack.enter_context(counted(layers))
            self.cache = cache_of(model, ids[:, :PROMPT])
            if whole:
                with_room(self.cache, PROMPT + 2)
            for token in range(TOKENS):
                if change is not None and token == at:
                    change(self.cache)
                before = len(told)
                states.clear()
                visited.clear()
                given = {CACHE: self.cache, "use_cache": True, **named}
                out = model(input_ids=ids[:, PROMPT + token :][:, :1], **given)
                logits.append(out.logits[0, -1])
                self.calls.append(len(told) - before)
                self.visits.append(len(visited))
                if heard:
                    self.hidden.append(torch.stack(states))
                elif out.hidden_states is not None:
                    self.hidden.append(torch.stack(out.hidden_states))
        self.logits = torch.stack(logits)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Ran)
        kept = zip(self.cache.layers, other.cache.layers, strict=True)
        return (
            torch.equal(self.logits, other.logits)
            and len(self.hidden) == len(other.hidden)
            and all(torch.equal(*both) for both in zip(self.hidden, other.hidden, strict=True))
            and all(torch.equal(a.keys, b.keys) for a, b in kept)
            and self.cache.get_seq_length() == PROMPT + TOKENS
        )


def test_a_token_takes_one_call(model: Any) -> None:
    """Keys and values grow on the way, and hooks of layers see what each of them gives."""
    whole, parts = Ran(model, True), Ran(model, False)
    assert whole == parts
    assert whole.calls == [1] * TOKENS and parts.calls == [0] * TOKENS
    assert whole.visits == [LAYERS] * TOKENS


def test_layers_are_called_once_with_the_memory_of_a_cache(model: Any) -> None:
    """The first layer answers for all in tokens 2 and 4; the third needs more memory."""
    whole, parts = Ran(model, True, heard=False), Ran(model, False, heard=False)
    assert whole == parts
    assert whole.calls == [1] * TOKENS and whole.visits == [LAYERS, 1, LAYERS, 1]
    assert parts.visits == [LAYERS] * TOKENS


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "mellum", "qwen3_vl_moe, resaved"])
def test_loops_of_families_go_over_layers_alike(name: str, tmp_path: Path) -> None:
    model = build(SAVED[name]).bfloat16().eval()
    with on_experts(model, tmp_path):
        whole = Ran(model, True, heard=False)
        assert whole == Ran(model, False, heard=False)
    assert whole.calls == [1] * TOKENS and whole.visits == [2, 1, 2, 1]


def test_the_models_list_is_what_it_was(model: Any) -> None:
    """Its layers, names and slices while kernels compute them, and itself afterwards."""
    from ktconv.generate.outside import on_kernels

    decoder = model.model
    before, names, layers = decoder.layers, list(model.state_dict()), [*decoder.layers]
    with on_kernels(model, model.test_pool):
        inside = decoder.layers
        assert inside is not before and [*inside] == layers and len(inside) == LAYERS
        assert [*inside[:2]] == layers[:2] and inside[-1] is layers[-1]
        assert [*inside[:LAYERS]] == layers and inside.training == before.training
        assert list(model.state_dict()) == names
    assert decoder.layers is before


def test_hidden_states_of_all_layers(tmp_path: Path) -> None:
    """Transformers notes what layers get by hooks of its own, which stay in a model."""
    with made(tmp_path) as model:
        heard = Ran(model, True)
        noted = Ran(model, True, heard=False, output_hidden_states=True)
    assert torch.equal(noted.logits, heard.logits) and noted.visits == [LAYERS] * TOKENS
    for theirs, ours in zip(noted.hidden, heard.hidden, strict=True):
        assert len(theirs) == LAYERS + 1 and torch.equal(theirs[1:LAYERS], ours[: LAYERS - 1])


def other_kind(cache: Any, number: int) -> None:
    """A layer of transformers' in place of one that grows in place."""
    from transformers.cache_utils import DynamicLayer

    other, one = DynamicLayer(), cache.layers[number]
    other.update(one.keys.clone(), one.values.clone())
    cache.layers[number] = other


CHANGED = "hook before|hook behind|hook of all|forward|list|numbers|LoRA|memory|cache"


@pytest.mark.parametrize("kind", CHANGED.split("|"))
def test_a_change_between_tokens_is_met(model: Any, kind: str) -> None:
    """Changes of a layer that is not called any more; of its keys, which lie elsewhere then."""
    layers = model.model.layers
    layer = layers[3]
    experts = layer.mlp.experts

    def change(cache: Any) -> None:
        if kind == "hook before":
            stack.callback(layer.register_forward_pre_hook(larger).remove)
        elif kind == "hook behind":
            stack.callback(layer.register_forward_hook(lambda _, x, y: 1.5 * y).remove)
        elif kind == "hook of all":
            hook = torch.nn.modules.module.register_module_forward_hook
            stack.callback(hook(lambda of, x, y: 1.5 * y if of is layer else y).remove)
        elif kind == "list":
            model.model.layers[3] = Larger(layer)
            stack.callback(layers.__setitem__, 3, layer)
        elif kind == "numbers":  # the model's code takes each layer by its number
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(
                type(model.model.layers), "__iter__", lambda x: map(x.__getitem__, NUMBERS)
            )
        elif kind == "forward":
            own = layer.forward  # the kernels', which take it away when they end
            layer.forward = lambda *x, **named: 1.5 * own(*x, **named)
        elif kind == "LoRA":
            experts.lora = lambda x, ids, weights: 0.5 * x
            stack.callback(setattr, experts, "lora", None)
        else:
            cache.layers[3].keys.mul_(1.5)
            if kind == "cache":
                other_kind(cache, 3)
            elif whole:
                cache.layers[3].reserve(PROMPT + 2)

    found = []
    for whole in (True, False):
        with ExitStack() as stack:
            found.append(Ran(model, whole, change, at=1, heard=False))
            assert model.model.layers is layers and (layers[3] is layer) == (kind != "list")
    assert found[0] == found[1]
    assert found[0].visits[:2] == [LAYERS] * 2


class Larger(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A layer around another one."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *given: Any, **named: Any) -> Any:
        return 1.5 * self.layer(*given, **named)


def test_two_threads_that_go_over_layers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread begins a token before the first one calls a layer, and ends it later."""
    from ktconv.generate.outside import on_kernels
    from ktconv.generate.outside.cache import CACHE, with_room

    ids = torch.tensor([[3, 4, 5]])

    def token(cache: Any) -> Any:
        with torch.inference_mode():
            given = {CACHE: cache, "use_cache": True}
            return model(input_ids=ids[:, :1], **given).logits

    begun, called, found = threading.Event(), threading.Event(), list[Any]()
    with on_kernels(model, model.test_pool), torch.inference_mode():
        expected = cache_of(model, ids)
        second, first = token(expected), token(expected)
        cache, other = cache_of(model, ids), cache_of(model, ids)
        with_room(cache, 9)
        with_room(other, 9)
        token(cache)
        thread = threading.Thread(target=lambda: found.append(token(other)))
        kind = type(model.model.layers)
        own = kind.__iter__

        def layers(self: Any) -> Iterator[Any]:
            for number, layer in enumerate(own(self)):
                if threading.current_thread() is thread:
                    begun.set()
                    assert called.wait(60)
                elif number == 0:
                    thread.start()
                    assert begun.wait(60)
                yield layer
            called.set()

        monkeypatch.setattr(kind, "__iter__", layers)
        found.append(token(cache))
        thread.join()
    assert torch.equal(found[0], first) and torch.equal(found[1], second)
    assert [one.count for one in (*cache.layers, *other.layers)] == [5] * LAYERS + [4] * LAYERS


def test_a_dense_layer_parts_them(tmp_path: Path) -> None:
    with made(tmp_path, mlp_only_layers=[2]) as model:
        whole = Ran(model, True)
        assert whole == Ran(model, False) and whole.calls == [2] * TOKENS
        short = Ran(model, True, heard=False)
        assert short == Ran(model, False, heard=False) and short.calls == [2] * TOKENS
        assert short.visits == [LAYERS, LAYERS - 1, LAYERS, LAYERS - 1]


def test_a_model_that_asks_for_router_logits(tmp_path: Path) -> None:
    """Transformers would make a loss of answers of routers that are not called."""
    with made(tmp_path, output_router_logits=True) as model:
        whole = Ran(model, True)
        assert whole.calls == [1] * TOKENS and model.config.output_router_logits
        assert whole == Ran(model, False)


def test_a_cache_of_another_kind_parts_them(model: Any) -> None:
    whole = Ran(model, True, lambda cache: other_kind(cache, 2))
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
    from ktconv.generate.outside.cache import CACHE, with_room

    def stop(*_: Any) -> None:
        raise InterruptedError

    told: list[float] = []
    ids = torch.tensor([[3, 4, 5]])
    with on_kernels(model, model.test_pool, told.append), torch.inference_mode():
        cache = cache_of(model, ids)
        with_room(cache, 9)
        handle = model.model.layers[2].register_forward_pre_hook(stop)
        try:
            with pytest.raises(InterruptedError):
                model(input_ids=ids[:, :1], use_cache=True, **{CACHE: cache})
        finally:
            handle.remove()
        assert [one.count for one in cache.layers] == [4, 4, 3, 3, 3]
        other = cache_of(model, ids)
        with_room(other, 9)
        found = model(input_ids=ids[:, :1], use_cache=True, **{CACHE: other}).logits
        assert len(told) == 2
        given = {CACHE: cache_of(model, ids)}
        expected = model(input_ids=ids[:, :1], use_cache=True, **given).logits
        assert torch.equal(found, expected)
