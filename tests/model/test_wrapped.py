"""Models inside wrappers, and models whose own experts are not loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.convert import Converted
from helpers.paths import EXAMPLE

from ktconv.errors import MemoryShortError, UsageError
from ktconv.model import expert_device, load_model, move_non_experts, replace_experts
from ktconv.model.sites import find_experts
from ktconv.system import machine
from ktconv.targets.expert_sets import expert_set

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def logits(model: Any, torch: Any) -> Any:
    ids = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.fixture
def expected(int8: Path, torch: Any) -> Any:
    """What the example answers on packed experts."""
    from helpers.adapted import example

    model = example()
    replace_experts(model, int8, threads=1)
    return logits(model, torch)


def wrapper(torch: Any, name: str) -> Callable[[Any], Any]:
    """A module that has another one under `name`, and its config nowhere."""

    class Wrapper(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            super().__init__()
            setattr(self, name, inner)

        def forward(self, *args: Any, **named: Any) -> Any:
            return getattr(self, name)(*args, **named)

    return Wrapper


def check(model: Any, expected: Any, int8: Path, torch: Any, path: str) -> None:
    """Found in both layers, replaced, moved, and answering as without a wrapper."""
    assert [site.path for site in find_experts(model).values()] == [path.format(n) for n in (0, 1)]
    assert expert_device(model) == torch.device("cpu")
    with replace_experts(model, int8, threads=1, keep=True) as replaced:
        assert (replaced.layers, replaced.untried) == ((0, 1), ())
        assert torch.equal(logits(model, torch), expected)
        assert move_non_experts(model, "cpu").moved == 0
    assert not torch.equal(logits(model, torch), expected)


@pytest.mark.parametrize("name", ["module", "_orig_mod", "_fsdp_wrapped_module"])
def test_a_wrapped_model(name: str, model: Any, expected: Any, int8: Path, torch: Any) -> None:
    check(
        wrapper(torch, name)(model), expected, int8, torch, f"{name}.model.layers.{{}}.mlp.experts"
    )


def test_wrapped_layers_and_experts(model: Any, expected: Any, int8: Path, torch: Any) -> None:
    compiled, sharded = wrapper(torch, "_orig_mod"), wrapper(torch, "_fsdp_wrapped_module")
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layer.mlp.experts = compiled(sharded(layer.mlp.experts))
        layers[number] = sharded(layer)
    path = "model.layers.{}._fsdp_wrapped_module.mlp.experts"
    check(model, expected, int8, torch, path)
    # The wrapper goes with them: a compiled one would run what was compiled.
    replace_experts(model, int8, threads=1)
    assert not dict(find_experts(model)[0].module.named_children())


def test_a_wrapped_list(model: Any, expected: Any, int8: Path, torch: Any) -> None:
    """Whose name is that of its wrapper."""
    from helpers.listed import Whole, with_lists

    compiled = wrapper(torch, "_orig_mod")
    for layer in with_lists(model, Whole).model.layers:
        layer.mlp.experts = compiled(layer.mlp.experts)
    check(model, expected, int8, torch, "model.layers.{}.mlp.experts")


def test_torch_compile(model: Any, expected: Any, int8: Path, torch: Any) -> None:
    """The kernels are left out of what is compiled, whatever part that is."""
    model.model.layers[0].mlp.experts = torch.compile(
        model.model.layers[0].mlp.experts, backend="eager"
    )
    assert find_experts(model)[0].path == "model.layers.0.mlp.experts"
    replace_experts(model, int8, threads=1)
    assert torch.equal(logits(model, torch), expected)
    block = model.model.layers[1].mlp
    x = torch.randn((1, 3, 128), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(torch.compile(block, backend="eager")(x), block(x))


def adapted(torch: Any, base: Any) -> Any:
    """As PEFT nests a layer that has LoRA, whose B is zero at first."""

    class Lora(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = base

        def forward(self, *args: Any) -> Any:
            return self.base_layer(*args)

    return Lora()


def test_adapters_beside_experts_stay(model: Any, expected: Any, int8: Path, torch: Any) -> None:
    """base_model.model.model.layers.0, with LoRA in attention."""
    for layer in model.model.layers:
        layer.self_attn.q_proj = adapted(torch, layer.self_attn.q_proj)
    peft = wrapper(torch, "base_model")(wrapper(torch, "model")(model))
    path = "base_model.model.model.layers.{}.mlp.experts"
    check(peft, expected, int8, torch, path)


@pytest.mark.parametrize("as_list", [False, True])
def test_adapters_of_experts_are_refused(as_list: bool, model: Any, int8: Path, torch: Any) -> None:
    from helpers.listed import with_lists

    if as_list:
        experts = with_lists(model).model.layers[1].mlp.experts
        experts[2].up_proj = adapted(torch, experts[2].up_proj)
    else:
        block = model.model.layers[1].mlp
        block.experts = adapted(torch, block.experts)
    modules = dict(model.named_modules())
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.experts.* have an adapter"):
        replace_experts(model, int8, threads=1)
    assert dict(model.named_modules()) == modules
    assert expert_device(model) == torch.device("cpu")


def test_experts_that_are_not_loaded(
    model: Any, expected: Any, int8: Path, converted_example: Converted, torch: Any
) -> None:
    """They are not needed, unless the output leaves some to the model."""
    find_experts(model)[1].module.to("meta")
    part = converted_example(method="int8", exclude_experts=expert_set({1: [0, 3]}))
    with pytest.raises(UsageError, match=r"layer 1 leaves experts \[0, 3\] .* not loaded"):
        replace_experts(model, part, threads=1)
    replaced = replace_experts(model, int8, threads=1)
    assert replaced.untried == (1,)
    assert torch.equal(logits(model, torch), expected)


def test_a_model_loaded_without_experts(
    loaded: Any, expected: Any, int8: Path, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_model(EXAMPLE, "float32", experts=False)
    assert expert_device(model) == torch.device("meta")
    others = sum(one.numel() for one in model.parameters() if not one.is_meta)
    assert others == sum(one.numel() for one in loaded[0].parameters()) - 2 * 8 * 3 * 128 * 256
    assert replace_experts(model, int8, threads=1).untried == (0, 1)
    assert torch.equal(logits(model, torch), expected)
    words = tokenizer("Once", return_tensors="pt")
    assert model.generate(**words, max_new_tokens=4, do_sample=False).shape[1] > 1
    monkeypatch.setattr(machine, "available_memory", lambda: others)
    with pytest.raises(MemoryShortError, match="needs about"):
        load_model(EXAMPLE, "float32", experts=False)
    monkeypatch.setattr(machine, "available_memory", lambda: 5 * others)
    load_model(EXAMPLE, "float32", experts=False)
    with pytest.raises(MemoryShortError, match="needs about"):
        load_model(EXAMPLE, "float32")


def test_codes_of_other_libraries_are_not_tried(model: Any, int8: Path, torch: Any) -> None:
    module = find_experts(model)[0].module
    for name, one in module.named_parameters():
        setattr(module, name, torch.nn.Parameter(one.to(torch.float8_e4m3fn), requires_grad=False))
    assert replace_experts(model, int8, threads=1).untried == (0,)
