"""`quantize-cpu --from-list`: a line for each change of a run, and a table of states at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from ktconv.cli.events import events, mode
from ktconv.cli.exits import interruptible
from ktconv.cli.options import progress_mode
from ktconv.cli.output import notify, print_result, sentence
from ktconv.cli.parsing import WORDS
from ktconv.cli.process import INTERRUPTED
from ktconv.errors import UsageError
from ktconv.system.text import table_lines
from ktconv.system.units import counted, format_duration, format_rate
from ktconv.system.waiting import Wait

_NEXT_STEP = "Finished layers are kept: run the same command again to continue."
# Options of the whole list, with and without a value: its runs do not get them.
_WITH_VALUE = {"--from-list", "--at-once", "--progress"}
_WITHOUT = {"--json"}


def convert_list(
    context: click.Context, listed: Path, given: Sequence[object], at_once: int, as_json: bool
) -> None:
    """Convert every model of a list. `given`: MODEL and OUTPUT, which a list replaces."""
    from ktconv.distributed.models.listing import read_list
    from ktconv.distributed.models.runs import Fleet, Run

    if any(one is not None for one in given):
        raise UsageError(
            "--from-list takes models and outputs from its file", "omit MODEL and OUTPUT"
        )
    common = _common(context.meta[WORDS])
    entries = read_list(listed, lambda words: _refused(context, [*words, *common]))

    def changed(run: Run, event: dict[str, Any]) -> None:
        if listener := events():
            listener.emit_of(run.entry.line, event)
            return
        if bar is not None:
            bar.changed(run, event)
        if line := _line(run, event, len(entries), units=bar is None):
            notify(line)

    fleet = Fleet(entries, common, at_once, changed)
    bar: Any = None
    if not events() and progress_mode() == "bar":
        from ktconv.cli.bar import FleetBar

        bar = FleetBar(len(entries))
    with interruptible(lambda: _NEXT_STEP), bar or nullcontext():
        fleet.run()
    facts = {"schema": 1, "runs": [run.facts() for run in fleet.runs]}
    print_result(as_json, facts, lambda: _table(fleet.runs))
    if fleet.exit_code:
        raise click.exceptions.Exit(fleet.exit_code)


def _common(words: Sequence[str]) -> list[str]:
    """The words of this command that each run gets."""
    found, rest = [], iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in _WITH_VALUE:
            if not equals:
                next(rest, None)
        elif word not in _WITHOUT:
            found.append(word)
    return found


def _refused(context: click.Context, words: Sequence[str]) -> str | None:
    """The error of these words as arguments of the command; None: they are right."""
    if "" in words:
        return "an argument is empty"
    try:
        context.command.make_context("quantize-cpu", list(words))
    except click.ClickException as error:
        return error.format_message().rstrip(".")
    return None


def _line(run: Any, event: dict[str, Any], count: int, units: bool) -> str | None:
    """A line about a change, of finished units only with `units`; None: nothing that a user must
    know."""
    name = f"{run.entry.output} (line {run.entry.line})"
    kind = event["event"]
    if kind == "run_finished":
        took = format_duration(run.seconds)
        if run.exit_code == INTERRUPTED:  # what is kept is said once, for all
            return f"{name}: interrupted, {took}."
        hint = f" Hint: {sentence(run.hint)}" if run.hint else ""
        return f"{name}: {run.words}, {took}.{hint}"
    if kind == "run_started":
        return f"{name}: started, one of {count}"
    if kind == "note":
        return f"{name}: {event['text']}"
    if kind == "waiting" and mode() != "none":
        seconds = event["seconds"]
        return f"{name}: {Wait(event['for'], event['why'], seconds).words}"
    if kind == "unit_finished" and units and mode() != "none":
        left = event["eta_seconds"]
        eta = "?" if left is None else format_duration(left)
        speed = format_rate(event["bytes_per_second"])
        return f"{name}: {run.finished}/{counted(run.units, 'unit')}, {speed}, ETA {eta}"
    return None


def _table(runs: Sequence[Any]) -> Iterator[str]:
    rows = [("line", "model", "output", "time", "state")]
    rows += [
        (
            str(run.entry.line),
            run.entry.shown,
            str(run.entry.output),
            format_duration(run.seconds),
            run.words,
        )
        for run in runs
    ]
    yield from table_lines(rows, left=range(5))
    done = sum(run.state == "done" for run in runs)
    yield f"{done} of {len(runs)} done."
