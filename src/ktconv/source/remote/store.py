"""The interface of what serves a remote directory, and the table of those that there are."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module

from msgspec import Struct

from ktconv.errors import CheckpointError, KtconvError
from ktconv.source.remote.urls import Url


class RemoteFile(Struct, frozen=True):
    """A file as its server describes it."""

    name: str  # relative to the directory, with slashes
    nbytes: int
    etag: str  # changes whenever the content does, as far as the server knows
    sha256: str | None = None


class WholeFileError(OSError):
    """A server that sends a whole file where a part of it was asked for."""


class ChangedError(OSError):
    """A server has another content under a name than before; the text is the name."""


class OtherRangeError(WholeFileError):
    """A server that sends another part of a file than was asked for."""


class UnnamedRangeError(WholeFileError):
    """A server that sends a part without Content-Range: of which bytes, and of how many?"""


def check_range(said: str | None, start: int) -> None:
    """OtherRangeError where a Content-Range begins elsewhere; not every server sends one."""
    match = re.match(r"bytes (\d+)-", said or "")
    if match is not None and int(match[1]) != start:
        raise OtherRangeError(f"bytes from {match[1]} on instead of {start}")


def not_in_parts(shown: str, error: WholeFileError) -> CheckpointError:
    """Error for a directory whose server does not send parts of files."""
    what = "whole files only"
    if isinstance(error, OtherRangeError):
        what = "other parts than it is asked for"
    elif isinstance(error, UnnamedRangeError):
        what = "parts without Content-Range, so that the size of a file is not known"
    return CheckpointError(
        f"{shown} cannot be read in parts: the server sends {what}",
        "download the directory, or use a server that answers ranges",
    )


class Store(ABC):
    """A remote directory. Safe to use from several threads; methods raise what their libraries
    raise, which `transient` and `explain` understand."""

    url: Url

    @abstractmethod
    def files(self) -> Sequence[RemoteFile]:
        """All files, those of folders too."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> bytes | bytearray:
        """The bytes from `start` to before `stop`, with one request."""

    @abstractmethod
    def state(self, names: Iterable[str]) -> Mapping[str, RemoteFile]:
        """These files as they are now, asked again; those that are gone are missing."""

    @abstractmethod
    def transient(self, error: BaseException) -> bool:
        """Whether the same request can succeed a little later."""

    @abstractmethod
    def explain(self, error: BaseException) -> KtconvError | None:
        """An error of the library in one sentence, with the way out and without secrets; None for
        one that neither a server nor a network has."""

    @property
    def pinned(self) -> Url:
        """The URL of exactly this state, where the server keeps states: of a commit."""
        return self.url


def open_store(url: Url) -> Store:
    """Open the store that serves `url`. UsageError names the extra where a package is missing."""
    module, name = _STORES[url.scheme]
    store: Store = getattr(import_module(module), name)(url)
    return store


# Their modules import packages that are not always installed.
_STORES: Mapping[str, tuple[str, str]] = {
    "hf": ("ktconv.source.remote.hub", "HubStore"),
    "s3": ("ktconv.source.remote.filesystem", "S3Store"),
    "gs": ("ktconv.source.remote.filesystem", "GcsStore"),
    "https": ("ktconv.source.remote.web", "WebStore"),
    "http": ("ktconv.source.remote.web", "WebStore"),
}
