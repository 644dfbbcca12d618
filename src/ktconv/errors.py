"""Every error that ktconv raises on purpose.

One family, `KtconvError`: the message is one sentence that names the file or
tensor, the hint says what to do next, and the class decides the exit code.
"""

from __future__ import annotations


class KtconvError(Exception):
    """Base class. `str(error)` is one sentence; `error.hint` the way out."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(KtconvError):
    """An option or argument that cannot be used as given."""


class CheckpointError(KtconvError):
    """The source checkpoint is missing, damaged, contradictory or unsupported."""


class OutputError(KtconvError):
    """The output directory holds something that this run must not touch."""


class ResourceError(KtconvError):
    """The machine ran out of something: disk space, memory, permissions."""

    exit_code = 3


class VerificationError(KtconvError):
    """Bytes that were written do not hold what they should."""

    exit_code = 1
