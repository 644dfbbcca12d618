"""Every error that ktconv raises on purpose.

One family, `KtconvError`: the message is one sentence that names the file or
tensor, the hint says what to do next, and the class decides the exit code.
A command can replace the hint by class: see `cli.exits`.
"""

from __future__ import annotations


class KtconvError(Exception):
    """Base class. `str(error)` is one sentence; `error.hint` says what to do."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(KtconvError):
    """An option or argument that cannot be used as given."""


class CheckpointError(KtconvError):
    """The source checkpoint is missing, damaged, contradictory or unsupported."""


class StaleBuildError(KtconvError):
    """The compiled library does not belong to these sources."""


class UnknownNamesError(CheckpointError):
    """Experts of the source have names, if it has any, that no known family has."""


class PackedExpertsError(CheckpointError):
    """Experts of the source were packed for KTransformers."""


class SourceChangedError(CheckpointError):
    """A file of the source changed while it was read."""


class OutputError(KtconvError):
    """The output directory contains something that this run must not change."""


class InUseError(OutputError):
    """Another run is writing the same layers or files."""


class ResourceError(KtconvError):
    """The machine ran out of something: disk space, memory, permissions."""

    exit_code = 3


class MemoryShortError(ResourceError):
    """More memory is needed than there is."""


class MemoryLimitError(ResourceError):
    """More memory is needed than an option allows; the hint says how much."""


class DiskSpaceError(ResourceError):
    """A disk is too small for what is going to be written."""


class DiskFullError(ResourceError):
    """A disk, or the quota on it, was used up while something was written."""


class FileSizeError(ResourceError):
    """A file became larger than the system allows."""


class VerificationError(KtconvError):
    """Written data do not match their source."""

    exit_code = 1
