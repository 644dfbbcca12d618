"""Commands in directories of their own, and what must be true of what is there afterwards."""

from __future__ import annotations

import json
import random
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.cli import STATE, check_reader, check_refusal, contents, staged
from helpers.disk_calls import Commands, Ended

from torture.shim import Told, Wrong, compiled
from torture.subjects import MODULES, SUBJECTS, Sources, Subject, installed, served_sources

AT_WORK = "another ktconv is converting"
PATIENCE = 120.0  # for processes that outlive the one that started them
Files = dict[str, str]  # name -> sha256


@dataclass(frozen=True)
class Clean:
    """What one uninterrupted run writes into each output, says and takes, and what was there
    before."""

    files: Mapping[str, Files]
    before: Mapping[str, Files]
    said: frozenset[str]  # lines on stderr
    calls: int
    seconds: float


@dataclass
class Trial:
    """A directory in which a subject is run, and what was done in it."""

    name: str
    subject: Subject
    place: Path
    told: Told
    steps: list[str] = field(default_factory=list)

    def output(self, name: str) -> Path:
        return self.place / name


@dataclass
class Bench:
    """A room with sources and a server of commands that has the shim loaded."""

    room: Path
    kept: Path  # where evidence goes
    commands: Commands
    sources: Sources
    seed: int
    failures: list[str] = field(default_factory=list)
    _clean: dict[str, Clean] = field(default_factory=dict)
    _number: int = 0

    @property
    def scratch(self) -> Path:
        """The directory for temporary files of all commands."""
        return self.room / "tmp"

    def random(self, *what: object) -> random.Random:
        return random.Random(":".join(map(str, (self.seed, *what))))

    def clean(self, name: str) -> Clean:
        """One run without any fault; made once."""
        if name not in self._clean:
            self._run_clean(name)  # files that are read for the first time are not in the time
            self._clean[name] = self._run_clean(name)
        return self._clean[name]

    def _run_clean(self, name: str) -> Clean:
        with self._directory(name, False) as trial:
            before = {one: contents(trial.output(one)) for one in trial.subject.outputs}
            started = time.monotonic()
            ended = self.run(trial, Wrong())
            seconds = time.monotonic() - started
            assert ended.returncode == 0, ended.stderr
            files = {one: contents(trial.output(one)) for one in trial.subject.outputs}
            said = frozenset(ended.stderr.splitlines())
            return Clean(files, before, said, trial.told.counted()[0], seconds)

    @contextmanager
    def trial(self, name: str, log: bool = False) -> Iterator[Trial]:
        """A directory for a subject. What is raised inside is a failure, and what is there is kept
        as evidence; the next trial goes on."""
        with self._directory(name, log) as trial:
            try:
                yield trial
            except AssertionError as error:
                self._keep(trial, "".join(traceback.format_exception(error)))

    @contextmanager
    def _directory(self, name: str, log: bool) -> Iterator[Trial]:
        self._number += 1
        place = self.room / "trials" / f"{name}-{self._number}"
        place.mkdir(parents=True)
        # Of its own: `clean` can begin a trial inside of another, which counts on.
        state, calls = (place.with_name(f"{place.name}.{what}") for what in ("state", "log"))
        told = Told(place, state, calls if log else None)
        trial = Trial(name, SUBJECTS[name], place, told)
        trial.subject.prepare(self.sources, place)
        try:
            yield trial
        finally:
            shutil.rmtree(place, ignore_errors=True)
            calls.unlink(missing_ok=True)

    def _keep(self, trial: Trial, why: str) -> None:
        target = self.kept / trial.place.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(trial.place, target)
        words = [str(word) for word in trial.subject.words(self.sources, trial.place)]
        evidence = {"seed": self.seed, "words": words, "steps": trial.steps, "why": why}
        (target / "evidence.json").write_text(json.dumps(evidence, indent=1))
        self.failures.append(f"{trial.place.name}: {', '.join(trial.steps)}\n{why}")

    def run(self, trial: Trial, wrong: Wrong | None = None, **how: Any) -> Ended:
        """The command of a trial once; `how` is of `Commands.run`."""
        shown = [str(wrong)] if wrong else []
        shown += [f"{key} {value:.4f}" for key, value in how.items() if key == "after"]
        trial.steps.append(" ".join(shown) or "run")
        words = trial.subject.words(self.sources, trial.place)
        variables = trial.told.variables(wrong) if wrong else {}
        return self.commands.run(words, variables=variables, **how)

    def finish(self, trial: Trial, wrong: Wrong | None = None) -> None:
        """The same command, not disturbed, and what must be there then."""
        finished = self.finished(trial)
        ended = self.run(trial, wrong)
        deadline = time.monotonic() + PATIENCE
        while ended.returncode and AT_WORK in ended.stdout + ended.stderr:
            assert trial.subject.fleet and time.monotonic() < deadline, ended.stderr
            time.sleep(0.2)
            ended = self.run(trial, wrong)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        self.check_end(trial)
        redone = [name for name, inode in finished.items() if Path(name).stat().st_ino != inode]
        assert redone == [], "files of finished units were written again"

    @staticmethod
    def finished(trial: Trial) -> dict[str, int]:
        """Inodes of the files of units that are in the journal, which stay as they are."""
        found: dict[str, int] = {}
        for name in trial.subject.outputs if trial.subject.keeps else ():
            output = trial.output(name)
            for record in (output / STATE).glob("*-?????.json"):
                files = [output / one["name"] for one in json.loads(record.read_bytes())["files"]]
                found |= {str(path): path.stat().st_ino for path in files}
        return found

    # ---- what must be true ----

    def check_end(self, trial: Trial) -> None:
        """The bytes of an uninterrupted run, and nothing else."""
        clean = self.clean(trial.name)
        for name in trial.subject.outputs:
            found = contents(trial.output(name))
            assert found == clean.files[name], differences(found, clean.files[name])
            assert not (trial.output(name) / STATE).exists()
        assert list(self.scratch.glob("ktconv*")) == [], "temporary files are left"

    def check_sound(self, trial: Trial) -> None:
        """What has a final name is complete; with --overwrite it can be of before, too."""
        clean = self.clean(trial.name)
        for name in trial.subject.outputs:
            output, before = trial.output(name), clean.before[name]
            if not before:
                check_reader(output, clean.files[name])
                continue
            for file, digest in contents(output).items():
                if not file.startswith(STATE):
                    assert digest in (before.get(file), clean.files[name].get(file)), file

    def check_refused(self, trial: Trial, ended: Ended, code: int, *phrases: str) -> None:
        """One sentence, this exit code, no traceback; nothing half-written; no staged files."""
        assert "Traceback" not in ended.stderr + ended.stdout, ended.stderr
        if trial.subject.fleet:
            assert ended.returncode == code and "failed: " in ended.stdout, ended
            assert all(phrase in ended.stdout for phrase in phrases), ended.stdout
        else:
            said = self.clean(trial.name).said  # ahead of the fault, such as tables
            lines = [line for line in ended.stderr.splitlines() if line not in said]
            check_refusal(ended.returncode, ended.stdout, "\n".join(lines), code, *phrases)
        self.check_sound(trial)
        for name in trial.subject.outputs:
            assert staged(trial.output(name)) == []

    def verify(self, trial: Trial) -> None:
        """`ktconv verify` of a sample of the weights."""
        words = ["verify", trial.output("output"), f"--source={self.sources.model}"]
        words += ["--level=weights", "--sample=0.3", "--threads=2", f"--seed={self._number}"]
        ended = self.commands.run(words)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def differences(found: Files, wanted: Files) -> str:
    """Names of files that differ."""
    names = sorted(found.keys() | wanted.keys())
    return "differs from a clean run: " + ", ".join(
        name for name in names if found.get(name) != wanted.get(name)
    )


@contextmanager
def opened_bench(
    room: Path, kept: Path, seed: int, modules: Sequence[str] = MODULES
) -> Iterator[Bench]:
    """A bench in an empty directory."""
    (room / "tmp").mkdir()
    with ExitStack() as stack:
        (room / "sources").mkdir()
        sources = stack.enter_context(served_sources(room / "sources"))
        library = str(compiled(room))
        commands = Commands(room, *installed(modules), LD_PRELOAD=library, TMPDIR=str(room / "tmp"))
        stack.callback(commands.close)
        yield Bench(room, kept, commands, sources, seed)
