"""The tables of options that exclude or need one another: each row refuses what it says."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import ktconv, refused

from ktconv.cli.app import app
from ktconv.cli.commands import COMMANDS
from ktconv.cli.conflicts import Conflict

PARSED: dict[str, Any] = dict(app.commands)


def table(function: str) -> tuple[Conflict, ...]:
    module = importlib.import_module(f"ktconv.cli.{function.partition(':')[0]}")
    return tuple(getattr(module, "CONFLICTS", ()))


TABLES = {name: found for name, row in COMMANDS.items() if (found := table(row.function))}
ROWS = [(name, row) for name, rows in TABLES.items() for row in rows]


def words_of(name: str, when: str, folder: Path) -> list[str]:
    """Arguments for which the conditions hold."""
    options = {one.opts[0]: one for one in PARSED[name].params}
    arguments = [one for one in PARSED[name].params if one.param_type_name == "argument"]
    words = {
        one.metavar: str(folder / one.metavar)
        for one in arguments
        if one.required or name == "quantize-cpu"
    }
    for condition in when.split():
        option, equals, values = condition.removeprefix("!").partition("=")
        if condition.startswith("!"):
            # Another value than that one is the one that the option gets here.
            assert option in options and (not equals or words[option] != f"{option}={values}")
            continue
        if option in {one.metavar for one in arguments}:
            words[option] = str(folder / option)
            continue
        found = options[option]
        value = values.split(",")[0] or value_of(found, folder)
        words[option] = option if found.is_flag else f"{option}={value}"
    given = [word for word in words.values() if word.startswith("--")]
    return [*given, *(word for word in words.values() if not word.startswith("--"))]


def value_of(option: Any, folder: Path) -> str:
    from ktconv.cli.help import choices_of

    if choices := choices_of(option):
        return str(choices[0])
    has_limit = getattr(option.type, "max", None) is not None
    if has_limit or option.metavar in ("N", "K", "T", "F", "B", "R"):
        return "1"
    return {"SIZE": "1GB", "[ADDRESS]": "auto", "LIST": "1", "SHAPE": "1,1,1,1", "N,N": "2,2"}.get(
        option.metavar, str(folder / "given")
    )


def test_commands_with_options_that_conflict() -> None:
    names = {"quantize-cpu", "quantize-gpu", "verify", "stats", "bench", "prune", "generate"}
    assert TABLES.keys() == names
    assert len(ROWS) > 100


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{name} {row.when}" for name, row in ROWS])
def test_a_row_refuses_what_it_says(name: str, row: Conflict, tmp_path: Path) -> None:
    """Its own message, unless a row above refuses the same words: both are of the table."""
    words = words_of(name, row.when, tmp_path)
    result = ktconv(name, *words)
    line = refused(result, 2).removeprefix("Error: ").rstrip(".")
    messages = [one.message.partition("{")[0] for one in TABLES[name]]
    assert any(line.startswith(message) for message in messages), line
    first = next(one for one in TABLES[name] if line.startswith(one.message.partition("{")[0]))
    assert TABLES[name].index(first) <= TABLES[name].index(row)
    hint = result.stderr.split("Hint: ")[1].strip().rstrip(".")
    assert hint in [one.hint for one in TABLES[name]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TABLES)
def test_most_rows_are_the_first_that_hold(name: str, tmp_path: Path) -> None:
    """A row that another one hides says nothing."""
    hidden = []
    for row in TABLES[name]:
        line = refused(ktconv(name, *words_of(name, row.when, tmp_path)), 2)
        start = row.message.partition("{")[0]
        if not line.removeprefix("Error: ").startswith(start):
            hidden.append(row.when)
    assert not hidden


@pytest.mark.parametrize("name", TABLES)
def test_rows_name_options_of_the_command(name: str) -> None:
    known = {one.opts[0] for one in PARSED[name].params}
    known |= {one.metavar for one in PARSED[name].params if one.param_type_name == "argument"}
    for row in TABLES[name]:
        for condition in row.when.split():
            assert condition.removeprefix("!").partition("=")[0] in known, row


def test_an_option_alone_is_refused_by_no_row(tmp_path: Path) -> None:
    """So that a condition that always holds is found."""
    for name, rows in TABLES.items():
        conditions = [row.when.split() for row in rows]
        # A row of options of which one is needed: the first of them is given.
        either = [one[0][1:] for one in conditions if all(word[0] == "!" for word in one)]
        words = words_of(name, " ".join(either), tmp_path)
        context = PARSED[name].make_context(name, words)
        from ktconv.cli.conflicts import refuse_conflicts

        refuse_conflicts(context, rows)
