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


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="With --version: what this build is, as a JSON document."),
    ] = False,
) -> None:
    if version:
        print(_build() if as_json else f"ktconv {__version__}")
        raise typer.Exit
    if as_json:
        context.fail("--json is an option of --version and of commands: ktconv COMMAND --json")


def _build() -> str:
    """What identifies a build, for scripts and bug reports; `ktconv doctor` tells about the
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
        help="Convert Mixture-of-Experts checkpoints into CPU expert weights, provably right.",
    )
    found.callback(invoke_without_command=True)(_root)
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
