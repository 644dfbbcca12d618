"""Fuzzes the readers with coverage guidance: python tests/fuzz/run.py --seconds 60 [READER...]

Each reader runs in a process of its own. Inputs that reach new code are kept in build/fuzz, from
where the next run continues; one that breaks a reader is kept, too, and named. To turn it into a
test, copy it to tests/fuzz/corpus/READER. Exit code 1: a reader broke.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

KEPT = ROOT / "build/fuzz"
SECONDS_EACH = 5  # an input that takes longer is a defect
MEMORY = 1 << 30  # so is one that needs more than this beyond what a reader starts with
LONGEST = 1 << 16  # bytes of an input
SHARE_OF_FORMS = 0.5  # how often JSON is changed as such, not as bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for all readers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        fuzz(options.inside, options.seconds, options.seed)
    else:
        sys.exit(report(options))


def report(options: argparse.Namespace) -> int:
    """Runs the readers, `jobs` at once, and prints what they did; the exit code."""
    from fuzz.readers import READERS

    names = options.readers or list(READERS)
    if unknown := [name for name in names if name not in READERS]:
        sys.exit(f"{unknown[0]} is not a reader; choose from: {', '.join(READERS)}")
    seconds = max(1, options.seconds * options.jobs // len(names))
    print(f"{'reader':12} {'inputs':>10} {'a second':>9} {'kept':>6} {'MB':>5}", flush=True)
    broken, total = [], 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, facts in pool.map(lambda one: (one, run(one, seconds, options.seed)), names):
            total += facts["inputs"]
            speed = facts["inputs"] / max(facts["seconds"], 1e-9)
            kept = len(list((KEPT / "corpus" / name).iterdir()))
            row = f"{name:12} {facts['inputs']:10} {speed:9.0f} {kept:6} {facts['memory']:5}"
            print(row + ("  BROKEN" if facts["broken"] else ""), flush=True)
            broken += [(name, facts)] if facts["broken"] else []
    print(f"{total} inputs, {len(broken)} readers broken")
    for name, facts in broken:
        print(f"\n--- {name} ---\n{facts['broken']}")
    with (KEPT / "history.jsonl").open("a") as history:
        history.write(json.dumps({"time": int(time.time()), "inputs": total}) + "\n")
    return int(bool(broken))


def run(name: str, seconds: int, seed: int) -> dict[str, Any]:
    """One reader in its process: inputs, seconds, peak memory in MB, what broke it."""
    (KEPT / "corpus" / name).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--inside", name, f"--seconds={seconds}", f"--seed={seed}"]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    found = dict(re.findall(r"stat::(\w+): *(\d+)", done.stderr))
    return {
        "inputs": int(found.get("number_of_executed_units", 0)),
        "memory": int(found.get("peak_rss_mb", 0)),
        "seconds": time.monotonic() - begin,
        "broken": (done.stdout + done.stderr)[-4000:] if done.returncode else "",
    }


def fuzz(name: str, seconds: int, seed: int) -> None:
    """Does not return."""
    import atheris

    with atheris.instrument_imports(include=["ktconv"]):
        from fuzz.readers import CORPUS, READERS, accepts
    reader = READERS[name]
    kept = KEPT / "corpus" / name
    flags = [
        f"-max_total_time={seconds}", f"-seed={seed}", f"-timeout={SECONDS_EACH}",
        f"-rss_limit_mb={2 * MEMORY >> 20}", f"-max_len={LONGEST}", "-print_final_stats=1",
        f"-artifact_prefix={KEPT}/{name}-", "-verbosity=0",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir=_memory_directory()) as scratch:
        directory = Path(scratch)

        def once(data: bytes) -> None:
            accepts(reader, directory, data)

        def changed(data: bytes, longest: int, number: int) -> bytes:
            return _changed(reader, data, longest, number) or atheris.Mutate(data, longest)

        seeds = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
        forms = reader.json or reader.header
        atheris.Setup(
            ["fuzz", *flags, str(kept), *seeds],
            once,
            **({"custom_mutator": changed} if forms else {}),
        )
        _limit_memory()
        atheris.Fuzz()


def _changed(reader: Any, data: bytes, longest: int, number: int) -> bytes | None:
    """The document with other values, keys or types; None where bytes are to be changed."""
    from helpers.mutation import mutated, mutated_safetensors

    rng = random.Random(number)
    if rng.random() > SHARE_OF_FORMS:
        return None
    try:
        if reader.header:
            found, _ = mutated_safetensors(data, rng)
        else:
            found, _ = mutated(json.loads(data), rng)
    except (ValueError, RecursionError, IndexError, KeyError):
        return None  # not JSON any more
    return found if len(found) <= longest else None


def _limit_memory() -> None:
    """A reader that believes in a size of gigabytes gets MemoryError, which is a defect."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))


def _memory_directory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    main()
