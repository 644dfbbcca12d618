"""Pieces of the report's HTML: hostile text made harmless, numbers, tables."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktconv.system.text import printable

MISSING = '<span class="none" title="not measured">–</span>'
_NOT_FINITE = {"nan", "inf", "-inf", "infinity", "-infinity"}


def escape(value: Any) -> str:
    """Text for an element or a quoted attribute; what cannot be seen is written as \\uXXXX."""
    return html.escape(printable(value if isinstance(value, str) else str(value), keep="\t\n"))


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> Sequence[Any]:
    """A list, or nothing: a text is no list of characters."""
    return value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else ()


def records(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in items(value) if isinstance(item, Mapping)]


def number(value: Any) -> float | None:
    """A number of the result, NaN and infinities included, also where JSON made words of them."""
    if isinstance(value, str) and value.strip().lower() in _NOT_FINITE:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def figure(value: float) -> str:
    """Four digits that matter; a real minus sign."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "−")
    mantissa, _, exponent = f"{value:.4g}".partition("e")
    if exponent:
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return mantissa.replace("-", "−")


def show(value: Any) -> str:
    """A value of the result as HTML; what is missing differs from 0 and from an empty text."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    given = number(value)
    if given is not None:
        text = figure(given)
        return text if math.isfinite(given) else f'<span class="odd">{text}</span>'
    if isinstance(value, str):
        return escape(value) if value else '<span class="none">(empty)</span>'
    return escape(json.dumps(value, default=str))


def show_id(value: Any) -> str:
    """Numbers that name something are not grouped: seed 12345, layer 1000."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return escape(value) if whole else show(value)


def show_error(value: Any) -> str:
    """Always four digits, so that a column of errors is easy to compare."""
    given = number(value)
    if not given or not math.isfinite(given):
        return show(value)
    mantissa, _, exponent = f"{given:#.4g}".partition("e")
    return f"{mantissa.rstrip('.')}{f'e{int(exponent)}' if exponent else ''}".replace("-", "−")


def show_cosine(value: Any) -> str:
    given = number(value)
    return f"{given:.6f}" if given is not None and math.isfinite(given) else show(value)


def show_share(value: Any) -> str:
    given = number(value)
    if given is None or not math.isfinite(given):
        return show(value)
    percent = given * 100
    digits = f"{percent:.3g}" if 0 < abs(percent) < 0.1 else f"{percent:.2f}".removesuffix(".00")
    return f"{digits} %".replace("-", "−")


def show_path(value: Any) -> str:
    return f'<span class="code">{show(value)}</span>' if value is not None else MISSING


# --- tables and lists of facts ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """How a table shows one value of its rows."""

    head: str
    value: Callable[[Mapping[str, Any]], Any]
    show: Callable[[Any], str] = show
    text: bool = False


def key(name: str, inner: str | None = None) -> Callable[[Mapping[str, Any]], Any]:
    """A getter for row[name], or row[name][inner]."""
    if inner is None:
        return lambda row: row.get(name)
    return lambda row: mapping(row.get(name)).get(inner)


def table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], label: str) -> str:
    """The rows in a box that scrolls when it is long; columns without any value are left out."""
    given = [(column, [column.value(row) for row in rows]) for column in columns]
    used = [
        (column, values) for column, values in given if any(value is not None for value in values)
    ]
    head = "".join(
        f'<th scope="col"{"" if column.text else _NUMERIC}>{escape(column.head)}</th>'
        for column, _ in used
    )
    cells = [_cells(column, values) for column, values in used]
    body = "".join(f"<tr>{''.join(row)}</tr>\n" for row in zip(*cells, strict=True))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table class="sortable"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>\n"
    )


_NUMERIC = ' class="n"'


def _cells(column: Column, values: Sequence[Any]) -> list[str]:
    if column.text:
        return [f"<td>{column.show(value)}</td>" for value in values]
    numbers = [number(value) for value in values]
    cells = []
    for value, given in zip(values, numbers, strict=True):
        attributes = _NUMERIC
        if given is not None and not math.isnan(given):
            attributes += f' data-v="{given!r}"'.replace("inf", "Infinity")
        cells.append(f"<td{attributes}>{column.show(value)}</td>")
    return cells


def tiles(figures: Sequence[tuple[str, str, str]]) -> str:
    """Large figures: (name, HTML of the value, HTML of a remark)."""
    parts = [
        f"<div><dt>{escape(name)}</dt><dd>{value}{f'<small>{remark}</small>' if remark else ''}"
        "</dd></div>\n"
        for name, value, remark in figures
    ]
    return f'<dl class="tiles">\n{"".join(parts)}</dl>\n'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values below one another: (name, HTML of the value)."""
    parts = [f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>\n" for name, value in pairs]
    return f'<dl class="facts">\n{"".join(parts)}</dl>\n'
