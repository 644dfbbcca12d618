"""`ktconv completion`, and its old spellings `--show-completion` and `--install-completion`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import click

from ktconv.cli.exits import errors_shown
from ktconv.cli.output import print_text
from ktconv.cli.parameters import argument
from ktconv.errors import UsageError
from ktconv.system.files import translated

Shell = Literal["bash", "zsh", "fish"]


class _Place(NamedTuple):
    """Files below the home directory from which a shell loads completions."""

    script: str
    startup: str = ""  # the file that loads it; "": the shell does so itself
    line: str = ""  # of that file; {} is the script


_PLACES = {
    "bash": _Place(".bash_completions/ktconv.sh", ".bashrc", "source {}"),
    "zsh": _Place(".zfunc/_ktconv", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": _Place(".config/fish/completions/ktconv.fish"),
}


def completion(
    shell: Annotated[Shell, argument("Shell to print for.", "bash|zsh|fish")],
) -> None:
    """Print the script that completes commands, options, their values and files in a shell.

    Load it with `source <(ktconv completion bash)`; zsh needs its compinit before.

    Example: ktconv completion bash
    """
    with errors_shown():
        print_text(_script(shell))


def complete_own_shell(install: bool) -> None:
    """Print the script of the shell that SHELL names, or write it where that shell loads it."""
    with errors_shown():
        shell = Path(os.environ.get("SHELL", "")).name
        if shell not in get_args(Shell):
            raise UsageError(
                f"SHELL is {shell or 'not set'}, and completions are made for bash, zsh and fish",
                "print one of them with ktconv completion bash, and load it in the shell",
            )
        print_text(_installed(shell) if install else _script(shell))


def _script(shell: str) -> str:
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    return kind(click.Command("ktconv"), {}, "ktconv", "_KTCONV_COMPLETE").source()


def _installed(shell: str) -> str:
    """Write the script and the line that loads it, unless it is there; says which files."""
    place, home = _PLACES[shell], Path.home()
    script = home / place.script
    with translated("write", script):
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(_script(shell) + "\n", encoding="utf-8")
    said = f"wrote {script}"
    if place.startup:
        startup = home / place.startup
        quoted = "'" + str(script).replace("'", "'\\''") + "'"
        if _added(startup, os.fsencode(place.line.format(quoted))):
            said += f", and a line to {startup} that loads it"
    return f"{said}; new shells complete ktconv"


def _added(path: Path, line: bytes) -> bool:
    """Whether a file had no such line, and has it now; what a link leads to is written."""
    with translated("write", path), path.open("a+b") as file:
        file.seek(0)
        content = file.read()
        if line in content.splitlines():
            return False
        file.write(b"\n" * (not content.endswith(b"\n") and bool(content)) + line + b"\n")
    return True
