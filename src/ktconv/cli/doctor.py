"""`ktconv doctor`."""

from __future__ import annotations

from pathlib import Path

from ktconv.cli.exits import errors_shown
from ktconv.cli.output import JsonOption, document_lines, print_result


def doctor(as_json: JsonOption = False) -> None:
    """Show what this machine supports: CPU, AMX, NUMA, memory, disk, optional packages.

    Example: ktconv doctor
    """
    with errors_shown(as_json):
        from ktconv.inspect.doctor import examine

        facts = examine(Path.cwd())
        print_result(as_json, facts, lambda: document_lines(facts))
