"""`ktconv inspect`."""

from __future__ import annotations

from typing import Annotated

from ktconv.cli.exits import errors_shown
from ktconv.cli.help import SOURCE
from ktconv.cli.output import JsonOption, document_lines, notify, print_result
from ktconv.cli.parameters import argument, flag
from ktconv.cli.sources import USUAL, Reading, reads_source


@reads_source("download", "cache_dir")
def inspect(
    path: Annotated[str, argument("A checkpoint, GGUF file, output or hub id.", "PATH")],
    reading: Reading = USUAL,
    explain: Annotated[
        bool,
        flag(
            "--explain",
            "Show how the experts were found.",
            SOURCE,
            "Prints the names and settings that were used, and what is left over. If ktconv does "
            "not know the names of a checkpoint, prints a map to edit, for --map: docs/maps.md.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint or a converted output contains; only headers are read.

    Example: ktconv inspect qwen3-int4
    """
    with errors_shown(as_json):
        from ktconv.inspect import explanation
        from ktconv.inspect.inspection import inspect_path

        facts = inspect_path(reading.source(path, headers_only=True), explain)
        if "map" in facts:
            notify(f"note: {facts['reason']}")
            print_result(as_json, facts, lambda: explanation.unknown_lines(facts))
            return
        shown = {name: fact for name, fact in facts.items() if name != "explained"}
        print_result(
            as_json,
            facts,
            lambda: [
                *document_lines(shown),
                *(explanation.lines_of(facts["explained"]) if "explained" in facts else ()),
            ],
        )
