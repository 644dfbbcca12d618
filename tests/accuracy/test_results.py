"""The arithmetic of benchmarks/accuracy: texts, ratios, tables."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import EVAL

from benchmarks.accuracy.results import add_result, kl_ratio, read_results, spread
from benchmarks.accuracy.tables import model_table, outlier_table, ratio_of, write_tables
from benchmarks.accuracy.texts import Text, cut_in_blocks, cut_in_halves, subset


def test_halves_are_the_whole_file_cut_at_a_line() -> None:
    first, second = cut_in_halves(EVAL)
    data = EVAL.read_bytes()
    assert (first.content + second.content).encode() == data
    assert first.content.endswith("\n")
    middle = len(first.content.encode())
    assert abs(middle - len(data) / 2) < 500
    assert first.name == f"eval.txt[0:{middle}]"
    assert second.name == f"eval.txt[{middle}:{len(data)}]"


@pytest.mark.parametrize("content", ["one line only", "", "first\n   \n"])
def test_a_text_that_cannot_be_cut_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "short.txt"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"short\.txt cannot be cut"):
        cut_in_halves(file)


def test_blocks_alternate_and_are_the_whole_file(tmp_path: Path) -> None:
    even, odd = cut_in_blocks(EVAL)
    lines = EVAL.read_text().splitlines(keepends=True)
    assert Counter((even.content + odd.content).splitlines(keepends=True)) == Counter(lines)
    assert even.content.startswith(lines[0])
    assert even.content.splitlines()[-1] == lines[-1].rstrip() or odd.content.endswith(lines[-1])
    assert 0.3 < len(odd.content) / len("".join(lines)) < 0.6
    file = tmp_path / "short.txt"
    file.write_text("one line\nand another\n")
    with pytest.raises(ValueError, match=r"short\.txt is too short"):
        cut_in_blocks(file)


def test_a_subset_is_half_of_the_lines_in_their_order() -> None:
    text = Text("numbers", "".join(f"line {number}, of many\n" for number in range(4000)))
    chosen = subset(text, 1).content.splitlines()
    lines = text.content.splitlines()
    places = [lines.index(line) for line in chosen]
    assert places == sorted(set(places))
    assert 0.45 < len(chosen) / len(lines) < 0.55
    assert subset(text, 1) == subset(text, 1)
    assert subset(text, 2).content != subset(text, 1).content


def test_ratio_of_equal_and_of_proportional_windows() -> None:
    base = [0.1, 0.4, 0.2]
    assert kl_ratio(base, base).value == 1
    assert kl_ratio(base, base).error == 0
    third = kl_ratio([one / 3 for one in base], base)
    assert math.isclose(third.value, 1 / 3)
    assert third.error < 1e-12


def test_the_error_of_a_ratio_is_its_spread_over_samples() -> None:
    chooser = np.random.default_rng(5)
    base = chooser.gamma(4.0, 1.0, (2000, 50))
    other = 0.6 * base + chooser.gamma(2.0, 0.2, base.shape)
    found = [kl_ratio(a.tolist(), b.tolist()) for a, b in zip(other, base, strict=True)]
    true = np.std([one.value for one in found])
    assert math.isclose(np.mean([one.error for one in found]), true, rel_tol=0.05)


def test_windows_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="2 windows cannot be compared with 3 others"):
        kl_ratio([1.0, 2.0], [1.0, 2.0, 3.0])
    assert math.isnan(kl_ratio([1.0], [2.0]).error)


def test_spread() -> None:
    assert spread(iter([3.0, 1.0, 2.0])) == (1.0, 2.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        spread([])


def a_row(variant: str, kl: float, **others: Any) -> dict[str, Any]:
    found = {
        "perplexity_source": 12.0,
        "perplexity_converted": 12.5,
        "kl_mean": kl,
        "kl_p99": 10 * kl,
        "top1_agreement": 0.9753,
        "kl_windows": [0.5 * kl, 1.5 * kl],
        "layer_errors": [0.1, 0.3],
    }
    row = {
        "model": "small", "variant": variant, "numa": 1, "calibration": None, "kind": None,
        "evaluation": "eval.txt[5:9]", "split": "halves", "weights": {"all": 0.125},
        "values": found, "cpu": "a CPU", "date": "2026-01-02", "commit": "abc1234",
    }  # fmt: skip
    return row | others


def test_the_latest_row_of_a_key_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert read_results(file) == []
    for kl in (0.5, 0.25):
        add_result(file, a_row("amax", kl))
    add_result(file, a_row("amax", 0.75, numa=2))
    assert [row["values"]["kl_mean"] for row in read_results(file)] == [0.25, 0.75]


def test_a_ratio_is_to_amax_with_the_same_parts_text_and_bits() -> None:
    rows = [
        a_row("amax", 0.5, numa=2),
        a_row("amax", 0.4),
        a_row("amax", 0.8, evaluation="other.txt"),
        a_row("int8-amax", 0.1),
        a_row("search", 0.2),
        a_row("int8-search", 0.05),
    ]
    found = [ratio_of(row, rows) for row in rows[-2:]]
    assert [one and one.value for one in found] == [0.5, 0.5]
    assert ratio_of(a_row("search", 0.2, evaluation="third.txt"), rows) is None
    assert ratio_of(rows[-1], rows, "kernels") is None


def test_the_table_of_a_model() -> None:
    rows = [a_row("search", 0.2), a_row("amax", 0.4)]
    lines = model_table(rows, "small")
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split(" |")[0] for line in lines[2:]] == ["| amax", "| search"]
    assert "0.1250 | 0.2000 | +0.500 | 0.20000 | 0.50 ± 0.00 | 2.00000 | 97.53 %" in lines[3]


def test_the_table_of_outliers_has_the_spread_of_seeds() -> None:
    pairs = zip(("small-outliers-1", "small-outliers-2"), (0.2, 0.3), strict=True)
    rows = [
        row
        for name, kl in pairs
        for row in (a_row("amax", 0.5, model=name), a_row("search", kl, model=name))
    ]
    head, _, amax, search = outlier_table(rows)
    assert head == "| codes | small, 2 seeds |"
    assert amax == "| amax | KL 0.5000 (0.5000 to 0.5000) |"
    assert search == "| search | 0.50 (0.40 to 0.60) |"


def test_tables_replace_what_was_between_their_marks(tmp_path: Path) -> None:
    document, rows = tmp_path / "page.md", [a_row("amax", 0.4)]
    names = ["model small", "outliers", "parts", "calibration", "time", "provenance"]
    document.write_text("".join(f"Text.\n<!-- {one} -->\nold\n<!-- end -->\n" for one in names))
    write_tables(document, rows)
    first = document.read_text()
    assert "old" not in first
    assert first.count("Text.\n") == len(names)
    assert model_table(rows, "small")[2] in first
    write_tables(document, rows)
    assert document.read_text() == first
    document.write_text("<!-- outliers -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="no place for the table <!-- model small -->"):
        write_tables(document, rows)
