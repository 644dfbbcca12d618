"""What of the hub's HTTP an upload uses, on this machine: repositories, LFS, commits, refusals.

The storage for large files has no chunks of the newer protocol (xet), which is switched off by
HF_HUB_DISABLE_XET; the library then sends each file in one request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_thisTokenMustNotBeShownAnywhere"
READ_ONLY = "hf_thisTokenMayOnlyReadAndIsSecret"
_SAMPLE_LIMIT = 200  # bytes: smaller files are sent inside the commit


@dataclass
class Repository:
    private: bool = False
    # Branch -> path -> content
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[str] = field(default_factory=list)  # their messages
    pull_requests: int = 0


class Hub:
    """The state of the server, and what a test makes it refuse."""

    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, Repository] = {}
        self.storage: dict[str, bytes] = {}  # large files by SHA-256
        self.stored: list[str] = []  # in the order in which they came, again and again
        self.requests: list[tuple[str, str]] = []  # method and path
        self.refused: dict[str, tuple[int, str]] = {}  # pattern of a path -> status and message
        self.fail_after: int | None = None  # large files that are still taken
        self.released: threading.Event | None = None  # which answers about large files wait for
        self.lock = threading.Lock()

    def reset(self) -> None:
        self.repositories, self.storage, self.stored, self.requests = {}, {}, [], []
        self.refused, self.fail_after, self.released = {}, None, None

    def asked(self, pattern: str) -> int:
        """How many requests had such a path."""
        return sum(re.search(pattern, path) is not None for _, path in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    timeout = 20

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def log_message(self, *_: Any) -> None:
        pass

    def _handle(self) -> None:
        body, path = self._body(), unquote(urlsplit(self.path).path)
        if (released := self.hub.released) is not None and path.startswith("/store/"):
            with self.hub.lock:
                self.hub.requests.append((self.command, path))
            released.wait(60)
            return
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
            for pattern, (status, said) in self.hub.refused.items():
                if re.search(pattern, path):
                    self._answer({"error": said}, status)
                    return
            if path.startswith("/store/"):
                self._store(path.rpartition("/")[2], body)
                return
            token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
            if token not in (TOKEN, READ_ONLY):
                self._answer({"error": "Invalid username or password."}, 401)
            elif token == READ_ONLY and self.command != "GET":
                words = f"Forbidden: {token} does not have the rights to do this"
                self._answer({"error": words}, 403)
            else:
                self._route(path, body)

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _answer(self, content: Any, status: int = 200, **headers: str) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    # ---- routes ----

    def _route(self, path: str, body: bytes) -> None:
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)(?:/(.+))?)?", path):
            repository = self.hub.repositories.get(match[1])
            if repository is None:
                self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            else:
                self._of_repository(match[1], repository, match[2], match[3] or "main", body)
        else:
            self._answer({"error": f"no such page: {path}"}, 404)

    def _of_repository(
        self, name: str, there: Repository, what: str | None, branch: str, body: bytes
    ) -> None:
        if what == "branch":
            exists = branch in there.branches
            there.branches.setdefault(branch, dict(there.branches["main"]))
            self._answer({"error": "it exists"} if exists else {}, 409 if exists else 200)
        elif branch not in there.branches:
            self._answer({"error": "no revision"}, 404, X_Error_Code="RevisionNotFound")
        elif what == "preupload":
            self._preupload(there.branches[branch], json.loads(body))
        elif what == "commit":
            self._commit(name, there, branch, body)
        elif what in (None, "revision"):
            files = [{"rfilename": path} for path in there.branches[branch]]
            facts = {"id": name, "modelId": name, "private": there.private, "sha": _oid(there)}
            self._answer({**facts, "siblings": files, "tags": []})
        else:
            self._answer({"error": f"no such page: {what}"}, 404)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        exists = name in self.hub.repositories
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.repositories.setdefault(name, Repository(private))
        answer = {"url": f"{self.hub.url}/{name}", "id": name, "name": name}
        self._answer({**answer, "error": "it exists"} if exists else answer, 409 if exists else 200)

    def _validate(self, card: str) -> None:
        """The hub refuses base models that are no ids."""
        found = re.search("^base_model: (.*)$", card, re.MULTILINE)
        wrong = found is not None and "/" not in found[1]
        said = '"base_model" is not valid. Use a model id from https://hf.co/models.'
        errors = [{"message": said}] if wrong else []
        self._answer({"errors": errors, "warnings": []}, 400 if wrong else 200)

    def _preupload(self, there: dict[str, bytes], wanted: dict[str, Any]) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] > _SAMPLE_LIMIT else "regular",
                "shouldIgnore": False,
                "oid": _file_oid(there.get(file["path"])),
            }
            for file in wanted["files"]
        ]
        self._answer({"files": files})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for one in wanted["objects"]:
            found = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.storage:
                href = f"{self.hub.url}/store/{one['oid']}?signature=secret-of-a-url"
                found["actions"] = {"upload": {"href": href}}
            objects.append(found)
        self._answer({"transfer": "basic", "objects": objects})

    def _store(self, oid: str, body: bytes) -> None:
        if self.hub.fail_after == 0:
            self._answer({"error": "the storage is down"}, 400)
            return
        if self.hub.fail_after is not None:
            self.hub.fail_after -= 1
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer({"error": "another checksum"}, 400)
            return
        self.hub.storage[oid] = body
        self.hub.stored.append(oid)
        self._answer({})

    def _commit(self, name: str, there: Repository, branch: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        asks = "create_pr=1" in self.path
        files: dict[str, bytes] = dict(there.branches[branch])
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                there.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.storage[value["oid"]]
        answer = {"success": True, "commitOid": _oid(there)}
        answer["commitUrl"] = f"{self.hub.url}/{name}/commit/{answer['commitOid']}"
        if asks:
            there.pull_requests += 1
            branch = f"refs/pr/{there.pull_requests}"
            answer["pullRequestUrl"] = f"{self.hub.url}/{name}/discussions/{there.pull_requests}"
        there.branches[branch] = files
        self._answer(answer)


def _oid(there: Repository) -> str:
    return hashlib.sha1(repr(there.commits).encode()).hexdigest()


def _file_oid(content: bytes | None) -> str | None:
    """Of a large file its SHA-256, of another that of git."""
    if content is None:
        return None
    if len(content) > _SAMPLE_LIMIT:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port of this machine."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
