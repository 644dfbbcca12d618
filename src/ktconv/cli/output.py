"""Output of all commands: results on stdout, messages on stderr."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, TextIO

import click

from ktconv.cli import calls
from ktconv.cli.events import events
from ktconv.cli.parameters import flag
from ktconv.system.text import printable, valid_unicode
from ktconv.system.units import format_size

JsonOption = Annotated[
    bool,
    flag(
        "--json",
        "Print one JSON document on stdout.",
        detail="An error is printed as a document too: "
        '`{"schema": 1, "error": {"message", "hint", "exit_code"}}`.',
    ),
]


def given_options(context: click.Context) -> frozenset[str]:
    """Options given on the command line, whatever their value: by their first long names."""
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(str(name)) for name in names}
    return frozenset(
        names[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"
    )


def print_text(text: str) -> None:
    """A table or document on stdout, line by line. A program gets the document."""
    if calls.is_called() and calls.keep(json.loads(text)):
        return
    _print(map(printable, text.split("\n")))


def print_result(as_json: bool, facts: dict[str, Any], lines: Callable[[], Iterable[str]]) -> None:
    """On stdout: `facts` as one JSON document, or `lines` for people. A program gets `facts`."""
    if calls.keep(facts):
        return
    if as_json:
        print_json(facts)
    else:
        _print(_for_terminal(map(printable, lines())))


def print_json(document: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    _print([json.dumps(valid_unicode(document), indent=1)])


def folded(line: str, width: int) -> list[str]:
    """A row of a table for a terminal of this width, broken between words; what follows begins
    where the second column does. Other lines stay whole: commands are copied from there."""
    columns = re.match(r"\s*\S+(?: \S+)*\s{2,}", line)
    if len(line) <= width or columns is None:
        return [line]
    indent = len(columns[0]) if len(columns[0]) <= width // 2 else 4
    return textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def _for_terminal(lines: Iterable[str]) -> Iterator[str]:
    if not sys.stdout.isatty():
        yield from lines
        return
    width = max(shutil.get_terminal_size().columns, 20)
    for line in lines:
        yield from folded(line, width)


def _print(lines: Iterable[str]) -> None:
    """Write lines to stdout. Control characters are escaped."""
    text = "".join(f"{line}\n" for line in lines)
    sys.stdout.write(_encodable(text, sys.stdout))
    sys.stdout.flush()


def print_piece(text: str) -> bool:
    """Write a piece of a text to stdout at once; False where its reader is gone. Control characters
    but ends of lines and tabs are escaped. A program gets the whole text in the document."""
    if calls.is_called():
        return True
    lines = ("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
    sys.stdout.write(_encodable("\n".join(lines), sys.stdout))
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not getattr(raw, "lost", False)


def _encodable(text: str, stream: TextIO) -> str:
    """`text` with escapes for characters that the stream's encoding cannot represent."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def fact_lines(facts: dict[str, Any], indent: int = 0) -> Iterator[str]:
    """Names and values as aligned lines; nested names indented."""
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        label = " " * indent + name.replace("_", " ")
        if isinstance(value, dict):
            yield label
            yield from fact_lines(value, indent + 2)
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


def notify(text: str) -> None:
    """One line on stderr; with `--progress json` an event; a program's log has it instead."""
    if calls.is_called():
        if text:
            calls.LOG.info("%s", text)
        return
    if listener := events():
        if text:
            listener.emit("note", text=text)
        return
    print(_encodable(printable(text), sys.stderr), file=sys.stderr, flush=True)


def sentence(text: str) -> str:
    """The message with one full stop at its end; very long names are cut in the middle."""
    shown = re.sub(r"(\S{140})\S{21,}(\S{140})", r"\1...\2", printable(text))
    return shown.rstrip(".") + "."


def document_lines(facts: dict[str, Any]) -> Iterator[str]:
    """The lines of a document without its schema number, which only readers of JSON need."""
    return fact_lines({name: fact for name, fact in facts.items() if name != "schema"})
