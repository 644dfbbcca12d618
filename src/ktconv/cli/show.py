"""What all commands share: results on stdout, words on stderr, errors as one sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn, TextIO

import typer

from ktconv.errors import KtconvError
from ktconv.text import printable, valid_unicode
from ktconv.units import format_size

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def given(context: typer.Context) -> frozenset[str]:
    """Options that were written, whatever their value: by their first long names."""
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(str(name)) for name in names}
    return frozenset(
        names[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"
    )


def print_text(text: str) -> None:
    """A table or document on stdout, line by line."""
    _print(map(printable, text.split("\n")))


def print_result(as_json: bool, facts: dict[str, Any], lines: Callable[[], Iterable[str]]) -> None:
    """On stdout: `facts` as one JSON document, or `lines` for people."""
    if as_json:
        _print([json.dumps(valid_unicode(facts), indent=1)])
    else:
        _print(map(printable, lines()))


def _print(lines: Iterable[str]) -> None:
    """Everything on stdout passes here, and its lines hold no control characters."""
    text = "".join(f"{line}\n" for line in lines)
    try:
        sys.stdout.write(_encodable(text, sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left, as `| head` does: the work is done all the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _encodable(text: str, stream: TextIO) -> str:
    """`text` with escapes for what the stream's encoding lacks, as ASCII lacks most."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def fact_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Names and values as aligned lines; nested names indented."""
    return _fact_lines(facts, 0)


def _fact_lines(facts: dict[str, Any], indent: int) -> Iterator[str]:
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        label = " " * indent + name.replace("_", " ")
        if isinstance(value, dict):
            yield label
            yield from _fact_lines(value, indent + 2)
        else:
            yield f"{label:<{indent + width}}  {_fact_text(name, value)}"


def _fact_text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("bytes"):
        return f"{value} ({format_size(value)})"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else str(value)


def say(text: str) -> None:
    """One line on stderr, if anybody still reads it: a lost log must not end an hour of work."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(_encodable(printable(text), sys.stderr), file=sys.stderr, flush=True)


@contextmanager
def interruptible(way_out: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM end a run cleanly, with exit code 130."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        say("")  # leaves the line on which the terminal shows ^C
        say(f"Interrupted. {way_out}")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def errors_shown() -> Iterator[None]:
    """KtconvError as one sentence and a hint on stderr, with its exit code."""
    try:
        yield
    except KtconvError as error:
        say(f"Error: {_sentence(str(error))}")
        if error.hint:
            say(f"Hint: {_sentence(error.hint)}")
        raise typer.Exit(error.exit_code) from None
    except OSError as error:  # where no file or tensor was known; the library knows most
        where = f" {error.filename}" if error.filename else ""
        say(f"Error: the system refused{where}: {_sentence(error.strerror or str(error))}")
        raise typer.Exit(3) from None
    except MemoryError:
        say("Error: this machine has too little memory for this.")
        say("Hint: use fewer --threads.")
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _sentence(text: str) -> str:
    """With one full stop at its end, and names of absurd length cut in the middle."""
    shown = re.sub(r"(\S{140})\S{21,}(\S{140})", r"\1...\2", printable(text))
    return shown.rstrip(".") + "."
