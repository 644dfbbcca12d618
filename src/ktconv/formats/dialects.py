"""Names of weight formats, one row each: what every command, library and engine calls a format.

A format is meant here by its numbers: codes and scales. Files that have the same numbers can differ
in layout and names, which belong to the command that writes them. Commands' names: `specs`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ktconv.formats.specs import CHANNEL, spec_of

Column = Literal["method", "kernel", "scheme"]  # of Names: the commands that take the name


class Names(NamedTuple):
    """The names of one format; "" where a command does not have it."""

    words: str  # what it is, in one line
    method: str = ""  # of quantize-cpu, recipes and --methods
    kernel: str = ""  # of bench, plan and the runtime: a key of FORMATS
    scheme: str = ""  # of quantize-gpu,
    group_size: int = 0  # with this --group-size; 0: a scheme has one only
    others: tuple[str, ...] = ()  # of other programs


def _names(method: str, words: str, *others: str, kernel: str = "") -> Names:
    """The row of what quantize-cpu calls `method`, with names of other programs."""
    spec = spec_of(method, "quantize-cpu")
    scheme = "" if spec.is_int and spec.group == CHANNEL else spec.scheme
    group = spec.group if scheme and spec.is_int else 0
    return Names(words, method, spec.kernel or kernel, scheme, group, others)


# Where formats share a name, the first row that has it is meant.
ROWS = (
    _names("int4", "INT4, a scale per row", "AMXINT4"),
    _names("int8", "INT8, a scale per row", "AMXINT8"),
    _names("int4-g128", "INT4 in groups of 128", "gint4-g128"),
    _names("int4-g64", "INT4 in groups of 64", "gint4-g64"),
    _names("rawint4", "INT4 in groups of 32", "int4-g32", "gint4", "gint4-g32"),
    _names("int8-g128", "INT8 in groups of 128", "gint8-g128"),
    _names("fp8", "FP8 in blocks of 128 x 128"),
    _names("fp8-channel", "FP8, a scale per row", "FP8_PERCHANNEL"),
    _names("mxfp4", "FP4 in groups of 32"),
    _names("mxfp8", "FP8 in groups of 32"),
    _names("nvfp4", "FP4 in groups of 16"),
    _names("gptq-int4", "INT4 in groups of 128, in GPTQ's files", kernel="gint4-128"),
    _names("awq", "INT4 in groups of 128, in AWQ's files"),
    _names("bf16", "not quantized"),
)


def folded(name: str) -> str:
    """A name as names are compared: case, "_" and "-" do not matter."""
    return name.strip().lower().replace("_", "-")


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
