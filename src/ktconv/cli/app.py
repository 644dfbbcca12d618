"""The command `ktconv` and the table of its subcommands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated

import typer

from ktconv import __version__
from ktconv.cli.commands import COMMANDS
from ktconv.cli.parsing import Command, Group

_ABOUT_ITSELF = {"-h", "--help", "--version", "--json"}  # options of `ktconv` alone


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version, and exit.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="With --version: what this build is, as JSON."),
    ] = False,
) -> None:
    if version:
        print(_build() if as_json else f"ktconv {__version__}")
        raise typer.Exit
    if as_json:
        context.fail("--json is an option of --version and of commands: ktconv COMMAND --json")


def _build() -> str:
    """Facts that identify a build, for scripts and bug reports; `ktconv doctor` is about the
    machine."""
    import json
    import platform

    from ktconv import native

    facts = {
        "schema": 1,
        "ktconv": __version__,
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "levels": native.isa_available(),
    }
    return json.dumps(facts)


def application(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """`ktconv` with these of its commands."""
    found = typer.Typer(
        name="ktconv",
        cls=Group,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Convert Mixture-of-Experts checkpoints into expert weights for CPUs and GPUs; "
        "verify, compare and measure them.",
    )
    found.callback(invoke_without_command=True)(_root)
    for name in names:
        module, _, function = COMMANDS[name].function.partition(":")
        command = getattr(import_module(f"ktconv.cli.{module}"), function)
        found.command(name, cls=Command)(command)
    return found


def application_for(words: Sequence[str]) -> typer.Typer:
    """`ktconv` with the command that these arguments name only, or with none where they ask about
    `ktconv` itself, which starts sooner; with all otherwise, as for a shell's completions."""
    if words and words[0] in COMMANDS:
        return application(words[:1])
    completes = "_KTCONV_COMPLETE" in os.environ
    return application(() if _ABOUT_ITSELF.issuperset(words) and not completes else COMMANDS)


def __getattr__(name: str) -> typer.Typer:
    """`app`: with all commands."""
    if name == "app":
        return application()
    raise AttributeError(name)
