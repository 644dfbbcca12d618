"""A wall clock that is wrong, differently in each run, and jumps; and files of odd times."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

from helpers.cli import check_refusal, contents, words

from torture.bench import Bench, Trial, differences
from torture.shim import Wrong

YEAR = 31_556_952
WRONG_BY = (-50 * YEAR, -20 * YEAR, -5 * YEAR, -YEAR, YEAR, 5 * YEAR, 20 * YEAR, 80 * YEAR)
JUMPS = (0, 1, 3, 50)  # after so many readings
TIMES = (-10 * YEAR, 0, 80 * YEAR, 230 * YEAR)  # of files, since 1970


def jumps(bench: Bench, name: str, rounds: int) -> Counter[str]:
    """Runs that are killed and continued, each at another time; progress is shown by lines."""
    counts, rng = Counter[str](), bench.random("clocks", name)
    calls = bench.clean(name).calls
    for _ in range(rounds):
        with bench.trial(name) as trial:
            for _ in range(rng.choice((1, 2, 3))):
                counts["runs"] += 1
                ended = bench.run(trial, _wrong(rng, "kill", rng.randint(1, calls)))
                killed = 3 if trial.subject.fleet else -9  # 3: a run of the list was
                assert ended.returncode in (0, killed), ended.stderr
                assert "Traceback" not in ended.stderr, ended.stderr
                bench.check_sound(trial)
            counts["runs"] += 1
            bench.finish(trial, _wrong(rng, "count", 0))
    return counts


def _wrong(rng: random.Random, kind: str, at: int) -> Wrong:
    return Wrong(kind, at, clock=rng.choice(WRONG_BY), jump=rng.choice(JUMPS))


def times_of_files(bench: Bench) -> Counter[str]:
    """Sources that were written before 1970 or will be in centuries; and ones whose time changes
    between two runs, which is a change of the source."""
    counts = Counter[str]()
    for seconds in TIMES:
        counts["odd times of a source"] += 1
        with bench.trial("int4") as trial:
            model = _copy(bench, trial, seconds)
            _end(bench, trial, model, "clean")
            _kill(bench, trial, model)
            _end(bench, trial, model, "output")
            found, clean = contents(trial.output("output")), contents(trial.output("clean"))
            assert found == clean, differences(found, clean)
        counts["times that change between runs"] += 1
        with bench.trial("int4") as trial:
            model = _copy(bench, trial, 50 * YEAR)
            _kill(bench, trial, model)
            _date(model, seconds)
            ended = bench.commands.run(words(model, trial.output("output")))
            line = check_refusal(ended.returncode, ended.stdout, ended.stderr, 2)
            assert "begun with other settings or another source" in line, line
            _date(model, 50 * YEAR)
            _end(bench, trial, model, "output")
    return counts


def _copy(bench: Bench, trial: Trial, seconds: int) -> Path:
    model = trial.place / "model"
    shutil.copytree(bench.sources.model, model)
    _date(model, seconds)
    return model


def _date(model: Path, seconds: int) -> None:
    for path in model.iterdir():
        os.utime(path, (seconds, seconds))


def _kill(bench: Bench, trial: Trial, model: Path) -> None:
    wrong = Wrong("kill", bench.clean("int4").calls // 2)
    ended = bench.commands.run(
        words(model, trial.output("output")), variables=trial.told.variables(wrong)
    )
    assert ended.returncode == -9, ended


def _end(bench: Bench, trial: Trial, model: Path, output: str) -> None:
    ended = bench.commands.run(words(model, trial.output(output)))
    assert ended.returncode == 0, ended.stderr
