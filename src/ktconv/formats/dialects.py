"""Names of weight formats, one row each: what every command, library and engine calls a format.

A format is meant here by its numbers: codes and scales. Files that have the same numbers can differ
in layout and names, which belong to the command that writes them. Pure Python, no imports.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Dialect = Literal["method", "kernel", "scheme"]


class Names(NamedTuple):
    """The names of one format; "" where a command does not have it."""

    words: str  # what it is, in one line
    method: str = ""  # of quantize-cpu, recipes and --methods
    kernel: str = ""  # of bench, plan and the runtime: a key of FORMATS
    scheme: str = ""  # of quantize-gpu calls it,
    group_size: int = 0  # with this --group-size; 0: a scheme has one only
    others: tuple[str, ...] = ()  # of other programs


# Where formats share a name, the first row that has it is meant.
ROWS = (
    Names("INT4, a scale per row", "int4", "int4", others=("AMXINT4",)),
    Names("INT8, a scale per row", "int8", "int8", others=("AMXINT8",)),
    Names(
        "INT4 in groups of 128",
        "int4-g128", "gint4-128", "W4A16", 128, ("gint4-g128",),
    ),
    Names(
        "INT4 in groups of 64",
        "int4-g64", "gint4-64", "W4A16", 64, ("gint4-g64",),
    ),
    Names(
        "INT4 in groups of 32",
        "rawint4", "gint4-32", "W4A16", 32, ("int4-g32", "gint4", "gint4-g32"),
    ),
    Names(
        "INT8 in groups of 128",
        "int8-g128", "gint8-128", "W8A16", 128, ("gint8-g128",),
    ),
    Names(
        "FP8 in blocks of 128 x 128",
        "fp8", "fp8", "FP8_BLOCK",
    ),
    Names(
        "FP8, a scale per row",
        "fp8-channel", "fp8-channel", "FP8_DYNAMIC", others=("FP8_PERCHANNEL",),
    ),
    Names("FP4 in groups of 32", "mxfp4", "mxfp4", "MXFP4A16"),
    Names("FP8 in groups of 32", "mxfp8"),
    Names("FP4 in groups of 16", "nvfp4", "nvfp4", "NVFP4A16"),
    Names("INT4 in groups of 128, in GPTQ's files", "gptq-int4", "gint4-128"),
    Names("INT4 in groups of 128, in AWQ's files", "awq"),
    Names("not quantized", "bf16", "bf16"),
)  # fmt: skip


def folded(name: str) -> str:
    """A name as names are compared: case, "_" and "-" do not matter."""
    return name.strip().lower().replace("_", "-")


def row_named(name: str) -> Names | None:
    """The first row with this name, in whatever dialect."""
    wanted = folded(name)
    rows = (row for row in ROWS if wanted in map(folded, names_in(row)))
    return next(rows, None) if wanted else None


def names_in(row: Names) -> tuple[str, ...]:
    """All names of a format."""
    names = (row.method, row.kernel, row.scheme, *row.others)
    return tuple(dict.fromkeys(name for name in names if name))


def translated(name: str, dialect: Dialect) -> str:
    """The name that a format has in `dialect`, whatever dialect `name` is of; `name` itself if no
    format is called so, or if `dialect` has no name for it.

    >>> translated("AMXINT4", "method"), translated("W4A16", "method")
    ('int4', 'int4-g128')
    """
    wanted = folded(name)
    for row in ROWS:  # a name of the dialect itself means what it means there
        if wanted and wanted == folded(getattr(row, dialect)):
            return str(getattr(row, dialect))
    found = row_named(name)
    return str(getattr(found, dialect)) if found and getattr(found, dialect) else name


def aliases_of_kernel(key: str) -> tuple[str, ...]:
    """The names that mean the row `key` of FORMATS, without that one: lower case."""
    names = [folded(name) for row in ROWS for name in names_in(row)]
    return tuple(
        dict.fromkeys(name for name in names if name != key and translated(name, "kernel") == key)
    )
