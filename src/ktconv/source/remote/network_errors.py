"""Errors of libraries for the network: their kind, and their text without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ktconv.errors import ResourceError

LATER = (408, 425, 429, 500, 502, 503, 504)  # HTTP: the same request can succeed later
REFUSED = (401, 403)
AGAIN = "then run the same command again; a conversion keeps its finished layers"
_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}|(?i:bearer)\s+\S+")
_HIDDEN = "[token]"
_PACKAGES = {
    "aiohttp",
    "botocore",
    "hf_xet",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "requests",
    "urllib3",
}

_CUT_OFF = {  # by name: packages are not always installed, and some have two names
    "ClientPayloadError",  # aiohttp
    "IncompleteReadError",  # botocore
    "ReadError",  # httpx and httpx2
    "RemoteProtocolError",
    "ResponseStreamingError",
}


def is_of_network(error: BaseException) -> bool:
    """Whether a library for the network raised it. huggingface_hub has httpx in its versions 1,
    httpx2 in versions 2."""
    modules = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    return bool(modules & _PACKAGES)


def is_cut_off(error: BaseException) -> bool:
    """Whether a connection ended in the middle of an answer."""
    return is_of_network(error) and any(kind.__name__ in _CUT_OFF for kind in type(error).__mro__)


def status_of(error: BaseException) -> int | None:
    """Status of HTTP, where a response caused the error."""
    found = getattr(getattr(error, "response", None), "status_code", None)
    return found if isinstance(found, int) else None


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what led to it."""
    one: BaseException | None = error
    for _ in range(20):
        if one is None:
            return
        yield one
        one = one.__cause__ or one.__context__


def cause(error: BaseException) -> object:
    """The system's message in errors of whatever library; otherwise the error."""
    said = (one.strerror for one in causes(error) if isinstance(one, OSError) and one.strerror)
    return next(said, error)


def first_line(error: object, token: str | None = None) -> str:
    """First line of a message, without tokens and without signatures of URLs."""
    lines = str(error).strip().splitlines()
    text = re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", lines[0] if lines else "")
    text = re.sub(r"(https?://)[^\s/@]+@", r"\1", text)
    if token:
        text = text.replace(token, _HIDDEN)
    return _TOKEN.sub(_HIDDEN, text)[:300].rstrip(".")


def failed(
    server: str, shown: str, error: BaseException, token: str | None = None
) -> ResourceError:
    """The error for a directory whose server ("the hub") cannot be reached, or broke off."""
    said = first_line(cause(error), token)
    if any(map(is_cut_off, causes(error))):
        return ResourceError(
            f"{server} broke off its answers for {shown} again and again: {said}",
            f"check the network and proxies, {AGAIN}",
        )
    return ResourceError(
        f"{server} cannot be reached for {shown}: {said}",
        f"check the network and the address, {AGAIN}",
    )
