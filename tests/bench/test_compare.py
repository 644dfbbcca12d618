"""Old reports: ratios, regressions, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.reports import SHAPE, report, row
from msgspec.structs import asdict, replace

from ktconv.bench.compare import compare, read_report
from ktconv.errors import UsageError


def saved(path: Path, *rows: Any, **changes: Any) -> Path:
    path.write_text(json.dumps({**report(*rows).facts(), **changes}))
    return path


def test_ratios_row_by_row(tmp_path: Path) -> None:
    old = read_report(saved(tmp_path / "old", row(1e-4), row(2e-4, tokens=4), row(1e-4, tokens=9)))
    new = report(row(1.05e-4), row(3e-4, tokens=4), row(1e-4, tokens=5))
    notes = compare(new, old, tolerance=0.1)
    assert [r.ratio for r in new.rows] == [pytest.approx(1.05), pytest.approx(1.5), None]
    assert [r.regressed for r in new.rows] == [False, True, None]
    assert [r.old_median_us for r in new.rows] == [pytest.approx(100), pytest.approx(200), None]
    assert "note: 1 rows are not in" in notes[0]
    assert "note: 1 rows of" in notes[1] and "9 tokens" in notes[1]
    assert notes[2] == "1 of 2 rows are more than 10% slower"


@pytest.mark.parametrize(("tolerance", "regressed"), [(0.0, True), (0.49, True), (0.51, False)])
def test_tolerance(tolerance: float, regressed: bool, tmp_path: Path) -> None:
    new = report(row(1.5e-4))
    compare(new, read_report(saved(tmp_path / "old", row(1e-4))), tolerance)
    assert new.rows[0].regressed is regressed


def test_another_machine_and_disturbed_rows_are_told(tmp_path: Path) -> None:
    old = read_report(saved(tmp_path / "old", row(1e-4), machine={"cpu": "another"}))
    new = report(row(2e-4))
    assert not any("disturbed" in note for note in compare(new, old, 0.1))
    new.rows[0] = replace(new.rows[0], disturbed=True)
    notes = compare(new, old, 0.1)
    assert "another machine (another)" in notes[0] and "disturbed" in notes[-1]


def test_rows_that_were_not_measured_again_are_named(tmp_path: Path) -> None:
    left = [row(tokens=tokens) for tokens in (4, 5, 6, 7)]
    old = read_report(saved(tmp_path / "old", row(), *left))
    notes = compare(report(row()), old, 0.1)
    assert "note: 4 rows of" in notes[0] and "not measured: ktconv int4" in notes[0]
    assert "5 tokens" in notes[0] and "7 tokens" not in notes[0] and notes[0].endswith("...")
    assert compare(report(row()), read_report(saved(tmp_path / "old", row())), 0.1)[0][0] == "0"


def test_nothing_in_common(tmp_path: Path) -> None:
    """Told by keys alone, before anything is measured; rows that are new all the same are new."""
    old = read_report(saved(tmp_path / "old", row(method="int8"), row(layer=3)))
    with pytest.raises(UsageError, match=r"no row of .* measured what this run would"):
        old.expect_any([row().key, row(layer=4).key])
    old.expect_any([row().key, row(layer=3).key])
    new = report(row())
    compare(new, old, 0.1)
    assert new.rows[0].ratio is None


def test_rows_of_shapes_with_two_names(tmp_path: Path) -> None:
    """Sizes alone tell what may be compared; a name decides between rows of the same sizes."""
    one, two, three = (
        row(s, shape=replace(SHAPE, name=n)) for s, n in ((1, "a"), (2, "b"), (4, "c"))
    )
    old = read_report(saved(tmp_path / "old", one, two))
    assert [(old.like(r) or three).median_us for r in (one, two)] == [1e6, 2e6]
    assert old.like(three) is None
    alone = read_report(saved(tmp_path / "old", one)).like(three)
    assert alone and alone.median_us == 1e6


def test_newer_names_and_older_reports(tmp_path: Path) -> None:
    facts = asdict(row(1e-4)) | {"added_later": 1}
    for name in (
        "source_error",
        "kernel_error",
        "read_gb_s",
        "ratio",
        "old_median_us",
        "regressed",
        "engine",
        "layer",
    ):
        del facts[name]
    old = read_report(saved(tmp_path / "old", rows=[facts]))
    assert old.rows[0].key == row().key


def _without(name: str) -> dict[str, Any]:
    facts = asdict(row())
    del facts[name]
    return facts


def _changed(**changes: Any) -> str:
    return json.dumps(report().facts() | {"rows": [asdict(row()) | changes]})


ODD: list[tuple[str, Any]] = [
    ("median_us", "16.0"),
    ("median_us", None),
    ("median_us", True),
    ("routing", ["balanced"]),
    ("method", {}),
    ("isa", None),
    ("engine", 3),
    ("tokens", "3"),
    ("tokens", 3.0),
    ("threads", True),
    ("parts", [1]),
    ("layer", "3"),
]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"rows":' + "[" * 100_000, "is nested too deeply"),
        ("[]", "is not a report"),
        ("{}", "is not a report"),
        ('{"schema": 1, "passed": true}', "is not a report"),
        (json.dumps(report().facts() | {"mode": "sft"}), "--mode sft, which is not compared"),
        (json.dumps(report().facts() | {"schema": 2}), "schema 2, this ktconv reads 1"),
        (json.dumps(report().facts() | {"rows": [1]}), "is not a complete report"),
        (json.dumps(report().facts() | {"rows": [_without("median_us")]}), "median_us"),
        (json.dumps(report().facts() | {"rows": [_without("shape")]}), "shape"),
        (json.dumps(report().facts() | {"rows": [asdict(row()) | {"shape": {}}]}), "hidden"),
        (json.dumps(report().facts() | {"rows": [asdict(row()) | {"median_us": 0}]}), "above 0"),
        *((_changed(**{name: value}), name) for name, value in ODD),
        (_changed(shape={**row().shape, "hidden": "256"}), "shape.hidden is of type str"),
        (_changed(shape={**row().shape, "name": []}), "shape.name is of type list"),
        (_changed(shape=[1]), "is not a complete report"),
        (_changed(median_us=-1), "above 0"),
        (_changed(median_us=float("inf")), "above 0"),
        (_changed(median_us=float("nan")), "above 0"),
        (_changed(median_us=10**400), "above 0"),
        (json.dumps(report(row(1), row(2)).facts()), "two rows measured the same"),
        (json.dumps(report().facts() | {"machine": []}), "is not a complete report"),
        (json.dumps(report().facts() | {"rows": 3}), "is not a complete report"),
    ],
)
def test_files_that_are_no_reports(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_report(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "is a directory"), (tmp_path / "nowhere", "does not exist")):
        with pytest.raises(UsageError, match=words):
            read_report(path)
