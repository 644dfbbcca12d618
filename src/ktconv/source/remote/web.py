"""Directories of web servers, through fsspec's file system for HTTP.

A server that lists its directories as HTML is asked for that; of others, the names are those that
the index of a checkpoint and the habit of checkpoints give. Signatures in the URL's query go with
every request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from ktconv.errors import CheckpointError, KtconvError
from ktconv.source.gguf.parts import part_names
from ktconv.source.remote.attempts import attempt
from ktconv.source.remote.filesystem import BUFFER_BYTES, FsspecStore, received
from ktconv.source.remote.network_errors import LATER, REFUSED, causes
from ktconv.source.remote.store import (
    ChangedError,
    RemoteFile,
    UnnamedRangeError,
    WholeFileError,
    check_range,
)
from ktconv.source.remote.urls import Url

_FOLDERS = 32  # that are looked into
_LISTING_BYTES = 16 << 20
_INDEX = "model.safetensors.index.json"
_INDEX_BYTES = 1 << 30
_NAMES = (
    *("config.json", "generation_config.json", "model.safetensors", _INDEX, "README.md"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
    *("processor_config.json", "video_preprocessor_config.json", "params.json"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md"),
)
_PARTS = 1000  # of a GGUF model, that are asked for
_IN_URLS = "/%:@!$&'()*+,;=?[]"  # what is quoted already stays as it is


class WebStore(FsspecStore):
    """https://host/directory/"""

    protocol, package = "http", "aiohttp"
    login = (
        "give a URL that may be read: a signature may have expired, or a user and password be "
        "missing"
    )

    def __init__(self, url: Url) -> None:
        super().__init__(url)
        host, slash, path = url.place.partition("/")
        self._base = f"{url.scheme}://{host}{slash}{quote(path, _IN_URLS)}/"
        self._query = f"?{quote(url.query, _IN_URLS)}" if url.query else ""

    def _list(self) -> Iterator[RemoteFile]:
        names = self._names() or self._usual_names()
        found = [file for file in self._each(self._now, sorted(names)) if file is not None]
        if not found:  # why?
            attempt(self, lambda: self._run(self._described_there, _INDEX, True))
        yield from found

    def _now(self, name: str) -> RemoteFile | None:
        """File as it is now, by asking for its first byte: signatures for reading do not allow
        HEAD."""
        return self._run(self._described_there, name)  # type: ignore[no-any-return]

    def _about(self, path: str) -> Mapping[str, Any]:
        raise NotImplementedError  # `_now` does not need it

    def _described(self, name: str, about: Mapping[str, Any]) -> RemoteFile:
        return RemoteFile(name, about["nbytes"], about["etag"])

    def _open(self, fsspec: Any) -> Any:
        found = super()._open(fsspec)
        # Proxies and .netrc, as other programs.
        found.client_kwargs = {"trust_env": True, **found.client_kwargs}
        return found

    def explain(self, error: BaseException) -> KtconvError | None:
        status = self._status(error)
        if any(type(one).__name__ == "TooManyRedirects" for one in causes(error)):
            return CheckpointError(
                f"the server sends requests for {self.url.shown} from one address to the next "
                "without end",
                "check the URL, and what its server redirects",
            )
        if status is None or status in (*LATER, *REFUSED, 404):
            return super().explain(error)
        # Without the server's own words: they can repeat the signature.
        return CheckpointError(
            f"the server answered {status} for {self.url.shown}", "check the URL"
        )

    # ---- names ----

    def _names(self) -> set[str]:
        """All names that the server lists, with those of folders."""
        found: set[str] = set()
        folders = [""]
        for folder in folders:  # grows
            for name in attempt(self, lambda one=folder: self._run(self._links, one)):  # type: ignore[misc]
                if not name.endswith("/"):
                    found.add(name)
                elif len(folders) < _FOLDERS and name not in folders:
                    folders.append(name)
        return found

    async def _links(self, folder: str) -> set[str]:
        """Names in a folder; those of folders end with a slash. None without a listing."""
        async with await self._ask(folder) as response:
            kind = response.headers.get("Content-Type", "").partition(";")[0]
            if response.status != 200 or kind != "text/html":
                if response.status not in (401, 403, 404, 405):
                    response.raise_for_status()
                return set()
            text = (await response.content.read(_LISTING_BYTES)).decode("utf-8", "replace")
            there = str(response.url)
        return {folder + name for name in _names_in(text, there)}

    def _usual_names(self) -> set[str]:
        if wanted := self.url.wanted:
            return {*_NAMES, *part_names(wanted)[:_PARTS]}
        index = attempt(self, lambda: self._now(_INDEX))
        if index is None or not 0 < index.nbytes < _INDEX_BYTES:
            return set(_NAMES)
        data = attempt(self, lambda: self.read(_INDEX, 0, index.nbytes))
        try:
            shards = set(json.loads(data)["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return set(_NAMES)  # whoever reads it says what is wrong
        return {*_NAMES, *(name for name in shards if isinstance(name, str))}

    # ---- requests ----

    async def _ask(self, name: str, start: int | None = None, stop: int = 0) -> Any:
        """A response, to be closed."""
        import aiohttp
        from yarl import URL

        headers = {"Accept-Encoding": "identity"}
        if start is not None:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        session = await self._fs.set_session()
        patience = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
        address = URL(self._base + quote(name) + self._query, encoded=True)
        return await session.get(
            address, headers=headers, timeout=patience, read_bufsize=BUFFER_BYTES
        )

    async def _described_there(self, name: str, strict: bool = False) -> RemoteFile | None:
        guessed = name in _NAMES and name not in self._known and not strict
        async with await self._ask(name, 0, 1) as response:
            if response.status in (404, 410) or (guessed and response.status in REFUSED):
                return None  # some servers refuse what is not there
            size = _size(response)
            if response.status != 416:  # of an empty file
                response.raise_for_status()
            if size is None:
                raise (UnnamedRangeError if response.status == 206 else WholeFileError)(name)
            return RemoteFile(name, size, _etag(response.headers))

    async def _get(self, name: str, start: int, stop: int) -> bytearray:
        async with await self._ask(name, start, stop) as response:
            response.raise_for_status()
            known, size = self._known.get(name), _size(response)
            if known and size is not None and not _same(known, size, response.headers):
                raise ChangedError(name)
            if response.status != 206 and (start, stop) != (0, size):
                raise WholeFileError("a whole file instead of a range")
            check_range(response.headers.get("Content-Range"), start)
            return await received(response.content.read, stop - start)


def _size(response: Any) -> int | None:
    """Size of the whole file; None where the server does not say."""
    if response.status in (206, 416):
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
    else:
        total = response.headers.get("Content-Length", "")
    return int(total) if total.isdecimal() else None


def _etag(headers: Mapping[str, str]) -> str:
    """Text from the server that tells contents apart: an ETag, a date, or nothing."""
    return (headers.get("ETag") or headers.get("Last-Modified") or "").strip('"')


def _same(known: RemoteFile, size: int, headers: Mapping[str, str]) -> bool:
    return (known.nbytes, known.etag) == (size, _etag(headers))


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for key, value in attrs if key == "href" and value]


def _names_in(page: str, address: str) -> Iterator[str]:
    """Names in a listing at `address` that are in that directory."""
    parser = _Links()
    parser.feed(page)
    here = urlsplit(address)
    directory = here.path if here.path.endswith("/") else here.path + "/"
    for link in parser.found:
        there = urlsplit(urljoin(f"{here.scheme}://{here.netloc}{directory}", link))
        if there.netloc == here.netloc and there.path.startswith(directory):
            name = unquote(there.path.removeprefix(directory))
            if name.strip("/") and "/" not in name.removesuffix("/"):
                yield name
