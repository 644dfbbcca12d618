"""Runs a Python program in which `import kt_kernel` means ktconv.

    python -m ktconv.compat.kt -m sglang.launch_server --model-path MODEL ...
    python -m ktconv.compat.kt SCRIPT.py ...

The program takes the place of this process, with the same interpreter options, so that it runs as
it would without.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from ktconv.compat.kt.alias import NAMES, prepare
from ktconv.errors import KtconvError, UsageError

USAGE = "usage: python -m ktconv.compat.kt (-m MODULE | -c CODE | SCRIPT) [ARGUMENT ...]"


def command(arguments: list[str]) -> list[str]:
    """The command line that runs the program. UsageError where it would not see the alias."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        raise UsageError(f"there is no program in {' '.join(arguments) or 'the command'}", USAGE)
    if arguments[0] in ("-m", "-c") and len(arguments) == 1:
        raise UsageError(f"{arguments[0]} has nothing behind it", USAGE)
    if sys.flags.ignore_environment:
        raise UsageError(
            "Python ignores its environment (-E or -I), through which the program gets kt_kernel",
            "leave the option out",
        )
    safe = getattr(sys.flags, "safe_path", False)  # Python 3.11
    for name in () if safe else NAMES:
        found = PathFinder.find_spec(name, [str(_first_on_path(arguments[0]))])
        if found is not None and found.origin is not None:  # else a directory without modules
            raise UsageError(
                f"{found.origin} would be imported instead of ktconv",
                "run the program from another directory, or with python -P",
            )
    # What multiprocessing, too, starts interpreters with.
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *options, *arguments]


def _first_on_path(program: str) -> Path:
    """The directory where Python looks for modules first."""
    if program in ("-m", "-c"):
        return Path.cwd()
    found = Path(program).resolve()
    return found if found.is_dir() else found.parent


def main(arguments: list[str]) -> int:
    """Ends by becoming the program; returns an exit status where that is not possible."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    try:
        line = command(arguments)
        environment = dict(os.environ)
        prepare(environment)
        sys.stdout.flush()
        os.execve(line[0], line, environment)
    except KtconvError as error:
        print(f"Error: {error}\n{error.hint or USAGE}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"Error: {sys.executable} cannot be started: {error.strerror}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
