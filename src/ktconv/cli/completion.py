"""`ktconv completion`."""

from __future__ import annotations

from typing import Annotated, Literal

import click

from ktconv.cli.exits import errors_shown
from ktconv.cli.output import print_text
from ktconv.cli.parameters import argument

Shell = Literal["bash", "zsh", "fish"]


def completion(
    shell: Annotated[Shell, argument("Shell to print for.", "bash|zsh|fish")],
) -> None:
    """Print the script that completes commands, options, their values and files in a shell.

    Load it with `source <(ktconv completion bash)`; zsh needs its compinit before.

    Example: ktconv completion bash
    """
    with errors_shown():
        from click.shell_completion import get_completion_class

        kind = get_completion_class(shell)
        assert kind is not None
        completer = kind(click.Command("ktconv"), {}, "ktconv", "_KTCONV_COMPLETE")
        print_text(completer.source())
