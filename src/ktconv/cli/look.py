"""`ktconv inspect` and `ktconv doctor`: they read and print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ktconv.cli.exits import errors_shown
from ktconv.cli.show import JsonOption, fact_lines, print_result


def inspect(
    path: Annotated[
        str, typer.Argument(help="A checkpoint, an output of ktconv, or a hub id.", metavar="PATH")
    ],
    as_json: JsonOption = False,
) -> None:
    """Tell what a checkpoint or a converted output holds, from headers alone.

    Example: ktconv inspect qwen3-int4
    """
    with errors_shown(as_json):
        from ktconv.inspection import inspect_path

        facts = inspect_path(path)
        print_result(as_json, facts, lambda: _lines(facts))


def doctor(as_json: JsonOption = False) -> None:
    """Tell what this machine can do: CPU, AMX, NUMA, memory, disk, optional packages.

    Example: ktconv doctor
    """
    with errors_shown(as_json):
        from ktconv.doctor import examine

        facts = examine(Path.cwd())
        print_result(as_json, facts, lambda: _lines(facts))


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """For people, who need not know which version of the JSON document this would be."""
    return fact_lines({name: fact for name, fact in facts.items() if name != "schema"})
