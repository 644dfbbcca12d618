"""The text of `--help` and `--help-all`: options in panels, one column for all of them.

Plain text in the width of the terminal, at most 80 columns, without colours: the same in a pipe.
`--help` has what most users need, a line or two for each option. `--help-all` adds the advanced
options, and the detail of every option.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from ktconv.cli.commands import COMMANDS, exit_codes
from ktconv.system.units import counted

FORMAT, ACCURACY, SOURCE = "Format", "Accuracy", "Source"
CASES, CHECKS, SPEED, SELECTION = "Cases", "Checks", "Speed", "Selection"
GPUS, HOT, CPUS = "GPUs", "Hot experts", "CPUs"
OUTPUT, RUN, ADVANCED = "Output", "Run", "Advanced"
PANELS = (
    FORMAT, ACCURACY, SOURCE, CASES, CHECKS, SPEED, SELECTION, GPUS, HOT, CPUS, OUTPUT, RUN,
    ADVANCED,
)  # fmt: skip

MOST = 2**31 - 1  # of anything that is counted
_NAMES = 25  # columns of names; longer ones have a line of their own
_MOST_VALUES = 20  # characters of values that stand in place of a metavar
EVERYTHING = "ktconv.help_all"  # in the meta of a context: whether --help-all was given
Row = tuple[str, list[str]]  # names, and lines or paragraphs of what they mean


def metavar_of(values: Sequence[str], name: str) -> str:
    """The metavar of a value that is one of a few: the values where they are short."""
    joined = "|".join(values)
    return joined if len(joined) <= _MOST_VALUES else name


def with_help_all(parameters: list[Any], help_option: Any) -> list[Any]:
    """The parameters of a command with the option --help-all, ahead of --help."""
    if help_option is None:
        return parameters
    every = copy(help_option)
    every.opts, every.secondary_opts, every.name = ["--help-all"], [], "help_all"
    show = help_option.callback

    def show_everything(context: Any, parameter: Any, value: Any) -> Any:
        context.meta[EVERYTHING] = bool(value)
        return show(context, parameter, value)

    every.callback = show_everything
    every.help = "Show advanced options and all details, and exit."
    help_option.help = "Show this message and exit."
    for one in (every, help_option):
        one.detail, one.panel = "", RUN
    rest = [one for one in parameters if one is not help_option]
    return [*rest, every, help_option]


# ---- options -----------------------------------------------------------------------------


def choices_of(option: Any) -> Sequence[str]:
    """The values of an option that has no others: of its Literal type."""
    return getattr(option.type, "choices", ())


def names_of(option: Any) -> str:
    """The names that help shows. Old spellings, which come behind the first, are not shown."""
    if "-h" in option.opts:
        return ", ".join(sorted(option.opts, key=len))  # click has them in any order
    names = "/".join([*option.opts[:1], *option.secondary_opts[:1]])
    return names if option.is_flag else f"{names} {option.metavar}"


def notes_of(option: Any, everything: bool) -> str:
    """Values, limits and the default, in brackets; "" where there are none."""
    notes = []
    choices = choices_of(option)
    told = everything and all(f"- {one}: " in option.detail for one in choices)
    if len(choices) > 1 and option.metavar != "|".join(choices) and not told:
        notes.append(", ".join(choices))
    most = getattr(option.type, "max", None)
    if everything and most is not None and most < MOST:
        notes.append(f"{option.type.min:g} to {most:g}")
    if shown := default_of(option):
        notes.append(f"default: {shown}")
    if option.required and option.param_type_name == "option":
        notes.append("required")
    return f"[{'; '.join(notes)}]" if notes else ""


def default_of(option: Any) -> str:
    """The default as the command line has it; "" where there is none, and for plain flags."""
    default = option.default
    if default is None or option.required or option.param_type_name == "argument":
        return ""
    if option.is_flag:
        both = option.opts, option.secondary_opts
        return str((both[0] if default else both[1])[0]) if option.secondary_opts else ""
    return str(getattr(default, "value", default)) if default not in ((), [], "") else ""


def _meaning(option: Any, everything: bool) -> list[str]:
    """The paragraphs that an option has; those that begin with "- " are items of a list."""
    detail = option.detail if everything else ""
    about = [f"{option.help} {notes_of(option, everything)}".rstrip()]
    return about + [part for block in detail.split("\n\n") for part in items(block) if part]


def items(block: str) -> Iterator[str]:
    """A paragraph as it is, or the items of a list."""
    if not block.lstrip().startswith("- "):
        yield " ".join(block.split())
        return
    for one in re.split(r"(?:^|\n)\s*- ", block):
        if one:
            yield "- " + " ".join(one.split())


def _panels(parameters: Iterable[Any], everything: bool) -> Iterator[tuple[str, list[Row]]]:
    """Panels in their order, with rows of names and meanings."""
    found: dict[str, list[Row]] = {panel: [] for panel in PANELS}
    for one in parameters:
        if one.param_type_name == "option" and not getattr(one, "hidden", False):
            found[one.panel].append((names_of(one), _meaning(one, everything)))
    if not everything:
        found.pop(ADVANCED)
    yield from ((panel, rows) for panel, rows in found.items() if rows)


# ---- text --------------------------------------------------------------------------------


def _lines(rows: Iterable[Row], names: int, width: int) -> Iterator[str]:
    """Names, and what they mean in the column next to them."""
    for name, paragraphs in rows:
        wrapped = [
            line
            for text in paragraphs
            for line in textwrap.wrap(
                text,
                max(width - names, 20),
                subsequent_indent="  " if text.startswith("- ") else "",
                break_on_hyphens=False,
                break_long_words=False,
            )
        ]
        first = f"  {name}"
        if len(first) + 2 > names or not wrapped:
            yield first
        else:
            yield f"{first:<{names}}{wrapped.pop(0)}"
        yield from (" " * names + line for line in wrapped)


def _section(formatter: Any, title: str, rows: Iterable[Row], names: int = _NAMES) -> None:
    lines = list(_lines(rows, names, formatter.width))
    formatter.write("\n".join(["", f"{title}:", *lines, ""]))


def _codes(formatter: Any, codes: Mapping[int, str]) -> None:
    text = ", ".join(f"{code} {meaning}" for code, meaning in codes.items())
    lines = textwrap.wrap(f"Exit codes: {text}.", formatter.width, subsequent_indent="  ")
    formatter.write("\n".join(["", *lines, ""]))


def write_command(command: Any, context: Any, formatter: Any) -> None:
    """Arguments, panels of options, exit codes, and where there is more."""
    everything = context.meta.get(EVERYTHING, False)
    parameters = command.get_params(context)
    arguments = [
        (str(one.metavar or one.name.upper()), _meaning(one, everything))
        for one in parameters
        if one.param_type_name == "argument"
    ]
    if arguments:
        _section(formatter, "Arguments", arguments)
    for panel, rows in _panels(parameters, everything):
        _section(formatter, panel, rows)
    name = str(context.info_name)
    if name in COMMANDS:
        _codes(formatter, {c: text.replace("`", "") for c, text in exit_codes(name).items()})
    if not everything:
        _more(formatter, name, command.params)


def _more(formatter: Any, name: str, parameters: Iterable[Any]) -> None:
    """Name the command that shows advanced options and details, if there are any."""
    options = [one for one in parameters if one.param_type_name == "option"]
    advanced = sum(one.panel == ADVANCED for one in options)
    if advanced or any(one.detail for one in options):
        more = f"{counted(advanced, 'advanced option')}, and more" if advanced else "More"
        lines = textwrap.wrap(f"{more} about these: ktconv {name} --help-all", formatter.width)
        formatter.write("\n".join(["", *lines, ""]))


def write_commands(group: Any, context: Any, formatter: Any) -> None:
    """The main commands, then the others in groups, then the options of `ktconv` itself."""
    panels: dict[str, list[Row]] = {}
    for name, row in COMMANDS.items():
        panels.setdefault(row.panel, []).append((name, [row.summary]))
    for panel, rows in panels.items():
        _section(formatter, panel, rows, names=16)
    options = [one for one in group.get_params(context) if not getattr(one, "hidden", False)]
    rows = [(names_of(one), [one.help]) for one in options]
    _section(formatter, "Options", rows, names=16)
    _codes(formatter, exit_codes())
    formatter.write("\nMore about a command: ktconv COMMAND --help\n")
