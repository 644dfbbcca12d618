"""Helpers of the tests that try to break `ktconv quantize-cpu`.

`run` calls the command in this process (fast), `start` in one of its own (can be killed).
Whatever happens, `refused` holds the command to its contract: one sentence, an exit code,
no traceback, nothing on stdout.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors import safe_open

from helpers import disk_calls
from helpers.families import Tensor, bf16, numbered, random_weights, simple_config, write_checkpoint
from ktconv.cli.app import app
from ktconv.quantize.packed.gptq.streaming import PASS

STATE = ".ktconv"


def layer_tensors(index: int, experts: int = 4, inner: int = 128) -> dict[str, Tensor]:
    """One decoder layer: experts, and a router that is copied."""
    weights = random_weights(inner=inner, experts=experts, seed=index)
    return {
        **numbered(f"model.layers.{index}.mlp.experts", weights),
        f"model.layers.{index}.mlp.gate.weight": bf16(weights.gate[:, 0]),
    }


def model_tensors(layers: int = 3, experts: int = 4, inner: int = 128) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index in range(layers):
        tensors |= layer_tensors(index, experts, inner)
    embedding = np.random.default_rng(99).standard_normal((64, 128))
    return {**tensors, "model.embed_tokens.weight": bf16(embedding)}


def write_model(
    directory: Path, layers: int = 3, experts: int = 4, inner: int = 128, shards: int = 3
) -> Path:
    """A checkpoint with experts, other tensors and a tokenizer file."""
    config = simple_config(
        num_hidden_layers=layers, num_experts=experts, moe_intermediate_size=inner
    )
    tensors = model_tensors(layers, experts, inner)
    write_checkpoint(directory, tensors, config, shards)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    return directory


# ---- running ---------------------------------------------------------------------------


def words(model: object, output: object, *more: object) -> list[str]:
    return ["quantize-cpu", *map(str, (model, output)), "--numa=1", "--threads=2", *map(str, more)]


def run(model: object, output: object, *more: object) -> Result:
    """The command in this process. Nothing but SystemExit may come out of it."""
    result = CliRunner().invoke(app, words(model, output, *more))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def done(model: object, output: object, *more: object) -> str:
    """The command, which must succeed; its stdout."""
    result = run(model, output, *more)
    assert result.exit_code == 0, result.stderr
    return str(result.stdout)


def ktconv(*words: object) -> Result:
    """The command in this process; raises what is no exit."""
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def process(*words: object, **changes: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with changed environment variables: for what only a
    process shows, as the environment that it reads when it starts."""
    command = [sys.executable, "-m", "ktconv", *map(str, words)]
    environment = {**os.environ, **changes}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def ktconv_done(*words: object) -> str:
    """The stdout of a command that succeeds."""
    result = ktconv(*words)
    assert result.exit_code == 0, result.stderr + result.stdout
    return str(result.stdout)


def refused(result: Result, code: int, *phrases: str) -> str:
    """The one sentence of a run that must have failed with `code`."""
    return check_refusal(result.exit_code, result.stdout, result.stderr, code, *phrases)


def refused_in_json(result: Result, code: int, *phrases: str) -> str:
    """The same of a run with --json, whose stdout holds the sentence in a document."""
    document = json.loads(result.stdout)
    assert document.keys() == {"schema", "error"} and document["schema"] == 1
    error = document["error"]
    assert error.keys() == {"message", "hint", "exit_code"} and error["exit_code"] == code
    line = check_refusal(result.exit_code, "", result.stderr, code, *phrases)
    assert error["message"].rstrip(".")[:100] == line.removeprefix("Error: ")[:-1][:100]
    assert ("Hint: " in result.stderr) == (error["hint"] is not None)
    return line


def check_refusal(got: int, stdout: str, stderr: str, code: int, *phrases: str) -> str:
    assert got == code, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    lines = [line for line in stderr.splitlines() if not _is_progress(line)]
    assert lines[0].startswith("Error: "), stderr
    assert sum(line.startswith("Error: ") for line in lines) == 1
    assert len(lines) <= 2 and all(line.startswith("Hint: ") for line in lines[1:]), stderr
    assert all(line.endswith(".") and not line.endswith("..") for line in lines), stderr
    for phrase in phrases:
        assert phrase in lines[0], f"{phrase!r} not in {lines[0]!r}"
    return lines[0]


def _is_progress(line: str) -> bool:
    told = " done, ", " modules ", " module "  # units, and the classes that quantize-gpu counts
    ahead = "note: ", "skipped: ", "memory: "  # of the work
    of_mix = line.endswith(" bits") or " bits  layers " in line
    return any(word in line for word in told) or line.startswith(ahead) or of_mix


def start(model: object, output: object, *more: object, stop_at: int = 0) -> subprocess.Popen[str]:
    """The command in a process of its own; it stops ahead of this call of disk_calls.CALLS."""
    program = [disk_calls.__file__, str(stop_at)] if stop_at else ["-m", "ktconv"]
    return subprocess.Popen(
        [sys.executable, *program, *words(model, output, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# ---- what is there ---------------------------------------------------------------------


def contents(directory: Path) -> dict[str, str]:
    """sha256 of every file below `directory`, by relative path."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def stamps(directory: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file: equal only if nothing was touched."""
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def check_reader(output: Path, clean: dict[str, str]) -> None:
    """Whatever has a final name is complete and what a clean run writes."""
    if not output.exists():
        return
    for path in output.iterdir():
        if path.suffix == ".safetensors":
            with safe_open(path, "np") as file:
                assert list(file.keys())
    for name, digest in contents(output).items():
        if name.startswith(f"{STATE}/{PASS}/"):  # what was measured of a text
            continue
        if name.startswith(STATE):
            assert not name.endswith((".safetensors", ".kt")) or ".part/" in name, name
        else:
            assert clean.get(name) == digest, f"{name} differs from a clean run"
    for folder in output.glob("_layer_*"):
        whole = {name for name in clean if name.startswith(f"{folder.name}/")}
        assert {name for name in contents(output) if name.startswith(f"{folder.name}/")} == whole


def staged(output: Path) -> list[str]:
    """What is left of units under way."""
    return sorted(path.name for path in (output / STATE).glob("*.part"))


@contextmanager
def tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """A file system of its own; skips where mounting is not allowed."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def remount(directory: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(directory)], check=True)


def edit_json(path: Path, change: Any) -> None:
    """Apply `change(content)` to a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
