"""The command `ktconv` and the table of its subcommands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated

import click

from ktconv import __version__
from ktconv.cli.commands import COMMANDS
from ktconv.cli.parameters import callback_of, flag, parameters_of
from ktconv.cli.parsing import Command, Group

_INSTALL, _SHOW = "--install-completion", "--show-completion"
_ABOUT_ITSELF = {"-h", "--help", "--version", "--json", _INSTALL, _SHOW}  # of `ktconv` alone


def _root(
    context: click.Context,
    version: Annotated[bool, flag("--version", "Show the version, and exit.")] = False,
    as_json: Annotated[
        bool, flag("--json", "With --version: what this build is, as JSON.")
    ] = False,
    install_completion: Annotated[
        bool, flag(_INSTALL, "Install the completion of $SHELL.", is_hidden=True)
    ] = False,
    show_completion: Annotated[
        bool, flag(_SHOW, "Print the completion of $SHELL.", is_hidden=True)
    ] = False,
) -> None:
    if install_completion or show_completion:
        from ktconv.cli.completion import complete_own_shell

        complete_own_shell(install_completion)
        raise click.exceptions.Exit
    if version:
        print(_build() if as_json else f"ktconv {__version__}")
        raise click.exceptions.Exit
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


def application(names: Iterable[str] = COMMANDS) -> Group:
    """`ktconv` with these of its commands."""
    found = Group(
        name="ktconv",
        callback=callback_of(_root),
        params=parameters_of(_root),
        no_args_is_help=True,
        invoke_without_command=True,
        subcommand_metavar="COMMAND [ARGS]...",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Convert Mixture-of-Experts checkpoints into expert weights for CPUs and GPUs; "
        "verify, compare and measure them.",
    )
    for name in names:
        module, _, function = COMMANDS[name].function.partition(":")
        found.add_command(Command(name, getattr(import_module(f"ktconv.cli.{module}"), function)))
    return found


def application_for(words: Sequence[str]) -> Group:
    """`ktconv` with the command that these arguments name only, or with none where they ask about
    `ktconv` itself, which starts sooner; with all otherwise, as for a shell's completions."""
    if words and words[0] in COMMANDS:
        return application(words[:1])
    completes = "_KTCONV_COMPLETE" in os.environ
    return application(() if _ABOUT_ITSELF.issuperset(words) and not completes else COMMANDS)


def __getattr__(name: str) -> Group:
    """`app`: with all commands."""
    if name == "app":
        globals()["app"] = found = application()  # from now on no question of this function
        return found
    raise AttributeError(name)
