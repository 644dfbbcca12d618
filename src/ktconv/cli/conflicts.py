"""Options that exclude or need one another: a table for each command, checked in one place.

A row has conditions, and the message and the hint of the error where all of them hold:

    --a             the option is given
    !--a            the option is not given
    NAME            the argument is given
    --a=x,y         its value, given or by default, is one of these
    !--a=x,y        its value is none of these

Message and hint may name the value of an option, like {--method}. What a request of the library
refuses too, whoever makes it, is checked there: `prepare` of the conversions, `ktconv.plan`,
`verify` without a source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ktconv.cli.output import given_options
from ktconv.errors import UsageError


class Conflict(NamedTuple):
    """Options that cannot be given together, and the error."""

    when: str  # conditions, separated by spaces
    message: str
    hint: str


def refuse_conflicts(context: Any, conflicts: Iterable[Conflict]) -> None:
    """UsageError by the first row whose conditions hold."""
    arguments = [one for one in context.command.params if one.param_type_name == "argument"]
    given = given_options(context) | {
        one.metavar for one in arguments if context.params.get(one.name) is not None
    }
    values = {one.opts[0]: context.params.get(one.name) for one in context.command.params}
    for conflict in conflicts:
        if all(_holds(condition, given, values) for condition in conflict.when.split()):
            shown = {name: str(value) for name, value in values.items()}
            raise UsageError(conflict.message.format(**shown), conflict.hint.format(**shown))


def _holds(condition: str, given: frozenset[str], values: Mapping[str, Any]) -> bool:
    name, equals, listed = condition.removeprefix("!").partition("=")
    found = str(values[name]) in listed.split(",") if equals else name in given
    return found != condition.startswith("!")


def one_of(*options: str, hint: str = "give one of them") -> list[Conflict]:
    """Rows for options of which only one may be given."""
    return [
        Conflict(f"{one} {other}", f"{one} and {other} cannot be combined", hint)
        for number, one in enumerate(options)
        for other in options[number + 1 :]
    ]


def belongs(
    options: Sequence[str], to: str, hint: str, why: str = "", when: str = ""
) -> list[Conflict]:
    """Rows for options that need another, `to`. `when`: how the lack of it is recognised."""
    return [
        Conflict(f"{option} {when or f'!{to}'}", f"{option} belongs to {to}{why}", hint)
        for option in sorted(options)
    ]


def apart(options: Sequence[str], other: str, when: str = "") -> list[Conflict]:
    """Rows for options that do not go with another, `other`, with its value. `when`: how that is
    recognised."""
    return [
        Conflict(
            f"{option} {when or other.replace(' ', '=')}",
            f"{option} does not belong to {other}",
            f"leave {option} out",
        )
        for option in options
    ]
