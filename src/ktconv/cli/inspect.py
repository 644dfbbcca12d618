"""`ktconv inspect`."""

from __future__ import annotations

from typing import Annotated

from ktconv.cli.exits import errors_shown
from ktconv.cli.options import ConfigOption, MapOption
from ktconv.cli.output import JsonOption, document_lines, print_result
from ktconv.cli.parsing import argument


def inspect(
    path: Annotated[str, argument("A checkpoint, GGUF file, output of ktconv, or hub id.", "PATH")],
    config: ConfigOption = None,
    naming: MapOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint or a converted output contains; only headers are read.

    Example: ktconv inspect qwen3-int4
    """
    with errors_shown(as_json):
        from ktconv.packed.inspection import inspect_path

        facts = inspect_path(path, config, naming)
        print_result(as_json, facts, lambda: document_lines(facts))
