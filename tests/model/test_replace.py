"""Models on packed experts: as good as their own, and refused where they would not be."""

from __future__ import annotations

import copy
import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.convert import Converted, read_model
from helpers.paths import EXAMPLE
from safetensors.numpy import save_file

from ktconv import native
from ktconv.errors import CheckpointError, UsageError
from ktconv.formats import parse_tensor_name, tensor_name
from ktconv.model import replace_experts
from ktconv.model.sites import find_experts

pytestmark = [pytest.mark.slow, pytest.mark.torch]

HIDDEN, EXPERTS = 128, 8


def distance(ours: Any, theirs: Any) -> float:
    """Relative to the size of theirs."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def logits(model: Any, torch: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 60, (2, 9), generator=generator)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


# ---- the example model -----------------------------------------------------------------


@pytest.mark.parametrize(("method", "bound"), [("int8", 0.02), ("int4", 0.2)])
def test_logits_stay_near(
    model: Any, method: str, bound: float, request: pytest.FixtureRequest, torch: Any
) -> None:
    own = logits(model, torch)
    with replace_experts(model, request.getfixturevalue(method), threads=1, keep=True) as replaced:
        assert (replaced.layers, replaced.method) == ((0, 1), method)
        assert 1e-6 < distance(logits(model, torch), own) < bound
        with replaced.originals():
            assert torch.equal(logits(model, torch), own)
        assert not torch.equal(logits(model, torch), own)
    assert torch.equal(logits(model, torch), own)


def test_generate_works_in_the_models_dtype(model: Any, int8: Path, torch: Any) -> None:
    model.to(torch.bfloat16)
    replace_experts(model, str(int8))  # with the pool of the process
    ids = torch.tensor([[5, 6, 7]])
    written = model.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0)
    assert written.shape[1] <= 7 and torch.equal(written[:, :3], ids)


def test_copies_of_a_model_share_packed_experts(model: Any, int8: Path, torch: Any) -> None:
    replace_experts(model, int8)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, torch), logits(model, torch))
    for layer, site in find_experts(model).items():
        assert find_experts(twin)[layer].module.experts is site.module.experts


def test_replaced_parameters_are_freed(model: Any, int8: Path, torch: Any) -> None:
    before = sum(parameter.numel() for parameter in model.parameters())
    owned = [weakref.ref(site.module) for site in find_experts(model).values()]
    replaced = replace_experts(model, int8, threads=1)
    gc.collect()
    assert [reference() for reference in owned] == [None, None]
    after = sum(parameter.numel() for parameter in model.parameters())
    assert before - after == 2 * EXPERTS * 3 * HIDDEN * 256
    with pytest.raises(UsageError, match="were not kept"):
        replaced.restore()
    with pytest.raises(UsageError, match="were not kept"), replaced.originals():
        pass


def test_restore_gives_back_model_and_level(model: Any, int8: Path, torch: Any) -> None:
    before, own = native.isa(), logits(model, torch)
    replaced = replace_experts(model, int8, threads=1, isa="scalar", keep=True)
    assert native.isa() == "scalar"
    assert distance(logits(model, torch), own) < 0.02
    replaced.restore()
    assert native.isa() == before and torch.equal(logits(model, torch), own)


def test_closed_experts_still_run(model: Any, int8: Path, torch: Any) -> None:
    own = logits(model, torch)
    with replace_experts(model, int8, threads=1):
        ours = logits(model, torch)
    assert torch.equal(logits(model, torch), ours) and not torch.equal(ours, own)


# ---- the module ------------------------------------------------------------------------


@pytest.fixture
def pair(model: Any, int8: Path) -> Any:
    """(the model's experts of layer 1, packed ones)."""
    own = find_experts(model)[1].module
    replace_experts(model, int8, threads=1)
    return own, find_experts(model)[1].module


def inputs(torch: Any, tokens: int, dtype: Any) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, HIDDEN), generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:3] for _ in range(tokens)])
    return x, ids, torch.rand((tokens, 3), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6, 1)])
def test_any_leading_shape_and_dtype(
    pair: Any, torch: Any, dtype: str, shape: tuple[int, ...]
) -> None:
    own, packed = pair
    x, ids, weights = inputs(torch, 6, getattr(torch, dtype))
    with torch.no_grad():
        theirs = own(x.float(), ids, weights.float())
        ours = packed(x.reshape(*shape, HIDDEN), ids, weights)
    assert ours.shape == (*shape, HIDDEN) and ours.dtype == x.dtype
    assert distance(ours.reshape(6, HIDDEN), theirs) < 0.02


def test_one_token_and_none(pair: Any, torch: Any) -> None:
    own, packed = pair
    x, ids, weights = inputs(torch, 1, torch.float32)
    with torch.no_grad():
        assert distance(packed(x[0], ids[0], weights[0]), own(x, ids, weights)[0]) < 0.02
        assert packed(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)
        assert not packed(x, ids[:, :0], weights[:, :0]).any()


def test_experts_that_are_elsewhere_are_skipped(pair: Any, torch: Any) -> None:
    _, packed = pair
    x, ids, weights = inputs(torch, 4, torch.float32)
    away, given = ids.clone(), ids.clone()
    away[0, 1], away[1, 0], away[3] = -1, EXPERTS, EXPERTS + 5
    without = weights * ((away >= 0) & (away < EXPERTS))
    with torch.no_grad():
        ours = packed(x, away, weights)
        assert torch.equal(ours, packed(x, ids, without))
    assert not ours[3].any()
    assert torch.equal(ids, given)


def test_strides_do_not_matter(pair: Any, torch: Any) -> None:
    _, packed = pair
    x, ids, weights = inputs(torch, 4, torch.bfloat16)
    apart = [torch.stack([part, part], dim=-1)[..., 0] for part in (x, ids, weights)]
    with torch.no_grad():
        assert torch.equal(packed(*apart), packed(x, ids.to(torch.int32), weights))


def test_a_default_device_changes_nothing(pair: Any, model: Any, int8: Path, torch: Any) -> None:
    """As torch.set_default_device("cuda") would."""
    _, packed = pair
    given = inputs(torch, 4, torch.float32)
    with torch.no_grad():
        expected = packed(*given)
        with torch.device("meta"):
            assert torch.equal(packed(*given), expected)


def test_gradients_and_other_devices_are_refused(pair: Any, model: Any, torch: Any) -> None:
    _, packed = pair
    x, ids, weights = inputs(torch, 2, torch.float32)
    for given in ((x.clone().requires_grad_(), weights), (x, weights.clone().requires_grad_())):
        with pytest.raises(UsageError, match="no gradients"):
            packed(given[0], ids, given[1])
    with pytest.raises(UsageError, match="no gradients"):
        model(input_ids=torch.tensor([[5, 6]]))
    with pytest.raises(UsageError, match="on meta"):
        packed(x.to("meta"), ids, weights)


# ---- refusals --------------------------------------------------------------------------


def small(torch: Any, **changes: Any) -> Any:
    """The example's architecture with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = json.loads((EXAMPLE / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    torch.manual_seed(3)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**config, **changes})).eval()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "are not those of the model"),
        ({"hidden_size": 64}, "hidden is 64 in the model and 128"),
        ({"moe_intermediate_size": 64}, "intermediate is 64 in the model and 256"),
        ({"num_experts": 4}, "experts is 4 in the model and 8"),
        ({"hidden_act": "gelu"}, "the same activation"),
        ({"num_hidden_layers": 3}, r"does not contain the experts of layers \[2\]"),
        ({"mlp_only_layers": [0]}, r"has experts of layers \[0\]"),
        ({"mlp_only_layers": [0, 1]}, "no experts were found in this Qwen3MoeForCausalLM"),
    ],
)
def test_other_models_are_refused_and_left_alone(
    changes: dict[str, Any], says: str, int8: Path, torch: Any
) -> None:
    model, before = small(torch, **changes), native.isa()
    modules = dict(model.named_modules())
    with pytest.raises(CheckpointError, match=says):
        replace_experts(model, int8, threads=1, isa="scalar")
    assert dict(model.named_modules()) == modules and native.isa() == before


def test_options_are_checked(model: Any, int8: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        replace_experts(model, tmp_path / "absent")
    with pytest.raises(CheckpointError, match="contains no packed experts"):
        replace_experts(model, tmp_path)
    with pytest.raises(UsageError, match="does not support mmx"):
        replace_experts(model, int8, isa="mmx")
    with pytest.raises(UsageError, match="0 threads"):
        replace_experts(model, int8, threads=0)
    replace_experts(model, int8, threads=1)
    with pytest.raises(UsageError, match="already uses packed experts"):
        replace_experts(model, int8)


def test_experts_that_matrices_do_not_describe(model: Any, int8: Path) -> None:
    module: Any = find_experts(model)[1].module
    module.has_bias = True  # as gpt-oss has
    with pytest.raises(CheckpointError, match="of the model have biases, those in"):
        replace_experts(model, int8, threads=1)
    module.has_bias = False
    module.forward = lambda hidden_states, top_k_index: hidden_states
    with pytest.raises(CheckpointError, match="Qwen3MoeExperts is called in a way that is not"):
        replace_experts(model, int8, threads=1)
    assert find_experts(model)[0].module is not module


def test_a_failed_start_gives_the_level_back(model: Any, int8: Path) -> None:
    before = native.isa()
    with pytest.raises(UsageError):
        replace_experts(model, int8, threads=0, isa="scalar")
    assert native.isa() == before


def test_layers_for_several_tokens_are_left_out(
    model: Any, int8: Path, tmp_path: Path, torch: Any
) -> None:
    shutil.copytree(int8, tmp_path / "mtp")
    renamed = {}
    for name, tensor in read_model(int8).items():
        found = parse_tensor_name(name)
        if found is not None and found.layer == 1:
            place = (found.proj, found.expert, found.part, found.kind)
            renamed[tensor_name(2, *place)] = np.frombuffer(tensor.data, np.int8)
    save_file(renamed, tmp_path / "mtp/model-mtp.safetensors")
    assert replace_experts(model, tmp_path / "mtp", threads=1).layers == (0, 1)


def test_folders_of_layers_serve_as_well(
    model: Any, converted_example: Converted, torch: Any
) -> None:
    folders = converted_example(method="int8", layout="layers")
    own = logits(model, torch)
    assert replace_experts(model, folders, threads=1).layers == (0, 1)
    assert 1e-6 < distance(logits(model, torch), own) < 0.02


def test_stray_experts_are_refused(torch: Any, fused_experts: Callable[[], Any]) -> None:
    stray = torch.nn.ModuleDict({"experts": fused_experts()})
    with pytest.raises(CheckpointError, match="not in a numbered layer"):
        find_experts(stray)
    layers = torch.nn.ModuleList(
        [torch.nn.ModuleDict({"a": fused_experts(), "b": fused_experts()})]
    )
    with pytest.raises(CheckpointError, match="both are layer 0"):
        find_experts(torch.nn.ModuleDict({"layers": layers}))
