"""Rows of peers, with peers that are made up: what is asked of them, what is told about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ktconv import native
from ktconv.bench import peer_rows
from ktconv.bench.cases import Request as BenchRequest
from ktconv.bench.cases import prepare
from ktconv.bench.measure import Effort
from ktconv.bench.peers import table
from ktconv.bench.peers.base import PeerError
from ktconv.bench.peers.request import Request, Result
from ktconv.bench.peers.table import Spec
from ktconv.bench.presets import parse_shape
from ktconv.bench.run import bench
from ktconv.errors import UsageError
from ktconv.formats import format_named

pytestmark = pytest.mark.usefixtures("quick")


def spec(name: str, *methods: str) -> Spec:
    return Spec(name, name.split()[0], "module", methods, "int8", lambda: pytest.fail("built here"))


def request(**changes: Any) -> BenchRequest:
    fields: dict[str, Any] = {
        "methods": (format_named("int4"),),
        "shapes": (parse_shape("128,128,6,2"),),
        "tokens": (1, 4),
        "threads": (1,),
        "isas": (native.isa(),),
        "effort": Effort(iterations=2),
        "seed": 7,
        "peers": True,
    }
    return BenchRequest(**{**fields, **changes})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Three peers: one that works, one that breaks off, one that is not installed."""
    found: list[Request] = []
    peers = {
        spec("good q4", "int4", "gint4-32"): None,
        spec("bad q4", "int4"): None,
        spec("missing q4", "int4"): "missing is not installed",
        spec("other q8", "int8"): None,
    }

    def measure(request: Request) -> Iterator[Result]:
        found.append(request)
        yield Result(1, (1e-3, 2e-3, 3e-3), 2.0, 2.0, 1000, 0.02, 0.1, "its build")
        if request.peer.startswith("bad"):
            raise PeerError("it fell over")
        yield Result(4, (5e-3,), 8.0, 4.0, 1000, 0.02, 0.1)

    monkeypatch.setattr(peer_rows, "PEERS", {peer.name: peer for peer in peers})
    monkeypatch.setattr(table, "why_not", peers.__getitem__)
    monkeypatch.setattr(peer_rows, "measure", measure)
    return found


def test_peers_get_what_we_got(asked: list[Request]) -> None:
    heard: list[str] = []
    rows = bench(request(), heard.append).rows
    assert [(r.engine, r.method, r.tokens, r.isa) for r in rows[2:]] == [
        ("good", "q4", 1, "own"),
        ("good", "q4", 4, "own"),
        ("bad", "q4", 1, "own"),
    ]
    assert (rows[2].median_us, rows[2].relative_error, rows[2].source_error) == (2000, 0.02, 0.1)
    assert rows[2].weight_gb_s == pytest.approx(2 * 1000 / 2e-3 / 1e9)
    assert rows[3].shape == rows[0].shape
    assert (rows[2].detail, rows[3].detail, rows[0].detail) == ("its build", "", "")
    first = asked[0]
    assert (first.peer, first.tokens, first.threads, first.seed) == ("good q4", (1, 4), 1, 7)
    assert (first.routing, first.different) == ("balanced", 4)
    assert "peers: missing is not installed" in heard
    assert "bad q4: left out, it fell over" in heard
    assert not any("other" in line for line in heard)


def test_peers_are_compared_with_our_fastest_row_of_the_same_work(asked: list[Request]) -> None:
    levels = tuple(native.isa_available())
    methods = (format_named("gint4-32"), format_named("int4"))
    rows = bench(request(methods=methods, isas=levels, threads=(1, 2)), lambda _: None).rows
    ours = [row for row in rows if row.engine == "ktconv"]
    assert len(ours) == 8 * len(levels) and all(row.times_ours is None for row in ours)
    good = [row for row in rows if row.engine == "good"]
    assert [(row.threads, row.tokens) for row in good] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    for row in good:
        fastest = min(
            one.median_us
            for one in ours
            if (one.method, one.tokens, one.threads) == ("int4", row.tokens, row.threads)
        )
        assert row.times_ours == pytest.approx(row.median_us / fastest)


def test_peers_are_held_against_the_limits_of_the_highest_level(asked: list[Request]) -> None:
    report = bench(request(isas=("scalar",)), lambda _: None)
    highest = native.isa_available()[-1]
    assert {limit.isa for limit in report.limits} == {"scalar", highest}
    peer = next(row for row in report.rows if row.engine == "good")
    limit = next(limit for limit in report.limits if limit.isa == highest)
    assert peer.peak_gops <= limit.int8_gops


def test_rows_of_peers_follow_those_of_their_shape(asked: list[Request]) -> None:
    shapes = (parse_shape("128,128,6,2"), parse_shape("128,256,6,2"))
    rows = bench(request(shapes=shapes), lambda _: None).rows
    engines = ["ktconv", "ktconv", "good", "good", "bad"]
    assert [(row.shape["name"], row.engine) for row in rows] == [
        (shape.name, engine) for shape in shapes for engine in engines
    ]


def test_peers_without_enough_memory_are_left_out(
    asked: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_rows, "fit", lambda *_, **__: False)
    heard: list[str] = []
    assert len(bench(request(), heard.append).rows) == 2
    assert not asked and "good q4: left out, too little memory is free" in heard


def test_peers_cannot_read_our_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="peers cannot read"):
        prepare(request(model=tmp_path))
