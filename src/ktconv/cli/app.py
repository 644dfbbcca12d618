"""The command `ktconv` and the table of its subcommands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from ktconv import __version__
from ktconv.cli.bench import bench
from ktconv.cli.compare import compare
from ktconv.cli.completion import completion
from ktconv.cli.doctor import doctor
from ktconv.cli.inspect import inspect
from ktconv.cli.parsing import Command, Group
from ktconv.cli.plan import plan
from ktconv.cli.push import push_command
from ktconv.cli.quantize_cpu import quantize_cpu_command
from ktconv.cli.quantize_gpu import quantize_gpu_command
from ktconv.cli.repack import merge_command, reshard_command
from ktconv.cli.stats import stats
from ktconv.cli.verify import verify

app = typer.Typer(
    name="ktconv",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Convert Mixture-of-Experts checkpoints into CPU expert weights, provably right.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ktconv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


COMMANDS: dict[str, Callable[..., None]] = {
    "quantize-cpu": quantize_cpu_command,
    "quantize-gpu": quantize_gpu_command,
    "merge": merge_command,
    "reshard": reshard_command,
    "verify": verify,
    "compare": compare,
    "push": push_command,
    "inspect": inspect,
    "stats": stats,
    "plan": plan,
    "bench": bench,
    "doctor": doctor,
    "completion": completion,
}
for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command)(_command)
