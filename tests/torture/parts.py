"""What is done to the commands, part by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from torture import clocks, faults, kills, machines
from torture.bench import Bench

# Of calls, every so many-th; --share makes them more or fewer, as it does the numbers below.
EVERY = {"disk": 8, "errors": 12, "fsyncs": 10, "interrupts": 40, "after": 30}
# At every call that needs space: one of each command, and of each way in which files are written.
FULL = (
    "int4", "int4-layers", "gguf", "nvfp4", "recipe", "gpu-mxfp4", "merge", "reshard", "remote",
)  # fmt: skip
LOSSES = 8  # of power, of each subject
ROUNDS = 12  # of each number of machines, of each subject that they share
TIMES = 2  # a clock is wrong in a few runs, of each subject
SHARED = ("int4", "int4-layers", "int4-small-shards", "nvfp4", "recipe", "gpu-mxfp4")
TOGETHER = 2, 3  # machines
WHOLE_ONLY = ("from-list",)  # several processes: the log has no order of their calls
Acts = Iterator[tuple[str, Callable[[], Counter[str]]]]  # subjects, and what counts what was done


@dataclass(frozen=True)
class Amount:
    """How much is done: kills of all subjects together, and a share of everything else."""

    kills: int
    share: float = 1.0

    def every(self, step: int) -> int:
        """Of calls, every so many-th."""
        return max(1, round(step / self.share))

    def times(self, count: int) -> int:
        return max(1, round(count * self.share))


Part = Callable[[Bench, Sequence[str], Amount], Acts]


def _kills(bench: Bench, names: Sequence[str], amount: Amount) -> Acts:
    each, more = divmod(amount.kills, len(names))
    for number, name in enumerate(names):
        yield name, partial(kills.kill, bench, name, each + (number < more))


def _disk(bench: Bench, names: Sequence[str], amount: Amount) -> Acts:
    for name in names:
        every = amount.every(1 if name in FULL else EVERY["disk"])
        yield name, partial(faults.full_disk, bench, name, every)


def _errors(bench: Bench, names: Sequence[str], amount: Amount) -> Acts:
    every = {what: amount.every(step) for what, step in EVERY.items()}
    for name in names:
        yield name, partial(faults.io_errors, bench, name, every["errors"])
        if name not in WHOLE_ONLY:
            yield name, partial(faults.failed_fsyncs, bench, name, every["fsyncs"])
        yield name, partial(faults.interrupted_calls, bench, name, every["interrupts"])
        yield name, partial(faults.short_writes, bench, name)


def _power(bench: Bench, names: Sequence[str], amount: Amount) -> Acts:
    for name in (name for name in names if name not in WHOLE_ONLY):
        yield name, partial(faults.power_losses, bench, name, amount.times(LOSSES))
        yield name, partial(faults.losses_after_kills, bench, name, amount.every(EVERY["after"]))


def _machines(bench: Bench, names: Sequence[str], amount: Amount) -> Acts:
    shared = [name for name in names if name in SHARED]
    for name in shared:
        yield name, partial(machines.network_locks, bench, name)
    for count in TOGETHER if shared else ():
        with machines.machines(bench, count) as found:
            for name in shared:
                yield name, partial(machines.share, bench, name, found, amount.times(ROUNDS))


def _clocks(bench: Bench, names: Sequence[str], amount: Amount) -> Acts:
    of_each = ((name, partial(clocks.jumps, bench, name, amount.times(TIMES))) for name in names)
    of_files = (("int4", partial(clocks.times_of_files, bench)) for _ in range("int4" in names))
    yield from chain(of_each, of_files)


PARTS: dict[str, Part] = {
    "kills": _kills,
    "disk": _disk,
    "errors": _errors,
    "power": _power,
    "machines": _machines,
    "clocks": _clocks,
}
