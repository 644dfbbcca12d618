"""Shares, the hottest experts, balance; and counts that are read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ktconv
from helpers.cli import refused as of_command
from safetensors.numpy import save_file

from ktconv.errors import KtconvError, UsageError
from ktconv.stats.command import StatsRequest, run
from ktconv.stats.counts import LayerCounts, Statistics
from ktconv.stats.files import read_trace, write_trace
from ktconv.targets.expert_sets import read_expert_set

# 10 tokens, two experts each.
LAYER = LayerCounts(3, 10, np.array([1, 9, 0, 5, 5]))


def silent(text: str) -> None:
    pass


def test_hottest() -> None:
    assert LAYER.hottest(1) == [1]
    assert LAYER.hottest(3) == [1, 3, 4]  # of equally used ones the lower first
    assert LAYER.hottest(5) == [1, 3, 4, 0, 2]
    assert LAYER.share([1, 3]) == 14 / 20
    assert LAYER.never == [2]


@pytest.mark.parametrize(
    ("share", "number"), [(0.01, 1), (0.45, 1), (0.46, 2), (0.7, 2), (0.95, 3), (0.96, 4), (1, 4)]
)
def test_fewest_that_take_a_share(share: float, number: int) -> None:
    found = LAYER.hottest_with_share(share)
    assert found == LAYER.hottest(number)
    assert LAYER.share(found) >= share
    assert LAYER.share(found[:-1]) < share


def test_balance() -> None:
    assert LayerCounts(0, 4, np.array([2, 2, 2, 2])).balance == pytest.approx(1)
    assert LayerCounts(0, 4, np.array([4, 0])).balance == 0
    assert LayerCounts(0, 4, np.array([4])).balance == 1
    even, odd = LayerCounts(0, 4, np.array([3, 3, 2])), LayerCounts(0, 4, np.array([4, 3, 1]))
    assert 0 < odd.balance < even.balance < 1


def report(path: Path, **changes: Any) -> Path:
    """What `ktconv stats --json` prints, as a file."""
    other = LayerCounts(5, 10, np.array([4, 4, 4, 4, 4]))
    content = Statistics([LAYER, other], {"model": "m", "tokens": 10}).facts(None, None)
    path.write_text(json.dumps(content | changes))
    return path


def test_choosing_again_without_the_model(tmp_path: Path) -> None:
    """From an earlier report: other numbers, no model."""
    recorded, hot = report(tmp_path / "stats.json"), tmp_path / "hot.json"
    facts, lines = run(StatsRequest(str(recorded), hot=2, write=hot), silent)
    assert read_expert_set(hot).layers == {3: (1, 3), 5: (0, 1)}
    assert facts["hot_share"] == (14 + 8) / 40
    assert [layer["hot"] for layer in facts["layers"]] == [[1, 3], [0, 1]]
    assert "4 of 10 experts take 55.0 % of the routed tokens" in lines[-1]
    run(StatsRequest(str(recorded), hot_share=0.7, layers=[3], write=hot), silent)
    assert read_expert_set(hot).layers == {3: (1, 3)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hot": 6}, "--hot 6 is more than the 5 experts of layer 3"),
        ({"hot_share": 0.0}, "--hot-share must be in (0, 1], got 0"),
        ({"hot_share": float("nan")}, "--hot-share must be in (0, 1], got nan"),
        ({"layers": [4]}, "--layers names layer 4"),
        ({"hot": 1, "write": Path("absent/hot.json")}, "--write absent/hot.json cannot be written"),
        ({"trace": Path("trace.npz")}, "--trace trace.npz does not end in .safetensors"),
        ({"trace": Path("trace.safetensors")}, "--trace does not apply"),
        ({"text": Path("text.txt")}, "--text does not apply"),
        ({"max_tokens": 7}, "--max-tokens does not apply"),
    ],
)
def test_refused_options(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        run(StatsRequest(str(report(tmp_path / "stats.json")), **options), silent)
    assert said in f"{caught.value} {caught.value.hint}"
    assert [path.name for path in tmp_path.iterdir()] == ["stats.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hot=1", "--hot-share=0.5"], "--hot and --hot-share cannot be combined"),
        (["--write=hot.json"], "--write needs a number of experts"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], said: str, tmp_path: Path) -> None:
    of_command(ktconv("stats", report(tmp_path / "stats.json"), *words), 2, said)
    assert not Path("hot.json").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": []},
        {"layers": 3},
        {"layers": [{"layer": 3, "tokens": 1}]},
        {"layers": [{"layer": 3, "tokens": 1, "counts": [0, 0]}]},
        {"layers": [{"layer": 3, "tokens": 1, "counts": [2]}]},
        {"layers": [{"layer": 3, "tokens": 1, "counts": [1.5]}]},
        {"layers": [{"layer": 3, "tokens": 1, "counts": [1]}] * 2},
        {"layers": [{"layer": 3, "tokens": 10**30, "counts": [10**30]}]},
        {"schema": 2},
    ],
)
def test_damaged_reports(changes: dict[str, Any], tmp_path: Path) -> None:
    path = report(tmp_path / "stats.json", **changes)
    with pytest.raises(KtconvError, match=r"stats\.json is not a complete report of ktconv stats"):
        run(StatsRequest(str(path)), silent)


# ---- traces ----------------------------------------------------------------------------

IDS = np.array([[0, 2], [2, 1], [2, 0]], np.int32)


def test_traces_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    write_trace(path, {1: IDS, 2: IDS + 1}, {1: 4, 2: 4})
    found = read_trace(path)
    assert [layer.layer for layer in found.layers] == [1, 2]
    assert found.layers[0].counts.tolist() == [2, 1, 3, 0]
    assert found.layers[1].counts.tolist() == [0, 2, 1, 3]
    hot = tmp_path / "hot.json"
    run(StatsRequest(str(path), hot=1, write=hot), silent)
    assert read_expert_set(hot).layers == {1: (2,), 2: (3,)}


def test_bench_replays_a_trace(tmp_path: Path) -> None:
    from ktconv.bench.routing import check_trace, parse_routing

    path = tmp_path / "trace.safetensors"
    write_trace(path, {1: IDS, 2: IDS + 1}, {1: 4, 2: 4})
    routing = parse_routing(f"trace:{path}")
    check_trace(routing, 4, 2)
    rows = next(routing.iterations(6, 4, 2, 0))
    assert rows.tolist() == [*IDS.tolist(), *(IDS + 1).tolist()]


def test_layers_that_route_differently_fit_into_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    for other, experts in ((IDS[:, :1], 4), (IDS, 5)):
        with pytest.raises(UsageError, match="differ in their number of experts"):
            write_trace(path, {1: IDS, 2: other}, {1: 4, 2: experts})
    assert not path.exists()


@pytest.mark.parametrize(
    ("ids", "metadata"),
    [
        (IDS[None], None),
        (IDS, {"layers": "1", "experts": "4"}),
        (IDS[None], {"layers": "1-2", "experts": "4"}),
        (IDS[None], {"layers": "1", "experts": "2"}),
        (IDS[None], {"layers": "1", "experts": "2000000"}),  # counts of that many: gigabytes, or
        (IDS[None], {"layers": "1", "experts": "9" * 30}),  # beyond what NumPy counts to
        (IDS[None] - 2, {"layers": "1", "experts": "4"}),
        (IDS[None] * 0 - 1, {"layers": "1", "experts": "4"}),
        (IDS[None].astype(np.float32), {"layers": "1", "experts": "4"}),
        (IDS[None][:, :0], {"layers": "1", "experts": "4"}),
    ],
)
def test_other_traces_are_refused(ids: Any, metadata: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    save_file({"ids": np.ascontiguousarray(ids)}, path, metadata)
    with pytest.raises(UsageError, match="is not a trace of ktconv stats"):
        run(StatsRequest(str(path)), silent)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(UsageError, match="is not a trace of ktconv stats"):
        run(StatsRequest(str(path)), silent)


# ---- sglang-kt's placement -------------------------------------------------------------

# Three layers of a model of four: layer 0 is dense.
PLACED = Statistics(
    [
        LayerCounts(1, 10, np.array([9, 1, 0, 4])),
        LayerCounts(2, 10, np.array([2, 8, 7, 3])),
        LayerCounts(3, 10, np.array([6, 5, 2, 1])),
    ],
    {"num_hidden_layers": 4},
)


def test_the_hottest_of_all_layers() -> None:
    """Sorted over all layers, not by layer; a layer can go without."""
    assert PLACED.chosen(None, None, 2) == {1: [0], 2: [1], 3: []}
    assert PLACED.hot(total=6).layers == {1: (0, 3), 2: (1, 2), 3: (0, 1)}
    assert PLACED.hot(total=8).layers == {1: (0, 3), 2: (0, 1, 2, 3), 3: (0, 1)}
    assert [PLACED.tied(total) for total in (1, 6, 7, 8, 9, 12)] == [0, 0, 0, 1, 0, 0]
    with pytest.raises(UsageError, match="--hot-total 13 is more than the 12 experts"):
        PLACED.hot(total=13)


def test_the_rule_of_frequency(tmp_path: Path) -> None:
    """As sglang-kt reads FILE.pt: the sum over buffers, flattened, the n x L largest."""
    torch = pytest.importorskip("torch")
    recorded, path = tmp_path / "stats.json", tmp_path / "counts.pt"
    recorded.write_text(json.dumps(PLACED.facts(None, None)))
    facts, lines = run(StatsRequest(str(recorded), hot_total=6, placement=path), silent)
    assert [layer["hot"] for layer in facts["layers"]] == [[0, 3], [1, 2], [0, 1]]
    assert "the 6 hottest of all layers: 6 of 12 experts" in lines[-1]
    content = torch.load(path, weights_only=True)
    counts = content["logical_count"]
    assert list(content) == ["logical_count"] and counts.dtype == torch.int64
    assert counts.shape == (1, 4, 4) and not counts[0, 0].any()
    per_layer, layers = 2, 3
    flat = counts.sum(dim=0).float().view(-1)
    largest = {divmod(int(at), 4) for at in torch.topk(flat, per_layer * layers).indices}
    assert largest == {(n, e) for n, ids in PLACED.hot(total=6).layers.items() for e in ids}
    assert (
        "as often as the last of these: 1."
        in run(StatsRequest(str(recorded), hot_total=8), silent)[1][-1]
    )


def test_placements_that_cannot_be_written(tmp_path: Path) -> None:
    def refused(said: str, **changes: Any) -> None:
        (tmp_path / "stats.json").write_text(json.dumps(PLACED.facts(None, None)))
        options = {"placement": tmp_path / "counts.pt", **changes}
        with pytest.raises(UsageError, match=said):
            run(StatsRequest(str(tmp_path / "stats.json"), **options), silent)
        assert not (tmp_path / "counts.pt").exists()

    refused("does not end in .pt", placement=tmp_path / "counts.bin")
    words = ["stats", tmp_path / "stats.json", "--placement", tmp_path / "counts.pt"]
    of_command(ktconv(*words, "--layers=1"), 2, "--placement needs all layers")
    of_command(ktconv(*words, "--hot=1", "--hot-total=2"), 2, "--hot and --hot-total cannot be")
    assert not (tmp_path / "counts.pt").exists()
    for layers in (None, 3, True, 10**12, 10**30):
        content = PLACED.facts(None, None) | {"num_hidden_layers": layers}
        (tmp_path / "old.json").write_text(json.dumps(content))
        with pytest.raises(UsageError, match="needs the number of layers"):
            run(StatsRequest(str(tmp_path / "old.json"), placement=tmp_path / "counts.pt"), silent)
    uneven = [*PLACED.layers[:2], LayerCounts(3, 10, np.array([6, 5]))]
    content = Statistics(uneven, PLACED.about).facts(None, None)
    (tmp_path / "uneven.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="different numbers of experts"):
        run(StatsRequest(str(tmp_path / "uneven.json"), placement=tmp_path / "counts.pt"), silent)
