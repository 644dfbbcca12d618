"""The `ktconv` command from its first instruction."""

from __future__ import annotations

import sys

from ktconv.cli.process import open_streams, quit_on_signals


def main() -> None:
    """Entry point of the `ktconv` command."""
    quit_on_signals()
    open_streams()
    from ktconv.cli.app import app

    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:  # of --help and --version; commands show their own
        print(
            f"Error: the operating system reported an error: {error.strerror or error}.",
            file=sys.stderr,
        )
        sys.exit(3)
