"""Kills: a command is hit at a counted call or at some moment, again and again, until it ends."""

from __future__ import annotations

import random
import signal
from collections import Counter

from helpers.cli import staged
from helpers.disk_calls import Ended

from torture.bench import AT_WORK, Bench, Trial
from torture.shim import Wrong

SIGNALS = (*6 * (signal.SIGKILL,), *2 * (signal.SIGINT,), *2 * (signal.SIGTERM,))
IN_A_ROW = (1, 1, 1, 2, 3, 5)
VERIFIED = 20  # every so many trials
INTERRUPTED = 130


def kill(bench: Bench, name: str, kills: int) -> Counter[str]:
    """Kills a command so often, in as many trials as that takes; how often by what."""
    rng, counts = bench.random("kills", name), Counter[str]()
    clean = bench.clean(name)
    while counts["kills"] < kills:
        counts["trials"] += 1
        with bench.trial(name) as trial:
            for number in range(rng.choice(IN_A_ROW)):
                if _hit_once(bench, trial, rng, counts, first=number == 0):
                    break
                if counts["kills"] == kills:
                    break
            bench.finish(trial)
            if trial.subject.verified and counts["trials"] % VERIFIED == 1:
                bench.verify(trial)
                counts["verified"] += 1
        if counts["trials"] > 3 * kills + 10:
            bench.failures.append(f"{name}: {clean.calls} calls, but they are hardly ever hit")
            break
    return counts


def _hit_once(
    bench: Bench, trial: Trial, rng: random.Random, counts: Counter[str], first: bool
) -> bool:
    """One run that is to be killed; whether it ended by itself."""
    clean, number = bench.clean(trial.name), rng.choice(SIGNALS)
    counted, group = rng.random() < 0.5, trial.subject.fleet and rng.random() < 0.5
    if counted:
        wrong = Wrong("kill", rng.randint(1, clean.calls), signal=number)
        ended = bench.run(trial, wrong)
        hit = trial.told.counted()[1] > 0
    else:
        after = rng.uniform(0, 1.1 * clean.seconds)
        ended = bench.run(trial, after=after, number=number, group=group)
        hit = ended.returncode in (-number, INTERRUPTED)
    bench.check_sound(trial)
    if hit:
        counts["kills"] += 1
        counts["counted" if counted else "random"] += 1
        counts[signal.Signals(number).name] += 1
    _check_end_of_run(bench, trial, ended, number, hit, first)
    return ended.returncode == 0


def _check_end_of_run(
    bench: Bench, trial: Trial, ended: Ended, number: int, hit: bool, first: bool
) -> None:
    assert "Traceback" not in ended.stderr + ended.stdout, ended.stderr
    if ended.returncode == 0:  # it was hit when all was done, or not at all
        return
    if trial.subject.fleet:  # one of its runs was hit; those that it left may be at work
        assert hit or AT_WORK in ended.stdout, ended
        return
    assert hit, ended
    if number == signal.SIGKILL:
        assert ended.returncode == -number, ended
        return
    assert ended.returncode in (INTERRUPTED, -number), ended  # the latter at its very beginning
    if ended.stdout:  # it was hit when it had said what it had done
        bench.check_end(trial)
    if first:  # what runs before it left is removed by the next one that gets to it
        assert all(staged(trial.output(one)) == [] for one in trial.subject.outputs)
