"""Reports as text, in every format."""

from __future__ import annotations

import csv
import io
import json

import pytest
from bench.reports import SCHEMA, problems, report, row
from msgspec.structs import asdict, replace

from ktconv.bench.limits import NodeReads
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


def test_rows_say_how_much_of_their_weights_is_local() -> None:
    shown = report(replace(QUIET, local_share=0.5), replace(QUIET, local_share=1.0), QUIET)
    head, _, *lines = render(shown, "markdown").splitlines()
    names = head.strip("| ").split(" | ")
    cells = [dict(zip(names, line.strip("| ").split("|"), strict=False)) for line in lines[:3]]
    assert [cell["local"].strip() for cell in cells] == ["50%", "100%", "-"]
    assert lines[0].rstrip(" |").endswith("r") and lines[-1].startswith("r remote: ")


def test_limits_between_nodes_are_shown() -> None:
    shown = report(QUIET)
    shown.nodes = NodeReads(
        {"0": 4, "2": 1}, {"0": {"0": 80.0, "2": 30.0}, "2": {"0": 20.0, "2": None}}
    )
    text = render(shown, "table")
    assert "NUMA node 0, 4 threads, reads memory: 80.0 GB/s from node 0, 30.0 GB/s from" in text
    assert "20.0 GB/s from node 0, not measured from node 2" in text
    assert text.endswith("memory of another node is read at 38% of the local rate at least")
    found = json.loads(render(shown, "json"))
    assert problems(found["numa"], SCHEMA["properties"]["numa"]) == []
    assert found["numa"]["read_gb_s"]["0"]["2"] == 30.0
    assert json.loads(render(report(QUIET), "json"))["numa"] is None


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
