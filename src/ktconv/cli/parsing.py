"""Command-line parsing on top of click: empty values, names of formats, escaped messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import getdoc
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from ktconv.cli import help
from ktconv.cli.commands import COMMANDS
from ktconv.cli.events import Events
from ktconv.cli.exits import errors_shown, print_error
from ktconv.cli.parameters import callback_of, parameters_of
from ktconv.errors import UsageError
from ktconv.system.text import printable

if TYPE_CHECKING:
    from ktconv.formats.dialects import Column

WORDS = "ktconv.words"  # in the meta of a context: the arguments of the command as they were given


@contextmanager
def usage_errors_printable() -> Iterator[None]:
    """Escape arguments in click's own errors as in ktconv's."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:  # its message is the help
        raise
    except click.ClickException as error:
        text = printable(error.format_message())
        vars(error)["format_message"] = lambda: text
        raise


class Group(click.Group):
    """The top-level command; handles usage errors of all subcommands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        help.write_commands(self, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        with usage_errors_printable():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with usage_errors_printable():
            return super().invoke(ctx)


class Command(click.Command):
    """A command that rejects empty values, and reports usage errors like its other errors."""

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        super().__init__(
            name, callback=callback_of(function), params=parameters_of(function),
            help=getdoc(function),
        )  # fmt: skip

    def get_short_help_str(self, limit: int = 0) -> str:
        """The line of the list of commands, which shells show too."""
        return COMMANDS[str(self.name)].summary

    def get_params(self, ctx: Any) -> Any:
        return help.with_help_all(super().get_params(ctx), self.get_help_option(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        help.write_command(self, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if ctx.resilient_parsing:  # a shell asks for completions
            return super().parse_args(ctx, args)
        as_json, as_events = wants_json(args), wants_events(args)  # parsing empties args
        ctx.meta[WORDS] = tuple(args)
        refuse_empty_shown(args, as_json)
        try:
            return super().parse_args(ctx, in_dialect(self.name, with_defaults(args)))
        except click.ClickException as error:
            vars(error)["message"] += _mistaken_value(error.message, ctx.meta[WORDS])
            if as_json:
                print_error(error.format_message(), None, error.exit_code)
            if as_events:
                Events().failed(error.format_message(), None, error.exit_code)
                raise click.exceptions.Exit(error.exit_code) from None
            raise


# Options whose value can be left out: the value that this means, and what values look like.
_OPTIONAL = {"--ray": ("auto", re.compile(r"auto|local|ray://.*|[^/\s]+:[0-9]+"))}
_VALUES = {"--ray": "HOST:PORT, auto or local"}


def with_defaults(words: Sequence[str]) -> list[str]:
    """`words` with a value for each option that has none; the next word can be an argument."""
    found = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        default, values = _OPTIONAL.get(word, (None, None))
        bare = values is not None and not values.fullmatch(following)
        found.append(f"{word}={default}" if bare else word)
    return found


# Options whose value is a format, with the column of its names.
_FORMATS: dict[tuple[str | None, str], Column] = {
    ("quantize-cpu", "--method"): "method",
    ("quantize-gpu", "--scheme"): "scheme",
}


def in_dialect(command: str | None, words: Sequence[str]) -> list[str]:
    """`words` with formats in the command's own names, where they have names of other programs.

    A format that is a scheme with a group size adds --group-size; BadParameter if another is given.
    """
    options = {option: column for (name, option), column in _FORMATS.items() if name == command}
    if not options:
        return list(words)
    from ktconv.formats.dialects import row_named, translated

    found: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*found, word, *rest]
        option, equals, value = word.partition("=")
        if option not in options:
            found.append(word)
            continue
        value = value if equals else next(rest, "")
        name = translated(value, options[option])
        found += [f"{option}={name}"] if value else [word]
        row = row_named(value)
        if options[option] == "scheme" and row and row.group_size and name != value.upper():
            found += _group_size(value, row.group_size, words)
    return found


def _group_size(name: str, size: int, words: Sequence[str]) -> list[str]:
    """The words that ask for this group size, which the format `name` has."""
    spaced = [after for before, after in pairwise(words) if before == "--group-size"]
    given = [*spaced, *(w.partition("=")[2] for w in words if w.startswith("--group-size="))]
    if given and given[-1] != str(size):
        message = f"{name} has groups of {size}, and --group-size is {given[-1]}; omit one"
        raise click.BadParameter(message, param_hint="'--scheme'")
    return [] if given else [f"--group-size={size}"]


# Values that an option does not have, and why.
_REFUSED = {
    ("--method", name): f"{name} has another order of bytes than int{bits}, no released engine "
    "reads it, and its producer's own driver is broken"
    for name, bits in (("moe_int4", 4), ("moe_int8", 8))
}


def _mistaken_value(message: str, words: Sequence[str]) -> str:
    """The end of a sentence about a value that there is not, or about too many arguments, where one
    was meant to be a value."""
    for option, value in pairwise(word for one in words for word in one.split("=", 1)):
        if why := _REFUSED.get((option, value.lower())):
            return f" {why[0].upper()}{why[1:]}."
    if "unexpected extra argument" not in message:
        return ""
    for word, following in pairwise(words):
        if word not in _OPTIONAL or following.startswith("-") or following not in message:
            continue
        if not _OPTIONAL[word][1].fullmatch(following):
            return f": what follows {word} is {_VALUES[word]}"
    return ""


def wants_json(words: Sequence[str]) -> bool:
    """Whether stdout will be one JSON document, as far as is known before parsing."""
    form = ("--format", "json") in pairwise(words)
    return form or "--json" in words or "--format=json" in words


def wants_events(words: Sequence[str]) -> bool:
    """Whether stderr will be JSON lines, as far as is known before parsing."""
    return ("--progress", "json") in pairwise(words) or "--progress=json" in words


def refuse_empty_shown(words: Sequence[str], as_json: bool) -> None:
    """`refuse_empty`; its error is shown as the command would show it."""
    try:
        refuse_empty(words)
    except UsageError:
        with errors_shown(as_json, progress="json" if wants_events(words) else "auto"):
            raise


def refuse_empty(words: Sequence[str]) -> None:
    """UsageError for an empty argument, usually an unset shell variable.

    As a path it would mean the current directory, as a list of numbers all of them.
    """
    for before, word in zip(["", *words], words, strict=False):
        option = re.fullmatch("(-[^=]*)=", word)
        named = before.startswith("-") and before != "--"
        name = option[1] if option else before if named else "an argument"
        if option or not word:
            raise UsageError(
                f"{name} is empty", "give a value: variables of the shell may be unset"
            )
