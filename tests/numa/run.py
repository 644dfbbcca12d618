"""Boots emulated machines and checks where weights lie: python tests/numa/run.py [MACHINE...]

Prints what each machine said. Exit code 1: a check failed. Where qemu is missing nothing is done,
and a line says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from numa.boot import Nodes, archive, boot, kernel, why_not  # noqa: E402

KEPT = ROOT / "build/numa"
# Nodes, and what is expected there (guest.py), or "crowd": what threads cost there (pool_crowd.c).
MACHINES = {
    "two": (Nodes([2, 2], [1024, 1024]), "nodes=0,1"),
    "four": (Nodes([1] * 4, [768] * 4), "nodes=0,1,2,3"),
    "eight": (Nodes([1] * 8, [512] * 8), "nodes=0,1,2,3,4,5,6,7"),
    "memoryless": (
        Nodes([1, 1, 1], [1024, 1024, 0]),
        "nodes=0,1 remark=has+CPUs+whose+own+memory+does+not+exist",
    ),
    "cpuless": (
        Nodes([1, 1, 0], [1024, 1024, 512]),
        "nodes=0,1 remark=has+memory+without+CPUs",
    ),
    "crowd": (Nodes([8] * 4, [256] * 4), "crowd"),
}
GOOD = ("numa: 0 failures", "crowd: 0 failures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=", ".join(MACHINES))
    parser.add_argument("--seconds", type=int, default=1200, help="limit of each machine")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    image = kernel(KEPT)
    root = archive(KEPT, ROOT / "src/ktconv", ROOT / "tests/numa/guest.py", ROOT / "native")
    bad = []
    for name in options.machines or MACHINES:
        nodes, words = MACHINES[name]
        start = time.monotonic()
        said = boot(image, root, nodes, words, options.seconds)
        print(f"--- {name}, {time.monotonic() - start:.0f} s\n{said}", flush=True)
        if not any(line in said for line in GOOD):
            bad.append(name)
    print(f"machines with failures: {', '.join(bad)}" if bad else "all machines: no failures")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
