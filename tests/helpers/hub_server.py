"""What of the hub's HTTP reading uses, on this machine: repositories, their files, signed addresses
on another host, refusals and faults. What is asked is counted."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from helpers.faults import Fault
from helpers.local_servers import Handler, listening

TOKEN = "hf_thisTokenMustNotBeShownAnywhere"
LARGE = 1000  # bytes: larger files are on the other host


@dataclass
class Repository:
    folder: Path
    gated: bool = False
    private: bool = False
    revisions: tuple[str, ...] = ("main",)

    @property
    def commit(self) -> str:
        return hashlib.sha1(str(self.folder).encode()).hexdigest()


class HubServer:
    """The state of the server. `fault` gets the number of each request for bytes of a large file,
    from 0 on, and says what goes wrong."""

    def __init__(self) -> None:
        self.url = self.storage_url = ""
        self.repositories: dict[str, Repository] = {}
        self.fault: Callable[[int], Fault | None] = lambda _: None
        self.valid_for = 10**9  # requests for which a signature is good
        self.signed: dict[str, int] = {}
        self.requests: list[str] = []  # paths at the hub
        self.ranges: list[tuple[str, int, int]] = []  # bytes that were sent: file, start, stop
        self.tokens: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.ranges)


class _Handler(Handler):
    hub: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append(path)
            if found := (self.headers.get("authorization") or "").removeprefix("Bearer "):
                self.hub.tokens.add(found)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", path):
            self._about(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3])
        else:
            self.answer({"error": f"no such page: {path}"}, 404)

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _repository(self, name: str, revision: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if found is None or (found.private and token != TOKEN):
            said = {"error": "Repository not found"}
            self.answer(said, 404 if token else 401, X_Error_Code="RepoNotFound")
            return None
        if found.gated and token != TOKEN:
            said = {"error": f"Access to model {name} is restricted; token was {token}"}
            self.answer(said, 401, X_Error_Code="GatedRepo", X_Error_Message="restricted")
            return None
        if revision not in (*found.revisions, found.commit):
            words = {"error": f"Invalid rev id: {revision}"}
            self.answer(words, 404, X_Error_Code="RevisionNotFound")
            return None
        return found

    def _about(self, name: str, revision: str) -> None:
        if (found := self._repository(name, revision)) is None:
            return
        files = []
        for path in sorted(found.folder.rglob("*")):
            if path.is_file():
                one: dict[str, Any] = {"rfilename": path.relative_to(found.folder).as_posix()}
                if parse_qs(urlsplit(self.path).query).get("blobs"):
                    one |= {"size": path.stat().st_size, "blobId": _blob(path)}
                    if path.stat().st_size > LARGE:
                        sha = hashlib.sha256(path.read_bytes()).hexdigest()
                        one["lfs"] = {"sha256": sha, "size": one["size"], "pointerSize": 130}
                files.append(one)
        facts = {"id": name, "modelId": name, "private": found.private, "sha": found.commit}
        self.answer({**facts, "siblings": files, "tags": []})

    def _file(self, name: str, revision: str, file: str) -> None:
        if (found := self._repository(name, revision)) is None:
            return
        path = found.folder / file
        if not path.is_file():
            self.answer({"error": "no such file"}, 404, X_Error_Code="EntryNotFound")
        elif path.stat().st_size > LARGE:
            with self.hub.lock:
                signature = f"secret{len(self.hub.signed)}"
                self.hub.signed[signature] = 0
            target = f"{self.hub.storage_url}{quote(str(path))}?Signature={signature}"
            linked = f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"'
            facts = {"X_Repo_Commit": found.commit, "X_Linked_Etag": linked}
            self.answer({}, 302, Location=target, ETag='"of-a-redirect"', **facts)
        else:
            self.send_range(path)

    def send_range(self, path: Path, fault: Fault | None = None) -> None:
        size = path.stat().st_size
        start, stop, status = 0, size, 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range") or ""):
            start, stop, status = int(match[1]), min(int(match[2]) + 1, size), 206
        kind = fault.kind if fault else ""
        if start >= size > 0:
            self.answer({}, 416, content_range=f"bytes */{size}")
            return
        if kind == "whole":
            start, stop, status = 0, size, 200
        if kind == "other" and start:
            start, stop = start - 1, stop - 1
        if kind == "less":
            stop = max(start + 1, stop - 1)
        with path.open("rb") as stream:
            stream.seek(start)
            data = stream.read(stop - start)
        if kind == "flip":
            data = bytes([data[0] ^ 1]) + data[1:]
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        written = f"{path.stat().st_mtime_ns}-{self.headers.get('host')}"  # each host has its own
        self.send_header("etag", f'"{hashlib.md5(written.encode()).hexdigest()}"')
        if status == 206:
            self.send_header("content-range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if kind in ("reset", "short"):
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            if kind == "reset":  # with a RST: nothing lingers
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.wfile.flush()
                self.connection.close()
            return
        pieces = 16 if kind == "slow" else 1
        for piece in range(pieces):
            step = -(-len(data) // pieces)
            self.wfile.write(data[piece * step : (piece + 1) * step])
            self.wfile.flush()
        with self.hub.lock:
            self.hub.ranges.append((path.name, start, stop))


class _Storage(_Handler):
    """The other host."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        [signature] = parse_qs(parts.query)["Signature"]
        path = Path(unquote(parts.path))
        assert "authorization" not in self.headers  # the token is for the hub alone
        with self.hub.lock:
            self.hub.signed[signature] += 1
            expired = self.hub.signed[signature] > self.hub.valid_for
            number = self.hub.asked["bytes"]
            self.hub.asked["bytes"] += 1
            self.hub.asked[path.name] += 1
        fault = self.hub.fault(number)
        if expired:
            self.answer({"error": "Request has expired"}, 403)
        elif fault is not None and isinstance(fault.kind, int):
            self.answer({"error": "not now"}, fault.kind, **fault.headers)
        else:
            self.send_range(path, fault)


def _blob(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@contextmanager
def serving() -> Iterator[HubServer]:
    """A hub and its storage on free ports of this machine."""
    hub = HubServer()
    with listening(_Handler, hub=hub) as hub.url, listening(_Storage, hub=hub) as hub.storage_url:
        yield hub
