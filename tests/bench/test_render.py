"""Reports as text, in every format."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, replace

import pytest
from bench.reports import report, row

from ktconv.bench.render import FORMATS, render

QUIET, LOUD = row(1e-4), replace(row(2e-4, tokens=7, method="bf16", unit="bf16"), disturbed=True)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_every_row_and_no_empty_end(form: str) -> None:
    text = render(report(QUIET, LOUD), form)
    assert text == text.strip()
    assert "bf16" in text and "int4" in text


def test_json_is_the_facts() -> None:
    assert json.loads(render(report(QUIET, LOUD), "json")) == report(QUIET, LOUD).facts()
    lines = render(report(QUIET, LOUD), "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == [asdict(QUIET), asdict(LOUD)]


def test_csv_has_a_column_for_everything() -> None:
    rows = list(csv.DictReader(io.StringIO(render(report(QUIET, LOUD), "csv"))))
    assert float(rows[1]["median_us"]) == LOUD.median_us
    assert rows[0]["shape_hidden"] == "256" and rows[0]["shape_name"] == "256,128,16,4"
    assert set(rows[0]) - {f"shape_{name}" for name in QUIET.shape} == set(asdict(QUIET)) - {
        "shape"
    }
    assert render(report(), "csv") == ""


def test_a_table_is_aligned_and_says_what_marks_mean() -> None:
    lines = render(report(QUIET, LOUD), "table").splitlines()
    assert lines[0].split()[:3] == ["shape", "method", "isa"]
    column = lines[0].index("tokens") + len("tokens")
    assert [line[column - 1] for line in lines[1:3]] == ["3", "7"]
    assert lines[2].endswith("!") and lines[-1].startswith("! disturbed")
    assert "disturbed" not in render(report(QUIET), "table")
    assert "cache" in render(report(replace(QUIET, in_cache=True)), "table")


def test_columns_that_say_nothing_are_left_out() -> None:
    heads = render(report(QUIET), "table").splitlines()[0].split()
    assert not {"engine", "ratio", "before", "ours"} & set(heads)
    with_peer = render(report(QUIET, row(engine="torch", isa="own")), "table")
    assert with_peer.splitlines()[0].split()[1] == "engine"


def test_shares_of_both_limits_are_shown() -> None:
    shown = replace(QUIET, share_of_memory=0.37, share_of_peak=1.02)
    head, line = render(report(shown), "markdown").splitlines()[::2]
    cells = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert (cells["of memory"], cells["of peak"]) == ("37%", "102% int8")


def test_peers_are_shown_beside_ours() -> None:
    peer = row(engine="kt-kernel", isa="own")
    peer = replace(peer, detail="amx", times_ours=2.5)
    head, _, *lines = render(report(QUIET, peer), "markdown").splitlines()
    names = head.strip("| ").split(" | ")
    ours, theirs = (dict(zip(names, line.strip("| ").split(" | "), strict=True)) for line in lines)
    assert (ours["isa"], ours["time / ours"]) == ("avx512", "-")
    assert (theirs["isa"], theirs["time / ours"]) == ("own (amx)", "2.50")


def test_comparisons_are_data() -> None:
    slower = replace(QUIET, old_median_us=50.0, ratio=2.0, regressed=True)
    text = render(report(slower, LOUD), "table")
    assert "2.00 SLOWER" in text and text.splitlines()[2].endswith("new")
    assert json.loads(render(report(slower), "json"))["rows"][0]["ratio"] == 2.0


def test_markdown_is_a_table() -> None:
    lines = render(report(QUIET), "markdown").splitlines()
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 3
