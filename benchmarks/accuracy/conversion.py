"""Runs the commands that are measured: `ktconv stats` and `ktconv quantize-cpu`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.texts import Text
from benchmarks.accuracy.variants import STATISTICS, Variant

_ALL_TOKENS = 1 << 30  # more than any text here has


class CommandFailed(Exception):
    """A command of ktconv that did not succeed; the message is the command's own."""


@dataclass(frozen=True)
class Statistics:
    """What `ktconv stats` recorded of a text, by the option's name, and how long all of it took."""

    paths: dict[str, Path]
    seconds: float


@dataclass(frozen=True)
class Converted:
    """An output, with the seconds that the command reports and the bytes that it read."""

    output: Path
    seconds: float
    source_bytes: int


def record_statistics(model: Path, text: Text, folder: Path) -> Statistics:
    """Importance and second moments of a text, in `folder`, or those that are there already."""
    done = folder / "seconds.json"
    paths = {"importance": folder / "importance.safetensors", "hessian": folder / "hessian"}
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        file = folder / "text.txt"
        file.write_bytes(text.content.encode())
        began = time.monotonic()
        options = [part for name in STATISTICS for part in (f"--{name}", str(paths[name]))]
        tokens = ["--max-tokens", str(_ALL_TOKENS)]
        _run(["stats", str(model), "--text", str(file), *tokens, *options, "--json"])
        done.write_text(json.dumps(time.monotonic() - began))
    return Statistics(paths, json.loads(done.read_text()))


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
