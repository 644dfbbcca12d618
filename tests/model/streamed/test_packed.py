"""The source's experts and packed ones in one pass, against a model with `replace_experts`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.convert import Converted
from helpers.paths import EXAMPLE
from helpers.streamed import on_meta, routed
from msgspec.structs import replace

from ktconv.errors import CheckpointError, UsageError
from ktconv.model import replace_experts
from ktconv.source import open_checkpoint
from ktconv.source.settings import ModelSettings
from ktconv.targets.expert_sets import expert_set

pytestmark = [pytest.mark.slow, pytest.mark.torch]

CHOSEN = {0: [0, 3], 1: [7]}  # of 8


class Example(NamedTuple):
    model: Any
    settings: dict[str, Any]
    checkpoint: Any
    layers: dict[int, Any]


@pytest.fixture(scope="module")
def example(torch: Any) -> Example:
    """In bfloat16: loaded, and as a streamed pass sees it."""
    from ktconv.model import load_model
    from ktconv.model.sites import find_experts
    from ktconv.model.streamed.calls import ExpertLayer

    model = load_model(EXAMPLE, "bfloat16")[0]
    model.set_experts_implementation("eager")
    checkpoint = open_checkpoint(EXAMPLE)
    layers = {
        layer.index: ExpertLayer.at(layer.index, on_meta(find_experts(model)[layer.index]), layer)
        for layer in checkpoint.layers
    }
    return Example(model, model.config.to_dict(), checkpoint, layers)


@pytest.fixture(scope="session")
def part(converted_example: Converted) -> Path:
    """In INT4 without some experts."""
    return converted_example(exclude_experts=expert_set(CHOSEN))


def both(example: Example, output: Path, **options: Any) -> Any:
    from ktconv.model.streamed.experts import SourceExperts
    from ktconv.model.streamed.packed import BothExperts

    source = SourceExperts(example.checkpoint, example.model.dtype, **options)
    return BothExperts(source, output, example.layers, ModelSettings(example.settings), 1)


@pytest.fixture(params=["part", "int4", "int8"])
def output(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("block", [7, 8192])
def test_both_sides(
    example: Example, output: Path, block: int, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.model.sites import find_experts
    from ktconv.model.streamed import packed
    from ktconv.model.streamed.calls import Call

    monkeypatch.setattr(packed, "TOKENS_AT_ONCE", block)
    read: list[int] = []
    with both(example, output, read=read.append) as runner, torch.inference_mode():
        for index, layer in example.layers.items():
            calls = []
            for window, tokens in enumerate((33, 1, 2)):
                for side in (0, 1):
                    rows = torch.randn((tokens, 128)).to(torch.bfloat16) + side / 8
                    ids, weights = routed(tokens, 8, 2, 2 * window + side)
                    calls.append(Call(side, window, rows, ids, weights.to(torch.bfloat16)))
            outputs = [torch.zeros_like(call.rows) for call in calls]
            runner.run(layer, calls, outputs)
            own = find_experts(example.model)[index].module
            with replace_experts(example.model, output, keep=True, threads=1):
                replaced = find_experts(example.model)[index].module
                for call, found in zip(calls, outputs, strict=True):
                    module = replaced if call.side else own
                    assert torch.equal(found, module(call.rows, call.ids, call.weights))
    chosen = 7  # of 8: `routed` leaves out the last one
    assert len(read) == 2 * chosen  # both sides together


# ---- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize("only_source", [False, True])
def test_experts_of_another_model(
    example: Example, int4: Path, only_source: bool, torch: Any
) -> None:
    """Sizes are the same: what they answer is not. Found in whichever layer that is."""
    from ktconv.model.matching import UnlikeExperts
    from ktconv.model.streamed.calls import Call

    first, last = example.layers[0], example.layers[1]
    exchanged = replace(last, source=first.source)
    rows = torch.randn((4, 128)).to(torch.bfloat16)
    ids, weights = routed(4, 8, 2, 0)
    calls = [Call(side, 0, rows, ids, weights) for side in (0, 1)]
    outputs = [torch.zeros_like(rows) for _ in calls]
    with both(example, int4) as runner, torch.inference_mode():
        runner.run(first, calls, outputs)
        with pytest.raises(UnlikeExperts, match=r"layer 1 .* are not those of the model"):
            runner.run(exchanged, calls[:1] if only_source else calls, outputs)


def test_outputs_that_do_not_match(example: Example, int4: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere is not a directory"):
        both(example, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="contains no packed experts"):
        both(example, tmp_path)
    one = example._replace(layers={0: example.layers[0]})
    with pytest.raises(CheckpointError, match=r"has experts of layers \[1\]"):
        both(one, int4)
    third = example._replace(layers={**example.layers, 2: example.layers[1]})
    with pytest.raises(CheckpointError, match=r"does not contain the experts of layers \[2\]"):
        both(third, int4)
