"""Meaning of a MODEL argument with a URL.

    hf://org/name, hf://org/name@REVISION, hf://org/name@REVISION/folder
    s3://bucket/prefix, gs://bucket/prefix, https://host/directory/

A file of a GGUF model may follow, as a path or, for repositories of the hub, after a colon.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.source.hub_cache import download_command
from ktconv.system.files import is_there

SCHEMES = ("hf", "s3", "gs", "gcs", "https", "http")

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_HUB = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/:\s]+|[^/:\s]+))?(?:/(?P<folder>[^:]*))?(?::(?P<file>[^:]+))?"
)
_OWN_REF = re.compile(r"refs/(?:pr|convert)/[^/:\s]+")
_GGUF = ".gguf"


class Url(Struct, frozen=True):
    """A directory that is read over a network."""

    scheme: str
    place: str  # without the scheme: org/name, bucket/prefix, host/path
    revision: str | None = None  # of a repository of the hub
    folder: str = ""  # in that repository; "" is all of it
    wanted: str | None = None  # of several GGUF models there: one
    query: str = ""  # of an https URL: signatures, which are not shown

    @property
    def full(self) -> str:
        """URL that opens it. May contain secrets."""
        return f"{self.scheme}://{self.place}" + (f"?{self.query}" if self.query else "")

    @property
    def shown(self) -> str:
        """URL for users: without passwords and signatures."""
        revision = f"@{_in_url(self.revision)}" if self.revision else ""
        folder = f"/{self.folder}" if self.folder else ""
        return f"{self.scheme}://{self._shown_place}{revision}{folder}"

    @property
    def whole(self) -> str:
        """`shown`, with the file that is wanted."""
        return self.shown + (f":{self.wanted}" if self.wanted else "")

    @property
    def download(self) -> str:
        """The command that brings what is meant of a repository of the hub into its cache."""
        patterns: tuple[str, ...] = (f"{self.folder}/*",) if self.folder else ()
        patterns = (f"*{self.wanted}*", "*.json") if self.wanted else patterns
        return download_command(self.place, self.revision, patterns=patterns)

    @property
    def _shown_place(self) -> str:
        if self.scheme not in ("http", "https"):
            return self.place
        host, slash, path = self.place.partition("/")
        return host.rpartition("@")[2] + slash + path

    @property
    def name(self) -> str:
        """Name that a user would give the model."""
        last = (self.folder or self._shown_place).rstrip("/").rpartition("/")[2]
        return re.sub(r"[^\w.-]", "-", last).strip(".-") or "model"


def is_url(model: object) -> bool:
    """Whether a MODEL argument is a URL; of any scheme, so that a wrong one is named."""
    return isinstance(model, str) and _URL.fullmatch(model) is not None


def shown_model(model: str) -> str:
    """A MODEL argument for users: of a URL, without passwords and signatures."""
    return _without_secrets(model) if is_url(model) else model


def url_of_path(path: Path) -> str | None:
    """The URL, without passwords and signatures, that was given where a path belongs; None for a
    path. Paths have one slash where it had two."""
    match = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]+:)/([^/].*)", str(path))
    return match and shown_model(f"{match[1]}//{match[2]}")


def no_directory(path: Path) -> str:
    """Message about a path that is not a directory, or is a URL where one belongs. ResourceError
    where that cannot be told."""
    if url := url_of_path(path):
        return f"{url} is a URL, not a directory on this machine"
    is_there(path)  # an error in a directory that may not be entered, of which is_dir says False
    return f"{path} is not a directory"


def parse_url(model: str) -> Url:
    """The parts of a URL. UsageError for a scheme or form that is not known."""
    match = _URL.fullmatch(model)
    if match is None or (scheme := match["scheme"].lower()) not in SCHEMES:
        raise UsageError(
            f"{_without_secrets(model)} is not a URL that ktconv reads",
            "use hf://org/name, s3://bucket/prefix, gs://bucket/prefix or https://host/directory/; "
            "give a directory of this machine by its path alone",
        )
    if scheme == "hf":
        return _hub_url(model, match["rest"])
    if scheme in ("http", "https"):
        try:
            parts = urlsplit(model)
        except ValueError as error:
            raise UsageError(
                f"{_without_secrets(model)} is not a URL: {error}", "check its host"
            ) from None
        place, wanted = _split_file(urlunsplit(("", parts.netloc, parts.path, "", ""))[2:])
        url = Url(scheme, place, wanted=wanted, query=parts.query)
        found = parts.hostname
    else:
        place, wanted = _split_file(match["rest"].strip("/"))
        url = Url("gs" if scheme == "gcs" else scheme, place, wanted=wanted)
        found = place.partition("/")[0]
    if not found or ".." in place.split("/"):
        raise UsageError(
            f"{_without_secrets(model)} names no directory",
            "give the directory of the checkpoint, for example s3://bucket/models/name",
        )
    return url


def _hub_url(model: str, rest: str) -> Url:
    match = _HUB.fullmatch(rest.rstrip("/"))
    if match is None or ".." in rest.split("/"):
        raise UsageError(
            f"{model} is not a repository of the hub",
            "give hf://org/name or hf://org/name@REVISION; of several GGUF models, "
            "hf://org/name:FILE",
        )
    folder, wanted = match["folder"] or "", match["file"]
    if folder.endswith(_GGUF) and wanted is None:
        folder, wanted = _split_file(folder)
    revision = match["revision"] and unquote(match["revision"])
    return Url("hf", match["id"], revision, folder.strip("/"), wanted)


def _in_url(revision: str) -> str:
    """A branch with slashes in its name has them as %2F, but for those of the hub's own."""
    return revision if _OWN_REF.fullmatch(revision) else quote(revision, safe="")


def _split_file(place: str) -> tuple[str, str | None]:
    """A directory, and the GGUF file that `place` names in it."""
    if not place.endswith(_GGUF):
        return place.rstrip("/"), None
    directory, _, name = place.rpartition("/")
    return directory, name


def _without_secrets(model: str) -> str:
    return re.sub(r"(://)[^/@]*@", r"\1", model).partition("?")[0]
