"""Names of weight formats, looked up: what every command, library and engine calls a format.

A format is meant here by its numbers: codes and scales. Files that have the same numbers can differ
in layout and names, which belong to the command that writes them. The rows are those of `specs`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ktconv.formats.specs import CHANNEL, SPECS, FormatSpec, names_in

Column = Literal["method", "kernel", "scheme"]  # of Names: the commands that take the name


class Names(NamedTuple):
    """The names of one format; "" where a command does not have it."""

    words: str  # what it is, in one line
    method: str = ""  # of quantize-cpu, recipes and --methods
    kernel: str = ""  # of bench, plan and the runtime: a key of FORMATS
    scheme: str = ""  # of quantize-gpu,
    group_size: int = 0  # with this --group-size; 0: a scheme has one only
    others: tuple[str, ...] = ()  # of other programs


def folded(name: str) -> str:
    """A name as names are compared: case, "_" and "-" do not matter."""
    return name.strip().lower().replace("_", "-")


_METHODS = {folded(name) for name in names_in("quantize-cpu")}


def _names(spec: FormatSpec) -> Names:
    """The row of what quantize-cpu writes; KTransformers' names that are methods mean those."""
    scheme = "" if spec.is_int and spec.group == CHANNEL else spec.scheme
    group = spec.group if scheme and spec.is_int else 0
    others = (*(name for name in spec.kt if folded(name) not in _METHODS), *spec.others)
    return Names(spec.words, spec.cpu, spec.kernel or spec.runs_as, scheme, group, others)


_WRITTEN = {spec.cpu: _names(spec) for spec in SPECS if spec.cpu}
# Where formats share a name, the first row that has it is meant: usual groups before others.
_FIRST = ("int4", "int8", "int4-g128", "int4-g64")
ROWS = tuple(_WRITTEN[name] for name in dict.fromkeys((*_FIRST, *_WRITTEN)))


def row_named(name: str) -> Names | None:
    """The first row with this name, in whatever column."""
    wanted = folded(name)
    rows = (row for row in ROWS if wanted in map(folded, all_names(row)))
    return next(rows, None) if wanted else None


def all_names(row: Names) -> tuple[str, ...]:
    """All names of a format."""
    names = (row.method, row.kernel, row.scheme, *row.others)
    return tuple(dict.fromkeys(name for name in names if name))


def translated(name: str, column: Column) -> str:
    """The name of a format in `column`, whichever column `name` is from; `name` itself if no
    format has it, or if the format has no name in `column`.

    >>> translated("AMXINT4", "method"), translated("W4A16", "method")
    ('int4', 'int4-g128')
    """
    wanted = folded(name)
    for row in ROWS:  # a name of the column itself means what it means there
        if wanted and wanted == folded(getattr(row, column)):
            return str(getattr(row, column))
    found = row_named(name)
    return str(getattr(found, column)) if found and getattr(found, column) else name


def aliases_of_kernel(key: str) -> tuple[str, ...]:
    """The names that mean the row `key` of FORMATS, without that one: lower case."""
    names = [folded(name) for row in ROWS for name in all_names(row)]
    return tuple(
        dict.fromkeys(name for name in names if name != key and translated(name, "kernel") == key)
    )
