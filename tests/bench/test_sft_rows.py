"""`bench --mode sft`: from times and errors to a row, and who takes turns when."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from itertools import cycle
from math import nan
from typing import Any

import pytest
from msgspec.structs import asdict, replace

pytest.importorskip("torch")
import torch
from bench.reports import LIMITS, SFT_SCHEMA, SHAPE, problems
from torch import Tensor

from ktconv.bench.measure import Effort
from ktconv.bench.peers.base import PeerError
from ktconv.bench.render import FORMATS
from ktconv.bench.run import Report
from ktconv.bench.sft import steps
from ktconv.bench.sft.render import render
from ktconv.bench.sft.rows import Case, Checked, Row, judge
from ktconv.bench.sft.steps import Times, in_turn, turn
from ktconv.native import Activation
from ktconv.train.gradients import NAMES, Found

pytestmark = pytest.mark.torch

ERRORS = dict.fromkeys(NAMES, 0.004)
BOUNDS = dict.fromkeys(NAMES, 0.006)


def row(errors: dict[str, float] | None = None, times: Times | None = None, **of: Any) -> Row:
    fields = {"engine": "ktconv", "method": "int8", "isa": LIMITS.isa, "shape": SHAPE}
    sizes = {"routing": "balanced", "rank": 16, "tokens": 3, "threads": LIMITS.threads}
    checked = Checked(ERRORS, errors or ERRORS, BOUNDS, 1_500_000, 2_000_000)
    spent = times or Times([0.002] * 3, [0.004] * 3)
    case = Case(**{**fields, **sizes, **of})
    return judge(case, spent, 12.0, checked, (LIMITS, LIMITS, LIMITS))


def test_operations_count_base_and_lora() -> None:
    found = row()
    base, lora = 12 * 6 * 256 * 128, 12 * 6 * 16 * (256 + 128)
    assert found.forward.gflops == pytest.approx((base + lora) / 0.002 / 1e9)
    assert found.backward.gflops == pytest.approx((base + 2 * lora) / 0.004 / 1e9)
    assert found.backward.share_of_bf16 == pytest.approx(found.backward.gflops / 200)
    assert (found.forward.median_us, found.backward.median_us) == pytest.approx((2000, 4000))
    assert (found.steps, found.saved_bytes, found.scratch_bytes) == (3, 1_500_000, 2_000_000)


def test_experts_without_a_gate_have_a_product_less() -> None:
    shape = replace(SHAPE, activation=Activation("relu2"))
    forward, backward = Case("", "", shape, "", 16, 1, 1, "").operations
    assert forward == 4 * 256 * 128 + 4 * 16 * (256 + 128)
    assert backward - forward == 4 * 16 * (256 + 128)


def test_errors_beyond_their_bounds_are_named() -> None:
    assert row().beyond_bound == []
    assert row({**ERRORS, "dx": 0.0061, "up_b": nan}).beyond_bound == ["dx", "up_b"]
    peer = Checked(dict.fromkeys(NAMES, 0.05))
    assert peer.beyond == []  # no bounds are known


@pytest.mark.parametrize(
    ("forward", "backward", "disturbed"),
    [([1.0] * 9, [1.0] * 9, False), ([1.0] * 7 + [2.0] * 2, [1.0] * 9, True)],
)
def test_times_that_vary_are_marked(
    forward: list[float], backward: list[float], disturbed: bool
) -> None:
    assert row(times=Times(forward, backward)).disturbed is disturbed
    assert row(times=Times(backward, forward)).disturbed is disturbed


def report(*rows: Row) -> Report[Row]:
    return Report({"cpu": "a CPU"}, [LIMITS], list(rows), "sft")


def test_facts_follow_the_schema() -> None:
    facts = json.loads(json.dumps(report(row(), row({**ERRORS, "dw": nan})).facts()))
    assert problems(facts, SFT_SCHEMA) == []
    assert facts["rows"][1]["kernel_errors"]["dw"] == "nan"
    row_schema = SFT_SCHEMA["properties"]["rows"]["items"]
    assert set(asdict(row())) == set(row_schema["properties"]) == set(row_schema["required"])
    timing = row_schema["properties"]["forward"]
    assert set(asdict(row().forward)) == set(timing["properties"]) == set(timing["required"])


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_both_passes_and_the_errors(form: str) -> None:
    text = render(report(row({**ERRORS, "gate_b": 0.0123})), form)
    if form in ("table", "markdown"):
        assert "0.0123" in text and " x" in text and "exceeds its bound" in text
        assert "2.0" in text and "4.0" in text
    elif form == "csv":
        (found,) = csv.DictReader(text.splitlines())
        assert float(found["forward_median_us"]) == pytest.approx(2000)
        assert found["kernel_errors_gate_b"] == "0.0123" and found["shape_hidden"] == "256"
    else:
        facts = json.loads(text)
        found = facts["rows"][0] if form == "json" else facts
        assert found["beyond_bound"] == ["gate_b"]


def test_a_csv_has_the_columns_of_all_rows() -> None:
    peer = replace(row(engine="torch", method="bf16", isa="own"), kernel_errors={})
    first, second = csv.DictReader(render(report(peer, row()), "csv").splitlines())
    assert first["kernel_errors_y"] == "" and second["kernel_errors_y"] == "0.004"


# ---- turns ----


@dataclass
class Recorder:
    """Takes turns that last `seconds` a step."""

    name: str
    heard: list[tuple[str, int]]
    seconds: float = 0.0

    def turn(self, steps: int) -> Times:
        self.heard.append((self.name, steps))
        return Times([self.seconds / 2] * steps, [self.seconds / 2] * steps)


def test_all_take_turns() -> None:
    heard: list[tuple[str, int]] = []
    found = in_turn([Recorder("a", heard), Recorder("b", heard)], Effort(iterations=7))
    assert heard == [("a", 3), ("b", 3), ("a", 3), ("b", 3), ("a", 1), ("b", 1)]
    assert [len(times_of(one).forward) for one in found] == [7, 7]


def times_of(found: Times | PeerError) -> Times:
    assert isinstance(found, Times)
    return found


@pytest.mark.parametrize("effort", [Effort(iterations=8), Effort(seconds=2.0)])
def test_a_peer_that_ends_on_the_way_does_not_stop_others(effort: Effort) -> None:
    class Mortal(Recorder):
        def turn(self, steps: int) -> Times:
            if ("mortal", 3) in self.heard:
                raise PeerError("it is out of memory")
            return super().turn(steps)

    heard: list[tuple[str, int]] = []
    first, second = in_turn([Mortal("mortal", heard, 0.1), Recorder("b", heard, 0.3)], effort)
    assert str(first) == "it is out of memory"
    assert len(times_of(second).forward) >= 8 and heard.count(("mortal", 3)) == 1


def test_turns_go_on_until_the_fastest_had_its_time() -> None:
    heard: list[tuple[str, int]] = []
    runners = [Recorder("slow", heard, 1.0), Recorder("fast", heard, 0.1)]
    found = in_turn(runners, Effort(seconds=1.6))
    assert [times_of(one).total for one in found] == pytest.approx([18, 1.8])
    heard.clear()
    in_turn([Recorder("slow", heard, 1.0)], Effort(seconds=0.1))
    assert len(heard) == 1  # its patience ends
    heard.clear()
    in_turn([Recorder("one", heard, 0.3)], Effort(seconds=0.5))
    assert len(heard) == steps._LEAST_TURNS


@dataclass
class Noted:
    """A layer that only notes what it is called with."""

    saved_bytes: int | None = None
    scratch_bytes: int | None = None
    heard: list[str] = field(default_factory=list)

    def forward(self, ids: Tensor) -> None:
        self.heard.append(f"forward {int(ids)}")

    def backward(self) -> None:
        self.heard.append("backward")

    def found(self) -> Found:
        return {}


def test_steps_go_through_the_routings() -> None:
    layer, ids = Noted(), cycle([torch.tensor(number) for number in range(2)])
    times = turn(layer, ids, 2)
    turn(layer, ids, 1)
    assert layer.heard == [
        "forward 0",
        "backward",
        "forward 1",
        "backward",
        "forward 0",
        "backward",
    ]
    assert len(times.forward) == len(times.backward) == 2 and min(times.forward) >= 0
