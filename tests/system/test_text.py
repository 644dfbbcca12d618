"""Text of terminals: aligned tables."""

from __future__ import annotations

from ktconv.system.text import table_lines


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
