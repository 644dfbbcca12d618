"""The command `ktconv` and the table of its subcommands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated

import typer

from ktconv import __version__
from ktconv.cli.parsing import Command, Group

# Modules and functions of the commands, which are loaded when they are asked for.
COMMANDS = {
    "quantize-cpu": "quantize_cpu:quantize_cpu_command",
    "quantize-gpu": "quantize_gpu:quantize_gpu_command",
    "merge": "repack:merge_command",
    "reshard": "repack:reshard_command",
    "verify": "verify:verify",
    "compare": "compare:compare",
    "push": "push:push_command",
    "inspect": "inspect:inspect",
    "stats": "stats:stats",
    "plan": "plan:plan",
    "bench": "bench:bench",
    "doctor": "doctor:doctor",
    "completion": "completion:completion",
}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ktconv {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def application(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """`ktconv` with these of its commands."""
    found = typer.Typer(
        name="ktconv",
        cls=Group,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Convert Mixture-of-Experts checkpoints into CPU expert weights, provably right.",
    )
    found.callback()(_root)
    for name in names:
        module, _, function = COMMANDS[name].partition(":")
        command = getattr(import_module(f"ktconv.cli.{module}"), function)
        found.command(name, cls=Command)(command)
    return found


def application_for(words: Sequence[str]) -> typer.Typer:
    """With the command that these arguments name alone, which is loaded sooner; with all where they
    name none, as where a shell asks for completions."""
    return application(words[:1] if words and words[0] in COMMANDS else COMMANDS)


def __getattr__(name: str) -> typer.Typer:
    """`app`: with all commands."""
    if name == "app":
        return application()
    raise AttributeError(name)
