"""Scores of experts: gathered on a text, written, read again; and rankings of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import EVAL, EXAMPLE

from ktconv.errors import CheckpointError, KtconvError, UsageError
from ktconv.stats.command import StatsRequest, run
from ktconv.stats.origin import Origin, Sizes
from ktconv.stats.scores import MEASURES, ScoreTap, read_scores, write_scores

pytestmark = pytest.mark.slow

ORIGIN = Origin("a/model", "0" * 64, "prose.txt", "1" * 64, 9, "2" * 64, "[]")
LAYERS = {3: Sizes(4, 6, 5), 10: Sizes(2, 6, 3)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where passes of these tests are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def expected_scores(torch: Any, tokens: int) -> list[list[list[float]]]:
    """By layer and expert: tokens, and sums of the products, the weights and the norms, by the
    model's own modules in float32: every expert is run on all tokens."""
    from ktconv.model import load_model

    model, tokenizer = load_model(EXAMPLE, dtype=torch.float32)
    ids = torch.tensor(tokenizer(EVAL.read_text())["input_ids"][:tokens])
    sums = [[[0.0] * 4 for _ in range(8)] for _ in model.model.layers]

    def seen(number: int) -> Any:
        def hook(module: Any, given: Any, _: Any) -> None:
            x, chosen, weights = given
            for expert in range(8):
                gate, up = module.gate_up_proj[expert].chunk(2)
                y = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ module.down_proj[expert].T
                for token, slot in (chosen == expert).nonzero().tolist():
                    norm, weight = float(y[token].norm()), float(weights[token, slot])
                    for place, value in enumerate((1, weight * norm, weight, norm)):
                        sums[number][expert][place] += value

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_hook(seen(number))
    with torch.inference_mode():
        for start in range(0, tokens, 512):
            model(ids[None, start : start + 512])
    return sums


def test_scores_are_those_of_the_model(torch: Any, tmp_path: Path) -> None:
    """Of whole windows and a short one, to float32's precision."""
    path, tokens = tmp_path / "scores.json", 700
    run(StatsRequest(str(EXAMPLE), EVAL, max_tokens=tokens, scores=path))
    found = read_scores(path)
    assert not found.foreign and found.origin is not None and found.origin.tokens == tokens
    for layer, sums in zip(found.layers.values(), expected_scores(torch, tokens), strict=True):
        counts, *totals = np.array(sums).T
        assert layer.tokens is not None and layer.tokens.tolist() == counts.tolist()
        values = (totals[0], counts * counts / tokens, totals[1], totals[2])
        for name, value in zip(MEASURES, values, strict=True):
            np.testing.assert_allclose(layer.measures[name] * counts, value, rtol=1e-5)
    lines = path.read_text().splitlines()
    assert sum('"layer":' in line for line in lines) == 2


def test_weights_of_zero_are_no_tokens(torch: Any) -> None:
    tap = ScoreTap({3: LAYERS[3]})
    tap.norms(3, 1, torch.tensor([2.0, 5.0, 0.0]), torch.tensor([0.5, 0.0, 0.25]))
    layer = tap.scores(8)[3]
    assert layer.tokens is not None and layer.tokens.tolist() == [0, 2, 0, 0]
    assert [layer.measures[name][1] for name in MEASURES] == [1.0, 0.25, 0.375, 2.0]
    assert all(layer.measures[name][0] == 0 for name in MEASURES)


def test_weights_on_the_input(torch: Any) -> None:
    """What an expert adds is its output for the weighted input."""
    tap = ScoreTap(LAYERS, on_input=[10])
    for layer in LAYERS:
        tap.norms(layer, 0, torch.tensor([2.0, 4.0]), torch.tensor([0.5, 0.25]))
    found = tap.scores(2)
    assert [found[n].measures["saliency"][0] for n in LAYERS] == [3.0, 3.0]
    assert [found[n].measures["output_norm"][0] for n in LAYERS] == [10.0, 3.0]


def test_outputs_that_overflow(torch: Any) -> None:
    tap = ScoreTap(LAYERS)
    with pytest.raises(CheckpointError, match="outputs of expert 1 of layer 3 are not finite"):
        tap.norms(3, 1, torch.tensor([np.inf]), torch.tensor([0.5]))


def test_a_later_run_goes_on(torch: Any) -> None:
    whole, killed, again = ScoreTap(LAYERS), ScoreTap(LAYERS), ScoreTap(LAYERS)
    first = (3, 1, torch.tensor([2.0, 5.0]), torch.tensor([0.5, 0.1]))
    second = (10, 0, torch.tensor([3.0]), torch.tensor([0.7]))
    for tap in (whole, killed):
        tap.norms(*first)
    again.restore(killed.state())
    for tap in (whole, again):
        tap.norms(*second)
    for one, other in zip(whole.scores(4).values(), again.scores(4).values(), strict=True):
        assert all(np.array_equal(one.measures[name], other.measures[name]) for name in MEASURES)


def test_an_interrupted_pass_goes_on(torch: Any, tmp_path: Path) -> None:
    """With the scores of the layers that were passed."""
    paths = tmp_path / "one.json", tmp_path / "two.json"
    run(StatsRequest(str(EXAMPLE), EVAL, max_tokens=600, scores=paths[0]))
    from ktconv.conversion.pipeline import Observer

    class Stops(Observer):
        def unit_started(self, key: str) -> None:
            if key == "layer-1":
                raise KeyboardInterrupt

    from contextlib import nullcontext

    request = StatsRequest(str(EXAMPLE), EVAL, max_tokens=600, scores=paths[1])
    with pytest.raises(KeyboardInterrupt):
        run(request, progression=lambda _: nullcontext(Stops()))
    lines: list[str] = []
    run(request, lines.append)
    assert "continuing behind layer 0" in lines
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_own_files_alone_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    tap = ScoreTap(LAYERS)
    for _ in range(2):
        write_scores(path, tap.scores(1), ORIGIN)
    assert list(read_scores(path).layers) == [3, 10] and read_scores(path).origin == ORIGIN
    path.write_text('{"layer": 0, "scores": [1.0, 2.0]}\n')
    with pytest.raises(UsageError, match="exists, and is not scores that ktconv wrote"):
        write_scores(path, tap.scores(1), ORIGIN)


# ---- other tools' rankings ---------------------------------------------------------------

RANKED = [{"layer": 3, "scores": [0.5, 2, -1.5]}, {"layer": 4, "ids": [2, 0, 1]}]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(json.dumps(one) for one in RANKED) + "\n\n",
        json.dumps(RANKED),
        json.dumps({"tool": "another", "layers": RANKED}, indent=2),
        json.dumps({"tool": "another", "layers": RANKED}),
    ],
)
def test_rankings(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ranking"
    path.write_text(text)
    found = read_scores(path)
    assert found.foreign and list(found.layers) == [3, 4]
    assert found.layers[3].measures["scores"].tolist() == [0.5, 2, -1.5]
    assert np.argsort(-found.layers[4].measures["scores"]).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ('{"a": 1}', "has no number of a layer"),
        ('{"layers": {}}', "has no list of layers"),
        ('{"layers": []}', "has no layer"),
        ('{"layer": 0, "ids": [0]}\n\n{"layer": 1, "ids": [0}', "line 3 of .* is not valid JSON"),
        (f'{{"layer": {10**400}, "ids": [0]}}', "no number of a layer"),
        (f'{{"layer": 1, "ids": [{10**400}]}}', "lists expert 10*$"),
        (f'{{"layer": 1, "scores": [1, {10**400}]}}', "are not finite numbers"),
        ('{"layer": -1, "ids": [0]}', "no number of a layer"),
        ('{"layer": true, "ids": [0]}', "no number of a layer"),
        ('{"layer": 1, "ids": [0]}\n{"layer": 1, "ids": [0]}', "has layer 1 twice"),
        ('{"layer": 1, "ids": [0, 4, 0]}', "lists expert 0 twice"),
        ('{"layer": 1, "ids": [0.5]}', "are not numbers of experts"),
        ('{"layer": 1, "ids": []}', "are not numbers of experts"),
        ('{"layer": 1, "ids": [99999999]}', "lists expert 99999999"),
        ('{"layer": 1, "scores": [1, NaN]}', "are not finite numbers"),
        ('{"layer": 1, "scores": [1, "2"]}', "are not finite numbers"),
        ('{"layer": 1, "scores": [1], "ids": [0]}', "neither or both"),
        ('{"layer": 1}', "neither or both"),
        ('{"kind": "expert scores", "schema": 2, "layers": []}', "has schema 2"),
        ('{"kind": "expert scores", "schema": 1, "layers": [{"layer": 0}]}', "are damaged"),
    ],
)
def test_files_that_are_no_scores(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    path.write_text(text)
    with pytest.raises(KtconvError, match=words) as caught:
        read_scores(path)
    assert isinstance(caught.value, UsageError) and caught.value.hint
