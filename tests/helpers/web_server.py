"""A web server of this machine with a folder, with or without listings, and with faults."""

from __future__ import annotations

import html
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qs, quote, unquote, urlsplit

from helpers.faults import Fault
from helpers.local_servers import Handler, listening


class WebServer:
    """`fault` gets the number of each request for bytes, from 0 on, and says what goes wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, ""
        self.listing = True
        self.query = ""  # without it requests are refused
        self.authorization = ""  # as well
        self.dated = True  # whether files have an ETag and a date
        self.fault: Callable[[int], Fault | None] = lambda _: None
        self.sent: list[tuple[str, int, int]] = []
        self.number = 0
        self.released = threading.Event()  # what "silent" answers wait for
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.sent)


class _Handler(Handler):
    web: WebServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = self.web.folder / unquote(parts.path).strip("/")
        allowed = self.web.authorization in ("", self.headers.get("authorization"))
        if parts.query != self.web.query or not allowed:
            self._say(403)
        elif path.is_dir() and self.web.listing:
            names = [one.name + "/" * one.is_dir() for one in sorted(path.iterdir())]
            links = [f'<a href="{quote(name)}">{html.escape(name)}</a>' for name in names]
            page = f'<a href="../">..</a><a href="?C=N">by name</a>{"".join(links)}'
            self._say(200, page.encode(), "text/html; charset=utf-8")
        elif path.is_file():
            self._file(path)
        else:
            self._say(404)

    def _say(
        self,
        status: int,
        data: bytes = b"",
        kind: str = "text/plain",
        reason: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.send_response(status, reason)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, path: Path) -> None:
        with self.web.lock:
            fault, self.web.number = self.web.fault(self.web.number), self.web.number + 1
        kind = fault.kind if fault else None
        status = path.stat()
        size, match = status.st_size, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["range"])
        assert match is not None  # nothing is asked for as a whole
        start, stop = int(match[1]), min(int(match[2]) + 1, size)
        if isinstance(kind, int):
            more = fault.headers if fault else {}
            self._say(kind, reason=f"cannot answer {self.path}", headers=more)
            return
        if kind == "silent":
            self.web.released.wait(60)
        if kind == "whole":
            start, stop = 0, size
        if kind == "other" and start:
            start, stop = start - 1, stop - 1
        with path.open("rb") as stream:
            stream.seek(start)
            data = stream.read(max(stop - start, 0))
        self.send_response(200 if kind == "whole" else 206 if start < size else 416)
        self.send_header("Content-Length", str(len(data)))
        if kind not in ("whole", "bare"):
            extent = f"{start}-{stop - 1}" if start < size else "*"
            self.send_header("Content-Range", f"bytes {extent}/{size}")
        if self.web.dated:
            self.send_header("ETag", f'"{size:x}-{status.st_mtime_ns:x}"')
        self.end_headers()
        self._send(data, kind)
        with self.web.lock:
            self.web.sent.append((path.name, start, stop))

    def _send(self, data: bytes, kind: str | None) -> None:
        if kind in ("reset", "short"):
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            if kind == "reset":  # with a RST: nothing lingers
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
            return
        step = max(1, -(-len(data) // 16)) if kind == "slow" else max(1, len(data))
        for at in range(0, len(data), step):
            self.wfile.write(data[at : at + step])
            self.wfile.flush()


class _GcsHandler(_Handler):
    """What gcsfs asks Google Cloud Storage; of each file the generation is when it was written."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        match = re.fullmatch(r"(?:/download)?/storage/v1/b/bucket/o(?:/(.+))?", parts.path)
        path = self.web.folder / unquote((match and match[1]) or "")
        if match is None or not path.exists():
            self._say(404)
        elif path.is_dir():
            [prefix] = query.get("prefix", [""])
            found = (
                self._about(one) for one in sorted(self.web.folder.rglob("*")) if one.is_file()
            )
            self._json({"items": [one for one in found if one["name"].startswith(prefix)]})
        elif "alt" not in query:
            self._json(self._about(path))
        elif query.get("generation", [""]) != [self._about(path)["generation"]]:
            self._say(404)
        else:
            self._file(path)

    def _about(self, path: Path) -> dict[str, str]:
        status, name = path.stat(), path.relative_to(self.web.folder).as_posix()
        generation = str(status.st_mtime_ns)
        return {"name": name, "size": str(status.st_size), "generation": generation}

    def _json(self, content: object) -> None:
        self._say(200, json.dumps(content).encode(), "application/json")


@contextmanager
def serving(folder: Path, as_gcs: bool = False) -> Iterator[WebServer]:
    """`folder` on a free port of this machine, as a directory or as the bucket gs://bucket."""
    web = WebServer(folder)
    with listening(_GcsHandler if as_gcs else _Handler, web=web) as web.url:
        yield web
