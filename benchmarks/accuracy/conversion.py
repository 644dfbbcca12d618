"""Runs the commands that are measured: `ktconv stats` and `ktconv quantize-cpu`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.texts import Text
from benchmarks.accuracy.variants import Variant

# Option of `ktconv stats` and placeholder of variants -> the name of what it writes.
STATISTICS = {"importance": "importance.safetensors", "hessian": "hessian"}
_ALL_TOKENS = 1 << 30  # more than any text here has


class CommandFailed(Exception):
    """A command of ktconv that did not succeed; the message is the command's own."""


@dataclass(frozen=True)
class Statistics:
    """Files by the placeholder that stands for them, and how long `ktconv stats` took for them."""

    paths: dict[str, Path]
    seconds: float


@dataclass(frozen=True)
class Converted:
    """An output, with the seconds that the command reports and the bytes that it read."""

    output: Path
    seconds: float
    source_bytes: int


def record_statistics(model: Path, text: Text, folder: Path, needs: Sequence[str]) -> Statistics:
    """A text as a file, and the statistics of it that are needed, in `folder`; those that are there
    already are not recorded again."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, seconds = {"text": folder / "text.txt"}, 0.0
    paths["text"].write_bytes(text.content.encode())
    for name in (name for name in needs if name in STATISTICS):
        paths[name], done = folder / STATISTICS[name], folder / f"{name}-seconds.json"
        if not done.exists():
            began = time.monotonic()
            tokens = ["--max-tokens", str(_ALL_TOKENS)]
            options = ["--text", str(paths["text"]), *tokens, f"--{name}", str(paths[name])]
            _run(["stats", str(model), *options, "--json"])
            done.write_text(json.dumps(time.monotonic() - began))
        seconds += json.loads(done.read_text())
    return Statistics(paths, seconds)


def convert(
    model: Path, variant: Variant, numa: int, statistics: Statistics | None, output: Path
) -> Converted:
    """Run quantize-cpu. Raises CommandFailed with what it says."""
    assert variant.options is not None
    paths = {} if statistics is None else {k: str(path) for k, path in statistics.paths.items()}
    options = [option.format_map(paths) for option in variant.options]
    fixed = ["--method", variant.format.key, "--numa", str(numa), "--overwrite", "--json"]
    report = json.loads(_run(["quantize-cpu", str(model), str(output), *fixed, *options]))
    return Converted(output, report["seconds"], report["source_bytes"])


def _run(arguments: list[str]) -> str:
    """What the command prints on stdout."""
    command = [sys.executable, "-m", "ktconv", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        try:
            error = json.loads(done.stdout)["error"]
            message = " ".join(filter(None, (error["message"], error["hint"])))
        except (ValueError, KeyError):
            message = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise CommandFailed(f"ktconv {' '.join(arguments)}: {message}")
    return done.stdout
