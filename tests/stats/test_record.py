"""Counting with a model: its own routers, on a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import EVAL, EXAMPLE
from helpers.paths import MODELS as TRAINED
from typer.testing import CliRunner

from ktconv.cli.app import app
from ktconv.errors import CheckpointError, ResourceError, UsageError
from ktconv.model.text import text_pieces
from ktconv.placement.expert_sets import read_expert_set
from ktconv.stats.command import StatsRequest, run
from ktconv.stats.record import Recorder, _batches, _chosen, token_windows
from ktconv.system import machine


@pytest.fixture(scope="module")
def recorder(torch: Any) -> Recorder:
    return Recorder(EXAMPLE)


def silent(text: str) -> None:
    pass


def test_counts_are_the_routers_choice(recorder: Recorder, torch: Any) -> None:
    """Held against the best of the router's own logits, which transformers hands out."""
    from ktconv.model import load_model

    statistics, ids = recorder.read(text_pieces(EVAL), 64, keep=True)
    model, tokenizer = load_model(EXAMPLE)
    tokens = torch.tensor(tokenizer(EVAL.read_text())["input_ids"][:64])[None]
    with torch.inference_mode():
        logits = model(tokens, output_router_logits=True).router_logits
    assert [layer.layer for layer in statistics.layers] == list(range(len(logits)))
    for layer, of_layer in zip(statistics.layers, logits, strict=True):
        expected = of_layer.float().topk(2).indices.numpy()
        assert (layer.tokens, layer.routed) == (64, 128)
        assert np.array_equal(np.sort(ids[layer.layer], axis=1), np.sort(expected, axis=1))
        assert layer.counts.tolist() == np.bincount(expected.ravel(), minlength=8).tolist()


def test_every_token_is_read_once(recorder: Recorder) -> None:
    """Up to the limit; the last window is shorter."""
    for limit in (1, 600, 10**9):
        statistics, _ = recorder.read([EVAL.read_text()[:6000]], limit)
        tokens = statistics.about["tokens"]
        assert tokens == limit if limit < 10**9 else tokens > 600
        assert all(layer.tokens == tokens for layer in statistics.layers)


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 8, 12, 99])
def test_windows_do_not_depend_on_pieces(limit: int) -> None:
    text = "abcdefghijk"
    expected = [ord(letter) for letter in text[:limit]]
    for cut in range(12):
        windows = list(token_windows(Letters(), [text[:cut], text[cut:]], 4, limit))
        assert [token for window in windows for token in window] == expected
        assert all(len(window) == 4 for window in windows[:-1])
        assert all(0 < len(window) <= 4 for window in windows)


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """Of a long text, which comes line by line."""
    path = tmp_path / "long.txt"
    path.write_text("word " * 300_000 + "\n" + "the end\n" * 10)
    pieces = list(text_pieces(path))
    assert len(pieces) == 2
    assert pieces[0].endswith("\n")
    assert "".join(pieces) == path.read_text()

    def endless() -> Any:
        yield "abcdefgh"
        raise AssertionError("more was read than needed")

    assert list(token_windows(Letters(), endless(), 4, 8)) == [
        [ord(letter) for letter in part] for part in ("abcd", "efgh")
    ]


def test_less_memory_gives_the_same_counts(
    recorder: Recorder, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Weights that lie in a folder, windows in batches; the folder is gone afterwards, and no
    library said a word."""
    pytest.importorskip("accelerate")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Recorder(EXAMPLE, max_memory=600_000) as offloaded:
        assert list(tmp_path.glob("ktconv-*/*"))
        for limit in (100, 2000):
            expected, ids = recorder.read(text_pieces(EVAL), limit, keep=True)
            found, same = offloaded.read(text_pieces(EVAL), limit, keep=True)
            assert found.about["tokens"] == limit
            for layer, other in zip(found.layers, expected.layers, strict=True):
                assert layer.counts.tolist() == other.counts.tolist()
                assert np.array_equal(same[layer.layer], ids[layer.layer])
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_disk_too_small_for_offloaded_weights(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setattr(machine, "disk_free", lambda path: 1000)
    with pytest.raises(ResourceError, match=r"has 1\.0 kB free, but up to .* are kept there"):
        Recorder(EXAMPLE, max_memory=600_000)


def test_batches() -> None:
    windows = [[1, 2], [3, 4], [5, 6], [7]]
    assert list(_batches(windows, 2)) == [[[1, 2], [3, 4]], [[5, 6]], [[7]]]
    assert list(_batches(windows, 8)) == [[[1, 2], [3, 4], [5, 6]], [[7]]]
    assert list(_batches(windows, 1)) == [[window] for window in windows]
    assert list(_batches([], 2)) == []


def test_hooks_are_gone_afterwards(recorder: Recorder) -> None:
    first, _ = recorder.read([EVAL.read_text()], 32)
    second, _ = recorder.read([EVAL.read_text()], 32)
    for one, other in zip(first.layers, second.layers, strict=True):
        assert one.counts.tolist() == other.counts.tolist()


def test_llama4_gives_every_expert_all_tokens(torch: Any) -> None:
    """Experts that are not chosen get zeros."""
    from ktconv.model.module import SortedExperts

    module = torch.nn.Module()
    module.down_proj = torch.zeros(3, 2, 8)
    hidden = torch.zeros((3, 4, 8))  # experts, tokens, hidden size
    hidden[2, 0] = hidden[0, 1] = hidden[2, 3] = 1
    routing = SortedExperts.routing(module, (hidden.reshape(12, 8),))
    assert _chosen(routing, 3).tolist() == [[2], [0], [-1], [2]]


def test_experts_without_weights_are_none(torch: Any) -> None:
    """As LongCat's that return their input, which are numbered behind the others."""
    from ktconv.model.module import Routing

    hidden, ids = torch.ones(2, 3), torch.tensor([[0, 4], [7, 3]])
    assert _chosen(Routing(hidden, ids, ids / 8 + 1), 4).tolist() == [[0, -1], [-1, 3]]
    assert ids.tolist() == [[0, 4], [7, 3]]  # the model goes on with them


def test_stats_record_command(torch: Any, tmp_path: Path) -> None:
    """Files and document agree, and the trace gives the same counts."""
    hot, trace = tmp_path / "hot.json", tmp_path / "trace.safetensors"
    words = ["stats", EXAMPLE, "--text", EVAL, "--max-tokens", 100, "--hot", 2]
    words += ["--write", hot, "--trace", trace, "--json"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["tokens"], facts["text"], facts["experts"]) == (100, "eval.txt", 16)
    chosen = read_expert_set(hot)
    assert {layer: list(ids) for layer, ids in chosen.layers.items()} == {
        about["layer"]: about["hot"] for about in facts["layers"]
    }
    again, _ = run(StatsRequest(str(trace), hot=2), silent)
    assert [one["counts"] for one in again["layers"]] == [one["counts"] for one in facts["layers"]]
    assert again["hot_share"] == facts["hot_share"]


def test_table(torch: Any) -> None:
    facts, lines = run(StatsRequest(str(EXAMPLE), max_tokens=64), silent)
    assert lines[0].split("  ")[0] == "layer"
    assert len(lines) == len(facts["layers"]) + 2
    assert facts["text"] == "the built-in sample"
    assert "the hottest quarter of each layer: 4 of 16 experts take" in lines[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"text": "absent.txt"}, "absent.txt cannot be read: No such file or directory$"),
        ({"text": "empty.txt"}, "empty.txt is empty"),
        ({"text": "binary.txt"}, "binary.txt cannot be read: it is not UTF-8 text"),
        ({"hot": 9}, "--hot 9 is more than the 8 experts of layer 0"),
        ({"layers": [5]}, "--layers names layer 5"),
    ],
)
def test_what_record_refuses(
    options: dict[str, Any], said: str, torch: Any, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    if "text" in options:
        options = {"text": tmp_path / options["text"]}
    with pytest.raises(UsageError, match=said):
        run(StatsRequest(str(EXAMPLE), **options), silent)


def test_a_dense_model_has_no_experts(torch: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(EXAMPLE).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no experts were found"):
        Recorder(tmp_path)


@pytest.mark.parametrize("name", ["tiny-qwen3moe", "tiny-deepseekv3"])
def test_trained_models(name: str, torch: Any) -> None:
    """Real routers: uneven, but no expert is dead on a text like the training's."""
    if not (TRAINED / name).is_dir():
        pytest.skip(f"{name} is not here")
    options = StatsRequest(str(TRAINED / name), TRAINED / name / "eval.txt", max_tokens=2048, hot=4)
    facts, _ = run(options, silent)
    assert all(layer["routed"] == 4 * 2048 for layer in facts["layers"])
    assert 0.3 < facts["hot_share"] < 0.9
    assert all(0.5 < layer["balance"] < 1 for layer in facts["layers"])
