"""HTTP servers on free ports of this machine, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Answers and says nothing on the terminal; connections stay open."""

    protocol_version = "HTTP/1.1"
    timeout = 20

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        pass  # of a client that went away


@contextmanager
def listening(kind: type[Handler], **attributes: object) -> Iterator[str]:
    """The URL of a server whose handlers are of this kind, with these attributes."""
    server = _Server(("127.0.0.1", 0), type("Handler", (kind,), attributes))
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
