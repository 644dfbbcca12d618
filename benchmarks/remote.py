#!/usr/bin/env python3
"""Measure conversions from servers of this machine against the same conversion of local files.

    remote.py MODEL --work DIR [--repeats 3] [--latency 0.05]

The server runs in a process of its own on the same cores and sends files by sendfile, as a web
server or in the protocol of S3; `--latency` is how long it waits before each answer. "Fetched
alone" are the same bytes by 8 connections without any conversion. The table goes to stdout.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import convert
import measure

PIECE = 16 << 20
CONNECTIONS = 8
GB = 1e9


class Handler(BaseHTTPRequestHandler):
    """A folder as http://HOST/, and as the bucket of the same name in the protocol of S3."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder: Path
    latency: float

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        name = unquote(parts.path).strip("/").removeprefix("bucket").strip("/")
        if self.latency:
            time.sleep(self.latency)
        path = self.folder / name
        if "list-type" in parse_qs(parts.query):
            self.say(self.listed().encode(), "application/xml")
        elif path.is_dir():
            links = (f'<a href="{one.name}">{one.name}</a>' for one in path.iterdir())
            self.say("".join(links).encode(), "text/html")
        elif path.is_file():
            self.send_file(path)
        else:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def listed(self) -> str:
        found = "".join(
            f"<Contents><Key>{escape(one.name)}</Key><Size>{one.stat().st_size}</Size>"
            f'<ETag>"{one.stat().st_mtime_ns:x}"</ETag>'
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for one in sorted(self.folder.iterdir())
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"

    def say(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_file(self, path: Path) -> None:
        status = path.stat()
        start, stop, size = 0, status.st_size, status.st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if match is not None:
            start, stop = int(match[1]), min(int(match[2]) + 1, size)
        self.send_response(200 if match is None else 206)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{status.st_mtime_ns:x}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if match is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        self.wfile.flush()
        if self.command == "HEAD":
            return
        with path.open("rb") as file:
            while start < stop:
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        pass  # a process that ends leaves its connections


def serve(folder: Path, latency: float) -> None:
    handler = type("Bound", (Handler,), {"folder": folder, "latency": latency})
    server = Server(("127.0.0.1", 0), handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def fetched_alone(port: int, model: Path) -> float:
    """Seconds for all bytes of the weights in pieces, thrown away."""
    pieces = [
        (path.name, at, min(at + PIECE, path.stat().st_size))
        for path in sorted(model.glob("*.safetensors"))
        for at in range(0, path.stat().st_size, PIECE)
    ]

    def fetch(mine: list[tuple[str, int, int]]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for name, start, stop in mine:
            connection.request("GET", f"/{name}", headers={"Range": f"bytes={start}-{stop - 1}"})
            connection.getresponse().read()
        connection.close()

    started = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(fetch, [pieces[at::CONNECTIONS] for at in range(CONNECTIONS)]))
    return time.perf_counter() - started


def conversion(source: str, options: argparse.Namespace) -> measure.Run:
    output = options.work / "out"
    command = [sys.executable, "-m", "ktconv", "quantize-cpu", source, str(output), "--numa", "1"]
    command += ["--threads", str(options.threads), "--json"]
    try:
        run = convert.checked(measure.run_measured(command))
    finally:
        shutil.rmtree(output, ignore_errors=True)
    run.extra = json.loads(run.stdout)
    return run


def row(name: str, runs: list[measure.Run]) -> list[str]:
    facts: dict[str, Any] = runs[0].extra
    seconds = statistics.median(run.seconds for run in runs)
    span = f"{min(run.seconds for run in runs):.2f} to {max(run.seconds for run in runs):.2f}"
    read = facts["source_bytes_read"] / GB
    peak = max(run.peak.anonymous for run in runs) / (1 << 30)
    own = statistics.median(run.cpu_seconds for run in runs)
    requests = facts.get("network_requests")
    return [
        name,
        f"{seconds:.2f} s ({span})",
        f"{read / seconds:.2f} GB/s",
        f"{own / read:.2f} s",
        f"{peak:.2f} GiB",
        "" if requests is None else f"{requests / read:.0f}",
        "" if requests is None else f"{facts['network_bytes'] / GB / read:.3f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, default=Path())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.latency)
        return 0
    command = [sys.executable, __file__, str(options.model), "--serve"]
    command += ["--latency", str(options.latency)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        address = f"http://127.0.0.1:{port}"
        os.environ |= {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "name",
            "AWS_SECRET_ACCESS_KEY": "word",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        sources = {"local files": str(options.model), "web server": address, "S3": "s3://bucket"}
        runs: dict[str, list[measure.Run]] = {name: [] for name in sources}
        alone = []
        measure.read_all(measure.source_files(options.model), options.threads)  # into the cache
        for number in range(options.repeats):
            alone.append(fetched_alone(port, options.model))
            for name, source in sources.items():
                convert.note(f"{number + 1} of {options.repeats}: {name}")
                runs[name].append(conversion(source, options))
    finally:
        server.kill()
        server.wait()
    size = sum(path.stat().st_size for path in options.model.glob("*.safetensors")) / GB
    print(f"commit {convert.commit()}, load {os.getloadavg()[0]:.1f}")
    print(f"fetched alone: {size / statistics.median(alone):.2f} GB/s\n")
    header = [
        "source",
        "time",
        "rate",
        "own CPU per GB",
        "memory",
        "requests per GB",
        "sent per byte",
    ]
    print("\n".join(convert.table(header, [row(name, found) for name, found in runs.items()])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
