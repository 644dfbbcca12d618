"""Options and arguments of commands, declared in their signatures, as parameters of click.

    threads: Annotated[int, option("Worker threads.", "T", min=0)] = 0

is `--threads T`. Types are str, int, float, bool, Path and Literals, lists of them, and None with
them where a default means that nothing was given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import click
from msgspec import Struct

from ktconv.cli import help

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

MOST_PARTS = 1024  # NUMA nodes of the largest machines
Run = TypeVar("Run", bound=Callable[..., None])


class Declared(Struct, frozen=True):
    """Declaration of a parameter in a signature, without its name, type and default."""

    words: str  # its line of --help
    metavar: str | None = None
    names: tuple[str, ...] = ()  # of an option; () for the parameter's own
    panel: str = help.RUN
    detail: str = ""  # what --help-all and the site say besides
    min: float | None = None
    max: float | None = None
    is_argument: bool = False
    is_hidden: bool = False  # an old spelling, which no help shows


def argument(words: str, metavar: str, detail: str = "") -> Declared:
    return Declared(words, metavar, detail=detail, is_argument=True)


def option(
    words: str, metavar: str, *names: str, panel: str = help.RUN, detail: str = "", **limits: Any
) -> Declared:
    """An option with a value. `words`: its line of --help; `detail`: what --help-all and the site
    say besides; `limits`: `min` and `max`, of whole numbers by default MOST. The first of `names`
    is the option's name, others are old spellings."""
    if isinstance(limits.get("min"), int):
        limits.setdefault("max", help.MOST)
    return Declared(words, metavar, names, panel, detail, **limits)


def flag(
    names: str, words: str, panel: str = help.RUN, detail: str = "", is_hidden: bool = False
) -> Declared:
    """An option without a value, like "--compat" or "--mtp/--no-mtp"."""
    return Declared(words, None, (names,), panel, detail, is_hidden=is_hidden)


def choice(
    values: Any,
    words: str,
    *names: str,
    panel: str = help.RUN,
    detail: str = "",
    metavar: str = "NAME",
) -> Declared:
    """An option that takes the values of a Literal type, in any case. `metavar` stands for them
    where they are long."""
    shown = help.metavar_of(get_args(values), metavar)
    return Declared(words, shown, names, panel, detail)


def with_options(
    command: Run, place: str, options: Sequence[Parameter], make: Callable[[dict[str, Any]], Any]
) -> Run:
    """Give a command `options` in place of its parameter `place`, which gets what `make` makes of
    their values, by name."""
    whole = signature(command, eval_str=True)  # get_type_hints of Python 3.10 adds Optional
    names = [one.name for one in options]

    @wraps(command)
    def run(*args: Any, **given: Any) -> None:
        made = make({name: given.pop(name) for name in names})
        command(*args, **{place: made}, **given)

    parameters: list[Parameter] = []
    for name, one in whole.parameters.items():
        if name == place:
            parameters += options
        else:
            kind = Parameter.KEYWORD_ONLY
            parameters.append(one.replace(kind=kind))
    changed: Any = run
    changed.__signature__ = whole.replace(parameters=parameters)
    changed.__annotations__ = {one.name: one.annotation for one in parameters}
    return cast(Run, run)


# ---- as click has them -------------------------------------------------------------------


def callback_of(command: Callable[..., None]) -> Callable[..., None]:
    """A command as click calls it: with the context, where its signature asks for that first."""
    asked = any(one.annotation is click.Context for one in _signature(command).parameters.values())
    return click.pass_context(command) if asked else command


def parameters_of(command: Callable[..., None]) -> list[click.Parameter]:
    """The arguments and options that a signature declares, in its order."""
    return [_parameter(*found) for found in _declared(_signature(command))]


def _signature(command: Callable[..., None]) -> Signature:
    return signature(command, eval_str=True)


def _declared(of: Signature) -> Iterator[tuple[Parameter, Any, Declared]]:
    """Parameters with their types and declarations."""
    for one in of.parameters.values():
        if get_origin(one.annotation) is Annotated:
            kind, declared = get_args(one.annotation)
            yield one, kind, declared


def _parameter(one: Parameter, kind: Any, declared: Declared) -> click.Parameter:
    alternatives = [part for part in get_args(kind) if part is not type(None)]
    if type(None) in get_args(kind):
        (kind,) = alternatives
    several = get_origin(kind) is list
    more: dict[str, Any] = {"type": _type(get_args(kind)[0] if several else kind, declared)}
    if one.default is not Parameter.empty:
        more["default"] = one.default
    if several:
        more["callback"] = _list_or_none
    if declared.is_argument:
        required = one.default is Parameter.empty
        return Argument(declared, one.name, required, nargs=-1 if several else 1, **more)
    names = declared.names or (f"--{one.name.replace('_', '-')}",)
    if kind is bool:
        return Option(declared, (one.name, *names), is_flag=True, **more)
    required = "default" not in more
    return Option(declared, (one.name, *names), required=required, multiple=several, **more)


def _list_or_none(_: click.Context, __: click.Parameter, value: Any) -> list[Any] | None:
    return list(value) if value else None


def _type(kind: Any, declared: Declared) -> Any:
    if get_origin(kind) is Literal:
        return Choice(get_args(kind))
    if kind is Path:
        return click.Path(path_type=Path)
    made: Any = {int: _Whole, float: _Number}.get(kind)
    if made:
        return made(declared.min, declared.max)
    return click.BOOL if kind is bool else click.STRING


class _Whole(click.IntRange):
    """Whole numbers, within limits where there are some; programs have some as 2.0."""

    name = "integer"  # of messages

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\.0+\s*", value):
            value = value.partition(".")[0]
        return super().convert(value, param, ctx)


class _Number(click.FloatRange):
    """Numbers, within limits where there are some. NaN is none: no check against it fails."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class Choice(click.Choice[str]):
    """One of a few names, in any case; messages have them as they are written."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        named = {one.casefold(): one for one in self.choices}
        return super().convert(named.get(value.casefold(), value), param, ctx)

    def get_missing_message(self, *_: Any, **__: Any) -> str:
        return f"Choose from {', '.join(self.choices)}."

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        start = incomplete.casefold()
        return [CompletionItem(one) for one in self.choices if one.casefold().startswith(start)]


class _Described(click.Parameter):
    """A parameter with its texts; what can be anything is completed as the name of a file."""

    def describe(self, declared: Declared) -> None:
        self.help, self.detail, self.panel = declared.words, declared.detail, declared.panel

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        if isinstance(self.type, Choice):
            return super().shell_complete(ctx, incomplete)
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


class Argument(_Described, click.Argument):
    """An argument of a command."""

    def __init__(self, declared: Declared, name: str, required: bool, **about: Any) -> None:
        super().__init__([name], required, metavar=declared.metavar, **about)
        self.describe(declared)

    def get_usage_pieces(self, ctx: Any) -> list[str]:
        name = self.make_metavar(ctx)
        shown = f"{{{name}}}" if "|" in name else name if self.required else f"[{name}]"
        return [shown + ("..." if self.nargs != 1 else "")]


class Option(_Described, click.Option):
    """An option of a command."""

    def __init__(self, declared: Declared, names: Sequence[str], **about: Any) -> None:
        super().__init__(names, metavar=declared.metavar, hidden=declared.is_hidden, **about)
        self.describe(declared)
