"""Faults of the disk: full, failing, slow to take data, without power."""

from __future__ import annotations

import errno
import random
import shutil
import signal
from collections import Counter

from helpers.cli import STATE, contents
from helpers.disk_calls import Ended

from torture.bench import Bench, Trial, differences
from torture.power import MODES, Disk, read_log
from torture.shim import ALLOCATING, Wrong

REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EIO: "the device reports an I/O error",
}
RESTARTED = "write,allocate,create,sync"  # after a signal, by Python; the others are not


def full_disk(bench: Bench, name: str, every: int = 1) -> Counter[str]:
    """From each call on that needs space no other one succeeds."""
    counts = Counter[str]()
    for at in range(1, _calls(bench, name, ALLOCATING) + 1, every):
        wrong = Wrong("fail", at, ALLOCATING, errno.ENOSPC, sticky=True)
        counts += _fail(bench, name, wrong, "full disk")
    return counts


def io_errors(bench: Bench, name: str, every: int = 1) -> Counter[str]:
    """Each call fails once, for another reason."""
    counts = Counter[str]()
    for at in range(1, bench.clean(name).calls + 1, every):
        error = (errno.EIO, errno.EDQUOT)[at // every % 2]
        counts += _fail(bench, name, Wrong("fail", at, "", error), errno.errorcode[error])
    return counts


def interrupted_calls(bench: Bench, name: str, every: int = 1) -> Counter[str]:
    """A signal comes during each call: it is made again."""
    counts = Counter[str]()
    for at in range(1, _calls(bench, name, RESTARTED) + 1, every):
        counts["EINTR"] += 1
        with bench.trial(name) as trial:
            ended = bench.run(trial, Wrong("fail", at, RESTARTED, errno.EINTR))
            assert ended.returncode == 0, ended.stderr
            bench.check_end(trial)
    return counts


def short_writes(bench: Bench, name: str) -> Counter[str]:
    """Half of what is to be written is, each time."""
    with bench.trial(name) as trial:
        ended = bench.run(trial, Wrong("short", calls="write"))
        assert trial.told.counted()[1] > 20, "hardly anything was written"
        assert ended.returncode == 0, ended.stderr
        bench.check_end(trial)
    return Counter({"short writes": trial.told.counted()[1]})


def failed_fsyncs(bench: Bench, name: str, every: int = 1) -> Counter[str]:
    """Each fsync fails once. Linux then takes the pages for written, so another fsync of the same
    file succeeds and means nothing: what counts is what a power loss after the next run leaves."""
    counts = Counter[str]()
    for at in range(1, _calls(bench, name, "sync") + 1, every):
        counts["fsync fails"] += 1
        with bench.trial(name, log=True) as trial:
            disk = Disk(trial.place)
            ended = bench.run(trial, Wrong("fail", at, "sync", errno.EIO))
            if ended.returncode:
                bench.check_refused(trial, ended, 3, REASONS[errno.EIO])
                counts["refused"] += 1
            else:
                # Nothing depends on it: the manifest was durable.
                assert all((trial.output(one) / "ktconv.json").exists() for one in _outputs(trial))
            bench.finish(trial, Wrong())
            _lose_power(trial, disk, bench.random("fsync", name, at), "nothing")
            _check_durable(bench, trial)
    return counts


def power_losses(bench: Bench, name: str, count: int) -> Counter[str]:
    """The power goes at some call of a run, of which others were killed or lost power before; what
    is left is sound, and the next run completes it."""
    counts, rng, clean = Counter[str](), bench.random("power", name), bench.clean(name)
    for _ in range(count):
        with bench.trial(name, log=True) as trial:
            for _ in range(rng.choice((1, 1, 2, 3))):
                disk = Disk(trial.place)
                if rng.random() < 0.3:  # a killed run, of which the next one sees all
                    ended = bench.run(trial, Wrong("kill", rng.randint(1, clean.calls)))
                    bench.check_sound(trial)
                ended = bench.run(trial, Wrong("kill", rng.randint(1, clean.calls * 11 // 10)))
                assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
                mode = rng.choice(MODES)
                _lose_power(trial, disk, rng, mode)
                trial.steps.append(f"power loss: {mode}")
                counts[f"power loss, {mode} kept"] += 1
                counts["power losses"] += 1
                bench.check_sound(trial)
                if ended.returncode == 0:
                    _check_durable(bench, trial)
            bench.finish(trial)
    return counts


def losses_after_kills(bench: Bench, name: str, every: int = 1) -> Counter[str]:
    """A run is killed at each call, the next one ends, and then the power goes: what the second
    found in memory, the first had perhaps not brought to the disk."""
    counts = Counter[str]()
    for at in range(1, bench.clean(name).calls + 1, every):
        counts["power losses"] += 1
        counts["power loss after a killed and a whole run"] += 1
        with bench.trial(name, log=True) as trial:
            disk = Disk(trial.place)
            bench.run(trial, Wrong("kill", at))
            bench.finish(trial, Wrong())
            _lose_power(trial, disk, bench.random("after", name, at), "nothing")
            _check_durable(bench, trial)
    return counts


# ---- parts of them ----


def _calls(bench: Bench, name: str, calls: str) -> int:
    with bench.trial(name) as trial:
        ended = bench.run(trial, Wrong(calls=calls))
        assert ended.returncode == 0, ended.stderr
        return trial.told.counted()[0]
    return 0


def _fail(bench: Bench, name: str, wrong: Wrong, what: str) -> Counter[str]:
    """One run with a fault: a refusal, or no effect at all; the next one ends well."""
    counts = Counter({what: 1})
    with bench.trial(name) as trial:
        ended = bench.run(trial, wrong)
        if not trial.told.counted()[1]:
            assert ended.returncode == 0, ended.stderr
            counts["not reached"] += 1
        elif ended.returncode:
            bench.check_refused(trial, ended, 3, REASONS[wrong.error])
            counts["refused"] += 1
        else:
            _check_harmless(bench, trial, ended)
            counts["no effect"] += 1
        bench.finish(trial)
    return counts


def _check_harmless(bench: Bench, trial: Trial, ended: Ended) -> None:
    """A run that ended well in spite of a fault has made a whole output; only its state directory
    may be there, which the next one removes."""
    for one in _outputs(trial):
        found = _without_state(trial, one)
        wanted = bench.clean(trial.name).files[one]
        assert found == wanted, differences(found, wanted)


def _lose_power(trial: Trial, disk: Disk, rng: random.Random, mode: str) -> None:
    """The directory of a trial as it is afterwards; the log begins anew."""
    log = trial.told.log
    assert log is not None
    for call in read_log(log) if log.exists() else ():
        disk.apply(call)
    for path in trial.place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    disk.restore(trial.place, mode, rng)  # type: ignore[arg-type]
    log.unlink(missing_ok=True)


def _check_durable(bench: Bench, trial: Trial) -> None:
    """A command that said it was done has left everything on the disk; what it removed can be
    there again."""
    for one in _outputs(trial):
        found = _without_state(trial, one)
        wanted = bench.clean(trial.name).files[one]
        assert found == wanted, "not durable: " + differences(found, wanted)


def _outputs(trial: Trial) -> tuple[str, ...]:
    return trial.subject.outputs


def _without_state(trial: Trial, name: str) -> dict[str, str]:
    found = contents(trial.output(name))
    return {one: digest for one, digest in found.items() if not one.startswith(STATE)}
