"""Command-line parsing on top of typer: options, empty values, escaped messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from ktconv.cli.events import Events
from ktconv.cli.exits import errors_shown, print_error
from ktconv.errors import UsageError
from ktconv.formats.specs import Dialect, names_in, spec_named, spec_of
from ktconv.system.text import printable

MOST = 2**31 - 1  # of anything that is counted
MOST_PARTS = 1024  # NUMA nodes of the largest machines
WORDS = "ktconv.words"  # in the meta of a context: the arguments of the command as they were given


def argument(words: str, metavar: str) -> Any:
    return typer.Argument(help=words, metavar=metavar)


def option(words: str, metavar: str, *names: str, **limits: Any) -> Any:
    """An option with a value; `limits` are `min` and `max`, of whole numbers by default MOST."""
    if isinstance(limits.get("min"), int):
        limits.setdefault("max", MOST)
    return typer.Option(*names, help=words, metavar=metavar, **limits)


def flag(names: str, words: str) -> Any:
    """An option without a value, like "--compat" or "--mtp/--no-mtp"."""
    return typer.Option(names, help=words)


def choice(values: Any, words: str, *names: str) -> Any:
    """An option that takes the values of a Literal type, in any case."""
    metavar = "|".join(get_args(values))
    return typer.Option(*names, help=words, metavar=metavar, case_sensitive=False)


@contextmanager
def usage_errors_printable() -> Iterator[None]:
    """Escape arguments in click's own errors as in ktconv's."""
    try:
        yield
    except Exception as error:
        wrong: Any = error
        if hasattr(wrong, "format_message"):  # of click, or of the copy of it in typer
            text = printable(wrong.format_message())
            wrong.format_message = lambda: text
        raise


class Group(TyperGroup):
    """The top-level command; handles usage errors of all subcommands."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        with usage_errors_printable():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with usage_errors_printable():
            return super().invoke(ctx)


class Command(TyperCommand):
    """A command that rejects empty values, and reports usage errors like its other errors."""

    def get_short_help_str(self, limit: int = 0) -> str:
        """The first sentence of the help, in the list of commands, which wraps it."""
        first, *_ = (self.help or "").strip().split("\n\n")
        return " ".join(first.split())

    def get_help(self, ctx: Any) -> str:
        """Several paths in words of people, as wide as before."""
        shown = "<list[Path]>"
        return str(super().get_help(ctx)).replace(shown, "<paths>".ljust(len(shown)))

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if ctx.resilient_parsing:  # a shell asks for completions
            return super().parse_args(ctx, args)
        as_json, as_events = wants_json(args), wants_events(args)  # parsing empties args
        ctx.meta[WORDS] = tuple(args)
        refuse_empty_shown(args, as_json)
        try:
            return super().parse_args(ctx, respelled(self.name, with_defaults(args)))
        except Exception as error:
            wrong: Any = error
            if hasattr(wrong, "format_message"):  # of click, or of the copy of it in typer
                wrong.message = wrong.message.removeprefix("Value error, ")  # of pydantic
                wrong.message += _mistaken_value(wrong.message, ctx.meta[WORDS])
                if as_json:
                    print_error(wrong.format_message(), None, wrong.exit_code)
                if as_events:
                    Events().failed(wrong.format_message(), None, wrong.exit_code)
                    raise typer.Exit(wrong.exit_code) from None
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


# Options of commands that name a format, which other dialects than theirs call otherwise.
_FORMATS: Mapping[tuple[str | None, str], Dialect] = {
    ("quantize-cpu", "--method"): "quantize-cpu",
    ("quantize-gpu", "--scheme"): "quantize-gpu",
}


def respelled(command: str | None, words: Sequence[str]) -> list[str]:
    """`words` with the command's own names of formats in place of those that kernels, the other
    command, compressed-tensors and KTransformers have: int4-g32 is rawint4."""
    found, option = list[str](), ""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if (command, option) in _FORMATS:
            found.append(_own_name(_FORMATS[command, option], word))
            option = ""
        elif equals and (command, name) in _FORMATS:
            found.append(f"{name}={_own_name(_FORMATS[command, name], value)}")
        elif word == "--":
            return [*found, *words[number:]]
        else:
            found.append(word)
            option = word
    if command == "quantize-gpu" and (group := _group_of(words)):
        found = [f"--group-size={group}", *found]
    return found


def _own_name(dialect: Dialect, value: str) -> str:
    own = {name.lower() for name in names_in(dialect)}
    spec = None if value.lower() in own else spec_named(value, dialect)
    return value if spec is None else spec.name_in(dialect)


def _group_of(words: Sequence[str]) -> int | None:
    """The group size that the name of a scheme in another dialect has, where it is not usual and
    none is given."""
    if any(word.partition("=")[0] == "--group-size" for word in words):
        return None
    pairs = zip(words, [*words[1:], ""], strict=True)
    values = [then for word, then in pairs if word == "--scheme"]
    values += [word.partition("=")[2] for word in words if word.startswith("--scheme=")]
    value = values[-1] if values else ""
    own = {name.lower() for name in names_in("quantize-gpu")}
    spec = None if value.lower() in own else spec_named(value, "quantize-gpu")
    return (
        None
        if spec is None or spec.group == spec_of(spec.scheme, "quantize-gpu").group
        else spec.group
    )


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
        name = option[1] if option else before if before.startswith("-") else "an argument"
        if option or not word:
            raise UsageError(f"{name} is empty", "give a value, or omit it")
