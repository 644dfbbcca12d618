"""Experts that are a list of modules: found by what they are, and replaced in their blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.convert import Converted
from helpers.paths import EXAMPLE

from ktconv.errors import CheckpointError, UsageError
from ktconv.model import expert_device, load_model, move_non_experts, replace_experts
from ktconv.model.evaluate import capture_layer_inputs
from ktconv.model.forms import EachExperts
from ktconv.model.listed import listed_in
from ktconv.model.module import PackedExperts
from ktconv.model.sites import find_experts
from ktconv.targets.expert_sets import expert_set

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def logits(model: Any, torch: Any, seed: int = 0) -> Any:
    ids = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def distance(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("block", ["Indexed", "Enumerated", "OneByOne", "Whole"])
def test_blocks_of_transformers_4(block: str, model: Any, int8: Path, torch: Any) -> None:
    """Whatever way a block takes to its list, the answer is that of the stacked experts."""
    from helpers import listed

    own = logits(model, torch)
    with replace_experts(model, int8, threads=1, keep=True):
        ours = logits(model, torch)
    listed.with_lists(model, getattr(listed, block))
    assert distance(logits(model, torch), own) < 1e-5
    kind = PackedExperts if block == "Whole" else EachExperts
    with replace_experts(model, int8, threads=1, keep=True) as replaced:
        assert (replaced.layers, replaced.untried) == ((0, 1), ())
        assert type(find_experts(model)[1].module) is kind
        if block == "Whole":
            assert torch.equal(logits(model, torch), ours)
        else:  # an expert's output is rounded to bf16; the sum of all, by the kernels, only once
            assert 1e-6 < distance(logits(model, torch), ours) < 0.01
    assert distance(logits(model, torch), own) < 1e-5


def test_names_of_mixtral_and_biases_of_zero(model: Any, int8: Path, torch: Any) -> None:
    from helpers.listed import with_lists

    own = logits(model, torch)
    with_lists(model, names=("w1", "w3", "w2"))
    assert replace_experts(model, int8, threads=1).layers == (0, 1)
    assert 1e-6 < distance(logits(model, torch), own) < 0.02
    biased, _ = load_model(EXAMPLE, "float32")
    with_lists(biased, bias=True)
    with pytest.raises(
        CheckpointError, match=r"those of the model have biases, those in .* do not"
    ):
        replace_experts(biased, int8, threads=1)


@pytest.mark.parametrize("configured", [True, False])
def test_another_activation_is_found_by_a_trial(
    model: Any, int8: Path, torch: Any, configured: bool
) -> None:
    """A module of one's own computes what its code says, whatever config.json says."""
    from helpers.listed import with_lists

    with_lists(model, function=torch.nn.functional.gelu)
    if not configured:
        model = torch.nn.ModuleDict({"layers": model.model.layers})
        for layer in model["layers"]:
            layer.self_attn = torch.nn.Identity()  # which has the config, too
    with pytest.raises(CheckpointError, match=r"in layer 0 do not compute .*: swiglu between"):
        replace_experts(model, int8, threads=1)


def test_stacked_experts_without_a_config_are_tried(model: Any, int8: Path, torch: Any) -> None:
    class Stacked(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, own: Any) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = own.gate_up_proj, own.down_proj
            self.function = torch.nn.functional.silu

        def forward(self, hidden: Any, ids: Any, weights: Any) -> Any:
            gate, up = torch.einsum("th,tkih->tki", hidden, self.gate_up_proj[ids]).chunk(2, -1)
            inner = self.function(gate) * up * weights[..., None]
            return torch.einsum("tki,tkhi->th", inner, self.down_proj[ids])

    layers = model.model.layers
    for layer in layers:
        layer.self_attn = torch.nn.Identity()
        layer.mlp.experts = Stacked(layer.mlp.experts)
    bare = torch.nn.ModuleDict({"layers": layers})
    with replace_experts(bare, int8, threads=1, keep=True) as replaced:
        assert replaced.layers == (0, 1)
    layers[1].mlp.experts.function = torch.nn.functional.gelu
    with pytest.raises(CheckpointError, match="in layer 1 do not compute"):
        replace_experts(bare, int8, threads=1)
    layers[0].mlp.experts.function = None
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.experts could not be tried: 'None"):
        replace_experts(bare, int8, threads=1)


def test_layers_that_are_not_known_are_no_secret(model: Any, int8: Path, torch: Any) -> None:
    """A model without config.json that says how many layers it has, and one layer in disguise."""
    from helpers.listed import with_lists

    bare = torch.nn.ModuleDict({"layers": with_lists(model).model.layers})
    for layer in bare["layers"]:
        layer.self_attn = torch.nn.Identity()
    bare["layers"][1].mlp.experts[3].scale = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(CheckpointError, match=r"has experts of layers \[1\], which are not MoE"):
        replace_experts(bare, int8, threads=1)
    bare["layers"][0].mlp.experts[0] = torch.nn.Linear(4, 4)
    with pytest.raises(CheckpointError, match="no experts were found in this ModuleDict") as error:
        replace_experts(bare, int8, threads=1)
    assert error.value.hint and "gate_proj, up_proj, down_proj and w1, w3, w2" in error.value.hint


def test_experts_called_with_more_are_refused(model: Any, int8: Path, torch: Any) -> None:
    from helpers.listed import Expert, with_lists

    class Weighted(Expert):
        def forward(self, x: Any, weights: Any) -> Any:  # type: ignore[override]
            return super().forward(x) * weights

    with_lists(model)
    for layer in model.model.layers:
        for expert in layer.mlp.experts:
            expert.__class__ = Weighted
    with pytest.raises(CheckpointError, match="ModuleList is called in a way that is not known"):
        replace_experts(model, int8, threads=1)


def test_excluded_experts_run_as_before(
    model: Any, converted_example: Converted, torch: Any
) -> None:
    from helpers.listed import with_lists

    part = converted_example(method="int8", exclude_experts=expert_set({0: [2]}))
    with_lists(model)
    own = model.model.layers[0].mlp.experts
    rows = torch.randn((3, 128), generator=torch.Generator().manual_seed(1))
    with replace_experts(model, part, threads=1) as replaced, torch.no_grad():
        assert replaced.own == {0: [2], 1: []}
        packed = model.model.layers[0].mlp.experts
        assert len(packed) == len(own) and packed is not own
        assert torch.equal(packed[2](rows), own[2](rows))
        assert 1e-4 < distance(packed[1](rows), own[1](rows)) < 0.02
        assert packed[1](rows[:0]).shape == (0, 128)
        last = packed[6:]
        assert len(last) == 2 and torch.equal(last[1](rows), packed[7](rows))
        assert packed[1](rows.bfloat16()).dtype == torch.bfloat16


def test_lists_that_are_no_experts(torch: Any) -> None:
    from helpers.listed import Expert

    def experts(count: int, inner: int = 8) -> list[Any]:
        wide, turned = torch.zeros(inner, 4), torch.zeros(4, inner)
        return [Expert({"gate": wide, "up": wide, "down": turned}) for _ in range(count)]

    def listed(*modules: Any) -> Any:
        return torch.nn.ModuleList(modules)

    found = listed_in(listed(*experts(3), torch.nn.Identity()))
    assert found is not None and (found.count, found.identities) == (3, 1)
    assert (found.hidden, found.intermediate, found.gated, found.biased) == (4, 8, True, False)
    assert listed_in(listed(*experts(2), *experts(1, 16))) is None
    assert listed_in(listed(*experts(2), None)) is None
    assert listed_in(listed(*experts(2), torch.nn.Linear(4, 4))) is None
    assert listed_in(listed()) is None
    assert listed_in(torch.nn.Sequential(*experts(2))) is None
    (normed,) = experts(1)
    normed.norm = torch.nn.LayerNorm(4)
    assert listed_in(listed(normed, normed)) is None

    def layer(**blocks: Any) -> Any:
        return torch.nn.ModuleDict({"layers": listed(torch.nn.ModuleDict(blocks))})

    # LongCat's layers have two dense MLPs in a list beside their experts.
    both = layer(mlps=listed(*experts(2)), experts=listed(*experts(3)))
    assert find_experts(both)[0].path == "layers.0.experts"
    shared = layer(shared_experts=listed(*experts(2)), experts=listed(*experts(3)))
    assert find_experts(shared)[0].path == "layers.0.experts"
    with pytest.raises(CheckpointError, match="no experts were found"):
        find_experts(layer(mlps=listed(*experts(2))))
    routed = layer(mlps=listed(*experts(3)), router=torch.nn.Linear(4, 3))
    assert find_experts(routed)[0].path == "layers.0.mlps"


def test_lists_of_layers_with_any_name(torch: Any, fused_experts: Callable[[], Any]) -> None:
    def model(*names: str) -> Any:
        found = torch.nn.ModuleDict({"experts": fused_experts()})
        for name in reversed(names):
            first = torch.nn.Identity()
            found = torch.nn.ModuleDict({name: torch.nn.ModuleList([first, found])})
        return found

    (site,) = find_experts(model("stack")).values()
    assert (site.layer, site.path, site.layers_path) == (1, "stack.1.experts", "stack")
    (site,) = find_experts(model("stages", "layers")).values()
    assert (site.layer, site.layers_path) == (1, "stages.1.layers")
    with pytest.raises(
        CheckpointError, match=r"stages\.1\.units\.1\.experts are not in a numbered"
    ):
        find_experts(model("stages", "units"))


def test_what_needs_experts_in_one_module_says_so(loaded: Any, int8: Path, torch: Any) -> None:
    from helpers.listed import with_lists

    model, tokenizer = loaded
    with_lists(model)
    for _ in range(2):  # the model's own, and packed ones
        with pytest.raises(UsageError, match="no call shows how tokens are routed"):
            capture_layer_inputs(model, tokenizer, "some words", 4)
        with pytest.raises(CheckpointError, match=r"has a module for each expert|of its own"):
            _ = find_experts(model)[0].stored
        if not isinstance(find_experts(model)[0].module, EachExperts):
            replace_experts(model, int8, threads=1)


def test_devices_of_a_list(model: Any, torch: Any) -> None:
    from helpers.listed import with_lists

    with_lists(model)
    before = sum(one.numel() for one in model.parameters())
    assert expert_device(model) == torch.device("cpu")
    moved = move_non_experts(model, "meta")
    assert moved.experts == 4 * 2 * 8 * 3 * 128 * 256
    assert moved.moved == 4 * before - moved.experts + sum(
        one.numel() * one.element_size() for one in model.buffers()
    )
    assert expert_device(model) == torch.device("cpu")
    model.model.layers[1].mlp.experts[3].up_proj.to("meta")
    with pytest.raises(CheckpointError, match=r"cpu \(layers 0-1\), meta \(layers 1\)"):
        expert_device(model)
