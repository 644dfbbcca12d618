"""`ktconv inspect` and `ktconv doctor`: they read and print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktconv.cli.show import JsonOption, errors_shown, fact_lines, print_result


def inspect(
    path: Annotated[str, typer.Argument(help="A checkpoint, an output of ktconv, or a hub id.")],
    as_json: JsonOption = False,
) -> None:
    """Tell what a checkpoint or a converted output holds, from headers alone.

    Example: ktconv inspect qwen3-int4
    """
    with errors_shown():
        from ktconv.inspection import inspect_path

        facts = inspect_path(path)
        print_result(as_json, facts, lambda: fact_lines(facts))


def doctor(as_json: JsonOption = False) -> None:
    """Tell what this machine can do: CPU, AMX, NUMA, memory, disk, optional packages.

    Example: ktconv doctor
    """
    with errors_shown():
        from ktconv.doctor import examine

        facts = examine(Path.cwd())
        print_result(as_json, facts, lambda: fact_lines(facts))
