"""Repositories of the Hugging Face hub, through huggingface_hub.

A revision is resolved to its commit once, so that all bytes are of one state. Address, token,
offline mode and time limits are the library's own: HF_ENDPOINT, HF_TOKEN and `hf auth login`,
HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from msgspec.structs import replace

from ktconv import __version__
from ktconv.errors import (
    CheckpointError,
    KtconvError,
    ResourceError,
    SourceChangedError,
    UsageError,
)
from ktconv.source.remote.network_errors import (
    AGAIN,
    LATER,
    REFUSED,
    cause,
    failed,
    first_line,
    is_of_network,
    status_of,
)
from ktconv.source.remote.store import (
    ChangedError,
    OtherRangeError,
    RemoteFile,
    Store,
    WholeFileError,
    check_range,
    not_in_parts,
)
from ktconv.source.remote.urls import Url

_PARTIAL, _BEHIND_THE_END = 206, 416


class DigestError(OSError):
    """A file that does not have the SHA-256 that the hub lists; the text is its name."""


class HubStore(Store):
    """A repository with models, or a folder of it. UsageError without huggingface_hub."""

    def __init__(self, url: Url) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError:
            raise UsageError(
                f"{url.shown} is read with the package huggingface_hub, which is not installed",
                "pip install 'ktconv[hub]'",
            ) from None
        self.url = url
        self._api = HfApi(library_name="ktconv", library_version=__version__)
        self._commit: str | None = None
        self._files: dict[str, RemoteFile] = {}
        self._signed: dict[str, str] = {}  # where the hub sent us for a file, while that works
        self._etags: dict[tuple[str, str], str] = {}  # of a file, by who gave it
        self._lock = threading.Lock()

    @property
    def pinned(self) -> Url:
        return replace(self.url, revision=self._commit or self.url.revision)

    def files(self) -> Sequence[RemoteFile]:
        info = self._api.model_info(self.url.place, revision=self.url.revision, files_metadata=True)
        self._commit = info.sha
        folder = f"{self.url.folder}/" if self.url.folder else ""
        found = (_described(one, folder) for one in info.siblings or ())
        self._files = {file.name: file for file in found if file is not None}
        return list(self._files.values())

    def state(self, names: Iterable[str]) -> Mapping[str, RemoteFile]:
        """Files as they were: those of a commit never change."""
        return {name: self._files[name] for name in names}

    # ---- bytes ----

    def read(self, name: str, start: int, stop: int) -> bytes:
        data, file = self._read(name, start, stop), self._files.get(name)
        if file is None or (start, len(data)) != (0, file.nbytes):
            return data
        if file.sha256 not in (None, hashlib.sha256(data).hexdigest()):
            raise DigestError(name)
        return data

    def _read(self, name: str, start: int, stop: int) -> bytes:
        signed = self._signed.get(name)
        if signed is not None:
            try:
                return self._get(name, signed, {}, start, stop)[0]
            except Exception as error:
                if status_of(error) not in REFUSED:
                    raise
                with self._lock:  # it expired: the hub signs another one
                    self._signed.pop(name, None)
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        path = f"{self.url.folder}/{name}" if self.url.folder else name
        address = hf_hub_url(
            self.url.place, path, revision=self._commit, endpoint=self._api.endpoint
        )
        headers = build_hf_headers(library_name="ktconv", library_version=__version__)
        data, found = self._get(name, address, headers, start, stop)
        if found is not None:
            with self._lock:
                self._signed[name] = found
        return data

    def _get(
        self, name: str, address: str, headers: Mapping[str, str], start: int, stop: int
    ) -> tuple[bytes, str | None]:
        """Some bytes, and the address of another host where they came from."""
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session, hf_raise_for_status

        wanted = {**headers, "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        with get_session().stream(
            "GET",
            address,
            headers=wanted,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            follow_redirects=True,
        ) as response:
            if response.status_code == _BEHIND_THE_END:
                raise ChangedError(name)  # it was longer
            if response.status_code >= 400:
                response.read()  # what the server says about it
            hf_raise_for_status(response)
            length = int(response.headers.get("content-length") or stop - start)
            if response.status_code != _PARTIAL and length != stop - start:
                raise WholeFileError(f"{self.url.shown}: the server sends whole files only")
            check_range(response.headers.get("content-range"), start)
            self._check_state(name, [*response.history, response])
            data: bytes = response.read()
            asked = [(one.url.host, one.url.port) for one in (*response.history, response)]
            return data, str(response.url) if asked[0] != asked[-1] else None

    def _check_state(self, name: str, responses: Sequence[Any]) -> None:
        """ChangedError where an ETag is not that of an earlier answer, or the size is another.

        The hub names the content by `X-Linked-Etag`, the host that sends it by an ETag of its own,
        and another host by another one: each is compared with its own.
        """
        last = responses[-1]
        said = [("linked", one.headers.get("x-linked-etag")) for one in responses]
        parts = urlsplit(str(last.url))
        said.append((f"{parts.netloc}{parts.path}", last.headers.get("etag")))
        for giver, etag in said:
            if not etag:
                continue
            etag = etag.removeprefix("W/").strip('"')
            with self._lock:
                if self._etags.setdefault((name, giver), etag) != etag:
                    raise ChangedError(name)
        total = last.headers.get("content-range", "").rpartition("/")[2]
        file = self._files.get(name)
        if file is not None and total.isdecimal() and int(total) != file.nbytes:
            raise ChangedError(name)

    # ---- errors ----

    def transient(self, error: BaseException) -> bool:
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        if isinstance(error, OfflineModeIsEnabled | WholeFileError | ChangedError):
            return False
        if isinstance(error, DigestError):
            return True  # of what a proxy between made of it
        if isinstance(error, HfHubHTTPError) or status_of(error) is not None:
            return status_of(error) in LATER
        return is_of_network(error) or isinstance(error, ConnectionError | TimeoutError)

    def explain(self, error: BaseException) -> KtconvError | None:
        from huggingface_hub import errors, get_token

        name, shown = self.url.place, self.url.shown
        page = f"{self._api.endpoint}/{quote(name)}"
        if isinstance(error, OtherRangeError):
            return not_in_parts(shown, error)
        if isinstance(error, ChangedError):
            return SourceChangedError(
                f"{shown}/{error} changed while it was read, though a commit never does",
                "check the server that HF_ENDPOINT names, and proxies, then start again",
            )
        if isinstance(error, DigestError):
            return CheckpointError(
                f"{shown}/{error} does not have the SHA-256 that the hub lists",
                "check proxies and the server that HF_ENDPOINT names, then start again",
            )
        if isinstance(error, errors.OfflineModeIsEnabled):
            return UsageError(
                f"{shown} is on the hub, and HF_HUB_OFFLINE forbids to ask there",
                f"unset HF_HUB_OFFLINE, or give {name} if it is in the local cache, where this "
                f"puts it: {self.url.download}",
            )
        if isinstance(error, errors.GatedRepoError):
            logged = "" if get_token() else ", and there is no token"
            return CheckpointError(
                f"{shown} is gated, and access is not granted{logged}",
                f"accept its conditions at {page}, then log in: hf auth login",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return CheckpointError(
                f"the hub has {name}, but no revision {self.url.revision} of it",
                f"choose a branch, tag or commit listed at {page}/tree/main",
            )
        if isinstance(error, errors.DisabledRepoError):
            return CheckpointError(f"the hub has disabled {name}", f"see {page}")
        if isinstance(error, errors.RepositoryNotFoundError):
            hidden = "that this token can see" if get_token() else "that is public"
            login = "" if get_token() else "; for a private one log in: hf auth login"
            return CheckpointError(
                f"the hub has no repository {name} {hidden}", f"check the name{login}"
            )
        if isinstance(error, errors.EntryNotFoundError):
            return CheckpointError(f"a file of {shown} is not there any more", f"see {page}")
        if isinstance(error, errors.HFValidationError):
            return UsageError(f"{name} cannot be a repository of the hub", "give hf://org/name")
        if isinstance(error, WholeFileError):
            return ResourceError(str(error), f"download the model first: {self.url.download}")
        said = first_line(cause(error), get_token())
        status = status_of(error)
        if status in REFUSED:
            return CheckpointError(
                f"the hub does not let us read {shown} (status {status})",
                "log in with a token that may read it: hf auth login",
            )
        if status is not None:
            return ResourceError(
                f"the hub answered {status} for {shown} again and again: {said}",
                f"wait a while, {AGAIN}",
            )
        if not (is_of_network(error) or isinstance(error, OSError)):
            return None
        return failed("the hub", shown, error, get_token())


def _described(sibling: Any, folder: str) -> RemoteFile | None:
    """A file in `folder`, as the hub describes it; None for another one."""
    name: str = sibling.rfilename
    if not name.startswith(folder):
        return None
    lfs = sibling.lfs
    sha256 = None if lfs is None else str(lfs.sha256)
    etag = sha256 or sibling.blob_id
    if sibling.size is None or not etag:
        raise CheckpointError(
            f"the hub does not say how large {name} is, or what identifies it",
            "download the model, and give its directory",
        )
    return RemoteFile(name.removeprefix(folder), int(sibling.size), str(etag), sha256)
