"""`ktconv completion`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ktconv.cli.exits import errors_shown
from ktconv.cli.output import print_text

Shell = Literal["bash", "zsh", "fish"]


def completion(
    shell: Annotated[
        Shell,
        typer.Argument(help="Shell to print for.", metavar="bash|zsh|fish", case_sensitive=False),
    ],
) -> None:
    """Print the script that completes commands, options, their values and files in a shell.

    Load it with `source <(ktconv completion bash)`; zsh needs its compinit before.

    Example: ktconv completion bash
    """
    with errors_shown():
        from typer.completion import get_completion_script  # type: ignore[attr-defined]

        name, variable = "ktconv", "_KTCONV_COMPLETE"
        print_text(get_completion_script(prog_name=name, complete_var=variable, shell=shell))
