"""Puts every converting command to torture: python tests/torture/run.py --kills 1000 [SUBJECT...]

Kills at counted calls and at random moments, faults of the disk, power losses, machines that share
an OUTPUT, clocks that jump: at the end there are the bytes of a run that nothing disturbed, or one
clear sentence says why not. Prints how often what was done; exit code 1: something else came of it.
Then build/torture has what was there, and evidence.json, in a directory of each failure. The same
seed does the same again, but for what random moments hit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

KEPT = ROOT / "build/torture"


def main() -> None:
    from torture.parts import PARTS
    from torture.shim import why_not
    from torture.subjects import SUBJECTS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--kills", type=int, default=1000, help="of all subjects together")
    parser.add_argument("--share", type=_share, default=1.0, help="of all else; 0.1: a tenth")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--work", type=Path, help="directory for all files; default: in memory")
    options = parser.parse_args()
    names, parts = options.subjects, options.parts.split(",")
    names = names or [name for name, subject in SUBJECTS.items() if not subject.slow]
    for kind, asked, known in (("subject", names, SUBJECTS), ("part", parts, PARTS)):
        if unknown := [name for name in asked if name not in known]:
            sys.exit(f"{unknown[0]} is not a {kind}; choose from: {', '.join(known)}")
    if reason := why_not():
        sys.exit(f"torture {reason}")
    sys.exit(report(names, parts, options))


def _share(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise ValueError
    return float(text)


def report(names: Sequence[str], parts: Sequence[str], options: argparse.Namespace) -> int:
    """Runs the parts, and prints what they did; the exit code."""
    from torture.bench import opened_bench
    from torture.parts import PARTS, Amount

    KEPT.mkdir(parents=True, exist_ok=True)
    amount = Amount(options.kills, options.share)
    counts = {part: dict[str, Counter[str]]() for part in parts}
    with (
        tempfile.TemporaryDirectory(dir=options.work or _memory(), prefix="torture-") as room,
        opened_bench(Path(room), KEPT, options.seed) as bench,
    ):
        for part in parts:
            for name, act in PARTS[part](bench, names, amount):
                started, failed = time.monotonic(), len(bench.failures)
                found = act()
                counts[part][name] = counts[part].get(name, Counter[str]()) + found
                row = _row(part, name, found, time.monotonic() - started)
                broken = len(bench.failures) - failed
                print(row + f"  {broken} BROKEN" * bool(broken), flush=True)
    for part, of_subjects in counts.items():
        print(_row(part, "all", sum(of_subjects.values(), Counter[str]())))
    for failure in bench.failures:
        print(f"\n--- {failure}")
    print(f"{len(bench.failures)} failures" + f"; evidence: {KEPT}" * bool(bench.failures))
    facts = {"seed": options.seed, "counts": counts, "failures": bench.failures}
    (KEPT / f"counts-{'-'.join(parts)}-{options.seed}.json").write_text(json.dumps(facts, indent=1))
    return int(bool(bench.failures))


def _row(part: str, name: str, found: Counter[str], seconds: float | None = None) -> str:
    text = ", ".join(f"{count} {what}" for what, count in sorted(found.items()))
    return f"{part:9} {name:18} {f'{seconds:.0f} s' if seconds is not None else '':>6}  {text}"


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    main()
