"""Models whose packed weights lack experts: those run on the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.convert import Converted
from helpers.paths import EXAMPLE

from ktconv.model import replace_experts
from ktconv.model.evaluate import predictions_of_both, windows
from ktconv.model.sites import find_experts
from ktconv.runtime.layers import Experts
from ktconv.runtime.layers.load import open_experts
from ktconv.targets.expert_sets import expert_set

pytestmark = pytest.mark.torch

CHOSEN = {0: [0, 3], 1: [7]}  # of 8


@pytest.fixture(scope="session")
def part(converted_example: Converted) -> Path:
    """The example in INT4 without some experts."""
    return converted_example(exclude_experts=expert_set(CHOSEN))


def test_excluded_experts_answer_as_before(part: Path, model: Any, torch: Any) -> None:
    """Tokens that go to them alone give what the model's own experts give."""
    own = find_experts(model)[0].module
    hidden = torch.randn((5, 128), generator=torch.Generator().manual_seed(1))
    ids, weights = torch.tensor([[0, 3]] * 5), torch.rand((5, 2))
    with torch.inference_mode():
        expected = own(hidden, ids, weights)
    with replace_experts(model, part, keep=True) as replaced, torch.inference_mode():
        assert replaced.own == CHOSEN
        packed = find_experts(model)[0].module
        found = packed(hidden, ids, weights)
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
        mixed = packed(hidden, torch.tensor([[0, 2]] * 5), weights)
        parts = packed(hidden, torch.tensor([[0, -1]] * 5), weights) + packed(
            hidden, torch.tensor([[-1, 2]] * 5), weights
        )
        assert torch.allclose(mixed, parts, rtol=1e-5, atol=1e-6)
        # own weights and packed ones differ, so the test above can fail
        assert not torch.allclose(mixed, own(hidden, torch.tensor([[0, 2]] * 5), weights))
    assert find_experts(model)[0].module is own


def test_shapes_and_tokens_that_need_none(part: Path, model: Any, torch: Any) -> None:
    hidden = torch.randn((2, 3, 128))
    ids, weights = torch.tensor([[1, 2]] * 6), torch.rand((6, 2))
    with replace_experts(model, part), torch.inference_mode():
        packed = find_experts(model)[0].module
        assert packed(hidden, ids, weights).shape == hidden.shape
        assert not packed(hidden, torch.full((6, 2), -1), weights).any()


def test_own_experts_are_no_part_of_the_models_tree(part: Path, model: Any, torch: Any) -> None:
    """Else a layer would have two sets of experts."""
    with replace_experts(model, part, keep=True):
        assert sorted(find_experts(model)) == [0, 1]
        assert not any("experts" in name for name, _ in model.named_parameters())


def test_fewer_quantized_experts_are_closer(
    part: Path, int4: Path, loaded: Any, torch: Any
) -> None:
    model, tokenizer = loaded
    texts = windows(tokenizer, (EXAMPLE.parent / "eval.txt").read_text(), 128, 16)
    found = []
    for output in (part, int4):
        with replace_experts(model, output, keep=True) as replaced:
            found.append(predictions_of_both(model, replaced, texts).result().kl_mean)
    assert 0 < found[0] < found[1]


def test_llama4_experts(torch: Any, part: Path) -> None:
    """Every expert is given all tokens: rows of excluded ones go to the model's own."""
    from ktconv.model.forms import SortedExperts
    from ktconv.model.stored import stored_in

    experts: Experts = open_experts(part, 0)

    class Doubled(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.zeros(8, 128, 4))
            self.down_proj = torch.nn.Parameter(torch.zeros(8, 2, 128))

        def forward(self, hidden: Any) -> Any:
            return 2 * hidden

    module = SortedExperts(experts, own=stored_in(Doubled()))
    hidden = torch.zeros((8, 2, 128))
    hidden[3, 0] = hidden[4, 1] = torch.randn(128)
    with torch.inference_mode():
        found = module(hidden.reshape(16, 128)).reshape(8, 2, 128)
        alone = SortedExperts(experts)(hidden.reshape(16, 128)).reshape(8, 2, 128)
    assert torch.equal(found[3, 0], 2 * hidden[3, 0])
    assert not alone[3].any()
    assert torch.equal(found[4], alone[4])
    assert found[4, 1].any()
    assert not found[[0, 1, 2, 5, 6, 7]].any()
