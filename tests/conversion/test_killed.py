"""Killed and interrupted at calls that change the disk: the bytes are those of one clean run.

Kills are placed by counting calls (disk_calls.py), so they hit the same on every machine."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers.cli import check_reader, contents, done, staged, words, write_model
from helpers.disk_calls import Commands, Site, Sites, hooked

pytestmark = pytest.mark.slow

LAYERS = 10
VARIANTS = {
    "shards": (),
    "several shards per layer": ("--max-shard-size=40kB",),
    "layer folders": ("--layout=layers",),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", layers=LAYERS)


@pytest.fixture(scope="module")
def clean(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """The files of a run that nothing disturbs, by its layout."""

    @cache
    def made(layout: str) -> dict[str, str]:
        output = tmp_path_factory.mktemp("clean") / "output"
        done(model, output, f"--layout={layout}")
        return contents(output)

    return made


@pytest.fixture(scope="module")
def struck() -> set[Site]:
    """Call sites at which a variant was killed."""
    return set()


@pytest.mark.parametrize("variant", VARIANTS)
def test_kill_9_at_every_call_site(
    commands: Commands, tmp_path: Path, struck: set[Site], variant: str
) -> None:
    """Ahead of the first call from one site, of the last call from the next; in each variant from
    sites that those before do not have. test_crash_points.py has faults at both calls of all."""
    options, sites = (*VARIANTS[variant], "--threads=1"), Sites()
    model = write_model(tmp_path / "model", layers=2, experts=1)
    with hooked(sites):
        done(model, tmp_path / "clean", *options)
    clean = contents(tmp_path / "clean")
    fresh = [site for site in dict.fromkeys(sites.found) if site not in struck]
    struck.update(fresh)
    for number, site in enumerate(fresh):
        first, *more = (call for call, found in enumerate(sites.found, start=1) if found == site)
        call, output = more[-1] if more and number % 2 else first, tmp_path / str(number)
        ended = commands.run(words(model, output, *options), call)
        check_reader(output, clean)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        done(model, output, *options)
        assert contents(output) == clean, f"killed at call {call}"
    assert len(struck) > 20


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_kill_9_until_done(commands: Commands, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Each run is given a few calls more than the one before, and goes on from what that left."""
    model = write_model(tmp_path / "model", layers=6, experts=2)
    done(model, tmp_path / "clean", *options)
    clean, output = contents(tmp_path / "clean"), tmp_path / "output"
    for call in itertools.count(8, 8):
        ended = commands.run(words(model, output, *options), call)
        check_reader(output, clean)
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert call > 40, "the runs were not killed often enough to show anything"
    assert contents(output) == clean


INTERRUPTS = [  # the call, threads, and of SIGINT and SIGTERM the layout
    (60, 1, "safetensors", "layers"),
    (100, 1, "layers", "safetensors"),
    (81, 2, "safetensors", "layers"),
]


@pytest.mark.parametrize(
    ("call", "threads", "number", "layout"),
    [
        (call, threads, number, layout)
        for call, threads, *layouts in INTERRUPTS
        for number, layout in zip((signal.SIGINT, signal.SIGTERM), layouts, strict=True)
    ],
)
def test_interrupt_leaves_finished_layers_and_says_how_to_continue(
    commands: Commands,
    model: Path,
    clean: Callable[[str], dict[str, str]],
    tmp_path: Path,
    layout: str,
    number: int,
    call: int,
    threads: int,
) -> None:
    options = (f"--layout={layout}", f"--threads={threads}")
    output = tmp_path / "output"
    ended = commands.run(words(model, output, *options), call, number)
    assert ended.returncode == 130, ended.stderr
    assert ended.stdout == "" and "Traceback" not in ended.stderr
    assert ended.stderr.count("Interrupted") == 1
    assert f"run the same command again to continue in {output}" in " ".join(ended.stderr.split())
    assert staged(output) == []
    check_reader(output, clean(layout))
    assert set(clean(layout)) & set(contents(output)), "nothing was finished before the interrupt"
    done(model, output, *options)
    assert contents(output) == clean(layout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_before_anything_is_finished_leaves_no_trace(
    commands: Commands, model: Path, tmp_path: Path, number: int
) -> None:
    for call in (1, 2, 3, 5, 8, 13) if number == signal.SIGINT else (1, 8):
        output = tmp_path / str(call)
        ended = commands.run(words(model, output, "--experts-only", "--threads=1"), call, number)
        assert ended.returncode == 130, ended.stderr
        assert not output.exists(), f"interrupted at call {call}"
