"""Killed at random moments until done: the bytes are those of one clean run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from breaking import STATE, check_reader, contents, done, staged, start, write_model

LAYERS = 10
VARIANTS = {
    "shards": (),
    "several shards per layer": ("--max-shard-size=40kB",),
    "layer folders": ("--layout=layers",),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", layers=LAYERS)


def names(output: Path) -> set[str]:
    """Final and staged names at this moment; the moments that a kill is aimed at."""
    return {path.name for folder in (output, output / STATE) for path in listed(folder)}


def listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def wait_for_new_names(process: subprocess.Popen[str], output: Path, count: int) -> None:
    """Until `count` names have appeared that were not there before, or the end."""
    before, seen = names(output), set()
    while process.poll() is None and len(seen) < count:
        seen |= names(output) - before


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_kill_9_until_done(model: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    done(model, tmp_path / "clean", *options)
    clean, output = contents(tmp_path / "clean"), tmp_path / "output"
    chance, kills = random.Random(20), 0
    for _ in range(200):
        process = start(model, output, *options)
        wait_for_new_names(process, output, chance.randint(1, 12 if kills < 8 else 10_000))
        time.sleep(chance.uniform(0, 0.004))
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.communicate()
        check_reader(output, clean)
        if process.returncode == 0:
            break
        kills += 1
    assert process.returncode == 0
    assert kills >= 5, "the runs were not killed often enough to show anything"
    assert contents(output) == clean


@pytest.mark.parametrize("layout", ["safetensors", "layers"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_finished_layers_and_says_how_to_continue(
    model: Path, tmp_path: Path, layout: str, number: signal.Signals
) -> None:
    options = (f"--layout={layout}", "--threads=1")
    done(model, tmp_path / "clean", *options)
    clean, output = contents(tmp_path / "clean"), tmp_path / "output"
    process = start(model, output, *options)
    wait_for_new_names(process, output, 5)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == "" and "Traceback" not in stderr
    assert stderr.count("Interrupted") == 1
    assert f"run the same command again to continue in {output}" in " ".join(stderr.split())
    assert staged(output) == []
    check_reader(output, clean)
    done(model, output, *options)
    assert contents(output) == clean


def test_interrupt_before_anything_is_finished_leaves_no_trace(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", layers=1, experts=64, inner=512)
    output = tmp_path / "output"
    process = start(model, output, "--experts-only", "--threads=1")
    while process.poll() is None and not staged(output):
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the conversion was faster than the signal")
    assert process.returncode == 130
    assert not output.exists()
