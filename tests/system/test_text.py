"""Text for terminals: aligned tables, and lists that are cut."""

from __future__ import annotations

from ktconv.system.text import first_few, table_lines


def test_tables_have_columns_as_wide_as_their_widest_cell() -> None:
    rows = [("layer", "method", "size"), ("0", "int4", "1.5 MB"), ("10", "int4-g128", "12 B")]
    assert list(table_lines(rows, left=(1,))) == [
        "layer  method       size",
        "    0  int4       1.5 MB",
        "   10  int4-g128    12 B",
    ]


def test_tables_end_no_line_with_spaces() -> None:
    assert list(table_lines([("a", "state"), ("b", "")], left=range(2))) == ["a  state", "b"]
    assert list(table_lines([])) == []


def test_lists_are_cut_and_say_how_much_is_left_out() -> None:
    assert first_few([]) == "" and first_few(["a", "b", "c"]) == "a, b, c"
    assert first_few(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert first_few([1, 2, 3], 1) == "1 and 2 more"
    assert first_few(["a", "b", "c"], 2, "; ") == "a; b; and 1 more"
