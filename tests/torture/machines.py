"""Machines that share an OUTPUT: servers of commands, with host names and processes apart."""

from __future__ import annotations

import errno
import random
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from helpers.cli import STATE, check_refusal
from helpers.disk_calls import Commands, Ended

from torture.bench import AT_WORK, Bench, Trial
from torture.shim import Told, Wrong, compiled
from torture.subjects import MODULES, installed

APART = ("unshare", "--uts", "--pid", "--fork", "--mount-proc")
NAMED = ("sh", "-c", 'hostname "$0" && exec "$@"')
LAYERS = (0, 1, 2)  # of the model
REFUSALS = (AT_WORK, "another ktconv is converting this model", "missing")


@dataclass
class Machine:
    """A server of commands, and the counters of its shim."""

    name: str
    commands: Commands
    room: Path

    def run(self, trial: Trial, words: list[object], wrong: Wrong) -> tuple[Ended, bool]:
        """The end of a command, and whether it was hit."""
        told = Told(trial.place, self.room / "state")
        ended = self.commands.run(words, variables=told.variables(wrong))
        return ended, told.counted()[1] > 0


def can_be_apart() -> bool:
    """Whether this user may have host names and process ids of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0


@contextmanager
def machines(bench: Bench, count: int) -> Iterator[list[Machine]]:
    """So many, apart from each other where that is allowed."""
    apart = can_be_apart()
    with ExitStack() as stack:
        found = []
        for number in range(count):
            name = f"machine-{number}"
            room = bench.room / name
            room.mkdir(exist_ok=True)
            ahead = (*APART, *NAMED, name) if apart else ()
            preload = {"LD_PRELOAD": str(compiled(room)), "TMPDIR": str(bench.scratch)}
            commands = Commands(room, *installed(MODULES), ahead=ahead, **preload)
            stack.callback(commands.close)
            found.append(Machine(name, commands, room))
        yield found


def share(bench: Bench, name: str, found: list[Machine], rounds: int) -> Counter[str]:
    """Machines convert layers of one model into one OUTPUT at the same time, all of a kind of
    round in turn."""
    kinds = (apart_layers, killed_meanwhile, same_layers, finalized_meanwhile)
    counts = Counter[str]()
    for number in range(rounds):
        kind, rng = kinds[number % len(kinds)], bench.random("machines", name, number)
        what = (kind.__doc__ or "").split(".")[0]
        with bench.trial(name) as trial:
            counts[what] += 1
            kind(bench, trial, found, rng, counts)
            complete(bench, trial, found[0], counts)
    return counts


def apart_layers(
    bench: Bench, trial: Trial, found: list[Machine], rng: random.Random, counts: Counter[str]
) -> None:
    """layers of their own. All end well; who is last writes the index."""
    for ended, _ in at_once(bench, trial, found, _disjoint(rng, len(found)), [Wrong()] * 9):
        assert ended.returncode == 0, ended.stderr


def killed_meanwhile(
    bench: Bench, trial: Trial, found: list[Machine], rng: random.Random, counts: Counter[str]
) -> None:
    """one is killed. It does its part again, while or after the others work."""
    shares = _disjoint(rng, len(found))
    wrong = [Wrong("kill", rng.randint(1, bench.clean(trial.name).calls // 2)), *[Wrong()] * 9]
    for number, (ended, hit) in enumerate(at_once(bench, trial, found, shares, wrong)):
        counts["kills"] += hit
        assert ended.returncode == (-signal.SIGKILL if hit else 0), (number, ended)
    bench.check_sound(trial)
    for ended, _ in at_once(bench, trial, found, shares, [Wrong()] * 9):
        assert ended.returncode == 0, ended.stderr


def same_layers(
    bench: Bench, trial: Trial, found: list[Machine], rng: random.Random, counts: Counter[str]
) -> None:
    """the same layers on all. Who comes second is refused, or finds nothing to do."""
    shares = [rng.choice(("0-2", "0-2", "0", "1-2")) for _ in found]
    for ended, _ in at_once(bench, trial, found, shares, [Wrong()] * 9):
        if ended.returncode:
            _check_refused(ended)
            counts["refused"] += 1


def finalized_meanwhile(
    bench: Bench, trial: Trial, found: list[Machine], rng: random.Random, counts: Counter[str]
) -> None:
    """--finalize while others work. It is refused, or the last of all that was missing."""
    shares = [*_disjoint(rng, len(found) - 1), "finalize"]
    ends = at_once(bench, trial, found, shares, [Wrong()] * 9)
    for (ended, _), share in zip(ends, shares, strict=True):
        if ended.returncode and share == "finalize":
            _check_refused(ended)
            counts["refused"] += 1
        else:
            assert ended.returncode == 0, ended.stderr


def complete(bench: Bench, trial: Trial, machine: Machine, counts: Counter[str]) -> None:
    """What none of them has done, and the bytes of one run on one machine."""
    words = trial.subject.words(bench.sources, trial.place)
    if (trial.output("output") / STATE).exists():
        ended, _ = machine.run(trial, [*words, "--finalize"], Wrong())
        counts["--finalize was needed"] += ended.returncode == 0
        if ended.returncode:
            _check_refused(ended)
            ended, _ = machine.run(trial, words, Wrong())
            assert ended.returncode == 0, ended.stderr
    bench.check_end(trial)


def at_once(
    bench: Bench, trial: Trial, found: list[Machine], shares: list[str], wrong: list[Wrong]
) -> list[tuple[Ended, bool]]:
    """A command on each machine for its share of the layers."""
    words = trial.subject.words(bench.sources, trial.place)
    orders = []
    for machine, layers, one in zip(found, shares, wrong, strict=False):
        trial.steps.append(f"{machine.name}: {layers} {one}")
        more = "--finalize" if layers == "finalize" else f"--layers={layers}"
        orders.append((machine, [*words, more], one))
    with ThreadPoolExecutor(len(orders)) as pool:
        runs = [pool.submit(one.run, trial, told, fault) for one, told, fault in orders]
        return [run.result() for run in runs]


def _disjoint(rng: random.Random, count: int) -> list[str]:
    """All layers, in so many shares of which none is empty."""
    layers = list(LAYERS)
    rng.shuffle(layers)
    cuts = sorted(rng.sample(range(1, len(layers)), count - 1))
    edges = [0, *cuts, len(layers)]
    return [",".join(map(str, sorted(layers[start:stop]))) for start, stop in pairwise(edges)]


def _check_refused(ended: Ended) -> None:
    line = check_refusal(ended.returncode, ended.stdout, ended.stderr, 2)
    assert any(phrase in line for phrase in REFUSALS), line


def network_locks(
    bench: Bench, name: str, errors: Sequence[int] = (errno.ENOLCK, errno.EIO, errno.ESTALE)
) -> Counter[str]:
    """Locks that a network file system refuses, and files that stay there while they are open."""
    counts = Counter[str]()
    for error in errors:
        counts["locks that fail"] += 1
        with bench.trial(name) as trial:
            ended = bench.run(trial, Wrong(locks=error))
            bench.check_refused(trial, ended, 3, "cannot lock")
            bench.finish(trial)
    counts["open files that stay"] += 1
    with bench.trial(name) as trial:
        bench.finish(trial, Wrong(nfs=True))
    with bench.trial(name) as trial:
        bench.run(trial, Wrong("kill", bench.clean(name).calls // 2))
        bench.finish(trial, Wrong(nfs=True))
    return counts
