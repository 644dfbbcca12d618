"""The `ktconv` command from its first instruction."""

from __future__ import annotations

import gc
import os
import sys

from ktconv.cli.process import open_streams, quit_on_signals

_OBJECTS = 50_000  # between two searches for cycles; imports make some 100 000 that stay


def main() -> None:
    """Entry point of the `ktconv` command."""
    quit_on_signals()
    open_streams()
    # Else idle threads of OpenBLAS, which start with NumPy, spin for 30 ms before they sleep.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    gc.set_threshold(_OBJECTS)
    from ktconv.cli.app import application_for

    try:
        try:
            application_for(sys.argv[1:])()
        finally:
            sys.stdout.flush()
    except OSError as error:  # of --help and --version; commands show their own
        print(
            f"Error: the operating system reported an error: {error.strerror or error}.",
            file=sys.stderr,
        )
        sys.exit(3)
