"""Options of quantize-cpu that choose codes, from the table of ways."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from types import MappingProxyType
from typing import Annotated, Any, get_args

from ktconv.cli.help import ACCURACY, ADVANCED
from ktconv.cli.parameters import Run, choice, flag, option, with_options
from ktconv.quantize.ways import WAYS, WayRow

Ways = Mapping[str, Any]  # values by names of options
NO_WAYS: Ways = MappingProxyType({})


def chooses_codes(command: Run) -> Run:
    """Give a command the options of all ways: its parameter `ways` becomes them."""
    options = [_parameter(row) for row in WAYS if row.option]
    return with_options(command, "ways", options, dict)


def values_of(ways: Ways, kept: str) -> dict[str, Any]:
    """The values for one of the places that a row's `kept` names; of `ways` what was given."""
    values = {row.option: row.value(ways[row.option]) for row in WAYS
              if row.option and row.kept == kept}  # fmt: skip
    if kept != "ways":
        return values
    return {name: value for name, value in values.items() if value not in (None, False)}


def _parameter(row: WayRow) -> Parameter:
    panel, name = ADVANCED if row.advanced else ACCURACY, row.option.replace("_", "-")
    default = False if row.takes is bool else None
    if row.takes is bool:
        made = flag(f"--{name}", row.words, panel, row.detail)
    elif row.metavar:
        made = option(row.words, row.metavar, panel=panel, detail=row.detail)
    else:
        made = choice(get_args(row.takes)[0], row.words, panel=panel, detail=row.detail)
    kind, hint = Parameter.KEYWORD_ONLY, Annotated[row.takes, made]
    return Parameter(row.option, kind, default=default, annotation=hint)
