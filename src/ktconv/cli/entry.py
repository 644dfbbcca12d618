"""The `ktconv` command from its first instruction."""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import sys
from typing import NoReturn

from ktconv.cli.process import INTERRUPTED, open_streams, quit_on_signals

_OBJECTS = 50_000  # between two searches for cycles; imports make some 100 000 that stay
_PLENTY = 4 << 30  # bytes of address space with which all imports succeed
_OTHER_IMPORTS = 96 << 20  # bytes of it, generously
_SECONDS = 20  # of CPU, of which NumPy's import takes a fraction of one
_NO_ROOM = ("failed to map segment", "cannot allocate memory")  # of the dynamic linker


def main() -> None:
    """Entry point of the `ktconv` command."""
    quit_on_signals()
    open_streams()
    # Else idle threads of OpenBLAS, which start with NumPy, spin for 30 ms before they sleep.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    gc.set_threshold(_OBJECTS)
    if not _numpy_fits():
        _end_without_memory()
    try:
        from ktconv.cli.app import application_for

        application = application_for(sys.argv[1:])
    except (ImportError, MemoryError) as error:
        if isinstance(error, ImportError) and not any(one in str(error) for one in _NO_ROOM):
            raise
        _end_without_memory()
    try:
        try:
            application()
        finally:
            sys.stdout.flush()
    except SystemExit as end:
        from ktconv.system import waiting

        if end.code == INTERRUPTED and waiting.left_behind():
            sys.stderr.flush()
            os._exit(INTERRUPTED)  # Python, and exit functions of libraries, wait for their threads
        raise
    except OSError as error:  # of --help and --version; commands show their own
        print(
            f"Error: the operating system reported an error: {error.strerror or error}.",
            file=sys.stderr,
        )
        sys.exit(3)


def _numpy_fits() -> bool:
    """Whether NumPy can be imported: OpenBLAS, which comes with it, ends a process with exit code 1
    where it gets no memory, or never stops asking. Tried in a process of its own, where the
    address space is limited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit >= _PLENTY:
        return True
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            with mmap.mmap(-1, _OTHER_IMPORTS):
                import numpy  # noqa: F401
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _end_without_memory() -> NoReturn:
    message, hint = "out of memory while ktconv starts", "raise the limit of memory (ulimit -v)"
    print(f"Error: {message}.\nHint: {hint}.", file=sys.stderr)
    if "--json" in sys.argv:
        error = {"message": message, "hint": hint, "exit_code": 3}
        print(json.dumps({"schema": 1, "error": error}), flush=True)
    sys.exit(3)
