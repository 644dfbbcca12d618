"""Object stores, through fsspec's file systems s3fs and gcsfs.

Credentials, endpoints and options are those of these libraries and of fsspec's own configuration:
AWS_*, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, FSSPEC_S3_*, FSSPEC_GS_*.
"""

from __future__ import annotations

import logging
import socket
import ssl
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ktconv.errors import (
    CheckpointError,
    KtconvError,
    ResourceError,
    SourceChangedError,
    UsageError,
)
from ktconv.source.remote.attempts import attempt
from ktconv.source.remote.network_errors import (
    AGAIN,
    LATER,
    REFUSED,
    cause,
    causes,
    failed,
    first_line,
    is_of_network,
)
from ktconv.source.remote.store import (
    ChangedError,
    RemoteFile,
    Store,
    WholeFileError,
    check_range,
    not_in_parts,
)
from ktconv.source.remote.urls import Url

_CHANGED = 412
_NOBODY = (ConnectionRefusedError, socket.gaierror)
BUFFER_BYTES = 1 << 20  # of a connection: 20 % less CPU time than with aiohttp's 64 KiB
_THREADS = 8  # that ask about files

T = TypeVar("T")


class FsspecStore(Store):
    """A directory of one of fsspec's file systems. UsageError where its package is missing."""

    protocol: str  # of fsspec
    package: str  # that has it
    login: str  # what to do when access is refused

    def __init__(self, url: Url) -> None:
        self.url = url
        self._known: dict[str, RemoteFile] = {}
        try:
            import fsspec

            self._fs = self._open(fsspec)
        except ImportError:
            raise UsageError(
                f"{url.shown} is read with the package {self.package}, which is not installed",
                "pip install 'ktconv[remote]'",
            ) from None
        except Exception as error:
            if (found := self.explain(error)) is None:
                raise
            raise found from error

    def _open(self, fsspec: Any) -> Any:
        return fsspec.filesystem(self.protocol, skip_instance_cache=True, use_listings_cache=False)

    def _run(self, coroutine: Callable[..., Any], *args: Any) -> Any:
        """The result of a coroutine, on fsspec's thread."""
        from fsspec.asyn import sync

        return sync(self._fs.loop, coroutine, *args)

    def files(self) -> Sequence[RemoteFile]:
        self._known = {file.name: file for file in self._list()}
        return list(self._known.values())

    def _list(self) -> Iterator[RemoteFile]:
        found = self._fs.find(self.url.place, detail=True)
        for path, about in found.items():
            name = path.removeprefix(f"{self.url.place}/")
            if about["type"] == "file" and name and not name.endswith("/"):
                yield self._described(name, about)

    def state(self, names: Iterable[str]) -> Mapping[str, RemoteFile]:
        wanted = list(names)
        found = self._each(self._now, wanted)
        return {file.name: file for file in found if file is not None}

    def _each(self, call: Callable[[str], T], names: Sequence[str]) -> list[T]:
        """`call` of every name, each tried again on its own."""
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(lambda name: attempt(self, lambda: call(name)), names))

    def _now(self, name: str) -> RemoteFile | None:
        try:
            about = self._about(f"{self.url.place}/{name}")
        except FileNotFoundError:
            return None
        return self._described(name, about) if about["type"] == "file" else None

    @abstractmethod
    def _about(self, path: str) -> Mapping[str, Any]:
        """Facts of a file, asked of the server again."""

    @abstractmethod
    def _described(self, name: str, about: Mapping[str, Any]) -> RemoteFile: ...

    def read(self, name: str, start: int, stop: int) -> bytes | bytearray:
        return self._run(self._get, name, start, stop)  # type: ignore[no-any-return]

    @abstractmethod
    async def _get(self, name: str, start: int, stop: int) -> bytes | bytearray:
        """The bytes of a file from `start` to before `stop`, with one request."""

    # ---- errors ----

    def _status(self, error: BaseException) -> int | None:
        """Status of HTTP, where a response caused the error."""
        import aiohttp

        for one in causes(error):
            if isinstance(one, aiohttp.ClientResponseError):
                return one.status
        return None

    def transient(self, error: BaseException) -> bool:
        if isinstance(error, WholeFileError | ChangedError | FileNotFoundError | PermissionError):
            return False
        if (status := self._status(error)) is not None:
            return status in LATER
        # What has never answered is more often misspelled than down.
        if not self._known and any(isinstance(one, _NOBODY) for one in causes(error)):
            return False
        return any(self._is_broken(one) for one in causes(error))

    def _is_broken(self, error: BaseException) -> bool:
        """Whether a connection failed."""
        import aiohttp

        broken = (ConnectionError, TimeoutError, aiohttp.ClientError)
        wrong = (aiohttp.InvalidURL, aiohttp.ClientSSLError, ssl.CertificateError)
        return isinstance(error, broken) and not isinstance(error, wrong)

    def explain(self, error: BaseException) -> KtconvError | None:
        shown, status = self.url.shown, self._status(error)
        said = first_line(cause(error))
        if isinstance(error, ChangedError):
            return SourceChangedError(
                f"{shown}/{error} changed while it was read",
                "make sure nothing writes there, then start again",
            )
        if isinstance(error, WholeFileError):
            return not_in_parts(shown, error)
        if isinstance(error, PermissionError) or status in REFUSED:
            return CheckpointError(
                f"the server does not let us read {shown} (status {status or 403})", self.login
            )
        if isinstance(error, FileNotFoundError) or status == 404:
            return CheckpointError(f"{shown} is not there", "check the URL")
        if status in LATER:
            return ResourceError(
                f"the server answered {status} for {shown} again and again",
                f"wait a while, {AGAIN}",
            )
        if any(self._is_broken(one) or is_of_network(one) for one in causes(error)):
            return failed("the server", shown, error)
        if isinstance(error, OSError | ValueError) or status is not None:
            return CheckpointError(f"{shown} cannot be read: {said}", "check the URL")
        return None


async def received(read: Callable[[int], Awaitable[bytes]], nbytes: int) -> bytearray:
    """A body of `nbytes` bytes, or of fewer, without a second copy of it in memory."""
    data, at = bytearray(nbytes), 0
    while chunk := await read(BUFFER_BYTES):
        data[at : at + len(chunk)] = chunk
        at += len(chunk)
    del data[at:]
    return data


# ---- Amazon S3 and what speaks its protocol --------------------------------------------------


class S3Store(FsspecStore):
    """s3://bucket/prefix. Every range is asked of the version that was there at the start."""

    protocol, package = "s3", "s3fs"
    login = (
        "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, of an account that may "
        "read it; for a public bucket set FSSPEC_S3_ANON=true"
    )

    def _open(self, fsspec: Any) -> Any:
        found = super()._open(fsspec)
        found.retries = 1  # `attempt` counts them
        return found

    def _about(self, path: str) -> Mapping[str, Any]:
        return dict(self._run(self._info, path))

    async def _info(self, path: str) -> Any:
        return await self._fs._info(path, refresh=True)

    def _described(self, name: str, about: Mapping[str, Any]) -> RemoteFile:
        return RemoteFile(name, int(about["size"]), str(about["ETag"]).strip('"'))

    async def _get(self, name: str, start: int, stop: int) -> bytes | bytearray:
        bucket, _, prefix = self.url.place.partition("/")
        wanted = {"Range": f"bytes={start}-{stop - 1}"}
        if name in self._known:
            wanted["IfMatch"] = f'"{self._known[name].etag}"'
        key = f"{prefix}/{name}" if prefix else name
        try:
            response = await self._fs._call_s3("get_object", Bucket=bucket, Key=key, **wanted)
        except OSError as error:
            if self._status(error) == _CHANGED:
                raise ChangedError(name) from error
            raise
        try:
            if response["ContentLength"] > stop - start:
                raise WholeFileError("a whole file instead of a range")
            check_range(response.get("ContentRange"), start)
            return await received(response["Body"].read, stop - start)
        finally:
            response["Body"].close()

    def _status(self, error: BaseException) -> int | None:
        for one in causes(error):
            response = getattr(one, "response", None)
            if isinstance(response, Mapping):
                code = response.get("Error", {}).get("Code")
                if code in ("SlowDown", "RequestTimeout"):
                    return 503
                status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
                return status if isinstance(status, int) else None
        return None

    def _is_broken(self, error: BaseException) -> bool:
        from botocore import exceptions

        return super()._is_broken(error) or isinstance(
            error,
            exceptions.HTTPClientError
            | exceptions.ConnectionError
            | exceptions.IncompleteReadError
            | exceptions.ResponseStreamingError,
        )

    def explain(self, error: BaseException) -> KtconvError | None:
        from botocore import exceptions

        shown, bucket = self.url.shown, self.url.place.partition("/")[0]
        found = {type(one): one for one in causes(error)}
        if {exceptions.NoCredentialsError, exceptions.PartialCredentialsError} & found.keys():
            return UsageError(f"there are no credentials to read {shown}", self.login)
        if (profile := found.get(exceptions.ProfileNotFound)) is not None:
            return UsageError(f"{shown} cannot be read: {first_line(profile)}", self.login)
        if exceptions.ParamValidationError in found:
            return UsageError(f"{bucket} cannot be the name of a bucket", "check the URL")
        codes = (getattr(one, "response", None) for one in causes(error))
        if any(isinstance(one, Mapping) and _code(one) == "NoSuchBucket" for one in codes):
            return CheckpointError(f"there is no bucket {bucket}", "check the URL and the endpoint")
        return super().explain(error)


def _code(response: Mapping[str, Any]) -> object:
    return response.get("Error", {}).get("Code")


# ---- Google Cloud Storage --------------------------------------------------------------------


class GcsStore(FsspecStore):
    """gs://bucket/prefix. Every range is asked of the generation that was there at the start.

    gcsfs tries failed requests again itself, for about half a minute.
    """

    protocol, package = "gs", "gcsfs"
    login = (
        "log in with an account that may read it: gcloud auth application-default login, or set "
        "GOOGLE_APPLICATION_CREDENTIALS"
    )

    def _open(self, fsspec: Any) -> Any:
        # It logs what it raises, too; without a handler that goes to stderr.
        logging.getLogger("gcsfs").addHandler(logging.NullHandler())
        from gcsfs.core import GCSFileSystem  # the other one asks for kinds of buckets by gRPC

        return GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)

    def _about(self, path: str) -> Mapping[str, Any]:
        return dict(self._fs.info(path))

    def _described(self, name: str, about: Mapping[str, Any]) -> RemoteFile:
        return RemoteFile(name, int(about["size"]), f"{about['generation']}-{about.get('crc32c')}")

    def read(self, name: str, start: int, stop: int) -> bytes:
        data: bytes = self._run(self._get, name, start, stop)
        if len(data) > stop - start:
            raise WholeFileError("a whole file instead of a range")
        return data

    async def _get(self, name: str, start: int, stop: int) -> bytes:
        """Not by `cat_file`, which in many versions of gcsfs asks for any generation."""
        address = self._fs.url(f"{self.url.place}/{name}")
        if name in self._known:
            address += f"&generation={self._known[name].etag.partition('-')[0]}"
        wanted = {"Range": f"bytes={start}-{stop - 1}"}
        try:
            said, data = await self._fs._call("GET", address, headers=wanted)
        except FileNotFoundError as error:  # this generation was replaced
            raise ChangedError(name) from error
        check_range(said.get("Content-Range"), start)
        return bytes(data)

    def _status(self, error: BaseException) -> int | None:
        if str(error).startswith("Forbidden"):
            return 403
        codes = (str(getattr(one, "code", "")) for one in causes(error))
        return next((int(code) for code in codes if code.isdecimal()), None)

    def transient(self, error: BaseException) -> bool:
        return self._status(error) is None and isinstance(error, ConnectionError | TimeoutError)
