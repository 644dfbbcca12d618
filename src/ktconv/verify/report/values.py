"""Values of a result as HTML: text escaped, numbers rounded, missing values marked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import markupsafe
from markupsafe import Markup

from ktconv.system.text import printable
from ktconv.system.units import counted as counted  # of templates
from ktconv.system.units import format_size

MISSING = Markup('<span class="none" title="not measured">–</span>')
_NOT_FINITE = {"nan", "inf", "-inf", "infinity", "-infinity"}


class Facts(dict[Any, Any]):
    """A mapping of the result in which a missing key is None."""

    def __missing__(self, key: Any) -> None:
        return None


def mapping(value: Any) -> Facts:
    return Facts(value) if isinstance(value, Mapping) else Facts()


def items(value: Any) -> Sequence[Any]:
    """The items of a list; none of any other value."""
    return value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else ()


def records(value: Any) -> list[Facts]:
    return [Facts(item) for item in items(value) if isinstance(item, Mapping)]


def number(value: Any) -> float | None:
    """A number of the result, also NaN and infinities, which JSON has as strings."""
    if isinstance(value, str) and value.strip().lower() in _NOT_FINITE:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def finite(value: Any) -> float | None:
    given = number(value)
    return given if given is not None and math.isfinite(given) else None


def figure(value: float) -> str:
    """Four significant digits, of rates in whole numbers all, and a real minus sign."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "−")
    if 9999.5 <= abs(value) < 1e7:
        return f"{value:,.0f}".replace("-", "−")
    mantissa, _, exponent = f"{value:.4g}".partition("e")
    if exponent:
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return mantissa.replace("-", "−")


def escape(value: Any) -> Markup:
    """Text for an element or a quoted attribute; invisible characters become \\uXXXX."""
    return markupsafe.escape(printable(str(value), keep="\t\n"))


def show(value: Any) -> Markup:
    """A value as HTML; a missing value looks different from 0 and from empty text."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return Markup("yes" if value else "no")
    given = number(value)
    if given is not None:
        text = Markup(figure(given))
        return text if math.isfinite(given) else Markup(f'<span class="odd">{text}</span>')
    if isinstance(value, str):
        return escape(value) if value else Markup('<span class="none">(empty)</span>')
    return escape(json.dumps(value, default=str))


def show_id(value: Any) -> Markup:
    """A value whose digits are not grouped if it is an id: seed 12345, layer 1000."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return escape(value) if whole else show(value)


def show_error(value: Any) -> Markup:
    """Always four digits, so that a column of errors is easy to compare."""
    given = finite(value)
    if not given:
        return show(value)
    mantissa, _, exponent = f"{given:#.4g}".partition("e")
    text = f"{mantissa.rstrip('.')}{f'e{int(exponent)}' if exponent else ''}"
    return Markup(text.replace("-", "−"))


def show_cosine(value: Any) -> Markup:
    given = finite(value)
    return show(value) if given is None else Markup(f"{given:.6f}")


def show_share(value: Any) -> Markup:
    given = finite(value)
    if given is None:
        return show(value)
    percent = given * 100
    digits = f"{percent:.3g}" if 0 < abs(percent) < 0.1 else f"{percent:.2f}".removesuffix(".00")
    return Markup(f"{digits} %".replace("-", "−"))


def show_path(value: Any) -> Markup:
    return MISSING if value is None else Markup(f'<span class="code">{show(value)}</span>')


def show_duration(value: Any) -> Markup:
    seconds = number(value)
    if seconds is None or not math.isfinite(seconds) or seconds < 60:
        return show(None if seconds is None else float(f"{seconds:.3g}")) + " s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return Markup(f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s")


def size_words(value: Any) -> str | None:
    """Bytes in a larger unit; None if that is not possible."""
    given = number(value)
    return None if given is None or not abs(given) < 1e30 else format_size(given)


def count_words(value: Any) -> str | None:
    """Millions and more in words; None for anything else."""
    given = number(value)
    if given is None or not 1e6 <= given < 1e18:
        return None
    scales = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
    factor, word = next(scale for scale in scales if given >= scale[0])
    return f"{given / factor:.4g} {word}"


# --- tables -----------------------------------------------------------------------------

# How a column shows its values; all but "text" are aligned as numbers.
_KINDS: dict[str, Callable[[Any], Markup]] = {
    "number": show,
    "text": show,
    "id": show_id,
    "error": show_error,
    "cosine": show_cosine,
    "share": show_share,
}
# Head, key of the row (two: of a mapping in the row), kind.
Column = tuple[str, "str | tuple[str, str]", str]


def columns_of(columns: Iterable[Column], rows: Sequence[Facts]) -> list[tuple[str, bool, Any]]:
    """Head, whether it is text, and cells of every column that has a value in some row."""
    found = []
    for head, key, kind in columns:
        values = [_value(row, key) for row in rows]
        if any(value is not None for value in values):
            cells = [_cell(value, kind) for value in values]
            found.append((head, kind == "text", cells))
    return found


def _value(row: Facts, key: str | tuple[str, str]) -> Any:
    return row[key] if isinstance(key, str) else mapping(row[key[0]])[key[1]]


def _cell(value: Any, kind: str) -> Markup:
    shown = _KINDS[kind](value)
    if kind == "text":
        return Markup(f"<td>{shown}</td>")
    given = number(value)
    if given is None or math.isnan(given):
        return Markup(f'<td class="n">{shown}</td>')
    data = repr(given).replace("inf", "Infinity")
    return Markup(f'<td class="n" data-v="{data}">{shown}</td>')
