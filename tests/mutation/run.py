"""Mutation testing: python tests/mutation/run.py [--each 40] [--again] [SUBJECT...]

Changes one place of a source at a time, in a copy of the working tree under build/mutants, and
runs the tests that must notice (tests/mutation/subjects.py). Results are kept there: a mutant
whose source is still the same is not tried again, but for survivors with --again. Exit code 1: a
mutant survived.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import click.testing  # noqa: F401
import hypothesis.strategies  # noqa: F401
import numpy as np  # noqa: F401
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from mutation.operators import Mutant, mutants  # noqa: E402
from mutation.plugin import KILLERS  # noqa: E402
from mutation.subjects import SUBJECTS, Subject  # noqa: E402

KEPT = ROOT / "build/mutants"
MEMORY = 12 << 30  # a mutant that allocates more is found
PATIENCE = 2.0  # a mutant that takes so many times as long as the tests do, and
SECONDS = 15  # so much more, is found, too
NAP = 0.02
RECENT = 5  # tests that found the last mutants of a file are run before all others
COMPILE = ["-std=c11", "-O1", "-g0", "-w", "-fPIC", "-fno-wrapv", "-DNDEBUG", "-ffp-contract=off"]
LEVELS = ("avx2", "avx512", "amx", "neon")  # in names of files and of tests
STATES = ("killed", "timeout", "survived", "same code", "not C")


class Tree:
    """A copy of the working tree, whose library is linked anew for each mutant in C."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._objects = KEPT / "objects"
        self._clock = int(time.time())

    def fill(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True,
        ).stdout.decode()  # fmt: skip
        shutil.rmtree(self.root, ignore_errors=True)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    def path(self, source: str) -> Path:
        return self.root / ("src/ktconv" if source.endswith(".py") else "native/src") / source

    # ---- C ----

    def build(self) -> None:
        """All objects, where those of an earlier run are not of the same sources."""
        files = sorted(path for path in (self.root / "native").rglob("*") if path.is_file())
        content = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        stamp = self._objects / "content"
        if stamp.exists() and stamp.read_text() == content:
            self.link({})
            return
        shutil.rmtree(self._objects, ignore_errors=True)
        self._objects.mkdir(parents=True)
        before = Path.cwd()
        os.chdir(self.root)  # where native/build_ffi.py finds its files
        runpy.run_path("native/build_ffi.py")["ffi"].emit_c_code("native/src/bindings.c")
        os.chdir(before)
        sources = sorted((self.root / "native/src").rglob("*.c"))
        for path in sources:
            self._compile(path, self._object(path), check=True)
        stamp.write_text(content)
        self.link({})

    def users(self, source: str) -> tuple[str, list[Path]]:
        """A level, and its C files whose objects depend on a source. What all levels include is
        changed, and tested, in scalar code alone; else in the first level that includes it."""
        found: dict[str, list[Path]] = {}
        named = str(self.path(source).resolve())
        for path in sorted((self.root / "native/src").rglob("*.c")):
            command = ["cc", "-MM", *self._includes(), str(path)]
            listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            names = listed.replace("\\\n", " ").split()[1:]
            if any(str(Path(name).resolve()) == named for name in names):
                found.setdefault(level_of(path.name), []).append(path)
        return next((level, found[level]) for level in ("scalar", *LEVELS) if level in found)

    def compiled(self, users: Iterable[Path]) -> dict[Path, Path] | None:
        """Objects that changed by their old ones; None: not C any more."""
        changed = {}
        for user in users:
            old = self._object(user)
            new = old.with_suffix(".new.o")
            if not self._compile(user, new):
                return None
            if new.read_bytes() != old.read_bytes():
                changed[old] = new
        return changed

    def link(self, changed: dict[Path, Path]) -> None:
        objects = [
            str(changed.get(path, path))
            for path in sorted(self._objects.glob("*.o"))
            if not path.name.endswith(".new.o")
        ]
        library = self.root / "src/ktconv/_native.abi3.so"
        library.unlink(missing_ok=True)
        subprocess.run(
            ["cc", "-shared", "-pthread", *objects, "-lm", "-o", str(library)], check=True
        )

    def _object(self, source: Path) -> Path:
        name = source.relative_to(self.root / "native/src").with_suffix(".o")
        return self._objects / "-".join(name.parts)

    def _includes(self) -> list[str]:
        return [f"-I{self.root}/native/include", f"-I{sysconfig.get_path('include')}"]

    def _compile(self, source: Path, target: Path, check: bool = False) -> bool:
        command = ["cc", *COMPILE, *self._includes(), "-c", str(source), "-o", str(target)]
        return not subprocess.run(command, capture_output=not check, check=check).returncode

    # ---- both ----

    def write(self, source: str, data: bytes) -> None:
        """With a time of its own, by which Python knows that it must compile a module again."""
        path = self.path(source)
        path.write_bytes(data)
        self._clock += 2
        os.utime(path, (self._clock, self._clock))

    def test(self, tests: Iterable[str], seconds: float) -> tuple[str, list[str]]:
        """State ("survived", "killed", "timeout" or, where no test ran, "none"); who failed."""
        with tempfile.TemporaryDirectory(dir=_memory_directory()) as scratch:
            failed = Path(scratch) / "failed"
            environment = os.environ | {
                "PYTHONPATH": f"{self.root}/src:{self.root}/tests",
                "PYTEST_DEBUG_TEMPROOT": scratch,
                "TMPDIR": scratch,
                KILLERS: str(failed),
            }
            options = ["-x", "-q", "-p", "mutation.plugin", "-p", "no:cacheprovider"]
            child = os.fork()  # has pytest and NumPy, and nothing of ktconv
            if not child:
                _run_tests(self.root, environment, [*options, *tests])
            code = _ended(child, seconds)
            if code is None:
                return "timeout", []
            if code in (4, 5):
                return "none", []
            names = failed.read_text(encoding="utf-8").splitlines() if failed.exists() else []
            return "killed" if code else "survived", names


def level_of(name: str) -> str:
    return next((level for level in LEVELS if level in name), "scalar")


def of_level(level: str) -> list[str]:
    """Options of pytest: no tests of other levels."""
    others = {"scalar", *LEVELS} - {level}
    return ["-k", " and ".join(f"not {one}" for one in sorted(others))]


def _run_tests(root: Path, environment: dict[str, str], arguments: list[str]) -> NoReturn:
    """In a process of its own, which it ends."""
    code = 1
    try:
        os.setsid()
        os.chdir(root)
        os.environ.update(environment)
        sys.path[:0] = environment["PYTHONPATH"].split(":")
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        code = int(pytest.main(arguments))
    finally:
        os._exit(code)


def _ended(process: int, seconds: float) -> int | None:
    """The exit code of a process; None where it took too long. Ends what it left running, too."""
    done, status = 0, 0
    for _ in range(round(seconds / NAP)):  # no clock: while both are stopped, no time passes
        time.sleep(NAP)
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if done:
        return os.waitstatus_to_exitcode(status)
    os.waitpid(process, 0)
    return None


def _memory_directory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Results:
    """States of mutants, by file, content and change; kept from run to run."""

    def __init__(self) -> None:
        self._path = KEPT / "results.jsonl"
        self.known: dict[str, str] = {}
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self.known[entry["key"]] = entry["state"]

    def add(self, key: str, state: str, where: str) -> None:
        self.known[key] = state
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "state": state, "where": where}) + "\n")


def chosen(source: str, data: bytes, each: int | None, seed: int) -> tuple[int, list[Mutant]]:
    """How many mutants a file has, and those that are tried."""
    found = mutants(source, data)
    if each is None or each >= len(found):
        return len(found), found
    order = list(range(len(found)))
    random.Random(f"{seed} {source}").shuffle(order)  # more of them are those and others
    return len(found), [found[number] for number in sorted(order[:each])]


class Trial:
    """The mutants of one source, and the tests that must notice."""

    def __init__(self, tree: Tree, source: str, subject: Subject) -> None:
        self.source = source
        self.data = tree.path(source).read_bytes()
        self._tree, self._recent = tree, list[str]()
        self._users: list[Path] = []
        self.tests = list(subject.tests)
        if not source.endswith(".py"):
            level, self._users = tree.users(source)
            self.tests[:0] = of_level(level)

    def key(self, mutant: Mutant) -> str:
        content = hashlib.sha256(self.data).hexdigest()
        return f"{self.source} {content[:16]} {mutant.start} {mutant.end} {mutant.new}"

    def where(self, mutant: Mutant) -> str:
        return f"{self.source}:{mutant.line(self.data)}: {mutant.described(self.data)}"

    def state(self, mutant: Mutant, seconds: float) -> str:
        """One of STATES."""
        self._tree.write(self.source, mutant.applied(self.data))
        try:
            return self._state(seconds)
        finally:
            self._tree.write(self.source, self.data)

    def _state(self, seconds: float) -> str:
        if self._users:
            changed = self._tree.compiled(self._users)
            if not changed:
                return "not C" if changed is None else "same code"
            self._tree.link(changed)
        for names in (self._recent[:RECENT], self.tests):
            state, failed = self._tree.test(names, seconds) if names else ("none", [])
            for name in failed:
                self._recent[:] = [name, *(one for one in self._recent if one != name)]
            if state in ("killed", "timeout"):
                return state
        return "survived" if state == "survived" else "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help="or a source; default: all")
    parser.add_argument("--each", type=int, help="mutants of a file, by chance; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="try survivors once more")
    options = parser.parse_args()
    wanted = [
        (source, subject)
        for name, subject in SUBJECTS.items()
        for source in subject.sources
        if not options.subjects or {name, source} & set(options.subjects)
    ]
    if not wanted:
        sys.exit(f"no such subject; choose from: {', '.join(SUBJECTS)}")
    KEPT.mkdir(parents=True, exist_ok=True)
    tree, results = Tree(KEPT / "tree"), Results()
    tree.fill()
    tree.build()
    sys.exit(report(tree, wanted, options, results))


def report(
    tree: Tree, wanted: list[tuple[str, Subject]], options: argparse.Namespace, results: Results
) -> int:
    """Prints a row for each file, then the survivors; the exit code."""
    limits: dict[tuple[str, ...], float] = {}
    survivors: list[str] = []
    total: Counter[str] = Counter()
    print(f"{'source':34} {'mutants':>7} {'tried':>6}", *(f"{name:>9}" for name in STATES))
    for source, subject in wanted:
        trial = Trial(tree, source, subject)
        count, picked = chosen(source, trial.data, options.each, options.seed)
        states: Counter[str] = Counter()
        for mutant in picked:
            state = results.known.get(trial.key(mutant))
            if state is None or (options.again and state == "survived"):
                tests = tuple(trial.tests)
                if tests not in limits:
                    tree.link({})
                    limits[tests] = limit(tree, tests)
                state = trial.state(mutant, limits[tests])
                results.add(trial.key(mutant), state, trial.where(mutant))
            states[state] += 1
            survivors += [trial.where(mutant)] if state == "survived" else []
        tree.link({})
        total.update(states)
        numbers = [f"{states[name]:9}" for name in STATES]
        print(f"{source:34} {count:7} {sum(states.values()):6}", *numbers, flush=True)
    print(f"{'all':34} {'':7} {sum(total.values()):6}", *(f"{total[name]:9}" for name in STATES))
    print(*survivors, sep="\n")
    return int(bool(survivors))


def limit(tree: Tree, tests: tuple[str, ...]) -> float:
    """Seconds that these tests may take; they must pass."""
    begin = time.monotonic()
    state, failed = tree.test(tests, 600)
    if state != "survived":
        sys.exit(f"{failed or tests} fails without any mutant")
    return SECONDS + PATIENCE * (time.monotonic() - begin)


if __name__ == "__main__":
    main()
